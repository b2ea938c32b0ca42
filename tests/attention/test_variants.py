"""The table of variants: every limit refuses, every refusal says what would do, and "auto" takes the fastest."""

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from tolerance import make_qkv

from flashtrain.kernels.attention import (
    NAMES,
    AttentionSpec,
    Intervals,
    Unsupported,
    attention,
    choose,
    limits,
    refusal,
    require,
    resolve,
    supporting,
    variants,
)
from flashtrain.kernels.attention.variants import VARIANTS

H200 = AttentionSpec(
    device_type="cuda",
    sm=90,
    cudnn_version=91900,
    triton=306,
    interpreted=False,
    fixed_cublas=False,
    torch_deterministic=False,
    dtype=torch.bfloat16,
    head_dim=128,
    v_head_dim=128,
    num_q_heads=32,
    num_kv_heads=8,
    q_len=8192,
    kv_len=8192,
    intervals=Intervals.causal(),
    softcap=0.0,
    needs_lse=False,
    needs_grad=True,
    deterministic=False,
)
CPU = replace(H200, device_type="cpu", sm=None, cudnn_version=None, dtype=torch.float32)
REPEATED = {"deterministic": True}
RTX_4090, RTX_5090 = replace(H200, sm=89), replace(H200, sm=120)
OLD_CUDNN = replace(H200, cudnn_version=91002)
BLACKWELL = replace(H200, sm=100)
TURING = 75
WINDOW = Intervals.window(1023, 0)
DOCUMENTS = Intervals.causal().in_documents(torch.zeros(1, 8192, dtype=torch.int32))

