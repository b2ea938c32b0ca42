"""Mistakes that public evaluation code made, each named with its thread, and what ours does instead."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from live_memory import LiveMemory
from presets import preset

from flashtrain.assembly import build_model, scorer
from flashtrain.device import PRECISIONS, Device
from flashtrain.evaluation.metrics import byte_perplexity, ppl_strided, summarize, word_perplexity
from flashtrain.evaluation.report import rows_by_metric
from flashtrain.evaluation.scoring import NOT_SCORED
from flashtrain.model.head import summed_cross_entropy

CPU = Device("cpu", PRECISIONS["fp32"], compile=False)
# (targets, loss) in float64 without any of our evaluation: two lengths, two contexts, strided windows
GOLDEN = [(63, 5.87103683), (150, 5.85339487), (16, 6.02326479), (16, 6.09595581), (150, 5.86505493)]


@pytest.fixture
def whole_documents(evaluation_of):
    """Score whole documents: (nll, stream, window, stride, ...) -> rows of the table."""

    def build(nll, stream, window, stride, **changes):
        longest = int(np.diff(stream.offsets).max()) - (changes.get("prefix") == "none")
        shortest = {"lengths": [longest], "targets_per_anchor": 1}
        table = evaluation_of(nll, stream, window=window, stride=stride, **shortest | changes).table
        return table.of("strided")

    return build


def hugging_faces_loop(nll, tokens, window, stride):
    """(targets, NLL sum) of each window of the documented loop, in tokens: one input fewer than tokens."""
    sums, before = [], 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        inputs = torch.from_numpy(tokens[begin : end - 1].astype(np.int64))[None]
        targets = torch.from_numpy(tokens[begin + 1 : end].astype(np.int64))[None]
        new = min(end - before, targets.shape[1])
        sums.append((new, float(nll(inputs, targets)[0, -new:].double().sum()) if new else 0.0))
        before = end
        if end == len(tokens):
            break
    return sums


@pytest.mark.parametrize(("length", "window", "stride"), [(300, 64, 4), (300, 64, 59), (128, 64, 1), (64, 64, 64)])
def test_strided_windows_equal_hugging_faces_loop_where_its_last_window_is_whole(
    length, window, stride, random_stream, recurrent_nll, whole_documents
):
    assert (length - window) % stride == 0
    stream = random_stream(length)
    total = ppl_strided(whole_documents(recurrent_nll, stream, window - 1, min(stride, window - 1)))
    theirs = hugging_faces_loop(recurrent_nll, stream.tokens, window, stride)
    assert total.targets == sum(targets for targets, _ in theirs) == length - 1
    assert total.nll_sum == pytest.approx(sum(nll for _, nll in theirs), rel=1e-6)


def test_transformers_34138_windows_are_weighted_by_their_targets(random_stream, recurrent_nll, whole_documents):
    """The last window is shorter; the mean of window means gives each of its targets more weight."""
    stream = random_stream(300)
    loss = ppl_strided(whole_documents(recurrent_nll, stream, 63, 50)).loss
    theirs = hugging_faces_loop(recurrent_nll, stream.tokens, 64, 50)
    exact = float(sum(nll for _, nll in theirs)) / sum(targets for targets, _ in theirs)
    mean_of_means = np.mean([nll / targets for targets, nll in theirs])
    assert abs(loss - exact) < 0.1 * abs(mean_of_means - exact)


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (16, 16), (50, 50), (50, 49), (299, 299), (1000, 1000)])
def test_transformers_30975_no_token_at_a_windows_edge_is_lost(
    window, stride, random_stream, recurrent_nll, whole_documents
):
    table = whole_documents(recurrent_nll, random_stream(300), window, stride)
    assert table.position.tolist() == list(range(1, 300))


def test_transformers_18887_the_first_window_has_all_its_inputs(random_stream, recurrent_nll, whole_documents):
    table = whole_documents(recurrent_nll, random_stream(300), 64, 16)
    assert (table.window == table.window[0]).sum() == 64
    assert table.context[:64].tolist() == list(range(1, 65))


@pytest.mark.parametrize("prefix", ["document", "window", "none"])
def test_transformers_40524_and_skylight_90_the_prefix_token_stands_where_the_policy_says(
    prefix, random_stream, evaluation_of, recurrent_nll
):
    fed, stream = [], random_stream(300)

    def nll(inputs, targets):
        fed.extend(inputs.tolist())
        return recurrent_nll(inputs, targets)

    curves = evaluation_of(nll, stream, lengths=[128], window=50, stride=20, prefix=prefix).curves
    begin_with_prefix = {"document": [True, False], "window": [True, True], "none": [False, False]}[prefix]
    assert {row[0] == 256 for row in fed} == set(begin_with_prefix)
    assert all(256 not in row[1:] for row in fed), "and nowhere else"
    assert curves.options.prefix == prefix
    assert curves.strided.score.targets == (298 if prefix == "none" else 299)


def test_lm_eval_1586_the_prefix_token_is_the_corpus_own_and_is_named(random_stream, evaluation_of, recurrent_nll):
    stream = random_stream(200)
    curves = evaluation_of(recurrent_nll, stream, prefix="window").curves
    assert curves.conditions.prefix_id == stream.tokens.array[0] == 256


def test_lm_eval_806_a_models_figures_do_not_drift(make_stream, evaluation_of):
    """A model without random numbers; a change of these figures is a change of what they mean."""
    options = preset("nano", num_layers=2, hidden_size=16, num_heads=2, vocab_size=257).resolve()
    model = build_model(options, "standard", CPU, "none")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            waves = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * (1 + 0.1 * number))
            parameter.copy_(waves.view_as(parameter))
    stream = make_stream([np.r_[256, (np.arange(150) ** 2) % 256]])
    curves = evaluation_of(scorer(model, CPU, 64, None, None), stream, lengths=[64, 151], window=31, stride=7).curves
    found = [*curves.at_length.values(), *curves.vs_context.values(), curves.strided.score]
    assert [(score.targets, score.loss) for score in found] == [
        (targets, pytest.approx(loss, rel=1e-6)) for targets, loss in GOLDEN
    ]


def test_lm_eval_242_bits_are_of_base_two(random_stream, recurrent_nll, whole_documents):
    total = ppl_strided(whole_documents(recurrent_nll, random_stream(300), 64, 64))
    assert 2**total.bits_per_byte == pytest.approx(byte_perplexity(total), rel=1e-12)
    assert byte_perplexity(total) == pytest.approx(total.perplexity, rel=1e-12), "a token is a byte here"


def rolling_windows(num_tokens, max_length):
    """lm-eval's rolling log-likelihood: (first input, targets) in y = [prefix] + tokens, windows made disjoint."""
    targets, windows = list(range(1, num_tokens + 1)), []
    while targets:
        new, targets = targets[:max_length], targets[max_length:]
        windows.append((max(new[-1] - max_length, 0), new))
    return windows


