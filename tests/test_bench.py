"""`python -m flashtrain.bench` from the command line to its files, on a CPU."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from commands import SMALL_BENCH, run_command
from torch.nn.functional import scaled_dot_product_attention

from flashtrain.kernels.attention.variants import VARIANTS

COMMAND = "python -m flashtrain.bench"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bench(tmp_path, capsys):
    """bench("key=value", ...) -> (what the terminal shows, bench.json)."""

    def run(*overrides):
        run_command(COMMAND, *SMALL_BENCH, "output=measured", *overrides)
        return capsys.readouterr().out, json.loads((tmp_path / "measured" / "bench.json").read_text())

    return run


def right(q, k, v, causal):
    """An attention of flash-attention's convention."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)


def mistake(*overrides):
    """The sentence that the command ends with, or its exit status."""
    with pytest.raises(SystemExit) as stop:
        run_command(COMMAND, *SMALL_BENCH, *overrides)
    code = stop.value.code
    return code.removeprefix("error: ") if isinstance(code, str) else code


def test_every_measurement_is_in_the_file_with_what_it_depends_on(bench):
    _, found = bench("masks=[causal,documents]", "num_kv_heads=2", "variants=[standard,sdpa_math]", "seed=3")
    assert found["settings"]["masks"] == ["causal", "documents"] and found["settings"]["seed"] == 3
    assert found["provenance"]["command"][1:3] == SMALL_BENCH[:2]
    assert found["provenance"]["packages"]["torch"] and found["provenance"]["packages"]["triton"]
    assert {"commit", "cuda", "cudnn", "device", "started"} <= set(found["provenance"])
    assert found["flops_per_visible_pair"] == {"forward": 4, "backward": 10}
    assert [state["after"] and state["after"]["length"] for state in found["gpu_states"]] == [None, 64, 128, 64, 128]
    rows = found["measurements"]
    assert [(row["mask"], row["length"], row["pass"], row["variant"]) for row in rows] == [
        (mask, length, pass_name, variant)
        for mask in ("causal", "documents")
        for length in (64, 128)
        for pass_name in ("forward", "backward")
        for variant in ("standard", "sdpa_math")
    ]
    for row in rows:
        assert (row["batch"], row["num_q_heads"], row["num_kv_heads"]) == (256 // row["length"], 4, 2)
        assert len(row["readings_ms"]) == 3 and row["median_ms"] == sorted(row["readings_ms"])[1]
        assert row["quartiles_ms"][0] <= row["median_ms"] <= row["quartiles_ms"][1]
        assert row["tflops"] == pytest.approx(row["flops"] / row["median_ms"] / 1e9)
        assert row["no_speed"] is None
        assert set(row["check"]["deviations"]) == {"out", "dq", "dk", "dv"} and row["check"]["not_finite"] == []
        for deviation in row["check"]["deviations"].values():
            assert deviation["passes"] and deviation["error"] <= deviation["allowed"]
        compared = row["check"]["compared"]
        assert len(compared) == 4 and compared[0] == [0, 0] and compared[-1] == [row["batch"] - 1, 1]
    assert rows[0]["flops"] == 4 * 4 * (64 * 65 // 2) * 4 * 16


def test_the_tables_show_lengths_and_passes_beside_one_another(bench, tmp_path):
    shown, found = bench("relative_to=sdpa_math", "masks=[causal,window]")
    assert "window of 10 keys, head dim 16, 4 heads" in shown
    assert "sdpa_flash takes the full and the causal mask, not window(9, 0)" in shown
    text = (tmp_path / "measured" / "bench.md").read_text()
    causal, window = re.findall(r"^\| (?:causal|window).*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert re.match(r"\| causal, head dim 16, 4 heads(, interpreted)? \| 64 forward \| 64 backward \| 128 for", causal)
    figures = re.findall(r"([\d.e-]+) \(([\d.,]+) ms, ([\d.]+)x\)", causal)
    assert len(figures) == 3 * 4
    assert [ratio for _, _, ratio in figures[4:8]] == ["1.00"] * 4
    (first, *_), rows = figures, found["measurements"]
    assert float(first[0]) == pytest.approx(rows[0]["tflops"], rel=0.01)
    assert float(first[2]) == pytest.approx(rows[0]["tflops"] / rows[1]["tflops"], abs=0.006)
    assert "`sdpa_flash`" in causal and "`sdpa_flash`" not in window
    assert f"`{COMMAND} device=cpu dtype=float32" in text


def test_the_picture_has_a_panel_for_each_pass_and_mask(bench, tmp_path):
    bench("variants=[sdpa_math]", "masks=[causal]", "passes=[forward]")
    height, width, _ = matplotlib.image.imread(tmp_path / "measured" / "bench.png").shape
    run_command(COMMAND, *SMALL_BENCH, "variants=[sdpa_math,sdpa_efficient]", "output=more")
    more = matplotlib.image.imread(tmp_path / "more" / "bench.png").shape
    assert more[1] == 2 * width and more[0] > 1.5 * height


def test_a_wrong_variant_has_no_speed_anywhere(bench, monkeypatch, tmp_path):
    def attend(q, k, v, *rest):
        out, _ = VARIANTS["sdpa_math"].attend(q, k, v, *rest)
        return 1.01 * out, None

    monkeypatch.setitem(VARIANTS, "sdpa_flash", replace(VARIANTS["sdpa_flash"], attend=attend))
    shown, found = bench("masks=[causal]", "lengths=[64]")
    assert "check" in shown
    rows = [row for row in found["measurements"] if row["variant"] == "sdpa_flash"]
    assert len(rows) == 2
    for row in rows:
        assert row["tflops"] is row["median_ms"] is row["readings_ms"] is None
        assert re.match(r"check failed: out [\d.e+]+x allowed, dq [\d.e+]+x allowed", row["no_speed"])
        assert not row["check"]["deviations"]["out"]["passes"]
    assert "| check failed: out " in (tmp_path / "measured" / "bench.md").read_text()
    assert all(row["tflops"] for row in found["measurements"] if row["variant"] != "sdpa_flash")


def test_a_variant_that_raises_is_told_of_beside_the_others(bench, monkeypatch, tmp_path):
    def attend(*inputs):
        raise ValueError("a tile of 3 | 5 is odd\nthe rest of it")

    monkeypatch.setitem(VARIANTS, "sdpa_flash", replace(VARIANTS["sdpa_flash"], attend=attend))
    shown, found = bench("masks=[causal]", "lengths=[64]")
    reason = "failed: ValueError: a tile of 3 | 5 is odd"
    for row in found["measurements"]:
        assert row["no_speed"] == (reason if row["variant"] == "sdpa_flash" else None)
        assert (row["check"] is None) == (row["variant"] == "sdpa_flash")
    cell = reason.replace("|", "\\|")
    assert f"| `sdpa_flash` | {cell} | {cell} |" in (tmp_path / "measured" / "bench.md").read_text()
    assert shown.endswith(f"\nsdpa_flash has no speed: {reason}\n")


def test_a_named_variant_without_a_speed_is_said_at_the_end(bench):
    shown, _ = bench("variants=[sdpa_cudnn,standard]", "lengths=[64]")
    assert shown.endswith("\nsdpa_cudnn has no speed: runs on cuda, not on cpu\n")


def test_a_named_variant_that_has_a_speed_somewhere_is_not(bench):
    shown, _ = bench("variants=[sdpa_flash,standard]", "masks=[causal,window]", "lengths=[64]")
    assert "has no speed" not in shown


def test_where_no_variant_has_a_speed_the_reasons_are_the_result(capsys, tmp_path):
    assert mistake("variants=[sdpa_cudnn,sdpa_flash]", "masks=[window]", "output=measured") == 1
    shown = capsys.readouterr().out
    assert "\nsdpa_cudnn has no speed: runs on cuda, not on cpu\nsdpa_flash has no speed: takes the full and" in shown
    found = json.loads((tmp_path / "measured" / "bench.json").read_text())
    assert {row["no_speed"] for row in found["measurements"] if row["variant"] == "sdpa_cudnn"} == {
        "runs on cuda, not on cpu"
    }
    assert (tmp_path / "measured" / "bench.md").exists()


def test_the_settings_hold_the_device_that_auto_became(bench):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    _, found = bench("device=auto", "variants=[sdpa_math]", "lengths=[64]", "masks=[causal]")
    assert found["settings"]["device"] == kind


def test_the_device_is_the_one_that_measured(bench):
    shown, found = bench("variants=[sdpa_math]", "lengths=[64]", "masks=[causal]")
    device = found["provenance"]["device"]
    assert device.startswith("CPU (") and f"a call on {device}; " in " ".join(shown.split())


@pytest.mark.parametrize(
    ("readings", "sentence"),
    [
        (
            (1.0, 1.0, 1.48, 1.48),
            "readings lie far apart: up to 19 % from their median, the outer quarters left out; "
            "run again on a quiet machine",
        ),
        ((1.0, 1.0, 1.1, 1.1), "at least half of the readings of each lie within 4.8 % of their median"),
    ],
)
def test_readings_that_lie_far_apart_are_a_warning_under_the_table(bench, monkeypatch, tmp_path, readings, sentence):
    class Told:
        def __init__(self):
            self.left = itertools.cycle(readings)

        def read(self, call):
            call()
            seconds = next(self.left)
            return lambda: seconds

    monkeypatch.setattr("flashtrain.bench.HostClock", Told)
    shown, _ = bench("variants=[sdpa_math]", "rounds=4", "lengths=[64]", "masks=[causal]")
    assert sentence in " ".join(shown.split())
    assert f"- {sentence}" in (tmp_path / "measured" / "bench.md").read_text()


def test_interpreted_kernels_are_said_to_be(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shown, found = bench("variants=[sdpa_math]", "lengths=[64]", "masks=[causal]")
    assert found["interpreted"] and "causal, head dim 16, 4 heads, interpreted" in shown
    monkeypatch.delenv("TRITON_INTERPRET")
    run_command(COMMAND, *SMALL_BENCH, "variants=[sdpa_math]", "lengths=[64]", "masks=[causal]", "output=plain")
    assert "interpreted" not in (tmp_path / "plain" / "bench.md").read_text()


def test_an_interrupted_command_leaves_what_it_has_measured(monkeypatch, tmp_path):
    asked = []

    def measure(problem, *args, **kwargs):
        asked.append(problem.length)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(problem, *args, **kwargs)

    from flashtrain import bench

    real = bench.measure
    monkeypatch.setattr(bench, "measure", measure)
    assert mistake("output=measured") == "interrupted"
    found = json.loads((tmp_path / "measured" / "bench.json").read_text())
    assert {row["length"] for row in found["measurements"]} == {64}


def test_without_an_output_the_folder_has_the_time(tmp_path):
    run_command(COMMAND, *SMALL_BENCH, "variants=[sdpa_math]", "lengths=[64]", "masks=[causal]")
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"[\d-]+_[\d-]+_bench", folder.name)
    assert {path.name for path in folder.iterdir()} == {"bench.json", "bench.md", "bench.png"}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("length=[64]", "there is no setting length; did you mean lengths?"),
        ("+lenghts=[64]", "there is no setting lenghts; did you mean lengths?"),
        ("model=nano", "there is no setting model"),
        ("lengths=64", "lengths takes a list"),
        ("lengths=[]", "lengths is empty; give at least one"),
        ("lengths=[64,64]", "lengths has 64 more than once; name each once"),
        ("lengths=[0]", "lengths has 0; all must be at least 1"),
        ("lengths=[100]", "tokens is 256 and no multiple of the length 100; the next that is: tokens=300"),
        ("head_dims=[24]", "hidden_size is 64 and no multiple of the head dim 24"),
        ("num_kv_heads=3", "num_kv_heads is 3 and does not divide the 4 heads of head dim 16"),
        ("num_kv_heads=0", "num_kv_heads is 0; it must be at least 1"),
        ("variants=[auto]", "variants has auto; allowed are standard, flash_v1, flash_v2,"),
        ("variants=[]", "variants is empty; give at least one"),
        ("peers=[flash_attn_func]", "peers has flash_attn_func; write MODULE:FUNCTION, as in flash_attn_"),
        ("peers=[no_such:attend]", "peers has no_such:attend, and no_such cannot be imported (ModuleNotFoundError("),
        ("peers=[math:attend]", "peers has math:attend, and math has no function attend; name one of its own"),
        ("peers=[math:sqrt,math:sqrt]", "peers has math:sqrt more than once; name each once"),
        ("peers=null", "peers cannot be null; give it a value"),
        ("masks=[prefix]", "masks has prefix; allowed are causal, full, window, documents"),
        ("passes=[sideways]", "passes has sideways; allowed are forward, backward"),
        ("dtype=float8", "dtype has float8; did you mean float32? allowed are bfloat16, float16, float32"),
        ("device=tpu", "device is tpu; allowed are auto, cpu and cuda"),
        ("window=0", "window is 0; it must be at least 1"),
        ("rounds=0", "rounds is 0; it must be at least 1"),
        ("warmup=-1", "warmup is -1; it must be 0 or more"),
        ("seed=-1", "seed is -1; it must be at least 0 and below 4294967296"),
        ("relative_to=flex", "relative_to is flex; it must be one of the variants: standard, sdpa_math, sdpa_flash"),
        ("output=", "output is empty; name a new folder, or leave it out for runs/ with the time"),
        ("output=taken", "output=taken exists; name another"),
    ],
    ids=lambda value: value if "=" in value else "",
)
def test_a_mistake_ends_in_one_sentence(tmp_path, override, sentence):
    (tmp_path / "taken").mkdir()
    assert mistake(override).startswith(sentence)
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]


