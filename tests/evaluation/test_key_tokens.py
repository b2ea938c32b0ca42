import math

import numpy as np
import pytest
import torch

from flashtrain.errors import UserError
from flashtrain.evaluation.key_tokens import read_keys, score_keys, short_context, write_keys
from flashtrain.evaluation.report import describe_scored
from flashtrain.evaluation.scoring import Documents, score
from flashtrain.evaluation.windows import opening_windows

PERIOD = 40


@pytest.fixture
def periodic(make_stream):
    """Documents that repeat every 40 tokens."""
    rng = np.random.default_rng(0)
    return make_stream([np.tile(rng.integers(0, 256, PERIOD), 8) for _ in range(3)])


def copying(found, otherwise):
    """A model whose NLL is `found` where the token 40 before the target is in sight, `otherwise` where not."""

    def nll(inputs, targets):
        position = torch.arange(1, inputs.shape[1] + 1)
        return torch.where(position >= PERIOD, found, otherwise).expand(inputs.shape)

    return nll


def test_the_short_context_of_32k_tokens_is_that_of_the_paper():
    assert short_context(32768) == (4096, 1024)
    assert short_context(2) == (1, 1)


def test_keys_are_what_long_context_makes_likely(periodic, evaluation_of):
    """Of 256 tokens those from 40 on are copied; in 32 to 39 tokens nothing is."""
    evaluation = evaluation_of(copying(1.0, 3.5), periodic, lengths=[256], key_tokens="self")
    keys = evaluation.curves.key_tokens
    assert (keys.keys, keys.chosen, keys.scored) == (3 * 216, 3 * 216, 3 * 255)
    assert keys.fraction == pytest.approx(216 / 255)
    assert keys.score.perplexity == pytest.approx(math.e)
    assert keys.choice.evaluator == "nano at step 400 (5e0c4af1)"
    assert keys.choice.short_context == 32


@pytest.mark.parametrize(("found", "otherwise"), [(1.0, 3.0), (2.0, 9.0)], ids=["gains 2", "keeps 2"])
def test_no_key_is_said_and_not_a_number(found, otherwise, periodic, evaluation_of):
    keys = evaluation_of(copying(found, otherwise), periodic, lengths=[256], key_tokens="self").curves.key_tokens
    assert keys.keys == 0 and keys.score is None


def test_short_context_scores_each_candidate_once(random_stream, evaluation_of, recurrent_nll):
    for longest in (64, 100, 128):
        table = evaluation_of(recurrent_nll, random_stream(200, 140), lengths=[longest], key_tokens="self").table
        short = table.of("short")
        least, step = short_context(longest)
        assert list(zip(short.document, short.position, strict=True)) == [
            (document, position) for document in (0, 1) for position in range(least, longest)
        ]
        assert short.context.min() == least
        assert (short.context < least + step).all()


def test_kept_keys_are_scored_for_another_model(periodic, evaluation_of, tmp_path):
    chosen = evaluation_of(copying(1.0, 3.5), periodic, lengths=[256], key_tokens="self")
    write_keys(chosen.keys, tmp_path / "key_tokens.parquet")
    path = str(tmp_path / "key_tokens.parquet")
    other = evaluation_of(copying(0.5, 0.7), periodic, lengths=[256], key_tokens=path)
    assert other.curves.key_tokens.score.loss == pytest.approx(0.5)
    assert other.curves.key_tokens.choice == chosen.curves.key_tokens.choice
    assert other.curves.key_tokens.keys == 3 * 216
    assert not other.table.lengths("short"), "the choice is made"
    half = evaluation_of(copying(0.5, 0.7), periodic, lengths=[148], key_tokens=path)
    keys = half.curves.key_tokens
    assert (keys.keys, keys.chosen, keys.reached) == (3 * 108, 3 * 216, 3 * 108)
    assert f"of its documents, of which {3 * 108} are in what was scored here" in describe_scored(half.curves)
    one = evaluation_of(copying(0.5, 0.7), periodic, lengths=[256], max_documents=1, key_tokens=path)
    assert (one.curves.key_tokens.keys, one.curves.key_tokens.reached) == (216, 216)


def test_places_in_the_text_serve_another_tokenizer(periodic, evaluation_of, make_stream):
    """Pairs of bytes as tokens: a pair is a key where one of its bytes is."""
    chosen = evaluation_of(copying(1.0, 3.5), periodic, lengths=[256], key_tokens="self")
    pairs = make_stream([np.r_[160, np.arange(160)] for _ in range(3)])
    table = score(
        lambda inputs, targets: targets.float(),
        Documents(pairs, "document"),
        [opening_windows(np.arange(3), 161)],
        bytes_per_token=np.r_[np.full(160, 2), 0],
        batch_tokens=1000,
        advance=lambda tokens: None,
    )
    keys = score_keys(table, chosen.keys)
    # keys are the bytes 40 to 255 of each document, of which no token is a prefix
    assert (keys.keys, keys.reached) == (3 * 108, 3 * 216)
    assert keys.score.loss == pytest.approx(np.mean(np.arange(20, 128)))


def test_keys_of_another_text_are_refused(periodic, evaluation_of, tmp_path):
    write_keys(evaluation_of(copying(1.0, 3.5), periodic, key_tokens="self").keys, tmp_path / "keys.parquet")
    with pytest.raises(UserError, match="is of the validation text 77d0b1e2 and this run's is 00000000"):
        read_keys(tmp_path / "keys.parquet", "00000000")


@pytest.mark.parametrize("content", [None, b"", b"no parquet"], ids=["missing", "empty", "text"])
def test_what_is_no_file_of_keys_is_refused(content, periodic, evaluation_of, tmp_path):
    path = tmp_path / "keys.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"keys.parquet is no file of key tokens .*; name the key_tokens.parquet of an"):
        evaluation_of(copying(1.0, 3.5), periodic, key_tokens=str(path))
