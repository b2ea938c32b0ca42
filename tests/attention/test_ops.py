"""Our kernels' operators: what torch.compile, opcheck and autograd are promised."""

import pytest
import torch
from tolerance import assert_as_accurate_as_standard
from torch._inductor.custom_graph_pass import CustomGraphPass

from flashtrain.kernels.attention import Intervals, attention

CAUSAL = Intervals.causal()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def attend(flash):
    def call(q, k, v, intervals=CAUSAL):
        return attention(q, k, v, intervals, variant=flash.name, return_lse=True)

    return call


def small_qkv(flash):
    return flash.qkv(1, 33, 40, 4, 2, 16, 24)


def operators(flash):
    return (getattr(torch.ops.flashtrain, name) for name in (flash.name, f"{flash.name}_backward"))


def window():
    """A mask and a cap as the operators take them: left, right, keys, queries, scale, softcap."""
    return 5, 0, None, None, 0.25, 0.0


def documents():
    bounds = documents_of(33, 40).bounds
    return None, None, bounds.keys, bounds.queries, 0.25, 2.0


def documents_of(Sq, Sk, per_document=11):
    ids = [torch.arange(S, device=DEVICE)[None] // per_document for S in (Sq, Sk)]
    return CAUSAL.in_documents(*ids)


masks = pytest.mark.parametrize("mask", [window, documents], ids=["window", "documents"])


@masks
def test_opcheck_of_the_forward(flash, mask):
    q, k, v = (x.requires_grad_() for x in small_qkv(flash))
    forward, _ = operators(flash)
    torch.library.opcheck(forward.default, (q, k, v, *mask()))


@masks
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["all", "dq", "dkdv"])
def test_opcheck_of_the_backward(flash, mask, needs):
    q, k, v = small_qkv(flash)
    forward, backward = operators(flash)
    out, lse = forward(q, k, v, *mask())
    inputs = (out, lse, q, k, v, out, lse, *mask(), *needs, False)
    torch.library.opcheck(backward.default, inputs)


def test_gradients_can_be_one_tensor(flash):
    q, k, v = flash.qkv(2, 33, 33, 4, 2, 16)
    forward, backward = operators(flash)
    out, lse = forward(q, k, v, *window())
    inputs = (out, lse, q, k, v, out, lse, *window())
    torch.library.opcheck(backward.default, (*inputs, True, True, True))
    (together,) = backward(*inputs, True, True, True)
    assert torch.equal(together, torch.cat(backward(*inputs, True, True, False), 2))


def test_gradients_that_no_compiler_joins_share_no_memory(flash, attend):
    q, k, v = (x.requires_grad_() for x in flash.qkv(2, 33, 33, 4, 2, 16))
    for gradient in torch.autograd.grad(attend(q, k, v)[0].sum(), (q, k, v)):
        assert gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes


def test_inductor_does_not_join_the_gradients_of_one_projection(flash):
    called = []

    class Record(CustomGraphPass):
        def __call__(self, graph):
            called.extend(str(node.target) for node in graph.nodes)

        def uuid(self):
            return None

    def attend_to_itself(qkv):
        q, k, v = qkv.unflatten(-1, (8, 16)).split((4, 2, 2), 2)
        return attention(q, k, v, CAUSAL, variant=flash.name)

    torch._dynamo.reset()
    q, k, v = flash.qkv(2, 33, 33, 4, 2, 16)
    qkv = torch.cat((q, k, v), 2).flatten(2).requires_grad_()
    dout = torch.randn_like(q)
    (expected,) = torch.autograd.grad(attend_to_itself(qkv), qkv, dout)
    with torch._inductor.config.patch(post_grad_custom_post_pass=Record(), force_disable_caches=True):
        (found,) = torch.autograd.grad(torch.compile(attend_to_itself, fullgraph=True)(qkv), qkv, dout)
    assert torch.equal(found, expected)
    assert f"flashtrain.{flash.name}_backward.default" in called and "aten.cat.default" not in called


def test_fakes_give_the_real_strides(flash):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in small_qkv(flash))
    forward, backward = operators(flash)
    out, lse = forward(q, k, v, *window())
    for operator, tensors, settings in (
        (forward, (q, k, v), window()),
        (backward, (out, lse, q, k, v, out, lse), (*window(), True, True, False)),
    ):
        real = operator(*tensors, *settings)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = operator(*map(mode.from_tensor, tensors), *settings)
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("intervals", [CAUSAL, documents_of(33, 40)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_whole(flash, attend, dynamic, intervals):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_as_accurate_as_standard(
        lambda q, k, v: compiled(q, k, v, intervals), small_qkv(flash), intervals, lse_gradient=True
    )


def test_compiles_whole_for_lengths_that_the_data_decide(flash, attend):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend_some(q, k, v, queries, keys):
        return attend(q[:, queries], k[:, keys], v[:, keys], Intervals())

    all_of_them = [torch.ones(S, dtype=torch.bool, device=DEVICE) for S in (33, 40)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_as_accurate_as_standard(
            lambda q, k, v: attend_some(q, k, v, *all_of_them), flash.qkv(1, 33, 40, 4, 2, 16), Intervals()
        )


def test_new_documents_compile_once(flash, attend):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    def isolated(q, k, v, q_documents, k_documents):
        return attend(q, k, v, CAUSAL.in_documents(q_documents, k_documents))

    with torch._dynamo.config.patch(error_on_recompile=True):
        for per_document in (11, 3, 40):
            ids = [torch.arange(S, device=DEVICE)[None] // per_document for S in (33, 40)]
            assert_as_accurate_as_standard(
                lambda q, k, v, ids=ids: isolated(q, k, v, *ids), small_qkv(flash), documents_of(33, 40, per_document)
            )


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv"])
def test_gradients_are_computed_for_what_asks(flash, attend, wanted):
    inputs = dict(zip("qkv", small_qkv(flash), strict=True))
    dout = torch.randn(1, 33, 4, 24).to(inputs["q"])
    for name in wanted:
        inputs[name].requires_grad_()
    out, _ = attend(*inputs.values())
    some = torch.autograd.grad(out, [inputs[name] for name in wanted], dout)
    for x in inputs.values():
        x.requires_grad_()
    out, _ = attend(*inputs.values())
    of_all = dict(zip("qkv", torch.autograd.grad(out, list(inputs.values()), dout), strict=True))
    for name, gradient in zip(wanted, some, strict=True):
        assert torch.equal(gradient, of_all[name])


def test_gradient_through_the_lse_alone(flash, attend):
    q, k, v = (x.requires_grad_() for x in small_qkv(flash))
    dq, dk, dv = torch.autograd.grad(attend(q, k, v)[1].sum(), (q, k, v))
    assert dq.abs().max() > 0 and dk.abs().max() > 0
    assert (dv == 0).all()


def test_second_derivatives_are_refused_in_one_sentence(flash, attend):
    q, k, v = (x.requires_grad_() for x in small_qkv(flash))
    (dq,) = torch.autograd.grad(attend(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{flash.name} has no second derivative; use"):
        dq.sum().backward()