# Every limit of every variant: the call it refuses, as a change to a call it serves, and the reason.
REFUSALS = [
    ("standard", H200, {"dtype": torch.float8_e4m3fn}, "computes in float16, bfloat16, float32, float64, not"),
    ("standard", H200, REPEATED, "is deterministic with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, and"),
    ("flash_v1", H200, {"head_dim": 100, "v_head_dim": 100}, "in multiples of 8, not 100"),
    ("flash_v1", H200, {"softcap": 30.0}, "caps no scores, and softcap is 30.0"),
    ("flash_v1", H200, {"intervals": WINDOW}, "takes the full and the causal mask, not window(1023, 0)"),
    ("flash_v1", H200, {"intervals": DOCUMENTS}, "the causal mask, not documents, chunks or a prefix"),
    ("flash_v2", CPU, {}, "or on cpu with TRITON_INTERPRET=1 in the environment, not on cpu"),
    ("flash_v2", H200, {"device_type": "mps", "interpreted": True}, "not on mps"),
    ("flash_v2", H200, {"triton": None}, "needs Triton, which is not installed (pip install triton)"),
    ("flash_v2", H200, {"sm": TURING}, "needs a GPU of sm_80 or later, and there is sm_75"),
    ("flash_v2", H200, {"sm": None}, "needs a GPU of sm_80 or later, and there is none here"),
    ("flash_v2", H200, {"dtype": torch.float64}, "computes in float16, bfloat16, float32, not in float64"),
    ("flash_v2", H200, {"head_dim": 8, "v_head_dim": 8}, "from 16 to 256 in multiples of 8, not 8"),
    ("flash_v2", H200, {"head_dim": 264, "v_head_dim": 264}, "head dimensions from 16 to 256"),
    ("flash_v2", H200, {"head_dim": 100, "v_head_dim": 100}, "in multiples of 8, not 100"),
    ("flash_v2", replace(CPU, interpreted=True), {"dtype": torch.bfloat16}, "not in bfloat16"),
    ("flash_hopper", CPU, {}, "runs on cuda, not on cpu"),
    ("flash_hopper", H200, {"triton": None}, "needs Triton, which is not installed (pip install triton)"),
    ("flash_hopper", H200, {"triton": 305}, "needs Triton 3.6 or later, and this is 3.5"),
    ("flash_hopper", H200, {"interpreted": True}, "runs compiled, and TRITON_INTERPRET=1 is in the environment"),
    ("flash_hopper", H200, {"sm": 89}, "needs a GPU of sm_90, and there is sm_89"),
    ("flash_hopper", H200, {"sm": 100}, "needs a GPU of sm_90, and there is sm_100"),
    ("flash_hopper", H200, {"sm": None}, "needs a GPU of sm_90, and there is none here"),
    ("flash_hopper", H200, {"dtype": torch.float32}, "computes in float16, bfloat16, not in float32"),
    ("flash_hopper", H200, {"head_dim": 8}, "from 16 to 128 in multiples of 8, not 8"),
    ("flash_hopper", H200, {"v_head_dim": 136}, "from 16 to 128 in multiples of 8, not 136"),
    ("sdpa_math", CPU, {"needs_lse": True}, "returns no log-sum-exp"),
    ("sdpa_math", CPU, {"softcap": 30.0}, "caps no scores, and softcap is 30.0"),
    ("sdpa_math", CPU, {"dtype": torch.float8_e4m3fn}, "not in float8_e4m3fn"),
    ("sdpa_math", CPU, {"intervals": WINDOW, "kv_len": 8193}, "for up to 8192 keys, not for 8193"),
    ("sdpa_math", H200, REPEATED, "is deterministic with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, and"),
    ("sdpa_efficient", H200, {"needs_lse": True}, "returns no log-sum-exp"),
    ("sdpa_efficient", H200, {"softcap": 30.0}, "caps no scores, and softcap is 30.0"),
    ("sdpa_efficient", CPU, {}, "runs on cuda, not on cpu"),
    ("sdpa_efficient", H200, {"sm": TURING}, "needs a GPU of sm_80"),
    ("sdpa_efficient", H200, {"dtype": torch.float64}, "not in float64"),
    ("sdpa_efficient", H200, {"head_dim": 100}, "of whole 16-byte rows, not 100 in bfloat16"),
    ("sdpa_efficient", H200, {"v_head_dim": 100}, "of whole 16-byte rows, not 100"),
    ("sdpa_efficient", H200, {"kv_len": 0}, "takes lengths from 1, not 8192 queries and 0 keys"),
    ("sdpa_efficient", H200, {"q_len": 16384, "kv_len": 16385}, "for up to 8192 keys, not for 16385"),
    ("sdpa_efficient", H200, REPEATED, "has a deterministic backward under torch.use_deterministic_algorithms(True)"),
    ("sdpa_flash", H200, {"needs_lse": True}, "returns no log-sum-exp"),
    ("sdpa_flash", H200, {"softcap": 30.0}, "caps no scores, and softcap is 30.0"),
    ("sdpa_flash", H200, {"intervals": DOCUMENTS}, "the causal mask, not documents, chunks or a prefix"),
    ("sdpa_flash", H200, {"device_type": "mps"}, "runs on cuda and cpu, not on mps"),
    ("sdpa_flash", H200, {"sm": TURING}, "needs a GPU of sm_80"),
    ("sdpa_flash", H200, {"dtype": torch.float32}, "computes in float16, bfloat16, not in float32"),
    ("sdpa_flash", H200, {"head_dim": 264, "v_head_dim": 264}, "from 8 to 256 in multiples of 8, not 264"),
    ("sdpa_flash", H200, {"v_head_dim": 64}, "takes one head dimension"),
    ("sdpa_flash", H200, {"q_len": 0}, "takes lengths from 1, not 0 queries"),
    ("sdpa_flash", H200, {"q_len": 1}, "where there are as many queries as keys, not 1 and 8192"),
    ("sdpa_flash", H200, {"intervals": WINDOW}, "takes the full and the causal mask"),
    ("sdpa_flash", RTX_4090, {"head_dim": 200, "v_head_dim": 200}, "has no backward for head dimension 200"),
    ("sdpa_flash", RTX_5090, {"head_dim": 224, "v_head_dim": 224}, "224 on sm_120"),
    ("sdpa_flash", CPU, {"dtype": torch.float8_e4m3fn}, "not in float8_e4m3fn"),
    ("sdpa_flash", CPU, {"v_head_dim": 64}, "takes one head dimension"),
    ("sdpa_flash", CPU, {"q_len": 1}, "takes the causal mask where"),
    ("sdpa_flash", H200, REPEATED, "has a deterministic backward under torch.use_deterministic_algorithms(True)"),
    ("sdpa_cudnn", H200, {"needs_lse": True}, "returns no log-sum-exp"),
    ("sdpa_cudnn", H200, {"softcap": 30.0}, "caps no scores, and softcap is 30.0"),
    ("sdpa_cudnn", H200, {"intervals": DOCUMENTS}, "the causal mask, not documents, chunks or a prefix"),
    ("sdpa_cudnn", CPU, {}, "runs on cuda, not on cpu"),
    ("sdpa_cudnn", H200, {"sm": TURING}, "needs a GPU of sm_80"),
    ("sdpa_cudnn", H200, {"dtype": torch.float32}, "computes in float16, bfloat16, not in float32"),
    ("sdpa_cudnn", H200, {"head_dim": 136}, "from 8 to 128 in multiples of 8, not 136"),
    ("sdpa_cudnn", H200, {"v_head_dim": 36}, "in multiples of 8, not 36"),
    ("sdpa_cudnn", H200, {"q_len": 1, "intervals": Intervals.full()}, "takes lengths from 2, not 1 queries"),
    ("sdpa_cudnn", H200, {"q_len": 4096}, "takes the causal mask where"),
    ("sdpa_cudnn", H200, {"intervals": WINDOW}, "takes the full and the causal mask"),
    ("sdpa_cudnn", H200, {"cudnn_version": None}, "needs cuDNN, which this PyTorch comes without"),
    ("sdpa_cudnn", OLD_CUDNN, {"q_len": 100, "kv_len": 100}, "no multiples of 128, and this is 91002"),
    ("sdpa_cudnn", H200, REPEATED, "is not deterministic, and that is asked for"),
    ("flex", CPU, {}, "runs on cuda, not on cpu"),
    ("flex", H200, {"triton": None}, "needs Triton, which is not installed (pip install triton)"),
    ("flex", H200, {"sm": TURING}, "needs a GPU of sm_80"),
    ("flex", H200, {"dtype": torch.float32}, "computes in float16, bfloat16, not in float32"),
    ("flex", H200, {"head_dim": 8}, "from 16 to 256 in multiples of 8, not 8"),
    ("flex", H200, {"v_head_dim": 264}, "from 16 to 256 in multiples of 8, not 264"),
    ("flex", RTX_4090, {"v_head_dim": 136}, "takes head dimensions up to 128 on sm_89, not 136"),
    ("flex", RTX_5090, {"head_dim": 256}, "up to 128 on sm_120, not 256"),
    ("flex", H200, {"q_len": 0}, "takes lengths from 1, not 0 queries"),
    ("flex", H200, REPEATED, "has a deterministic backward under torch.use_deterministic_algorithms(True)"),
]