@pytest.mark.parametrize(("length", "max_length"), [(300, 64), (257, 64), (65, 64), (40, 64)])
def test_lm_eval_2467_a_stride_of_the_window_is_its_rolling_log_likelihood(
    length, max_length, random_stream, recurrent_nll, whole_documents
):
    """Which depends on its max_length, so window and stride are in the row of the result."""
    stream = random_stream(length)
    table = whole_documents(recurrent_nll, stream, max_length, max_length)
    y, expected = torch.from_numpy(stream.tokens.array.astype(np.int64)), 0.0
    for first, targets in rolling_windows(length - 1, max_length):
        last = targets[-1]
        nll = recurrent_nll(y[None, first:last], y[None, first + 1 : last + 1])[0, -len(targets) :]
        expected += float(nll.double().sum())
    total = ppl_strided(table)
    assert total.nll_sum == pytest.approx(expected, rel=1e-6)
    assert word_perplexity(total, 50) == pytest.approx(math.exp(expected / 50), rel=1e-5)
    assert byte_perplexity(total) == pytest.approx(math.exp(expected / (length - 1)), rel=1e-5)


def test_lm_eval_1565_window_and_stride_stand_in_the_row(random_stream, evaluation_of, recurrent_nll):
    curves = evaluation_of(recurrent_nll, random_stream(200), window=50, stride=20).curves
    (row,) = rows_by_metric(curves)["ppl_strided"]
    assert (row["window"], row["stride"]) == (50, 20)


