import numpy as np
import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.evaluation.journal import Journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "unfinished.f32"


class Stopped(Exception):
    pass


def stopping_after(calls, nll):
    """`nll` that raises when it is called once more; counts its calls in `.made`."""

    def stopping(inputs, targets):
        if stopping.made == calls:
            raise Stopped
        stopping.made += 1
        return nll(inputs, targets)

    stopping.made = 0
    return stopping


@pytest.mark.parametrize("calls", [0, 1, 4, 9, 13])
def test_a_stopped_evaluation_goes_on_to_the_same_table(calls, path, random_stream, evaluation_of, recurrent_nll):
    stream = random_stream(300, 200, 129, 40, 3)
    changes = {"window": 50, "stride": 20, "key_tokens": "self", "batch_tokens": 150}
    whole = stopping_after(None, recurrent_nll)
    expected = evaluation_of(whole, stream, **changes)
    with pytest.raises(Stopped):
        evaluation_of(stopping_after(calls, recurrent_nll), stream, journal=Journal(path), **changes)
    rest = stopping_after(None, recurrent_nll)
    journal = Journal(path)
    again = evaluation_of(rest, stream, journal=journal, **changes)
    assert calls + rest.made == whole.made, "nothing is scored twice"
    assert (journal.num_known > 0) == (calls > 0)
    assert np.array_equal(again.table.nll, expected.table.nll)
    assert again.curves == expected.curves
    if calls:
        assert 0 < again.curves.cost.tokens < expected.curves.cost.tokens


def test_a_document_that_is_scored_is_not_scored_again(path, random_stream, evaluation_of, recurrent_nll):
    """Documents of 128 tokens are fed one by one here: after two, the third is the first to be fed."""
    stream = random_stream(128, 128, 128)
    with pytest.raises(Stopped):
        evaluation_of(stopping_after(2, recurrent_nll), stream, journal=Journal(path), batch_tokens=128)
    fed = []

    def noting(inputs, targets):
        fed.append(inputs[0].tolist())
        return recurrent_nll(inputs, targets)

    evaluation_of(noting, stream, journal=Journal(path), batch_tokens=128)
    assert fed[0] == stream.tokens[256:].tolist()


@pytest.mark.parametrize("lost", [1, 4, 100])
def test_a_batch_that_was_cut_while_it_was_written_is_scored_again(
    lost, path, random_stream, evaluation_of, recurrent_nll
):
    stream = random_stream(300, 200, 129)
    expected = evaluation_of(recurrent_nll, stream, journal=Journal(path))
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    again = evaluation_of(recurrent_nll, stream, journal=Journal(path))
    assert np.array_equal(again.table.nll, expected.table.nll)
    assert path.read_bytes() == content


def test_a_whole_journal_needs_no_model(path, random_stream, evaluation_of, recurrent_nll):
    stream = random_stream(300, 200)
    expected = evaluation_of(recurrent_nll, stream, journal=Journal(path))
    again = evaluation_of(stopping_after(0, recurrent_nll), stream, journal=Journal(path))
    assert again.curves == expected.curves
    assert str(again.curves.cost) == "Nothing was left to score."


def test_it_is_removed_when_asked(path):
    journal = Journal(path)
    journal.remove()
    journal.append(np.ones(3, np.float32))
    journal.remove()
    assert not path.exists()


@pytest.mark.parametrize("there", [None, 2, 5], ids=["removed", "shorter", "longer"])
def test_a_journal_that_another_process_changed_is_left_as_it_is(there, path):
    journal = Journal(path)
    journal.append(np.arange(3, dtype=np.float32))
    path.unlink()
    if there is not None:
        np.arange(there, dtype=np.float32).tofile(path)
    with pytest.raises(UserError, match="unfinished.f32 was changed while this evaluation went on: another process"):
        journal.append(np.ones(3, np.float32))
    assert (np.fromfile(path, np.float32).tolist() if path.exists() else None) == (there and [*range(there)])


def test_no_room_ends_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"missing.f32 cannot be written \(No such file or directory\); make room"):
        Journal(tmp_path / "none" / "missing.f32").append(torch.ones(2).numpy())