def test_a_peer_has_rows_of_its_own_everywhere(bench, module, tmp_path):
    module("other.attention", attend=lambda *inputs, causal: (right(*inputs, causal), None))
    name = "other.attention:attend"
    shown, found = bench(f"peers=[{name}]", f"relative_to={name}", "masks=[causal,window]", "num_kv_heads=2")
    assert found["settings"]["peers"] == [name] and found["provenance"]["peers"] == {name: []}
    rows = [row for row in found["measurements"] if row["variant"] == name]
    assert [(row["mask"], row["length"], row["pass"]) for row in rows] == [
        (mask, length, pass_name)
        for mask in ("causal", "window")
        for length in (64, 128)
        for pass_name in ("forward", "backward")
    ]
    for row in rows[:4]:
        assert len(row["readings_ms"]) == 3 and row["no_speed"] is None and not row["detached"]
        assert set(row["check"]["deviations"]) == {"out", "dq", "dk", "dv"}
    reason = "takes the full and the causal mask, not window(9, 0)"
    assert {row["no_speed"] for row in rows[4:]} == {reason}
    assert f"{name} {reason}" in " ".join(shown.split())
    text = (tmp_path / "measured" / "bench.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \| .*$", text, re.MULTILINE)
    assert row.count("1.00x") == 4
    assert f"- {name} {reason}" in text and f"relative to {name} | forward | backward |" in text
    means = re.findall(r"^\| `(\w+)` \| [\d.]+x \(smallest [\d.]+x, 2 of 4 cells\) \|", text, re.MULTILINE)
    assert means == ["standard", "sdpa_math", "sdpa_flash"]
    assert [(one["variant"], one["pass"], one["cells"]) for one in found["multiples"]] == [
        (variant, pass_name, 2) for pass_name in ("forward", "backward") for variant in means
    ]