def test_lm_eval_2301_no_window_crosses_from_one_document_into_another(
    random_stream, make_stream, evaluation_of, recurrent_nll
):
    first, second = random_stream(150).tokens.array, random_stream(130, seed=1).tokens.array
    settings = {"window": 50, "stride": 20, "key_tokens": "self"}
    apart = [evaluation_of(recurrent_nll, make_stream([alone]), **settings).table for alone in (first, second)]
    both = evaluation_of(recurrent_nll, make_stream([first, second]), **settings).table
    for document, table in enumerate(apart):
        together = both.where(both.document == document)
        assert np.array_equal(together.position, table.position)
        np.testing.assert_allclose(together.nll, table.nll, rtol=1e-5)


def test_lingua_46_bytes_are_those_of_the_scored_part(random_stream, evaluation_of, recurrent_nll):
    curves = evaluation_of(recurrent_nll, random_stream(1000)).curves
    assert {length: score.bytes for length, score in curves.at_length.items()} == {32: 31, 64: 63, 128: 127}
    assert {score.bytes for score in curves.vs_context.values()} == {7 * 16}


def test_lighteval_1252_the_target_is_the_next_token(make_stream, whole_documents):
    """Labels that are not shifted make a model that copies its input an oracle, and one that knows the next none."""

    def counting(inputs, targets):
        return torch.where(inputs + 1 == targets, 0.0, 100.0)

    assert ppl_strided(whole_documents(counting, make_stream([np.arange(100)]), 30, 10)).perplexity == 1.0


def test_axolotl_3988_short_documents_are_not_padded(random_stream, whole_documents, recurrent_nll):
    shapes = []

    def nll(inputs, targets):
        shapes.append(tuple(inputs.shape))
        return recurrent_nll(inputs, targets)

    lengths = (90, 20, 7, 20, 2)
    stream = random_stream(*lengths)
    table = whole_documents(nll, stream, 64, 64)
    assert {length for _, length in shapes} == {90, 64, 19, 6, 1}, "90 is the opening"
    for document, length in enumerate(lengths):
        tokens = torch.from_numpy(stream.tokens[stream.offsets[document] :][:length].astype(np.int64))[None]
        if length <= 65:
            alone = recurrent_nll(tokens[:, :-1], tokens[:, 1:])[0]
            np.testing.assert_allclose(table.nll[table.document == document], alone, rtol=1e-5)


def test_transformer_xl_131_targets_are_counted_where_they_are_asked_for(random_stream, evaluation_of, recurrent_nll):
    asked = []

    def nll(inputs, targets):
        asked.append(int((targets != NOT_SCORED).sum()))
        return recurrent_nll(inputs, targets)

    evaluation = evaluation_of(nll, random_stream(300, 140, 3), window=50, stride=20, key_tokens="self")
    assert sum(asked) == len(evaluation.table)
    assert summarize(evaluation.table).targets == len(evaluation.table)


def test_pytorch_25162_no_document_is_scored_twice_to_make_batches_even(random_stream, whole_documents, recurrent_nll):
    table = whole_documents(recurrent_nll, random_stream(*[30] * 7), 64, 64, batch_tokens=4 * 29)
    assert table.document.tolist() == [document for document in range(7) for _ in range(29)]


def test_litgpt_599_and_veomni_1077_documents_with_more_targets_weigh_more(make_stream, whole_documents):
    """Two documents of different sizes and losses: neither the mean of documents nor of batches."""

    def nll(inputs, targets):
        return targets.float()

    table = whole_documents(nll, make_stream([np.full(5, 1), np.full(101, 4)]), 200, 200, batch_tokens=1)
    assert ppl_strided(table).loss == pytest.approx((4 * 1 + 100 * 4) / 104, rel=1e-12)


