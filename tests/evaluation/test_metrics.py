import math

import numpy as np
import pytest
import torch

from flashtrain.evaluation.metrics import (
    Score,
    loss_by_position,
    ppl_at_length,
    ppl_at_length_macro,
    summarize,
)
from flashtrain.evaluation.scoring import Documents, score
from flashtrain.evaluation.table import TargetTable
from flashtrain.evaluation.windows import OPENING, PURPOSES, documents_of, opening_windows


def table_of(nll, document=0, position=1, bytes=1, length=None):
    """Openings of one length: as many tokens as the last position needs, unless given."""
    nll = np.asarray(nll, dtype=np.float32)
    document, position, bytes = (
        np.broadcast_to(np.asarray(column, dtype=np.int32), nll.shape) for column in (document, position, bytes)
    )
    return TargetTable(
        purpose=np.full(nll.shape, PURPOSES.index(OPENING), np.int8),
        length=np.full(nll.shape, length or position.max() + 1),
        window=document,
        document=document,
        position=position,
        context=position,
        offset=position - 1,
        bytes=bytes,
        nll=nll,
    )


def openings(nll, stream, length, bytes_per_token):
    documents = Documents(stream, "document")
    windows = opening_windows(documents_of(documents.num_tokens, length), length)
    return score(
        nll,
        documents,
        [windows],
        bytes_per_token=bytes_per_token,
        batch_tokens=4096,
        advance=lambda tokens: None,
    )


def test_a_uniform_model_has_the_vocabulary_size_as_perplexity(random_stream, byte_counts):
    def uniform(inputs, targets):
        return torch.nn.functional.cross_entropy(
            torch.zeros(len(inputs), 257, inputs.shape[1]), targets, reduction="none"
        )

    total = summarize(openings(uniform, random_stream(600, 700), 512, byte_counts))
    assert total.perplexity == pytest.approx(257, rel=1e-6)
    assert total.bits_per_byte == pytest.approx(math.log2(257), rel=1e-6)


def test_an_oracle_has_perplexity_one():
    total = summarize(table_of(np.zeros(100)))
    assert (total.perplexity, total.loss, total.bits_per_byte) == (1.0, 0.0, 0.0)


def test_the_mean_is_over_targets_not_over_documents():
    table = table_of([1.0] * 99 + [5.0], document=[0] * 99 + [1])
    assert summarize(table).loss == pytest.approx(1.04)
    assert summarize(table).perplexity == pytest.approx(math.exp(1.04))
    assert ppl_at_length_macro(table, [2]) == {2: pytest.approx((math.exp(1) + math.exp(5)) / 2)}


def test_shorter_lengths_from_one_forward_equal_a_forward_each(random_stream, byte_counts, recurrent_nll):
    stream = random_stream(300, 90, 256, 400)
    lengths = [2, 7, 64, 255, 256]
    table = openings(recurrent_nll, stream, 256, byte_counts)
    scores, macros = ppl_at_length(table, lengths), ppl_at_length_macro(table, lengths)
    for length in lengths:
        losses = []
        for document in (0, 2, 3):
            start = stream.offsets[document]
            tokens = torch.from_numpy(stream.tokens[start : start + length].astype(np.int64))[None]
            losses.append(recurrent_nll(tokens[:, :-1], tokens[:, 1:]).detach().double())
        assert scores[length].targets == 3 * (length - 1)
        assert scores[length].documents == 3
        assert scores[length].loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)
        assert macros[length] == pytest.approx(np.mean([math.exp(loss.mean()) for loss in losses]), rel=1e-6)


@pytest.mark.parametrize("length", [2, 3, 64, 100, 129])
def test_position_ranges_hold_every_target_once(length, random_stream, byte_counts, recurrent_nll):
    table = openings(recurrent_nll, random_stream(150, 130), length, byte_counts)
    buckets = loss_by_position(table)
    edges = list(buckets)
    assert edges[0][0] == 1 and edges[-1][1] == length
    assert all(first[1] == second[0] for first, second in zip(edges, edges[1:], strict=False))
    assert sum(bucket.targets for bucket in buckets.values()) == len(table) == 2 * (length - 1)
    assert all(bucket.documents == 2 for bucket in buckets.values())
    weighted = sum(bucket.loss * bucket.targets for bucket in buckets.values()) / len(table)
    assert weighted == pytest.approx(summarize(table).loss, rel=1e-12)


def test_position_ranges_double():
    table = table_of(np.arange(99.0), position=np.arange(1, 100))
    assert list(loss_by_position(table)) == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 100)]
    assert loss_by_position(table)[2, 4].nll_sum == 1 + 2


def test_bits_per_byte_is_over_the_text_that_was_scored():
    total = summarize(table_of([math.log(2), 3 * math.log(2), 50.0], bytes=[1, 3, 0]))
    assert total.bits_per_byte == pytest.approx(1.0)  # 4 bits for 4 bytes, the special token left out
    assert total.loss == pytest.approx((4 * math.log(2) + 50) / 3)
    assert 2**total.bits_per_byte == pytest.approx(math.exp(total.text_nll_sum / total.bytes))


def test_bits_per_byte_of_byte_tokens_is_the_log2_of_perplexity():
    total = summarize(table_of(np.random.default_rng(0).exponential(2.0, 5000)))
    assert total.bits_per_byte == pytest.approx(math.log2(total.perplexity), rel=1e-12)


def test_bits_per_byte_without_text_is_not_a_number():
    assert math.isnan(summarize(table_of([1.0, 2.0], bytes=0)).bits_per_byte)


def test_sums_are_in_double_precision():
    nll = np.full(3_000_000, 0.1, dtype=np.float32)
    exact = 3_000_000 * float(np.float32(0.1))
    total = summarize(table_of(nll))
    assert total.nll_sum == pytest.approx(exact, rel=1e-12)
    assert abs(float(np.cumsum(nll)[-1]) - exact) > 1  # what single precision would have made of it


def test_perplexity_that_overflows_is_infinite():
    assert Score(nll_sum=1e6, targets=1, text_nll_sum=0, bytes=0, documents=1).perplexity == math.inf
    assert ppl_at_length_macro(table_of([1e6, 1.0], document=[0, 1]), [2])[2] == math.inf


def test_the_true_model_of_a_markov_source_has_its_entropy_rate(make_stream):
    rng = np.random.default_rng(1)
    transition = rng.dirichlet(np.full(16, 0.3), size=16)
    stationary = np.linalg.matrix_power(transition, 200)[0]
    row_entropies = -(transition * np.log(np.maximum(transition, 1e-300))).sum(axis=1)
    entropy_rate = float(stationary @ row_entropies)

    cumulative, state, documents = transition.cumsum(axis=1), 0, []
    for _ in range(8):
        draws, document = rng.random(4096), []
        for draw in draws:
            state = min(int(np.searchsorted(cumulative[state], draw)), 15)
            document.append(state)
        documents.append(document)

    log_transition = torch.from_numpy(np.log(np.maximum(transition, 1e-300)))

    def nll(inputs, targets):
        return -log_transition[inputs, targets.clamp(min=0)]

    table = openings(nll, make_stream(documents), 4096, np.ones(16, dtype=np.int64))
    standard_error = table.nll.std() / math.sqrt(len(table))
    assert abs(summarize(table).loss - entropy_rate) < 4 * standard_error < 0.03
