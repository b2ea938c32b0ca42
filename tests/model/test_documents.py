"""Documents packed into a row are computed as if each were alone: nothing of one reaches another."""

from functools import partial

import pytest
import torch
from presets import preset
from torch._dynamo.testing import CompileCounterWithBackend

from flashtrain.kernels.attention import AttentionSpec, Intervals, attention, refusal
from flashtrain.model.gpt import GPT
from flashtrain.model.head import IGNORED, summed_cross_entropy
from flashtrain.model.rope_options import RopeOptions

VOCAB = 100
SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": VOCAB, "windows": [8, None]}
FAMILIES = {"learned": preset("gpt2", max_positions=48, **SMALL), "rope": preset("nano", **SMALL)}
LENGTHS = ((20, 28), (5, 17, 26))  # of the documents in each row

each_family = pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
each_variant = pytest.mark.parametrize("variant", ["standard", "sdpa_math", "flash_v2"])


def documents_of(*rows):
    """(B, S) int32 ids of rows that hold documents of these lengths."""
    ids = [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in rows]
    return torch.stack(ids).int()


DOCUMENTS = documents_of(*LENGTHS)


def make_model(options, variant="standard"):
    """The model, or a skipped test where the variant cannot serve documents on a CPU."""
    spec = AttentionSpec.on(
        "cpu",
        dtype=torch.float32,
        head_dim=16,
        num_q_heads=4,
        num_kv_heads=4,
        q_len=48,
        kv_len=48,
        intervals=Intervals.causal().in_documents(DOCUMENTS),
    )
    if reason := refusal(variant, spec):
        pytest.skip(f"{variant} {reason}")
    torch.manual_seed(0)
    return GPT(options, partial(attention, variant=variant))


def make_tokens(seed=0):
    return torch.randint(VOCAB, DOCUMENTS.shape, generator=torch.Generator().manual_seed(seed))


def next_tokens(tokens, documents):
    """The label of each token: the next of its document, none for the last."""
    labels = torch.full_like(tokens, IGNORED)
    within = documents[:, 1:] == documents[:, :-1]
    labels[:, :-1] = torch.where(within, tokens[:, 1:], IGNORED)
    return labels


def summed_loss(model, hidden, labels):
    return summed_cross_entropy(hidden.flatten(0, 1), model.head_weight, labels.flatten(), VOCAB, chunk_size=64)


@each_variant
@each_family
def test_changing_one_document_leaves_every_bit_of_the_others(options, variant):
    model, tokens = make_model(options, variant), make_tokens()
    in_changed = torch.zeros_like(tokens, dtype=torch.bool)
    in_changed[1] = DOCUMENTS[1] == 1  # it has a document before it and one after it
    results = []
    for fed in (tokens, torch.where(in_changed, (tokens + 1) % VOCAB, tokens)):
        hidden = model(fed, DOCUMENTS)
        labels = next_tokens(fed, DOCUMENTS).masked_fill(in_changed, IGNORED)
        gradients = torch.autograd.grad(summed_loss(model, hidden, labels), list(model.parameters()))
        results.append((hidden @ model.head_weight.T, gradients))
    (logits, gradients), (changed_logits, changed_gradients) = results
    assert torch.equal(logits[~in_changed], changed_logits[~in_changed])
    assert (logits != changed_logits)[in_changed].any(dim=-1).all()
    for (name, _), expected, actual in zip(model.named_parameters(), gradients, changed_gradients, strict=True):
        assert torch.equal(expected, actual), name


@each_variant
@each_family
def test_packed_loss_is_the_token_weighted_mean_of_the_documents_alone(options, variant):
    model, tokens = make_model(options, variant), make_tokens()
    labels = next_tokens(tokens, DOCUMENTS)
    packed = summed_loss(model, model(tokens, DOCUMENTS), labels) / (labels != IGNORED).sum()
    total, count = 0.0, 0
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        for document in row.split(lengths):
            hidden = model(document[None, :-1])
            total += summed_loss(model, hidden, document[1:]).item()
            count += len(document) - 1
    assert count == (labels != IGNORED).sum()
    # Matrix products of other shapes sum in another order, which float32 rounds at 6e-8 of the loss.
    assert packed.item() == pytest.approx(total / count, rel=1e-6)


@each_family
def test_positions_restart_at_each_document(options):
    """One token repeated makes the first layer's queries a function of position alone."""
    queries = []

    def recording(q, k, v, intervals):
        queries.append(q)
        return attention(q, k, v, intervals, variant="standard")

    torch.manual_seed(0)
    model = GPT(options, recording)
    model(torch.zeros_like(DOCUMENTS))
    model(torch.zeros_like(DOCUMENTS), DOCUMENTS)
    in_order, packed = queries[:: options.num_layers]
    for row, lengths in enumerate(LENGTHS):
        positions = torch.cat([torch.arange(length) for length in lengths])
        torch.testing.assert_close(packed[row], in_order[row, positions])
    assert (in_order[0, 0] - in_order[0, 20]).norm() > 0.01 * in_order[0, 0].norm()


def test_dynamic_scaling_follows_the_length_of_each_document():
    rope = RopeOptions("dynamic", 10000.0, factor=2.0, original_length=18)
    model, plain = (make_model(preset("nano", **SMALL, **changes)) for changes in ({"rope": rope}, {}))
    tokens = make_tokens()
    packed = model(tokens, DOCUMENTS)
    for row, lengths in enumerate(LENGTHS):
        parts = zip(tokens[row].split(lengths), packed[row].split(lengths), strict=True)
        for document, hidden in parts:
            alone = model(document[None])[0]
            torch.testing.assert_close(hidden, alone)
            assert torch.equal(alone, plain(document[None])[0]) == (len(document) <= 18)


SCALINGS = {
    "dynamic": RopeOptions("dynamic", 10000.0, 2.0, 18),
    "yarn": RopeOptions("yarn", 10000.0, 4.0, 18),
    "llama3": RopeOptions("llama3", 10000.0, 4.0, 18),
}


@pytest.mark.parametrize("rope", SCALINGS.values(), ids=SCALINGS)
def test_scaled_positions_compile_into_one_graph(rope):
    eager, compiled = (make_model(preset("nano", **SMALL | {"num_layers": 1}, rope=rope)) for _ in range(2))
    torch.compiler.reset()
    compiled.compile(backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(make_tokens(), DOCUMENTS), eager(make_tokens(), DOCUMENTS))


def test_one_document_in_a_row_is_a_row_without_documents():
    model, tokens = make_model(FAMILIES["rope"]), make_tokens()
    assert torch.equal(model(tokens, torch.zeros_like(DOCUMENTS)), model(tokens))


@each_variant
def test_new_documents_every_step_compile_once(variant):
    """One graph, which cannot hold what waits for the device."""
    eager, compiled = (make_model(FAMILIES["rope"], variant) for _ in range(2))
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled.compile(backend=counter, fullgraph=True, dynamic=False)
    rows = [LENGTHS, ((48,), (47, 1)), ((1,) * 48, (16, 16, 16))]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(rows):
            tokens, documents = make_tokens(seed), documents_of(*lengths)
            expected, actual = eager(tokens, documents), compiled(tokens, documents)
            torch.testing.assert_close(actual, expected)
            actual.sum().backward()
    assert counter.frame_count == 1