def test_torchtitan_2366_the_loss_of_an_evaluation_is_that_of_training(random_stream, whole_documents):
    options = preset("nano", num_layers=1, hidden_size=16, num_heads=1, vocab_size=257).resolve()
    torch.manual_seed(0)
    model = build_model(options, "standard", CPU, "none")
    stream = random_stream(60, 60, 60)
    table = whole_documents(scorer(model, CPU, 16, None, None), stream, 59, 59)
    rows = torch.from_numpy(stream.tokens.array.astype(np.int64)).view(3, 60)
    hidden, targets = model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
    loss = summed_cross_entropy(hidden, model.head_weight, targets, options.vocab_size, 16)
    assert ppl_strided(table).nll_sum == pytest.approx(loss.item(), rel=1e-6)


def test_llama_cpp_23569_logits_exist_one_chunk_at_a_time():
    """Of 131,072 tokens and 128,256 words they would be 62.6 GiB; there are as many rows as a chunk has."""
    options = preset("nano", num_layers=1, hidden_size=8, num_heads=1, vocab_size=2000, windows=[8]).resolve()
    model = build_model(options, "sdpa_math", CPU, "none")
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    with LiveMemory() as memory:
        scorer(model, CPU, 128, None, 128)(tokens, tokens)
    chunk = 128 * options.padded_vocab_size * 4
    assert memory.peak < 6 * chunk < 8192 * options.padded_vocab_size * 4 / 10


def test_dspark_81_a_length_is_that_of_what_was_fed(random_stream, evaluation_of, recurrent_nll):
    fed = []

    def nll(inputs, targets):
        fed.extend(len(row) for row in inputs)
        return recurrent_nll(inputs, targets)

    lengths = [32, 90, 128, 4096]
    evaluation = evaluation_of(nll, random_stream(130, 100, 300), lengths=lengths, follows_length=True)
    curves, reached = evaluation.curves, lengths[:3]
    assert curves.unreached == (4096,) and list(curves.at_length) == reached
    assert set(fed) == set(reached)
    for length in reached:
        assert evaluation.table.of("opening", length).position.max() == length - 1


def test_llama_cpp_2714_both_halves_of_a_window_are_scored(random_stream, whole_documents, recurrent_nll):
    """It scores the latter half of disjoint windows: other targets, so another figure."""
    table = whole_documents(recurrent_nll, random_stream(257), 64, 64)
    assert [(table.window == window).sum() for window in np.unique(table.window)] == [64, 64, 64, 64]


def test_llama_cpp_7111_bits_per_byte_stand_beside_every_perplexity(random_stream, evaluation_of, recurrent_nll):
    curves = evaluation_of(recurrent_nll, random_stream(200), window=50).curves
    rows = [row for rows in rows_by_metric(curves).values() for row in rows]
    assert len(rows) > 8
    assert all(row["bits_per_byte"] > 0 and row["perplexity"] > 1 for row in rows)


def test_an_evaluation_draws_no_random_numbers(random_stream, evaluation_of, recurrent_nll):
    state = torch.get_rng_state()
    evaluation_of(recurrent_nll, random_stream(200), window=50, key_tokens="self")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_of_a_window_is_cross_entropy(random_stream, whole_documents):
    """Of a model in plain PyTorch, float32, each window by hand."""
    torch.manual_seed(1)
    table = torch.randn(257, 257)

    def nll(inputs, targets):
        return F.cross_entropy(table[inputs].mT, targets, reduction="none")

    stream = random_stream(100)
    rows = whole_documents(nll, stream, 30, 30)
    y = torch.from_numpy(stream.tokens.array.astype(np.int64))
    np.testing.assert_allclose(rows.nll, F.cross_entropy(table[y[:-1]], y[1:], reduction="none"), rtol=1e-6)