def case_id(case) -> str:
    name, base, change, _ = case
    return "-".join([name, base.device_type, *(f"{field}={value}" for field, value in change.items())])


@pytest.mark.parametrize("case", REFUSALS, ids=case_id)
def test_limit_refuses_and_says_who_would_do(case):
    name, base, change, reason = case
    spec = replace(base, **change)
    if change:
        assert refusal(name, base) is None
    with pytest.raises(Unsupported, match="would do$") as error:
        require(name, spec)
    message = str(error.value)
    assert message.startswith(f"attention: {name} ") and reason in message
    assert ", ".join(supporting(spec)) in message and name not in supporting(spec)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_limit_goes_untested(name, monkeypatch):
    """Taking any limit away from a variant changes what happens to the refusals above."""
    specs = [replace(base, **change) for variant, base, change, _ in REFUSALS if variant == name]
    expected = [refusal(name, spec) for spec in specs]
    names = VARIANTS[name].unsupported.__code__.co_names
    parts = [part for part in names if callable(getattr(limits, part, None))]
    assert parts
    for part in parts:
        with monkeypatch.context() as patch:
            patch.setattr(limits, part, lambda *arguments, **keywords: None)
            assert [refusal(name, spec) for spec in specs] != expected, f"no refusal tests {part} of {name}"


def test_what_is_served():
    assert supporting(H200) == tuple(name for name in NAMES if name != "auto")
    assert supporting(CPU) == ("standard", "sdpa_math", "sdpa_flash")
    assert "flash_v2" in supporting(replace(CPU, interpreted=True))
    assert refusal("sdpa_math", replace(CPU, intervals=WINDOW, kv_len=8192)) is None
    assert refusal("sdpa_efficient", replace(H200, q_len=1 << 20, kv_len=1 << 20)) is None
    assert refusal("sdpa_efficient", replace(H200, dtype=torch.float32, head_dim=100, v_head_dim=4)) is None
    assert refusal("sdpa_flash", replace(RTX_4090, head_dim=200, v_head_dim=200, needs_grad=False)) is None
    assert refusal("sdpa_flash", replace(RTX_4090, head_dim=256, v_head_dim=256)) is None
    assert refusal("sdpa_cudnn", replace(H200, q_len=100, kv_len=100)) is None


