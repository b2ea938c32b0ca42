"""The one signature: what it validates, what it promises for every variant, and that it compiles."""

import logging
import math

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals, Unsupported, attention
from flashtrain.kernels.attention.intervals import Bounds
from flashtrain.kernels.attention.standard import standard

FULL, CAUSAL, WINDOW = Intervals.full(), Intervals.causal(), Intervals.window(5, 2)
CPU_VARIANTS = ("standard", "sdpa_math", "sdpa_flash")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "v": zeros(2, 7, 2, 8)}


def bounds(R: int, Sq: int, Sk: int) -> Intervals:
    """A mask that was made for R rows of Sq queries and Sk keys."""
    ids = (torch.zeros(R, S, dtype=torch.int32) for S in (Sq, Sk))
    return FULL.in_documents(*ids)


def of_dtype(dtype: torch.dtype) -> Intervals:
    right = bounds(2, 5, 7).bounds
    return Intervals(bounds=Bounds(right.keys.to(dtype), right.queries.to(dtype)))


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        pytest.param({"k": zeros(2, 7, 8)}, ValueError, r"k must be .* not \(2, 7, 8\)", id="three-dimensions"),
        pytest.param({"v": zeros(2, 7, 2, 8).half()}, TypeError, "one floating dtype, not .*float16", id="two-dtypes"),
        pytest.param({name: x.long() for name, x in GOOD.items()}, TypeError, "floating", id="integers"),
        pytest.param({"k": zeros(2, 7, 2, 8).to("meta")}, ValueError, "one device, not cpu, meta", id="two-devices"),
        pytest.param({"q": zeros(3, 5, 4, 8)}, ValueError, "one batch size, not 3, 2 and 2", id="two-batches"),
        pytest.param({"v": zeros(2, 6, 2, 8)}, ValueError, r"not \(7, 2\) and \(6, 2\)", id="two-kv-lengths"),
        pytest.param({"v": zeros(2, 7, 4, 8)}, ValueError, r"not \(7, 2\) and \(7, 4\)", id="two-kv-heads"),
        pytest.param({"q": zeros(2, 5, 4, 16)}, ValueError, "one head_dim, not 16 and 8", id="two-head-dims"),
        pytest.param({"q": zeros(2, 5, 3, 8)}, ValueError, "3 query heads are not a multiple of 2", id="odd-group"),
        pytest.param({"scale": 0.0}, ValueError, "scale must be above 0 and finite, not 0.0", id="no-scale"),
        pytest.param({"scale": math.nan}, ValueError, "scale must be .* finite, not nan", id="scale-nan"),
        pytest.param({"softcap": -1.0}, ValueError, "above 0 and finite, or 0 .* not -1", id="softcap"),
        pytest.param({"softcap": math.inf}, ValueError, "softcap must be .* finite, .* not inf", id="softcap-inf"),
        pytest.param({"intervals": bounds(2, 5, 6)}, ValueError, "for 2 rows of 6 keys, .* 2 of 7", id="mask-keys"),
        pytest.param({"intervals": bounds(3, 5, 7)}, ValueError, "made for 3 rows of 5 queries", id="mask-rows"),
        pytest.param({"intervals": bounds(2, 5, 7).to("meta")}, ValueError, "mask must be on cpu", id="mask-device"),
        pytest.param({"intervals": of_dtype(torch.int64)}, ValueError, "int32, not torch.int64", id="mask-int64"),
    ],
)
def test_wrong_inputs_are_named(bad, error, message):
    attention(**(GOOD | {"intervals": bounds(2, 5, 7)}))
    with pytest.raises(error, match=message):
        attention(**({"intervals": FULL} | GOOD | bad))


def test_a_named_variant_never_falls_back():
    q, k, v = make_qkv(1, 4, 6, 2, 2, 8)
    for call in (
        lambda: attention(q, k, v, FULL, variant="sdpa_cudnn"),
        lambda: attention(q, k, v, CAUSAL, variant="sdpa_flash"),
        lambda: attention(q, k, v, FULL, variant="sdpa_flash", return_lse=True),
    ):
        with pytest.raises(Unsupported, match="standard.* would do$"):
            call()


