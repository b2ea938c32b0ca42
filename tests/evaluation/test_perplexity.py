import math

import numpy as np
import pytest
import torch

from flashtrain.errors import UserError

# of the fixture `evaluation_of`
LENGTHS, TARGETS_PER_ANCHOR = [32, 64, 128], 16


def test_context_helps_exactly_where_the_model_can_use_it(make_stream, curves_of):
    """Documents repeat every 40 tokens; the model copies from 40 tokens ago, and is uniform before."""
    period = 40
    rng = np.random.default_rng(0)
    stream = make_stream([np.tile(rng.integers(0, 256, period), 13) for _ in range(3)])

    def copy_nll(inputs, targets):
        nll = torch.full(inputs.shape, math.log(256))
        source = inputs[:, : max(0, inputs.shape[1] - period + 1)]
        nll[:, period - 1 :] = torch.where(source == targets[:, period - 1 :], 0.0, 100.0)
        return nll

    curves = curves_of(copy_nll, stream)
    perplexities = {length: score.perplexity for length, score in curves.vs_context.items()}
    assert perplexities[32] == pytest.approx(256)
    # 16 targets that see 48 to 63 tokens, and 112 to 127: all 40 or more
    assert perplexities[64] == perplexities[128] == 1.0
    # of targets 1 to L - 1 the first 39 are guessed
    for length, score in curves.at_length.items():
        assert score.loss == pytest.approx(math.log(256) * min(39, length - 1) / (length - 1), rel=1e-6)
    assert curves.by_position[64, 128].loss == 0.0


def test_context_lengths_score_the_same_targets(random_stream, curves_of):
    stream = random_stream(500, 131, 128, 127)
    seen = {length: [] for length in LENGTHS}

    def nll(inputs, targets):
        if int((targets[0] >= 0).sum()) == TARGETS_PER_ANCHOR:
            seen[inputs.shape[1]] += targets[targets >= 0].tolist()
        return torch.zeros(inputs.shape)

    curves = curves_of(nll, stream)
    anchors = [(0, 128), (0, 256), (0, 384), (1, 128), (2, 128)]
    expected = np.concatenate([stream.tokens[stream.offsets[d] + e - 16 : stream.offsets[d] + e] for d, e in anchors])
    for length in LENGTHS:
        assert seen[length] == expected.tolist()
        assert curves.vs_context[length].targets == 5 * 16
        assert curves.vs_context[length].documents == 3


def test_every_length_is_about_the_same_documents(random_stream, curves_of, recurrent_nll):
    curves = curves_of(recurrent_nll, random_stream(200, 100, 128, 40, 900))
    assert {score.documents for score in curves.at_length.values()} == {3}
    assert {score.documents for score in curves.by_position.values()} == {3}
    assert [score.targets for score in curves.at_length.values()] == [3 * 31, 3 * 63, 3 * 127]
    coverage = curves.coverage
    assert (coverage.documents, coverage.documents_long_enough, coverage.documents_in_corpus) == (3, 3, 5)
    assert (coverage.anchors, coverage.anchors_in_corpus) == (9, 9)
    assert coverage.longest_document == 900


def test_position_ranges_add_up_to_the_longest_length(random_stream, curves_of, recurrent_nll):
    curves = curves_of(recurrent_nll, random_stream(200, 300))
    total = curves.at_length[128]
    assert sum(score.nll_sum for score in curves.by_position.values()) == pytest.approx(total.nll_sum, rel=1e-12)
    assert sum(score.targets for score in curves.by_position.values()) == total.targets


def test_lengths_beyond_every_document_are_kept_apart(random_stream, curves_of, recurrent_nll):
    curves = curves_of(recurrent_nll, random_stream(70, 90), lengths=[32, 64, 91, 4096])
    assert list(curves.at_length) == list(curves.vs_context) == [32, 64]
    assert curves.unreached == (91, 4096)
    assert curves.longest == 64


def test_no_document_of_the_shortest_length_is_a_user_error(random_stream, curves_of, recurrent_nll):
    with pytest.raises(UserError, match="longest validation document has 31"):
        curves_of(recurrent_nll, random_stream(31, 20))


def test_caps_choose_the_same_documents_each_time(random_stream, curves_of, recurrent_nll):
    stream = random_stream(*[130 + 10 * n for n in range(20)])
    first, second = (curves_of(recurrent_nll, stream, max_documents=4, max_anchors=6) for _ in range(2))
    assert first == second
    assert (first.coverage.documents, first.coverage.documents_long_enough) == (4, 20)
    assert (first.coverage.anchors, first.coverage.anchors_in_corpus) == (
        6,
        sum((130 + 10 * n) // 128 for n in range(20)),
    )
    assert first.at_length[128].targets == 4 * 127
    assert first.vs_context[128].targets == 6 * 16


@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
def test_curves_do_not_depend_on_the_batch(batch_tokens, random_stream, curves_of, recurrent_nll):
    stream = random_stream(200, 300, 128)
    reference, other = (
        curves_of(recurrent_nll, stream),
        curves_of(recurrent_nll, stream, batch_tokens=batch_tokens),
    )
    for curve in ("at_length", "vs_context", "by_position"):
        ours, theirs = getattr(reference, curve), getattr(other, curve)
        assert {key: score.targets for key, score in ours.items()} == {key: s.targets for key, s in theirs.items()}
        for key in ours:
            assert ours[key].nll_sum == pytest.approx(theirs[key].nll_sum, rel=1e-6)


def test_another_document_changes_nothing(random_stream, make_stream, curves_of, recurrent_nll):
    alone = random_stream(260)
    beside = make_stream([alone.tokens.array, random_stream(127, seed=1).tokens.array])  # too short to be scored
    assert curves_of(recurrent_nll, beside).at_length == curves_of(recurrent_nll, alone).at_length
    assert curves_of(recurrent_nll, beside).vs_context == curves_of(recurrent_nll, alone).vs_context


def test_beyond_training_begins_after_the_training_length(random_stream, curves_of, recurrent_nll):
    curves = curves_of(recurrent_nll, random_stream(200))
    assert [curves.beyond_training(length) for length in (511, 512, 513)] == [False, False, True]


def test_where_predictions_follow_the_length_each_length_has_its_own_forward(random_stream, curves_of):
    """A model whose loss is the number of tokens fed: perplexity at length L is exp(L), if L tokens were fed."""
    stream = random_stream(300, 400)

    def nll(inputs, targets):
        return torch.full(inputs.shape, float(inputs.shape[1]))

    apart, together = (curves_of(nll, stream, follows_length=follows) for follows in (True, False))
    assert {length: score.loss for length, score in apart.at_length.items()} == {32: 32, 64: 64, 128: 128}
    assert {length: score.loss for length, score in together.at_length.items()} == {32: 128, 64: 128, 128: 128}
    assert apart.at_length_macro[64] == pytest.approx(math.exp(64))
    assert {score.loss for score in apart.by_position.values()} == {128}
    for length in LENGTHS:
        assert apart.at_length[length].targets == together.at_length[length].targets == 2 * (length - 1)


def test_a_long_document_is_fed_in_one_piece(random_stream, curves_of):
    shapes = set()

    def nll(inputs, targets):
        shapes.add(tuple(inputs.shape))
        return torch.zeros(inputs.shape)

    curves = curves_of(nll, random_stream(131_072, 40_000), lengths=[1024, 131_072], batch_tokens=16_384)
    assert shapes == {(1, 131_072), (1, 1024)}
    assert curves.at_length[131_072].targets == 131_071
