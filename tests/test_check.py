"""`python -m flashtrain.check` from the command line to its exit status, on a CPU."""

import itertools
import json
import platform
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from commands import SMALL_CHECK, run_command

import flashtrain
from flashtrain.accuracy.cases import CHUNK, DTYPES, MASKS, ROWS, WINDOW, covering
from flashtrain.kernels.attention.variants import VARIANTS, Variant

COMMAND = "python -m flashtrain.check"


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """check("key=value", ...) -> (what the terminal shows, the JSON file, the exit status)."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides):
        status = 0
        try:
            run_command(COMMAND, *SMALL_CHECK, "output=found.json", *overrides)
        except SystemExit as stop:
            status = stop.code
        return capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text()), status

    return run


def mistake(*overrides):
    with pytest.raises(SystemExit) as stop:
        run_command(COMMAND, *overrides)
    return stop.value.code.removeprefix("error: ")


def replace_attend(monkeypatch, name, attend):
    monkeypatch.setitem(VARIANTS, name, Variant("for a test", lambda spec: None, attend))


class SlightlyWrong(torch.autograd.Function):
    """The identity, whose gradient is a little more."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 1e-4)


def test_what_is_right_passes_and_the_file_has_what_the_terminal_shows(check):
    shown, found, status = check("variants=[standard,sdpa_math]")
    assert status == 0
    results = Counter((row["variant"], row["result"]) for row in found["results"])
    assert results == {
        ("standard", "passed"): 12, ("sdpa_math", "passed"): 8, ("sdpa_math", "skipped"): 4,
    }  # fmt: skip
    assert "20 passed, 0 failed, 4 skipped" in shown
    assert "sdpa_math caps no scores, and softcap is 5.0 (2 of 12 cases)" in shown
    for variant, tensors in (("standard", ["out", "lse", "dq", "dk", "dv"]), ("sdpa_math", ["out", "dq", "dk", "dv"])):
        rows = [row for row in found["results"] if row["variant"] == variant and row["result"] == "passed"]
        assert all(list(row["tensors"]) == tensors for row in rows)
        (line,) = [line for line in shown.splitlines() if line.split()[:2] == [variant, "float32"]]
        for name in tensors:
            figures = [row["tensors"][name] for row in rows]
            largest = [max(figure[key] for figure in figures) for key in ("error", "baseline")]
            assert "/".join(f"{value:.1e}".replace("e-0", "e-") for value in largest) in line
        assert all(figure["error"] <= figure["allowed"] for row in rows for figure in row["tensors"].values())
    assert "CUDA sm_80" not in shown
    assert found["provenance"]["packages"]["torch"] in shown
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_device_that_was_used_is_named_and_whether_kernels_were_interpreted(check, monkeypatch, interpret):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # there is a GPU, and `device` is cpu
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA of another day")
    shown, found, _ = check("variants=[standard]", "masks=[full]")
    cpu = f"CPU ({platform.machine()})"
    assert f"\n{cpu}{', Triton interpreted' if interpret == '1' else ''}, torch " in shown
    assert (found["provenance"]["device"], found["provenance"]["interpreted"]) == (cpu, interpret == "1")
    assert "NVIDIA" not in shown and "NVIDIA" not in json.dumps(found)


