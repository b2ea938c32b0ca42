"""What holds for any documents, windows, batches, pieces and variants."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from presets import preset

from flashtrain.assembly import build_model, scorer
from flashtrain.device import PRECISIONS, Device
from flashtrain.evaluation.metrics import loss_by_position, ppl_at_length, ppl_strided, ppl_vs_context, summarize
from flashtrain.evaluation.scoring import Documents, score
from flashtrain.evaluation.table import concatenate
from flashtrain.evaluation.windows import STRIDED, documents_of, opening_windows, strided_windows

CPU = Device("cpu", PRECISIONS["fp32"], compile=False)
VOCAB = 257
PREFIX = 256
EPS = float(np.finfo(np.float32).eps)

many_cases = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths_of_documents = st.lists(st.integers(1, 90), min_size=1, max_size=5)
prefixes = st.sampled_from(["document", "window", "none"])


@st.composite
def windows_and_strides(draw):
    window = draw(st.integers(1, 40))
    return window, draw(st.integers(1, window))


def score_whole(nll, stream, window, stride, prefix="document", batch_tokens=200, bytes_per_token=None):
    documents = Documents(stream, prefix)
    chosen = documents_of(documents.num_tokens, 2)
    counts = np.r_[np.ones(256, np.int64), 0] if bytes_per_token is None else bytes_per_token
    return score(
        nll,
        documents,
        strided_windows(chosen, documents.num_tokens, window, stride),
        bytes_per_token=counts,
        batch_tokens=batch_tokens,
        advance=lambda tokens: None,
    )


@many_cases(max_examples=150)
@given(lengths_of_documents, windows_and_strides(), prefixes, st.integers(1, 300))
def test_every_target_is_scored_once_with_the_context_that_was_asked_for(lengths, windowing, prefix, batch_tokens):
    window, stride = windowing
    stream, inputs_seen = stream_of_lengths(lengths), []

    def nll(inputs, targets):
        inputs_seen.append((tuple(inputs.shape), int((targets >= 0).sum())))
        return torch.zeros(inputs.shape)

    tokens = [length - (prefix == "none") for length in lengths]
    if max(tokens) < 2:
        return
    table = score_whole(nll, stream, window, stride, prefix, batch_tokens)
    expected = [(d, position) for d, length in enumerate(tokens) for position in range(1, length)]
    assert sorted(zip(table.document.tolist(), table.position.tolist(), strict=True)) == expected
    assert sum(count for _, count in inputs_seen) == len(table) == len(expected)
    for (rows, fed), _ in inputs_seen:
        assert fed <= window and (rows == 1 or rows * fed <= batch_tokens)
    first = table.position <= window
    assert np.array_equal(table.context[first], table.position[first]), "a document's first window scores all it has"
    assert ((window - stride + 1 <= table.context[~first]) & (table.context[~first] <= window)).all()


@pytest.fixture(scope="module")
def models():
    """variant -> the same random GPT with that attention, far from uniform."""

    def build(variant):
        options = preset("nano", num_layers=2, hidden_size=32, num_heads=2, vocab_size=VOCAB).resolve()
        torch.manual_seed(0)
        model = build_model(options, variant, CPU, "none").eval()
        with torch.no_grad():
            model.token_embedding.weight.mul_(20)
        return model

    return {variant: build(variant) for variant in ("standard", "sdpa_math", "sdpa_flash", "flash_v2")}


def assert_same_sums(first, second):
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.targets, ours.bytes, ours.documents) == (theirs.targets, theirs.bytes, theirs.documents)
        assert theirs.nll_sum == pytest.approx(ours.nll_sum, rel=1e-6)
        assert theirs.text_nll_sum == pytest.approx(ours.text_nll_sum, rel=1e-6)


def all_scores(evaluation):
    curves = evaluation.curves
    by_key = (curves.at_length, curves.vs_context, curves.by_position)
    return [score for scores in by_key for score in scores.values()] + [curves.strided.score]


@pytest.mark.parametrize(
    ("variant", "chunk", "piece", "batch_tokens", "prefix"),
    [
        ("standard", 7, None, 1, "document"),
        ("standard", 4096, 1, 512, "document"),
        ("standard", 64, 17, 4096, "window"),
        ("standard", 64, 17, 100, "none"),
        ("sdpa_math", 100, 24, 150, "document"),
        ("sdpa_math", 100, 40, 300, "window"),
        ("sdpa_flash", 1000, None, 512, "document"),
        ("sdpa_flash", 30, None, 100, "none"),
        ("flash_v2", 4096, 32, 4096, "document"),
    ],
)
def test_sums_do_not_depend_on_variant_chunk_piece_or_batch(
    variant, chunk, piece, batch_tokens, prefix, models, random_stream, evaluation_of
):
    stream = random_stream(50, 100, 42, 11)
    limits = {"max_documents": 2, "max_anchors": 2}
    settings = {"lengths": [20, 41], "window": 25, "stride": 10, "prefix": prefix} | limits
    expected = all_scores(evaluation_of(scorer(models["standard"], CPU, 4096, None, None), stream, **settings))
    other = scorer(models[variant], CPU, chunk, None, piece)
    found = all_scores(evaluation_of(other, stream, batch_tokens=batch_tokens, **settings))
    assert expected[0].loss > 1
    assert_same_sums(expected, found)


@many_cases(max_examples=15)
@given(windows_and_strides(), st.integers(1, 200), st.integers(1, 50), st.integers(1, 64))
def test_sums_of_any_windows_do_not_depend_on_batch_chunk_or_piece(models, windowing, batch_tokens, piece, chunk):
    stream = stream_of_lengths([45, 60, 2, 31])
    whole = score_whole(scorer(models["standard"], CPU, 4096, None, None), stream, *windowing)
    other = score_whole(
        scorer(models["sdpa_math"], CPU, chunk, None, piece), stream, *windowing, batch_tokens=batch_tokens
    )
    assert_same_sums([ppl_strided(whole)], [ppl_strided(other)])
    assert np.array_equal(whole.position, other.position) and np.array_equal(whole.context, other.context)


@many_cases(max_examples=40)
@given(st.lists(st.integers(2, 90), min_size=1, max_size=7), windows_and_strides(), st.integers(1, 3))
def test_sums_of_parts_of_the_documents_are_those_of_the_whole(recurrent_nll, lengths, windowing, world_size):
    """What ranks would score, without a document twice or none where they do not divide evenly."""
    stream = stream_of_lengths(lengths)
    documents = Documents(stream, "document")
    whole = score_whole(recurrent_nll, stream, *windowing)
    shards = [np.arange(rank, len(lengths), world_size) for rank in range(world_size)]
    parts = [
        score(
            recurrent_nll,
            documents,
            strided_windows(shard, documents.num_tokens, *windowing),
            bytes_per_token=np.r_[np.ones(256, np.int64), 0],
            batch_tokens=64,
            advance=lambda tokens: None,
        )
        for shard in shards
        if len(shard)
    ]
    assert_same_sums([ppl_strided(whole)], [ppl_strided(concatenate(parts))])
    sums = [summarize(part) for part in parts]
    assert sum(part.targets for part in sums) == ppl_strided(whole).targets
    assert sum(part.nll_sum for part in sums) == pytest.approx(ppl_strided(whole).nll_sum, rel=1e-6)


@pytest.mark.parametrize("vocab_size", [2, 257, 50257, 128256])
def test_a_uniform_models_perplexity_is_the_vocabulary_size(vocab_size, make_stream):
    """Through the head, whose padding gets no probability; exact to the last bit of a float32 NLL."""
    options = preset("nano", num_layers=1, hidden_size=8, num_heads=1, vocab_size=vocab_size).resolve()
    model = build_model(options, "standard", CPU, "none")
    with torch.no_grad():
        model.token_embedding.weight.zero_()
    stream = make_stream([np.arange(40) % vocab_size, np.arange(23) % vocab_size])
    nll = scorer(model, CPU, 16, None, None)
    table = score_whole(nll, stream, 16, 5, bytes_per_token=np.full(vocab_size, 3))
    total = ppl_strided(table)
    assert (table.nll == np.float32(math.log(vocab_size))).all()
    assert total.perplexity == pytest.approx(vocab_size, rel=EPS * math.log(vocab_size))
    assert total.bits_per_byte == pytest.approx(math.log2(vocab_size) / 3, rel=1e-7)


@many_cases(max_examples=15)
@given(windows_and_strides(), st.integers(0, 1000))
def test_a_markov_source_has_its_entropy_in_any_windows(windowing, seed):
    """The model needs one token: the loss is that of the source, in any windows, and the same to the last bit."""
    rng = np.random.default_rng(seed)
    transition = rng.dirichlet(np.full(16, 0.5), size=16)
    log_transition = torch.from_numpy(np.log(transition)).float()
    stream = stream_of([markov_chain(transition, 200, rng) for _ in range(3)])

    def nll(inputs, targets):
        return -log_transition[inputs, targets.clamp(min=0)]

    table = score_whole(nll, stream, *windowing, bytes_per_token=np.ones(16, np.int64))
    pairs = [stream.tokens[start:stop] for start, stop in ((0, 200), (200, 400), (400, 600))]
    expected = sum(-log_transition[pair[:-1], pair[1:]].double().sum().item() for pair in pairs)
    assert ppl_strided(table).nll_sum == pytest.approx(expected, rel=1e-12)


def test_the_entropy_rate_of_a_markov_source_is_found():
    rng = np.random.default_rng(5)
    transition = rng.dirichlet(np.full(8, 0.5), size=8)
    stationary = np.linalg.matrix_power(transition, 500)[0]
    rate = -float(stationary @ (transition * np.log(transition)).sum(axis=1))
    log_transition = torch.from_numpy(np.log(transition))
    stream = stream_of([markov_chain(transition, 8000, rng) for _ in range(4)])
    nll = lambda inputs, targets: -log_transition[inputs, targets.clamp(min=0)]  # noqa: E731
    table = score_whole(nll, stream, 512, 512, batch_tokens=8192, bytes_per_token=np.ones(8, np.int64))
    standard_error = table.nll.std() / math.sqrt(len(table))
    assert abs(ppl_strided(table).loss - rate) < 4 * standard_error < 0.03


@many_cases(max_examples=30)
@given(st.lists(st.integers(20, 300), min_size=1, max_size=5).filter(lambda lengths: max(lengths) >= 32))
def test_ranges_of_positions_hold_all_that_the_lengths_hold(evaluation_of, recurrent_nll, lengths):
    evaluation = evaluation_of(recurrent_nll, stream_of_lengths(lengths))
    table, longest = evaluation.table, evaluation.curves.longest
    ranges = loss_by_position(table).values()
    total = ppl_at_length(table, [longest])[longest]
    assert sum(score.targets for score in ranges) == total.targets
    assert sum(score.nll_sum for score in ranges) == pytest.approx(total.nll_sum, rel=1e-12)
    assert {score.documents for score in ranges} == {total.documents}
    contexts = ppl_vs_context(table)
    assert len({(score.targets, score.bytes, score.documents) for score in contexts.values()}) == 1
    last = table.of("context", longest)
    for length in contexts:
        rows = table.of("context", length)
        assert np.array_equal(rows.document, last.document) and np.array_equal(rows.position, last.position)
        assert rows.context.max() == length - 1


def test_openings_and_one_window_of_all_tokens_agree(random_stream, recurrent_nll):
    stream = random_stream(90, 90)
    documents = Documents(stream, "document")
    opened = score(
        recurrent_nll,
        documents,
        [opening_windows(np.arange(2), 90)],
        bytes_per_token=np.r_[np.ones(256, np.int64), 0],
        batch_tokens=1000,
        advance=lambda tokens: None,
    )
    whole = score_whole(recurrent_nll, stream, 89, 89)
    assert_same_sums([summarize(opened)], [summarize(whole.of(STRIDED))])


def stream_of_lengths(lengths):
    rng = np.random.default_rng(0)
    return stream_of([np.r_[PREFIX, rng.integers(0, 256, length - 1)] for length in lengths])


def stream_of(documents):
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return type("Stream", (), {"tokens": np.concatenate(documents).astype(np.uint16), "offsets": offsets})


def markov_chain(transition, length, rng):
    cumulative, state, chain = transition.cumsum(axis=1), 0, []
    for draw in rng.random(length):
        state = min(int(np.searchsorted(cumulative[state], draw)), len(transition) - 1)
        chain.append(state)
    return chain
