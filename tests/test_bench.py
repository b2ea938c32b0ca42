"""`python -m flashtrain.bench` from the command line to its files, on a CPU."""

import json
import re
from dataclasses import replace

import matplotlib.image
import pytest
from commands import SMALL_BENCH, run_command

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


def mistake(*overrides):
    with pytest.raises(SystemExit) as stop:
        run_command(COMMAND, *SMALL_BENCH, *overrides)
    return stop.value.code.removeprefix("error: ")


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
        assert all(check["passes"] and check["error"] <= check["allowed"] for check in row["check"].values())
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
        assert not row["check"]["out"]["passes"]
    assert "| check failed: out " in (tmp_path / "measured" / "bench.md").read_text()
    assert all(row["tflops"] for row in found["measurements"] if row["variant"] != "sdpa_flash")


def test_where_no_variant_can_the_reasons_are_the_result(bench):
    shown, found = bench("variants=[sdpa_cudnn]")
    assert "sdpa_cudnn runs on cuda, not on cpu" in shown
    assert {row["no_speed"] for row in found["measurements"]} == {"runs on cuda, not on cpu"}


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
        ("masks=[prefix]", "masks has prefix; allowed are causal, full, window, documents"),
        ("passes=[sideways]", "passes has sideways; allowed are forward, backward"),
        ("dtype=float8", "dtype has float8; did you mean float32? allowed are bfloat16, float16, float32"),
        ("device=tpu", "device is tpu; allowed are auto, cpu and cuda"),
        ("window=0", "window is 0; it must be at least 1"),
        ("rounds=0", "rounds is 0; it must be at least 1"),
        ("warmup=-1", "warmup is -1; it must be 0 or more"),
        ("seed=-1", "seed is -1; it must be at least 0 and below 4294967296"),
        ("relative_to=flex", "relative_to is flex; it must be one of the variants: standard, sdpa_math, sdpa_flash"),
        ("output=taken", "output=taken exists; name another"),
    ],
    ids=lambda value: value if "=" in value else "",
)
def test_a_mistake_ends_in_one_sentence(tmp_path, override, sentence):
    (tmp_path / "taken").mkdir()
    assert mistake(override).startswith(sentence)
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]


def test_the_defaults_are_the_table_of_the_readme(monkeypatch):
    from flashtrain import bench
    from flashtrain.entry import main

    received = []
    monkeypatch.setattr("sys.argv", ["bench.py"])
    main(received.append, bench.ROOT)
    (config,) = received
    assert (config.lengths, config.head_dims, config.masks) == ([2048, 8192, 32768], [64, 128], ["causal", "full"])
    assert (config.tokens, config.hidden_size, config.dtype) == (32768, 2048, "bfloat16")
    assert (config.variants, config.passes) == (None, ["forward", "backward"])
