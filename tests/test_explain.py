"""`python -m flashtrain.explain` from the command line to its files, on a machine without a GPU."""

import json
import re
import shutil
from dataclasses import replace

import matplotlib.image
import pytest
import torch
from commands import SMALL_EXPLAIN, run_command

from flashtrain.explain import MOST
from flashtrain.kernels.attention import tiles
from flashtrain.performance.counters import Counters
from flashtrain.performance.counters import count as real_count
from flashtrain.performance.devices import DEVICES
from flashtrain.performance.explanation import data_size, duration
from flashtrain.performance.io import standard_elements
from flashtrain.performance.roofline import Rates
from flashtrain.performance.timing import HostClock

COMMAND = "python -m flashtrain.explain"


@pytest.fixture(autouse=True)
def in_an_empty_folder_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def explain(tmp_path, capsys):
    """explain("key=value", ...) -> (what the terminal shows, explain.json)."""

    def run(*overrides):
        run_command(COMMAND, *SMALL_EXPLAIN, "device=a100", "output=told", *overrides)
        return capsys.readouterr().out, json.loads((tmp_path / "told" / "explain.json").read_text())

    return run


def mistake(*overrides):
    with pytest.raises(SystemExit) as stop:
        run_command(COMMAND, *SMALL_EXPLAIN, *overrides)
    return stop.value.code.removeprefix("error: ")


def test_the_file_holds_every_number_of_the_tables(explain):
    shown, found = explain()
    assert [(row["length"], row["pass"], row["variant"]) for row in found["cases"]] == [
        (length, pass_name, variant)
        for length in (64, 128, 256)
        for pass_name in ("forward", "backward")
        for variant in ("standard", "flash_v1", "flash_v2")
    ]
    lines = shown.splitlines()
    for row in found["cases"]:
        assert row["asked_bytes"] == sum(one["bytes"] for one in row["transfers"])
        assert all(one["bytes"] == one["elements"] * one["element_bytes"] for one in row["transfers"])
        assert row["compulsory_bytes"] <= row["hbm_bytes"] <= row["asked_bytes"]
        assert row["flops_per_byte"] == row["flops"] / row["hbm_bytes"]
        assert row["measured_seconds"] is None
        if row["length"] == 128:
            line = next(one for one in lines if one.startswith(f" {row['variant']} {row['pass']}"))
            for figure in (row["asked_bytes"], row["compulsory_bytes"], row["hbm_bytes"]):
                assert data_size(figure) in line
            assert row["bound"] in line and duration(row["least_seconds"]) in line


def test_the_page_has_the_tables_the_text_and_the_command(explain, tmp_path):
    _, found = explain()
    page = (tmp_path / "told" / "explain.md").read_text()
    assert "|  | 64 | 128 | 256 |\n|---|---:|---:|---:|\n| standard forward | " in page
    for row in found["cases"]:
        assert f", {duration(row['least_seconds'])} |" in page
    assert all(paragraph in page for paragraph in found["text"])
    assert "`python -m flashtrain.explain length=128" in page


def test_the_least_time_is_the_larger_of_the_two(explain):
    _, found = explain()
    rates = found["rates"]
    assert (rates["flops"], rates["bandwidth"], rates["measured"]) == (312e12, 2039e9, False)
    for row in found["cases"]:
        compute = row["flops"] / row["share_of_sms"] / rates["flops"]
        memory = row["hbm_bytes"] / rates["bandwidth"]
        assert row["least_seconds"] == pytest.approx(max(compute, memory))
        assert row["bound"] == ("compute" if compute > memory else "memory")


def test_standard_is_the_closed_form_in_the_text_and_the_file(explain):
    shown, found = explain("mask=full", "variants=[standard]", "passes=[forward]")
    (row,) = [row for row in found["cases"] if row["length"] == 128]
    once = standard_elements(128, 16)
    assert sum(one["elements"] for one in row["transfers"]) == 2 * once
    assert f"4Nd + 4N^2 = {once:,} elements (N = 128, d = 16)" in shown


def test_the_text_is_right_where_others_err(explain):
    shown, found = explain()
    told = " ".join(shown.split())
    assert "softmax = f / l: the numerator is f, the denominator l" in told
    assert "O = P V, what is read is P, not S" in told
    assert all(" ".join(paragraph.split()) in told for paragraph in found["text"])


