"""The hardware's counters: ncu's table, whose kernels are whose, every way to have none. A script plays ncu."""

import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from flashtrain.kernels.attention import Intervals, tiles
from flashtrain.performance import counters, profiled
from flashtrain.performance.attention import Problem
from flashtrain.performance.counters import METRICS, Counters, Kernel, Unreadable, command, count, parse
from flashtrain.performance.io import Launch, Shape, predict
from flashtrain.performance.masks import Masks
from flashtrain.performance.traffic import total_bytes

MASKS = Masks(window=1024, longest_document=2047, seed=0)
SMALL = Problem("full", 32, batch=1, head_dim=16, num_q_heads=2, num_kv_heads=2)

HEADINGS = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum"'
)
UNITS = '"","","","","","","","","","","","byte","byte","byte"'
MARKER = "at::cuda::(anonymous namespace)::spin_kernel(long)"
CLEANER = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, float>>(T3)"


def log(*kernels, passes="1 pass"):
    """What ncu writes of (name, bytes read, written, through L2) with the thousands apart."""
    connected = ["==PROF== Connected to process 4242 (/usr/bin/python3.12)"]
    progress = [
        f'==PROF== Profiling "{name}" - {index}: 0%....50%....100% - {passes}'
        for index, (name, *_) in enumerate(kernels)
    ]
    rows = [
        f'"{index}","4242","python3.12","host","{name}","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0",'
        f'"{read:,}","{written:,}","{l2:,}"'
        for index, (name, read, written, l2) in enumerate(kernels)
    ]
    ended = ["==PROF== Disconnected from process 4242", "==WARNING== Note: Running with uncontrolled GPU caches."]
    return "\n".join([*connected, *progress, *ended, HEADINGS, UNITS, *rows]) + "\n"


def a_range(*kernels, left=0):
    return [(MARKER, 1, 1, 1), *kernels, (MARKER, 1, 1, 1), (CLEANER, 10**9, left, 10**9)]