def test_without_a_name_to_be_relative_to_there_are_no_means(bench, tmp_path):
    shown, found = bench("variants=[standard,sdpa_math]", "masks=[causal]", "lengths=[64]")
    assert found["multiples"] == [] and "geometric" not in shown + (tmp_path / "measured" / "bench.md").read_text()


def test_a_peer_that_exits_or_writes_is_told_of_at_the_end(bench, module):
    def exits(q, k, v, causal):
        raise SystemExit

    def writes(q, k, v, causal):
        q.data.zero_()
        return right(q, k, v, causal)

    module("other", exits=exits, writes=writes)
    peers = "peers=[other:exits,other:writes]"
    shown, found = bench(peers, "variants=[standard]", "masks=[causal]", "lengths=[64]")
    assert "\nother:exits has no speed: failed: RuntimeError: raised SystemExit()\n" in shown
    assert "\nother:writes has no speed: failed: changes its inputs\n" in shown
    assert all(row["tflops"] for row in found["measurements"] if row["variant"] == "standard")


def test_a_module_that_exits_is_a_mistake(tmp_path, monkeypatch):
    (tmp_path / "exiting.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    assert mistake("peers=[exiting:attend]").startswith("peers has exiting:attend, and exiting cannot be imported (Sys")


def test_a_wrong_peer_has_no_speed_but_the_reason(bench, module):
    module("other", attend=lambda *inputs, causal: 1.01 * right(*inputs, causal))
    shown, found = bench("peers=[other:attend]", "masks=[causal]", "lengths=[64]")
    rows = [row for row in found["measurements"] if row["variant"] == "other:attend"]
    assert [row["tflops"] for row in rows] == [None, None]
    assert all(row["no_speed"].startswith("check failed: out ") for row in rows)
    assert "\nother:attend has no speed: check failed: out " in shown


def test_a_peer_without_a_backward_has_a_forward_and_a_reason(bench, module, tmp_path):
    def attend(q, k, v, causal):
        if q.requires_grad:
            raise RuntimeError("forward only")
        return right(q, k, v, causal)

    module("other", attend=attend)
    shown, found = bench("peers=[other:attend]", "masks=[causal]", "lengths=[64]")
    forward, backward = (row for row in found["measurements"] if row["variant"] == "other:attend")
    assert forward["tflops"] and forward["detached"] and set(forward["check"]["deviations"]) == {"out"}
    reason = "has no backward: it takes no inputs that require gradients (RuntimeError: forward only)"
    assert backward["no_speed"] == reason and not backward["detached"]
    text = (tmp_path / "measured" / "bench.md").read_text()
    assert f"- other:attend {reason}\n" in text
    assert "- other:attend takes no inputs that require gradients: it is timed on others\n" in text
    assert re.search(r"\| `other:attend` \| [^|]+ ms\) \| - \|", text)
    assert "has no speed" not in shown


def test_where_only_a_peer_has_a_speed_the_command_has_measured(bench, module):
    module("other", attend=right)
    shown, _ = bench("variants=[sdpa_cudnn]", "peers=[other:attend]", "masks=[causal]", "lengths=[64]")
    assert shown.endswith("\nsdpa_cudnn has no speed: runs on cuda, not on cpu\n")


def test_a_module_named_as_a_variant_and_two_functions_of_one_module_stay_apart(bench, module):
    module("standard", attend=right, attend_too=right)
    names = ["standard", "standard:attend", "standard:attend_too"]
    _, found = bench(f"variants={names[:1]}", f"peers=[{','.join(names[1:])}]", "masks=[causal]", "lengths=[64]")
    assert [row["variant"] for row in found["measurements"]] == names * 2


def test_relative_to_a_peer_that_is_not_measured_is_a_mistake(module):
    module("other", attend=right)
    assert mistake("peers=[other:attend]", "relative_to=flash_attn:flash_attn_func") == (
        "relative_to is flash_attn:flash_attn_func; it must be one of the variants: standard, sdpa_math, sdpa_flash; "
        "or of the peers: other:attend"
    )


def test_the_readmes_command_with_peers_runs(module, tmp_path):
    """test_readme.py runs all that need no other package."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (command,) = re.findall(r"`(python -m flashtrain\.bench [^`]*peers=[^`]*)`", readme)
    module("flash_attn_interface", flash_attn_func=right)
    module("flash_attn.cute", flash_attn_func=lambda *inputs, causal: (right(*inputs, causal), None))
    run_command(" ".join(command.split()), *SMALL_BENCH, "lengths=[64]", "masks=[causal]", "output=measured")
    text = (tmp_path / "measured" / "bench.md").read_text()
    assert "`flash_attn_interface:flash_attn_func`" in text and "`flash_attn.cute:flash_attn_func`" in text


def test_the_defaults_are_the_table_of_the_readme(monkeypatch):
    from flashtrain import bench
    from flashtrain.entry import main

    received = []
    monkeypatch.setattr("sys.argv", ["bench.py"])
    main(received.append, bench.ROOT)
    (config,) = received
    assert (config.lengths, config.head_dims, config.masks) == ([2048, 8192, 32768], [64, 128], ["causal", "full"])
    assert (config.tokens, config.hidden_size, config.dtype) == (32768, 2048, "bfloat16")
    assert (config.variants, config.peers, config.passes) == (None, [], ["forward", "backward"])