def test_the_text_follows_the_numbers(explain, tmp_path):
    """The A100's L2 has halves of 20 MiB. At 128 tokens all fits one; at 16k what flash_v2 reads again does. What
    flash_v1 reads again at 4k in 8 heads is 24 MiB. At 64k flash_v2's keys and values do not fit."""

    def told(*overrides):
        shown, _ = explain("head_dim=128", *overrides)
        shutil.rmtree(tmp_path / "told")
        return " ".join(shown.split())

    small = told()
    assert small.count("All fit, so HBM need see each input and output once") == 6
    large = told("length=16384", "lengths=[16384]", "num_heads=16")
    assert "standard forward: 2,199 GFLOP" in large and "half of L2, 20.0 MiB, is taken to keep" in large
    assert large.count("No pass reads anything twice, so HBM sees all that is asked for: ") == 2
    assert large.count("that does not fit, so HBM sees all that is asked for: ") == 2
    assert large.count("that fits, so HBM need see each matrix once in it: ") == 3
    assert "bound by memory" in large and "on the 15% of the SMs that it has programs for" in large
    partly = told("length=4096", "lengths=[4096]", "num_heads=8", "variants=[flash_v1]", "passes=[forward]")
    assert "HBM sees all that is asked for, but for what the other half of L2 serves" in partly
    longest = told("length=65536", "lengths=[65536]", "num_heads=1", "variants=[flash_v2]", "passes=[forward]")
    assert "that does not fit, but up to 108 programs side by side read the same blocks" in longest


def test_each_pass_says_what_it_reads_again(explain):
    """Half of the H200's L2 keeps K and V of the head dims, not Q and dO of three heads."""
    sizes = ["head_dim=256", "num_heads=6", "num_kv_heads=2", "batch=2", "length=4096", "lengths=[4096]"]
    shown, found = explain("device=h200", *sizes, "variants=[flash_v2]", "passes=[backward]")
    told = " ".join(shown.split())
    again = "What programs at work at a time read again and again in the pass"
    assert f"{again} dK, dV is 36.3 MiB at most; that does not fit, but up to 64 programs side by side" in told
    assert f"{again} dQ is 12.0 MiB at most; that fits, so HBM need see each matrix once in it: 88.4 MiB." in told
    (row,) = found["cases"]
    assert f"With what other passes ask for, HBM sees {data_size(row['hbm_bytes'])}." in told
    assert [(one["name"], one["fits_l2"]) for one in row["passes"]] == [
        ("delta", True), ("dK, dV", False), ("dQ", True),
    ]  # fmt: skip
    assert row["hbm_bytes"] == sum(one["hbm_bytes"] for one in row["passes"])


def test_under_a_window_as_much_is_read_again_as_the_window_shows(explain):
    sizes = ["length=131072", "lengths=[131072]", "num_heads=16", "head_dim=128", "window=1024"]
    shown, _ = explain("device=h200", "mask=window", *sizes, "variants=[flash_v2]", "passes=[forward]")
    assert "in the pass forward is 4.25 MiB at most; that fits, so HBM need see" in " ".join(shown.split())


def test_one_of_something_is_in_the_singular(explain):
    shown, _ = explain("device=h200", "length=1", "lengths=[1]", "num_heads=1")
    told = " ".join(shown.split())
    assert "1 token: full, 1 head of 16," in told and "in 1 tile of 64," in told and "in 1 block of 512," in told
    assert "for all 1" not in told and not re.search(r"(?<![\d.,])1 (tokens|heads|tiles|blocks)\b", told)


def test_passes_that_a_mask_adds_are_named(explain):
    shown, _ = explain("mask=causal")
    assert "S = scale Q K^T, make the mask, mask S, P = softmax(S), O = P V" in " ".join(shown.split())


def test_who_cannot_do_the_mask_says_so_and_is_left_out(explain):
    shown, found = explain("mask=documents", "batch=2")
    assert "flash_v1 takes the full and the causal mask, not documents" in shown
    assert set(found["refused"]) == {"flash_v1"}
    assert {row["variant"] for row in found["cases"]} == {"standard", "flash_v2"}
    assert mistake("device=h200", "mask=window", "variants=[flash_v1]").startswith("flash_v1 takes the full and")