def outcome(variant, pass_name, ranges, reason=None):
    return {"variant": variant, "pass": pass_name, "ranges": ranges, "reason": reason}


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """ncu(body) puts a script of that name in front of the PATH: Python, that finds log and request."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(body):
        script = folder / "ncu"
        script.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            "log = open(sys.argv[sys.argv.index('--log-file') + 1], 'w')\nrequest = json.loads(sys.argv[-1])\n" + body
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return install


def writes(logged, *outcomes):
    return f"log.write({logged!r})\nopen(request['outcomes'], 'w').write({json.dumps(outcomes)!r})\n"


def counted(problems=(SMALL,), variants=("standard",), passes=("forward",)):
    return count(list(problems), MASKS, list(variants), list(passes), dtype=torch.bfloat16, seed=3)


def test_the_table_is_read_between_what_ncu_says():
    kernels = parse(log(("_fwd_kernel", 1_234_567, 0, 89), ("f(int, float)", 12, 3_000, 2**40)))
    assert kernels == [
        Kernel("_fwd_kernel", dict(zip(METRICS, (1_234_567, 0, 89), strict=True))),
        Kernel("f(int, float)", dict(zip(METRICS, (12, 3_000, 2**40), strict=True))),
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"byte"', '"Kbyte"'), "ncu's units are Kbyte, Kbyte, Kbyte, not bytes"),
        (("lts__t_bytes.sum", "other"), "ncu's table cannot be read ('lts__t_bytes.sum' is not in list)"),
        (('"12"', '"n/a"'), "ncu's table cannot be read (could not convert string to float: 'n/a')"),
        ((HEADINGS, "=="), "ncu's table cannot be read"),
        ((UNITS, "=="), "ncu's units are"),
    ],
    ids=["units", "metric", "number", "no headings", "no units"],
)
def test_a_table_that_is_another_is_not_read(change, sentence):
    with pytest.raises(Unreadable) as error:
        parse(log(("k", 12, 3, 4), ("k", 12, 3, 4)).replace(*change))
    assert str(error.value).startswith(sentence)


def test_a_call_has_its_kernels_and_what_it_left_in_l2(ncu):
    """Kernels before the first marker, the markers' bytes, and what the last kernel reads are nobody's."""
    first = a_range(("gemm", 100, 20, 3_000), ("softmax", 1_000, 200, 5_000), left=7)
    raised = a_range()
    second = a_range(("_bwd_kernel", 11, 22, 33))
    ncu(
        writes(
            log(("init", 1, 1, 1), *first, *raised, *second),
            outcome("standard", "forward", 1),
            outcome("flash_v1", "forward", 2, "failed: out of memory"),
            outcome("flash_v2", "backward", 3),
        )
    )
    found, remarks = counted()
    assert found == [
        Counters("standard", "forward", 32, dram_read=1_100, dram_written=227, l2=8_000),
        Counters("flash_v2", "backward", 32, dram_read=11, dram_written=22, l2=33),
    ]
    assert found[0].dram == 1_327
    assert remarks == ["flash_v1 forward at 32 tokens was not counted: failed: out of memory"]


def test_where_no_call_runs_each_says_why_and_longer_ones_are_tried(ncu):
    ncu(writes("==WARNING== No kernels were profiled.\n", outcome("standard", "forward", 0, "failed: out of memory")))
    reason = "standard forward at 32 tokens was not counted: failed: out of memory"
    assert counted([SMALL, SMALL]) == ([], [reason, reason])


def test_kernels_that_ran_more_than_once_are_remarked_on(ncu):
    ncu(writes(log(*a_range(("gemm", 1, 2, 3)), passes="2 passes"), outcome("standard", "forward", 1)))
    found, (remark,) = counted()
    assert len(found) == 1 and "at 32 tokens up to 2 times" in remark


def test_a_kernel_that_is_missing_is_no_zero(ncu):
    ncu(writes(log(*a_range(("gemm", 1, 2, 3)), *a_range()), outcome("standard", "forward", 2)))
    assert counted() == (
        [],
        ["no bytes were counted from 32 tokens on: ncu's table lacks kernels of standard forward"],
    )


def test_the_command_says_all_that_is_to_run(tmp_path):
    request = {"problem": asdict(SMALL), "masks": asdict(MASKS), "passes": ["forward"]}
    line = command("/opt/ncu", tmp_path / "log", request)
    options = "--profile-from-start off --clock-control none --cache-control none --replay-mode kernel --csv --page raw"
    options += f" --print-units base --log-file {tmp_path}/log"
    options += " --metrics dram__bytes_read.sum,dram__bytes_write.sum,lts__t_bytes.sum"
    assert line[:-4] == ["/opt/ncu", *options.split()]
    assert line[-4:-1] == [sys.executable, "-m", "flashtrain.performance.profiled"]
    assert json.loads(line[-1]) == request


def test_the_request_reaches_the_program_with_the_paths_of_this_one(ncu, tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    ncu(
        f"json.dump([request, os.environ['PYTHONPATH'].split(':'), os.environ['LC_ALL']], open({str(seen)!r}, 'w'))\n"
        + writes(log(*a_range(("gemm", 1, 2, 3))), outcome("standard", "forward", 1))
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    counted()
    request, paths, locale = json.loads(seen.read_text())
    assert Problem(**request["problem"]) == SMALL and Masks(**request["masks"]) == MASKS
    assert (request["variants"], request["passes"]) == (["standard"], ["forward"])
    assert (request["dtype"], request["seed"], locale) == ("bfloat16", 3, "C")
    assert paths[0] == str(tmp_path) and set(sys.path[1:]) <= set(paths)


NO_RIGHT = "ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (writes(f"==ERROR== {NO_RIGHT}\n" * 2, outcome("standard", "forward", 1)), f"ncu failed: {NO_RIGHT}"),
        (
            "log.write('==ERROR== LibraryNotLoaded\\n==ERROR== Failed to initialize the profiler\\n')\nsys.exit(9)\n",
            "ncu failed: LibraryNotLoaded; Failed to initialize the profiler; exit status 9",
        ),
        ("print('Traceback\\nKilled', file=sys.stderr)\nsys.exit(1)\n", "ncu failed: exit status 1; Killed"),
        ("", "the program that ncu ran ended early, without a word"),
        (
            writes("==WARNING== No kernels were profiled.\n", outcome("standard", "forward", 1)),
            "ncu's table lacks kernels of standard forward",
        ),
    ],
    ids=["no right", "no library", "death", "silence", "no kernels"],
)
def test_a_run_that_gives_nothing_is_the_last_and_says_why(ncu, tmp_path, body, reason):
    runs = tmp_path / "runs"
    ncu(f"open({str(runs)!r}, 'a').write('x')\n" + body)
    assert counted([SMALL, SMALL]) == ([], [f"no bytes were counted from 32 tokens on: {reason}"])
    assert runs.read_text() == "x"


def test_a_run_that_hangs_is_ended_with_all_that_it_started(ncu, tmp_path, monkeypatch):
    """Its child too, which would hold the pipes open."""
    monkeypatch.setattr(counters, "TIME_LIMIT", 3)
    child = tmp_path / "child"
    ncu(
        "import subprocess, time\n"
        f"open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\ntime.sleep(600)\n"
    )
    assert counted([SMALL, SMALL]) == (
        [],
        ["no bytes were counted from 32 tokens on: ncu had not ended after 0.05 minutes"],
    )
    state = Path("/proc", child.read_text(), "stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("its child is alive")


def test_without_ncu_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    sentence = "no bytes were counted from 32 tokens on: ncu is not on the PATH; install Nsight Compute"
    assert counted() == ([], [sentence])


def test_what_cannot_be_executed_says_so(ncu):
    ncu("")
    Path(shutil.which("ncu")).write_text("#!/no/such/program\n")
    assert "cannot be run (No such file or directory)" in counted()[1][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program must fail for want of a GPU")
def test_the_program_is_found_from_anywhere_and_its_last_word_is_told(ncu, tmp_path, monkeypatch):
    ncu("place = sys.argv.index('-m')\nos.execv(sys.argv[place - 1], sys.argv[place - 1 :])\n")
    monkeypatch.chdir(tmp_path)
    found, (remark,) = counted()
    assert found == [] and "ncu failed: exit status 1; " in remark
    assert "CUDA" in remark or "NVIDIA" in remark


class Ranges:
    """A clock that counts what it is shown."""

    def __init__(self):
        self.ranges = 0

    def read(self, call):
        self.ranges += 1
        call()
        return lambda: float("nan")


def test_each_call_that_runs_has_a_range_and_each_other_a_reason():
    given = {"device": "cpu", "dtype": torch.float32, "seed": 0}
    passes = ["forward", "backward"]
    found = profiled.outcomes(SMALL, Intervals.full(), ["sdpa_cudnn", "standard"], passes, Ranges(), **given)
    assert [(one["variant"], one["pass"], one["ranges"], one["reason"] is None) for one in found] == [
        ("sdpa_cudnn", "forward", 0, False),
        ("standard", "forward", 1, True),
        ("sdpa_cudnn", "backward", 1, False),
        ("standard", "backward", 2, True),
    ]


def test_a_range_is_marker_call_marker_and_a_clean_l2(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("Properties", (), {"L2_cache_size": 8}))
    buffer = type("Buffer", (), {"sum": lambda: events.append("clean")})
    monkeypatch.setattr(torch, "zeros", lambda *size, **kind: buffer)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append("marker"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    clock = profiled.ProfilerClock()
    expected = ["clean", "wait", "start", "marker", "call", "marker", "clean", "wait", "stop"]
    clock.read(lambda: events.append("call"))
    assert (events, clock.ranges) == (expected, 1)

    def fails():
        events.append("call")
        raise RuntimeError

    events.clear()
    with pytest.raises(RuntimeError):
        clock.read(fails)
    assert (events, clock.ranges) == (expected, 2)


@pytest.mark.gpu
def test_dram_moves_what_the_model_of_standard_says():
    problem = Problem("full", 4096, batch=1, head_dim=128, num_q_heads=16, num_kv_heads=16)
    found, remarks = counted([problem])
    if not found:
        pytest.skip("; ".join(remarks))
    launch = Launch(tiles("sm_90", 128, torch.bfloat16), sram_elements=2**15)
    shape = Shape(1, 4096, 4096, 16, 16, 128)
    model = total_bytes(predict("standard", "forward", shape, Intervals.full(), torch.bfloat16, launch).transfers)
    assert found[0].dram == pytest.approx(model, rel=0.15)