def test_auto_serves_what_only_standard_can():
    q, k, v = make_qkv(1, 4, 6, 2, 2, 8)
    out, lse = attention(q, k, v, WINDOW, return_lse=True)
    torch.testing.assert_close((out, lse), standard(q, k, v, WINDOW, 8**-0.5))


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_scale_defaults_to_the_inverse_root_of_the_head_dim(variant):
    q, k, v = make_qkv(1, 6, 6, 2, 1, 16)
    for scale, expected in ((None, 0.25), (0.7, 0.7)):
        out = attention(q, k, v, CAUSAL, variant=variant, scale=scale)
        torch.testing.assert_close(out, standard(q, k, v, CAUSAL, expected)[0])


def test_lse_is_right_and_differentiable():
    inputs = make_qkv(2, 9, 5, 4, 2, 8)

    def attend(q, k, v):
        return attention(q, k, v, CAUSAL, return_lse=True)

    assert_as_accurate_as_standard(attend, inputs, CAUSAL, lse_gradient=True)


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_any_strides_are_read_right(variant):
    q, k, v = make_qkv(2, 12, 12, 4, 1, 8)
    expected = attention(q, k, v, CAUSAL, variant=variant)
    layouts = {
        "heads first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        "head_dim not dense": [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)],
        "slices of one tensor": torch.cat((q, k, v), dim=2).split((4, 1, 1), dim=2),
        "every other element": [torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v)],
        "expanded heads": [q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1)],
    }
    for name, layout in layouts.items():
        out = attention(*layout, CAUSAL, variant=variant)
        torch.testing.assert_close(out, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_autocast_does_not_change_the_arithmetic(variant):
    inputs = make_qkv(2, 20, 20, 4, 2, 16)

    def attend(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, k, v, CAUSAL, variant=variant)

    assert attend(*inputs).dtype == torch.float32
    assert_as_accurate_as_standard(attend, inputs, CAUSAL)


def compiled(**options):
    """attention under torch.compile without a graph break, on the backend that generates no code."""
    torch._dynamo.reset()
    return torch.compile(
        lambda q, k, v, intervals: attention(q, k, v, intervals, **options), fullgraph=True, backend="aot_eager"
    )


@pytest.mark.parametrize(
    ("options", "intervals"),
    [
        ({"variant": "standard"}, WINDOW),
        ({"variant": "sdpa_math"}, WINDOW),
        ({"variant": "sdpa_flash"}, CAUSAL),
        ({"variant": "auto"}, WINDOW),
        ({"variant": "auto", "return_lse": True}, CAUSAL),
    ],
    ids=str,
)
def test_compiles_in_one_graph(options, intervals):
    attend = compiled(**options)
    inputs = make_qkv(2, 20, 20, 4, 2, 16)
    assert_as_accurate_as_standard(lambda q, k, v: attend(q, k, v, intervals), inputs, intervals)


@pytest.mark.parametrize("variant", ["sdpa_flash", "standard"])
def test_one_graph_serves_all_lengths(variant):
    attend = compiled(variant=variant)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for length in (16, 17, 30, 45, 64):
            q, k, v = make_qkv(1, length, length, 4, 2, 16)
            torch.testing.assert_close(attend(q, k, v, CAUSAL), standard(q, k, v, CAUSAL, 0.25)[0])


def test_auto_logs_from_a_trace(caplog, monkeypatch):
    monkeypatch.setattr("flashtrain.kernels.attention.variants._logged", set())
    attend = compiled()
    with caplog.at_level(logging.INFO, logger="flashtrain"):
        attend(*make_qkv(1, 6, 6, 2, 2, 8), CAUSAL)
        attend(*make_qkv(1, 6, 6, 2, 2, 8), CAUSAL)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: auto chose sdpa_flash, for a compiled call"
    ]


def test_refusal_in_a_trace_carries_the_reason():
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="sdpa_cudnn runs on cuda, not on cpu; standard"):
        compiled(variant="sdpa_cudnn")(*make_qkv(1, 6, 6, 2, 2, 8), CAUSAL)