def test_operators_are_classed(explain):
    shown, found = explain("length=8192", "num_heads=16", "head_dim=128", "lengths=[8192]")
    bounds = {one["name"]: one["bound"] for one in found["operators"]}
    assert bounds["MLP up"] == bounds["attention, flash_v2"] == "compute"
    assert bounds["softmax P"] == bounds["norm"] == bounds["attention, standard"] == "memory"
    assert all(f" {name} " in shown for name in bounds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")
def test_counts_are_shown_beside_the_model(explain, tmp_path):
    shown, found = explain("count_length=40", "mask=causal", "num_kv_heads=1")
    assert len(found["counted"]) == 6 and all(one["equal"] for one in found["counted"])
    assert all(one["counted_elements"] == one["model_elements"] > 0 for one in found["counted"])
    row = f"| standard forward | {found['counted'][0]['counted_elements']:,} | "
    page = (tmp_path / "told" / "explain.md").read_text()
    for text in (shown, page):
        assert "Elements at 40 tokens, counted as each runs" in text
        assert all(f"{one['counted_elements']:,}" in text for one in found["counted"])
    assert row in page


def test_what_cannot_be_counted_says_why(explain, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shown, found = explain("count_length=40")
    assert "flash_v2 runs on cuda, or on cpu with TRITON_INTERPRET=1 in the environment, not on cpu" in shown
    assert {one["variant"] for one in found["counted"]} == {"standard"}


def test_the_picture_has_three_panels_side_by_side(explain, tmp_path):
    explain()
    height, width, _ = matplotlib.image.imread(tmp_path / "told" / "explain.png").shape
    assert width > 3 * height


@pytest.fixture
def gpu(monkeypatch):
    """The GPU is here, and played by the CPU, without counters; the verb."""
    from flashtrain import explain as verb

    real = verb.measure
    monkeypatch.setattr(verb, "count", lambda *args, **kwargs: ([], ["no bytes were counted: no counters"]))
    monkeypatch.setattr(verb, "_device", lambda word: (DEVICES[word], True))
    monkeypatch.setattr(verb, "achievable", lambda *args, **kwargs: Rates(1e12, 1e14, measured=True))
    monkeypatch.setattr(verb, "CudaClock", HostClock)
    monkeypatch.setattr(verb, "measure", lambda *args, **kwargs: real(*args, **kwargs | {"device": "cpu"}))
    return verb


HERE = ["dtype=float32", "lengths=[64]", "length=64", "rounds=3", "warmup=1", "variants=[standard]"]


def test_where_the_gpu_is_here_times_stand_beside_the_prediction(explain, gpu):
    shown, found = explain(*HERE)
    assert found["rates"] == {"bandwidth": 1e12, "flops": 1e14, "measured": True}
    assert found["nominal"]["bandwidth"] == 2039e9
    assert "100 TFLOP/s and 1.00 TB/s measured here" in shown and "The data sheet says" in shown
    for row in found["cases"]:
        line = next(one for one in shown.splitlines() if one.startswith(f" {row['variant']} {row['pass']}"))
        assert row["measured_seconds"] > 0 and duration(row["measured_seconds"]) in line


def test_bytes_that_the_hardware_counts_stand_beside_the_model(explain, gpu, monkeypatch, tmp_path):
    """DRAM moves 1.5 times the model's bytes at 48 tokens, and as many at 96."""

    def count(problems, masks, variants, passes, *, dtype, seed):
        assert ([one.length for one in problems], variants, passes) == ([48, 96], ["standard"], ["forward"])
        model = {length: 4 * standard_elements(length, 16) * 2 for length in (48, 96)}
        rows = [(48, model[48], model[48] // 2), (96, model[96] - 640, 640)]
        found = [Counters("standard", "forward", length, *dram, l2=2 * sum(dram)) for length, *dram in rows]
        return found, ["standard backward at 96 tokens was not counted: out of memory"]

    # Without an L2, HBM sees all that is asked for.
    monkeypatch.setitem(DEVICES, "a100", replace(DEVICES["a100"], l2_bytes=0, num_sms=1))
    monkeypatch.setattr(gpu, "count", count)
    shown, found = explain(*HERE, "mask=full", "passes=[forward]", "counter_lengths=[48,96]")
    first, second = found["counted_by_hardware"]
    assert (first["length"], first["dram_over_hbm"], second["dram_over_hbm"]) == (48, 1.5, 1)
    assert (second["dram_read_bytes"], second["dram_written_bytes"]) == (second["hbm_bytes"] - 640, 640)
    assert first["l2_bytes"] == 3 * first["asked_bytes"]
    assert found["counted_by_hardware_remarks"] == ["standard backward at 96 tokens was not counted: out of memory"]
    told = " ".join(shown.split())
    assert "standard backward at 96 tokens was not counted: out of memory" in told
    words = "DRAM moved 1.50 times the model's bytes where they differ most (forward, 48 tokens), and 50.0% to 50.0%"
    page = (tmp_path / "told" / "explain.md").read_text()
    title = "DRAM bytes, counted by the hardware, beside the model"
    row = f"| standard forward, 48 | {data_size(first['hbm_bytes'])} | {data_size(first['dram_read_bytes'])} |"
    assert words in told and words in page and title in told and title in page and row in page


def test_without_counters_the_rest_is_explained(explain, gpu):
    shown, found = explain(*HERE)
    assert "no bytes were counted: no counters" in shown and "counted by the hardware" not in shown
    assert found["counted_by_hardware"] == [] and found["counted_by_hardware_remarks"] == [
        "no bytes were counted: no counters"
    ]
    assert all(row["measured_seconds"] > 0 for row in found["cases"])


@pytest.mark.parametrize("none", ["null", "[]"])
def test_no_lengths_are_no_counts(explain, gpu, monkeypatch, none):
    monkeypatch.setattr(gpu, "count", real_count)
    shown, found = explain(*HERE, f"counter_lengths={none}")
    assert found["counted_by_hardware"] == found["counted_by_hardware_remarks"] == []


def test_where_the_device_is_elsewhere_nothing_is_counted(explain):
    _, found = explain("counter_lengths=[64]")
    assert found["counted_by_hardware"] == found["counted_by_hardware_remarks"] == []


def test_a_folder_that_cannot_be_made_is_known_before_anything_is_measured(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "achievable", lambda *args, **kwargs: pytest.fail("measured"))
    (tmp_path / "file").touch()
    sentence = "file/told cannot be written (Not a directory); say output=DIR with another place"
    assert mistake("device=a100", "output=file/told") == sentence


def test_standard_alone_ends_where_the_table_of_tiles_does(tmp_path):
    """Where the kernels end, too."""
    sentence = "head_dim is 300; it must be at most 256"
    assert mistake("device=h200", "head_dim=300", "variants=[standard]", "output=told") == sentence
    assert list(tmp_path.iterdir()) == []
    for device in DEVICES.values():
        assert tiles(device.architecture, MOST["head_dim"], torch.bfloat16).forward.BLOCK_M
    limits = f"flash_v1 takes head dimensions from 16 to {MOST['head_dim']} in multiples of 8, not 20"
    assert limits in mistake("device=h200", "head_dim=20", "variants=[flash_v1]", "output=told")
    sizes = [f"head_dim={MOST['head_dim']}", "lengths=[64]", "length=64"]
    run_command(COMMAND, *SMALL_EXPLAIN, "device=h200", *sizes, "output=told")


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_is_explained(device, tmp_path):
    run_command(COMMAND, *SMALL_EXPLAIN, f"device={device}", "output=told")
    assert json.loads((tmp_path / "told" / "explain.json").read_text())["device"]["label"] == DEVICES[device].label


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("device=auto", "device is auto and no GPU that is known is here; say which to explain: a100,"),
        ("device=b200", "device has b200; did you mean h200? allowed are auto, a100,"),
        ("variants=[flex]", "variants has flex; allowed are standard, flash_v1, flash_v2"),
        ("variants=[]", "variants is empty; give at least one"),
        ("mask=prefix", "mask has prefix; allowed are causal, full, window, documents"),
        ("lengths=[64,64]", "lengths has 64 more than once; name each once"),
        ("lengths=[0]", "lengths has 0; all must be at least 1"),
        ("length=0", "length is 0; it must be at least 1"),
        ("count_length=0", "count_length is 0; it must be at least 1"),
        ("num_kv_heads=3", "num_kv_heads is 3 and does not divide the 2 heads"),
        ("head_dim=20", "flash_v1 takes head dimensions from 16 to 256 in multiples of 8, not 20"),
        ("head_dim=264", "head_dim is 264; it must be at most 256"),
        ("lengths=[100000000000]", "the longest length is 100000000000 and batch 1; a call must have at most 16777216"),
        ("length=16777217", "the longest length is 16777217 and batch 1; a call must have at most 16777216 tokens"),
        ("batch=131072", "the longest length is 16384 and batch 131072; a call must have at most 16777216 tokens"),
        ("count_length=100000", "count_length is 100000; it must be at most 4096"),
        ("window=100000000000000000000", "window is 100000000000000000000; it must be at most 16777216"),
        ("longest=nan", "longest is nan; it must be 0 or more"),
        ("head_dims=[64]", "there is no setting head_dims; did you mean head_dim?"),
        ("dtype=float8", "dtype has float8; did you mean float32?"),
        ("rounds=0", "rounds is 0; it must be at least 1"),
        ("warmup=-1", "warmup is -1; it must be 0 or more"),
        ("counter_lengths=[0]", "counter_lengths has 0; all must be at least 1"),
        ("counter_lengths=[64,64]", "counter_lengths has 64 more than once; name each once"),
        ("output=taken", "output=taken exists; name another"),
        ("output=", "output is empty; name a new folder, or leave it out for runs/ with the time"),
    ],
    ids=lambda value: value if "=" in value else "",
)
def test_a_mistake_ends_in_one_sentence(tmp_path, override, sentence):
    (tmp_path / "taken").mkdir()
    others = [] if override.startswith("device") else ["device=h200"]
    assert mistake(*others, "variants=[flash_v1,flash_v2]", override).startswith(sentence)
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]
