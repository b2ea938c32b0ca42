from functools import partial

import numpy as np
import pytest
import torch

from flashtrain.evaluation.scoring import NOT_SCORED, Documents, score
from flashtrain.evaluation.windows import CONTEXT, Windows, anchors_every, documents_of, opening_windows


def score_alone(nll, stream, windows, prefix="document", **arguments):
    defaults = {"batch_tokens": 100, "advance": lambda tokens: None}
    return score(nll, Documents(stream, prefix), [windows], **defaults | arguments)


@pytest.fixture
def score_bytes(byte_counts):
    return partial(score_alone, bytes_per_token=byte_counts)


def zero_nll(inputs, targets):
    return torch.zeros(inputs.shape)


def test_each_target_is_the_token_after_its_input(make_stream):
    stream = make_stream([np.arange(1000, 1040), np.arange(60000, 60050)])  # beyond int16: ids are unsigned

    def nll(inputs, targets):
        assert inputs.dtype == targets.dtype == torch.int64
        asked = targets != NOT_SCORED
        assert torch.equal(targets[asked], inputs[asked] + 1)
        return targets.float()

    starts = np.array([20, 0, 30])
    windows = Windows(CONTEXT, 20, np.array([0, 1, 1]), starts, starts + 20, np.full(3, 6))
    table = score_alone(nll, stream, windows, bytes_per_token=np.ones(65536, dtype=np.int64), batch_tokens=40)
    expected = [stream.offsets[d] + start + 14 + np.arange(6) for d, start in ((0, 20), (1, 0), (1, 30))]
    assert table.nll.tolist() == stream.tokens.array[np.concatenate(expected)].tolist()
    assert table.document.tolist() == [0] * 6 + [1] * 12
    assert table.position.tolist() == [*range(34, 40), *range(14, 20), *range(44, 50)]


def test_context_counts_the_tokens_that_the_model_saw(random_stream, score_bytes):
    def tokens_seen(inputs, targets):
        return torch.arange(1.0, inputs.shape[1] + 1).expand(inputs.shape)

    stream = random_stream(70, 64, 129)
    windows = anchors_every(np.diff(stream.offsets), 64).windows(32, num_targets=31)
    table = score_bytes(tokens_seen, stream, windows)
    assert table.context.tolist() == table.nll.astype(int).tolist() == [*range(1, 32)] * 4


def test_every_target_of_the_openings_is_scored_once(random_stream, score_bytes):
    asked = []

    def nll(inputs, targets):
        asked.append(int((targets != NOT_SCORED).sum()))
        return torch.zeros(inputs.shape)

    stream = random_stream(40, 12, 33, 32, 90)
    table = score_bytes(nll, stream, opening_windows(documents_of(np.diff(stream.offsets), 32), 32))
    rows = set(zip(table.document.tolist(), table.position.tolist(), strict=True))
    assert len(rows) == len(table) == sum(asked) == 4 * 31
    assert rows == {(document, position) for document in (0, 2, 3, 4) for position in range(1, 32)}


def test_answers_where_nothing_was_asked_are_not_read(random_stream, score_bytes):
    def nll(inputs, targets):
        return torch.where(targets == NOT_SCORED, torch.nan, 1.0)

    stream = random_stream(64, 100)
    windows = anchors_every(np.diff(stream.offsets), 32).windows(32, num_targets=5)
    assert score_bytes(nll, stream, windows).nll.tolist() == [1.0] * 25


@pytest.mark.parametrize("batch_tokens", [1, 48, 49, 96, 150, 10_000])
def test_the_table_does_not_depend_on_the_batch(batch_tokens, random_stream, score_bytes, recurrent_nll):
    stream = random_stream(*[50] * 7)
    windows = opening_windows(np.arange(7), 48)
    sizes = []

    def nll(inputs, targets):
        sizes.append(inputs.numel())
        return recurrent_nll(inputs, targets)

    table = score_bytes(nll, stream, windows, batch_tokens=batch_tokens)
    alone = score_bytes(recurrent_nll, stream, windows, batch_tokens=48)
    assert max(sizes) <= max(batch_tokens, 48)
    assert sum(sizes) == 7 * 48
    np.testing.assert_allclose(table.nll, alone.nll, rtol=1e-5)
    assert np.array_equal(table.position, alone.position)


def test_bytes_are_those_of_the_scored_tokens(make_stream):
    bytes_per_token = np.array([1, 4, 2, 0])
    table = score_alone(
        zero_nll,
        make_stream([[3, 0, 1, 2, 1, 3, 0]]),
        opening_windows(np.array([0]), 7),
        bytes_per_token=bytes_per_token,
    )
    assert table.bytes.tolist() == [1, 4, 2, 4, 0, 1]
    assert table.offset.tolist() == [0, 1, 5, 7, 11, 11]


def test_progress_counts_every_token_fed(random_stream, score_bytes):
    fed = []
    score_bytes(zero_nll, random_stream(*[33] * 5), opening_windows(np.arange(5), 32), advance=fed.append)
    assert fed == [0, 96, 64], "none known before"


def test_scoring_keeps_no_graph_and_takes_low_precision(random_stream, score_bytes):
    weight = torch.ones((), requires_grad=True)

    def nll(inputs, targets):
        loss = (weight * inputs).to(torch.bfloat16)
        assert not loss.requires_grad
        return loss

    table = score_bytes(nll, random_stream(33), opening_windows(np.array([0]), 32))
    assert table.nll.dtype == np.float32