def test_the_settings_in_the_file_have_the_device_that_auto_found(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check("device=auto", "variants=[standard]", "masks=[full]")[1]["settings"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("feature", "attend"),
    [
        ("softcap", lambda right, q, k, v, intervals, scale, *_: right(q, k, v, intervals, scale, 0.0)),
        ("lse_gradient", lambda right, *call: [x.detach() if n else x for n, x in enumerate(right(*call))]),
    ],
)
def test_a_variant_that_leaves_out_a_feature_fails_its_cases_and_no_others(check, monkeypatch, feature, attend):
    right = VARIANTS["standard"].attend
    replace_attend(monkeypatch, "sdpa_math", lambda *call: attend(right, *call))
    shown, found, status = check("variants=[standard,sdpa_math]")
    assert status == 1
    failed = [(row["variant"], row["case"]["group"]) for row in found["results"] if row["result"] == "failed"]
    assert failed == [("sdpa_math", feature)] * 2
    assert "22 passed, 2 failed, 0 skipped" in shown


def test_a_variant_that_is_named_and_runs_nowhere_is_a_failure(check):
    shown, found, status = check("variants=[standard,flex]")
    assert status == (
        "error: variants has flex, and none of the cases ran with it: the reasons are under skipped; name others, "
        "or other cases"
    )
    assert "12 passed, 0 failed, 12 skipped" in shown and len(found["results"]) == 24


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("", "output is empty; name a file, or say output=null for none"),
        ("folder", "output=folder exists; name another"),
        ("file", "output=file exists; name another"),
        ("n" * 300, "n" * 300 + " cannot be written (File name too long); say output=DIR with another place"),
    ],
)
def test_where_no_file_can_be_made_is_said_before_anything_is_measured(tmp_path, monkeypatch, output, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flashtrain.check.measure", lambda *arguments: pytest.fail("it measured"))
    Path("folder").mkdir()
    Path("file").write_text("kept")
    assert mistake(*SMALL_CHECK, f"output={output}") == sentence
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", tmp_path / "folder"]
    assert Path("file").read_text() == "kept"


def test_a_slightly_wrong_gradient_is_found(check, monkeypatch):
    right = VARIANTS["standard"].attend
    replace_attend(monkeypatch, "sdpa_math", lambda q, k, *rest: right(q, SlightlyWrong.apply(k), *rest))
    shown, found, status = check("variants=[standard,sdpa_math]")
    assert status == 1
    assert "12 passed, 12 failed, 0 skipped" in shown
    wrong = {
        (row["variant"], name)
        for row in found["results"]
        for name, figure in row["tensors"].items()
        if not figure["passes"]
    }
    assert wrong == {("sdpa_math", "dk")}
    told = " ".join(shown.split())  # whole lines, however the terminal wraps them
    assert "sdpa_math, full, 9 queries, 9 keys, heads 2/1, head dim 16, float32: dk[" in told
    assert "is right: error" in told and "> allowed" in told


def test_what_a_variant_raises_fails_its_cases_and_ends_nothing(check, monkeypatch):
    def attend(*arguments):
        raise RuntimeError("no kernel image\nand a long trace")

    replace_attend(monkeypatch, "sdpa_flash", attend)
    shown, found, status = check("variants=[sdpa_flash,standard]")
    assert status == 1
    reasons = {row["reason"] for row in found["results"] if row["variant"] == "sdpa_flash"}
    assert reasons == {"RuntimeError: no kernel image"}
    assert "raised" in shown and "a long trace" not in shown
    assert "12 passed, 12 failed" in shown


def test_nan_is_null_in_the_file(check, monkeypatch):
    right = VARIANTS["standard"].attend

    def attend(*arguments):
        out, lse = right(*arguments)
        return out * torch.nan, lse

    replace_attend(monkeypatch, "sdpa_math", attend)
    _, found, status = check("variants=[sdpa_math]", "masks=[full]")
    assert status == 1
    assert {row["tensors"]["out"]["error"] for row in found["results"]} == {None}


def test_all_variants_are_told_of_and_refused_kinds_of_calls_once(check):
    shown, found, status = check()
    assert status == 0
    assert {row["variant"] for row in found["results"]} == set(VARIANTS)
    supports = shown[: shown.index("Largest error")]
    assert all(f"\n {name} " in supports for name in VARIANTS)
    assert "flex runs on cuda (12 of 12 cases)" in shown
    assert "sdpa_flash takes one head dimension for q, k and v (2 of 12 cases)" in shown


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("variants=[flash_v3]", "variants has flash_v3; did you mean flash_v2? allowed are standard, flash_v1,"),
        ("variants=[auto]", "variants has auto; allowed are standard,"),
        ("variants=[]", "variants is empty; give at least one"),
        ("dtypes=[float16,float16]", "dtypes has float16 more than once; name each once"),
        ("lengths=[[9,9],[9,4],[9,9]]", "lengths has [9, 9] more than once; name each once"),
        ("masks=[casual]", "masks has casual; did you mean causal?"),
        ("dtypes=[float64]", "dtypes has float64; did you mean float"),
        ("lengths=[[9]]", "lengths has [9]; each must be two numbers of at least 1"),
        ("lengths=[300,300]", "lengths takes a list of lists, as in lengths=[[...],[...]]"),
        ("heads=[[4,4],6]", "heads takes a list of lists, as in heads=[[...],[...]]"),
        ("softcap=null", "softcap cannot be null; give it a value"),
        ("lengths=[]", "lengths is empty; give at least one"),
        ("heads=[[4,3]]", "heads has [4, 3]; query heads must be a multiple of KV heads"),
        ("head_dims=[0]", "head_dims has 0; all must be at least 1"),
        ("softcap=-1", "softcap is -1.0; it must be above 0"),
        ("v_head_dim=0", "v_head_dim is 0; it must be at least 1"),
        ("seed=-1", "seed is -1; it must be at least 0"),
        ("output=nowhere/found.json", "output is nowhere/found.json and there is no folder nowhere; make it first"),
        ("device=tpu", "device is tpu; allowed are auto, cpu and cuda"),
        ("train.steps=3", "there is no setting train; allowed are device, variants,"),
        ("variant=[standard]", "there is no setting variant; did you mean variants?"),
    ],
)
def test_a_mistake_ends_in_one_sentence(override, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mistake(override).startswith(sentence)
    assert not list(tmp_path.iterdir())


CALLS = {
    "settings": yaml.safe_load((Path(flashtrain.__file__).parent / "conf/check.yaml").read_text()),
    "as long as each other": {
        "masks": list(MASKS), "dtypes": list(DTYPES), "lengths": [[9, 9], [9, 4], [4, 9]], "long_lengths": [],
        "heads": [[4, 4], [4, 2], [3, 1]], "head_dims": [64, 128, 72],
    },
    "of two": {
        "masks": ["causal", "window"], "dtypes": ["float16", "float32"], "lengths": [[9, 9], [4, 9]],
        "long_lengths": [], "heads": [[4, 4], [4, 2]], "head_dims": [64, 128],
    },
}  # fmt: skip
FEATURES = ("softcap", "v_head_dim", "lse_gradient")


def cases_of(settings, long=True):
    return covering(
        settings["masks"],
        settings["dtypes"],
        settings["lengths"] + (settings["long_lengths"] if long else []),
        settings["heads"],
        settings["head_dims"],
        softcap=5.0,
        v_head_dim=32,
        lse_gradient=True,
        seed=0,
    )


def choices_of(case):
    return {
        "group": case.group,
        "dtypes": case.dtype,
        "lengths": (case.q_len, case.kv_len),
        "heads": (case.q_heads, case.kv_heads),
        "head_dims": case.head_dim,
    }


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("long", [False, True])
def test_any_two_choices_meet(name, long):
    settings = CALLS[name]
    cases = cases_of(settings, long)
    choices = {
        "group": [*settings["masks"], *FEATURES],
        "dtypes": settings["dtypes"],
        "lengths": [tuple(pair) for pair in settings["lengths"] + settings["long_lengths"] * long],
        "heads": [tuple(pair) for pair in settings["heads"]],
        "head_dims": settings["head_dims"],
    }
    for one, other in itertools.combinations(choices, 2):
        met = {(choices_of(case)[one], choices_of(case)[other]) for case in cases}
        assert met == set(itertools.product(choices[one], choices[other])), (one, other)
    square = tuple(settings["lengths"][0])
    for mask in {"full", "causal"} & set(settings["masks"]):
        plain = [case for case in cases if case.group == mask and (case.q_len, case.kv_len) == square]
        met = {(case.dtype, case.head_dim) for case in plain}
        assert met == set(itertools.product(settings["dtypes"], settings["head_dims"]))
        for other in ("dtypes", "head_dims"):
            met = {(choices_of(case)["heads"], choices_of(case)[other]) for case in plain}
            assert met == set(itertools.product(choices["heads"], choices[other]))
    assert len({case.seed for case in cases}) == len(cases)


def test_each_feature_has_its_cases_and_no_others():
    cases = cases_of(CALLS["settings"])
    for case in cases:
        assert case.softcap == (5.0 if case.group == "softcap" else 0.0)
        assert case.v_head_dim == (32 if case.group == "v_head_dim" else case.head_dim)
        assert case.lse_gradient == (case.group == "lse_gradient")
        assert case.group in (case.mask, *FEATURES)
    assert {case.mask for case in cases if case.group in FEATURES} == set(MASKS)


def test_the_settings_ask_for_all_there_is_and_for_few_enough_cases():
    settings = CALLS["settings"]
    assert set(settings["masks"]) == set(MASKS) and set(settings["dtypes"]) == set(DTYPES)
    assert settings["variants"] is None
    signs = [(q_len > kv_len) - (q_len < kv_len) for q_len, kv_len in settings["lengths"]]
    assert signs[0] == 0 and set(signs) == {-1, 0, 1}
    assert max(map(max, settings["long_lengths"])) > 4096
    assert {q_heads // kv_heads for q_heads, kv_heads in settings["heads"]} == {1, 3}
    assert settings["head_dims"] == [64, 128]
    assert settings["softcap"] > 0 and settings["v_head_dim"] not in settings["head_dims"] and settings["lse_gradient"]
    assert [len(cases_of(settings, long)) for long in (False, True)] == [37, 46]


@pytest.mark.parametrize(("q_len", "kv_len"), [(130, 130), (130, 70), (70, 130)])
def test_masks_are_what_their_names_say(q_len, kv_len):
    shown = {}
    for mask in MASKS:
        (case,) = covering(
            [mask], ["float32"], [(q_len, kv_len)], [(2, 1)], [16],
            softcap=0.0, v_head_dim=None, lse_gradient=False, seed=3,
        )  # fmt: skip
        shown[mask] = case.intervals("cpu").dense(q_len, kv_len).expand(ROWS, -1, -1)
    causal = shown["causal"]
    assert shown["full"].all() and not causal.all()
    for mask, most in (("window", WINDOW), ("chunked", CHUNK), ("documents", kv_len)):
        assert not (shown[mask] & ~causal).any() or mask == "documents" and q_len != kv_len
        assert 0 < shown[mask].sum(dim=-1).max() <= most and shown[mask].sum() < causal.sum()
    assert not torch.equal(*shown["documents"])
    assert (causal & ~shown["prefix_lm"]).sum() == 0 and not torch.equal(*shown["prefix_lm"])