def test_what_is_deterministic():
    asked = replace(H200, deterministic=True)
    of_ours = ("flash_v1", "flash_v2", "flash_hopper")
    of_cublas, of_torch = ("standard", "sdpa_math"), ("sdpa_efficient", "sdpa_flash", "flex")
    assert supporting(asked) == of_ours
    assert set(supporting(replace(asked, fixed_cublas=True))) == {*of_ours, *of_cublas}
    assert set(supporting(replace(asked, torch_deterministic=True))) == {*of_ours, *of_torch}
    assert set(supporting(replace(asked, needs_grad=False))) == {*of_ours, *of_torch}
    assert supporting(replace(CPU, deterministic=True)) == supporting(CPU)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(H200, "flash_hopper", id="hopper-bf16"),
        pytest.param(replace(H200, needs_grad=False), "flash_hopper", id="hopper-no-gradients"),
        pytest.param(replace(H200, needs_lse=True), "flash_hopper", id="hopper-lse"),
        pytest.param(replace(H200, **REPEATED), "flash_hopper", id="hopper-deterministic"),
        pytest.param(replace(H200, **REPEATED, dtype=torch.float32), "flash_v2", id="hopper-fp32-deterministic"),
        pytest.param(replace(BLACKWELL, **REPEATED), "flash_v2", id="blackwell-deterministic"),
        pytest.param(replace(H200, q_len=4096), "flash_hopper", id="hopper-Sq-less-than-Sk"),
        pytest.param(replace(H200, intervals=WINDOW), "flash_hopper", id="hopper-window"),
        pytest.param(replace(H200, intervals=DOCUMENTS), "flash_hopper", id="hopper-documents"),
        pytest.param(replace(H200, softcap=30.0), "flash_hopper", id="hopper-softcap"),
        pytest.param(replace(H200, softcap=30.0, head_dim=64, v_head_dim=64), "flash_v2", id="hopper-softcap-64"),
        pytest.param(replace(H200, softcap=30.0, needs_grad=False), "flash_v2", id="hopper-softcap-forward"),
        pytest.param(replace(H200, softcap=30.0, deterministic=True), "flash_v2", id="hopper-softcap-deterministic"),
        pytest.param(replace(H200, head_dim=256, v_head_dim=256), "flash_v2", id="hopper-wide-heads"),
        pytest.param(replace(H200, triton=305), "sdpa_cudnn", id="hopper-old-triton"),
        pytest.param(BLACKWELL, "sdpa_cudnn", id="blackwell-bf16"),
        pytest.param(replace(BLACKWELL, needs_grad=False), "sdpa_cudnn", id="blackwell-no-gradients"),
        pytest.param(replace(BLACKWELL, needs_lse=True), "flash_v2", id="blackwell-lse"),
        pytest.param(replace(H200, head_dim=64, v_head_dim=64, sm=80), "flash_v2", id="ampere-bf16"),
        pytest.param(replace(H200, dtype=torch.float32), "sdpa_efficient", id="hopper-fp32"),
        pytest.param(replace(H200, dtype=torch.float64), "sdpa_math", id="hopper-fp64"),
        pytest.param(replace(H200, sm=TURING), "sdpa_math", id="turing"),
        pytest.param(replace(H200, triton=None, intervals=WINDOW), "sdpa_efficient", id="hopper-no-triton"),
        pytest.param(CPU, "sdpa_flash", id="cpu"),
        pytest.param(replace(CPU, interpreted=True), "sdpa_flash", id="cpu-interpreter"),
        pytest.param(replace(CPU, q_len=4096), "sdpa_math", id="cpu-Sq-less-than-Sk"),
        pytest.param(replace(CPU, q_len=4096, kv_len=16384), "standard", id="cpu-long-dense-mask"),
    ],
)
def test_auto_takes_the_fastest_that_serves(spec, expected):
    name, reason = choose(spec)
    assert name == expected == resolve("auto", spec)
    assert reason.startswith("the fastest that can serve this call")


def test_auto_needs_no_flex_where_flash_v2_serves():
    changes = itertools.product(
        (TURING, 80, 89, 90, 120), (torch.float16, torch.float32), (8, 16, 100, 256), (64, 136), (0, 1, 100)
    )
    for sm, dtype, D, Dv, q_len in changes:
        for intervals, softcap, needs_lse in ((DOCUMENTS, 30.0, True), (WINDOW, 0.0, False)):
            asked = {"sm": sm, "dtype": dtype, "head_dim": D, "v_head_dim": Dv, "q_len": q_len}
            spec = replace(H200, **asked, intervals=intervals, softcap=softcap, needs_lse=needs_lse)
            assert refusal("flash_v2", spec) is None or refusal("flex", spec) is not None, asked


def test_auto_never_takes_what_is_for_study():
    assert "flash_v1" not in choose(replace(H200, cudnn_version=None))[0]
    with pytest.raises(Unsupported) as error:
        choose(replace(CPU, dtype=torch.float8_e4m3fn))
    assert "flash_v1" not in str(error.value)


def test_auto_says_what_it_passed_over():
    assert "sdpa_cudnn returns no log-sum-exp" in choose(replace(BLACKWELL, needs_lse=True))[1]


def test_auto_passes_over_what_is_found_wrong(monkeypatch):
    found = replace(VARIANTS["flash_hopper"], wrong=lambda spec: "computes wrong numbers here")
    monkeypatch.setitem(VARIANTS, "flash_hopper", found)
    name, reason = choose(H200)
    assert name == "sdpa_cudnn" and reason.endswith("; flash_hopper computes wrong numbers here")
    assert resolve("flash_hopper", H200) == "flash_hopper" in supporting(H200)


def test_auto_tries_only_what_it_would_take(monkeypatch):
    tried = replace(VARIANTS["flash_hopper"], wrong=lambda spec: pytest.fail("tried"))
    monkeypatch.setitem(VARIANTS, "flash_hopper", tried)
    assert choose(BLACKWELL)[0] == "sdpa_cudnn"
    assert choose(replace(H200, dtype=torch.float64))[0] == "sdpa_math"


@pytest.mark.parametrize("dynamic", [None, True], ids=["static first", "dynamic"])
def test_a_trial_is_no_part_of_a_compiled_call(dynamic, monkeypatch):
    tried = []

    @torch.compiler.assume_constant_result
    def trial(head_dim, *passes):
        tried.append((head_dim, *passes))
        return None if torch.arange(3).sum().item() == 3 else "counts wrong"

    torch._dynamo.reset()
    monkeypatch.setattr(variants, "_trial_of_flash_hopper", trial)
    found = replace(VARIANTS["sdpa_flash"], wrong=VARIANTS["flash_hopper"].wrong)
    monkeypatch.setitem(VARIANTS, "sdpa_flash", found)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for head_dim in (16, 32, 72, 128):
        inputs = make_qkv(1, 4, 4, 2, 2, head_dim)
        torch.testing.assert_close(compiled(*inputs, Intervals.causal()), attention(*inputs, Intervals.causal()))
    for deterministic in (False, True):
        compiled(*(x.requires_grad_() for x in inputs), Intervals.causal(), deterministic=deterministic)
    both = ("forward", "backward"), ("forward", "backward in order")
    assert set(tried) == {(64, "forward"), (128, "forward"), *((128, *passes) for passes in both)}


def test_auto_refuses_what_no_variant_serves():
    with pytest.raises(Unsupported, match="no variant can serve this call; .*; standard computes in"):
        choose(replace(CPU, dtype=torch.float8_e4m3fn))


def test_auto_logs_a_choice_once(caplog, monkeypatch):
    monkeypatch.setattr("flashtrain.kernels.attention.variants._logged", set())
    spec = replace(BLACKWELL, intervals=Intervals.window(17, 17))
    with caplog.at_level(logging.INFO, logger="flashtrain"):
        for _ in range(3):
            resolve("auto", spec)
    (record,) = caplog.records
    assert record.getMessage().startswith("attention: auto chose flash_v2, the fastest that can serve")
    assert "sdpa_cudnn takes the full and the causal mask, not window(17, 17)" in caplog.text


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("flash_v3", "flash_v2"), ("cudnn", "sdpa_cudnn"), ("Standard", "standard"), ("sdpa-flash", "sdpa_flash")],
)
def test_unknown_name_is_answered_with_the_nearest(name, nearest):
    with pytest.raises(Unsupported, match=f"no variant '{name}'; the nearest is '{nearest}'"):
        resolve(name, CPU)


def test_spec_of_tensors_is_the_spec_of_their_description():
    q, k, v = make_qkv(2, 5, 7, 4, 2, 16, 24)
    expected = AttentionSpec.on(
        "cpu",
        dtype=torch.float32,
        head_dim=16,
        v_head_dim=24,
        num_q_heads=4,
        num_kv_heads=2,
        q_len=5,
        kv_len=7,
        intervals=Intervals.full(),
        needs_grad=False,
    )
    assert AttentionSpec.of(q, k, v, Intervals.full()) == expected
    v.requires_grad_()
    assert AttentionSpec.of(q, k, v, Intervals.full()) == replace(expected, needs_grad=True)
    with torch.no_grad():
        assert AttentionSpec.of(q, k, v, Intervals.full()) == expected


def test_spec_reads_the_interpreter_from_the_environment(monkeypatch):
    q, k, v = make_qkv(1, 2, 2, 1, 1, 16)
    for value, interpreted in (("1", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert AttentionSpec.of(q, k, v, Intervals.full()).interpreted is interpreted
