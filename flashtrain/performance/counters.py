"""The bytes that DRAM and L2 moved in calls of attention, by the GPU's own counters, which Nsight Compute reads.

`ncu` runs profiled.py and writes a line for each kernel; markers among them say which call a kernel is of. What L2
still holds for DRAM at the end of a call is written in the kernel behind it, and counts. All kernels of a call count,
PyTorch's too; a copy or a fill by the driver is no kernel and does not.
"""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashtrain.performance import profiled
from flashtrain.performance.attention import Problem
from flashtrain.performance.masks import Masks

DRAM_READ, DRAM_WRITTEN, L2 = METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")

TIME_LIMIT = 1800
"""Seconds for a run of ncu, which takes some seconds for each call where all is well."""

ERROR = "==ERROR== "
"""How a line of ncu's begins that says what went wrong; other lines of its own begin with == too."""

REPLAYED = re.compile(r"^==PROF== Profiling .* - (\d+) passes$", re.MULTILINE)
"""The line of a kernel that ran more than once, for all of its counters to be read."""


@dataclass(frozen=True)
class Counters:
    """One pass of a variant, in bytes."""

    variant: str
    pass_name: str
    length: int
    dram_read: int
    dram_written: int
    l2: int
    """Through L2, to and from all sides."""

    @property
    def dram(self) -> int:
        return self.dram_read + self.dram_written


@dataclass(frozen=True)
class Kernel:
    name: str
    bytes: dict[str, int]
    """By metric."""


class Unreadable(Exception):
    """Why a run of ncu gave no counters; the end of a sentence."""


def count(
    problems: list[Problem], masks: Masks, variants: list[str], passes: list[str], *, dtype: torch.dtype, seed: int
) -> tuple[list[Counters], list[str]]:
    """Count every variant and pass on every problem, on the current CUDA device, in a program of its own for each.

    Returns what was counted, and a sentence for each call that was not and for what makes counters doubtful. Where a
    run gives nothing, it is the last.
    """
    torch.cuda.empty_cache()  # the program needs the memory that this one keeps
    found: list[Counters] = []
    remarks: list[str] = []
    for problem in problems:
        request = {"problem": asdict(problem), "masks": asdict(masks), "variants": variants, "passes": passes}
        request |= {"dtype": str(dtype).removeprefix("torch."), "seed": seed}
        try:
            outcomes, log = _profile(request)
            counted, uncounted = _attributed(outcomes, parse(log), problem.length)
        except Unreadable as reason:
            remarks.append(f"no bytes were counted from {problem.length:,} tokens on: {reason}")
            break
        found += counted
        remarks += uncounted
        if times := [int(number) for number in REPLAYED.findall(log)]:
            remarks.append(
                f"ncu ran kernels at {problem.length:,} tokens up to {max(times)} times to read all counters; later "
                "runs find in L2 what earlier ones left"
            )
    return found, remarks


def command(ncu: str, log: Path, request: dict) -> list[str]:
    """What runs the calls of a request under ncu; clocks and caches stay as they are without a profiler."""
    return [
        *(ncu, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"),
        *("--replay-mode", "kernel", "--csv", "--page", "raw", "--print-units", "base"),
        *("--log-file", str(log), "--metrics", ",".join(METRICS)),
        *(sys.executable, "-m", profiled.__name__, json.dumps(request)),
    ]


def _profile(request: dict) -> tuple[list[dict], str]:
    """The outcomes of the calls, and what ncu logged."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise Unreadable("ncu is not on the PATH; install Nsight Compute")
    # The program finds what this one finds; numbers are written as in C, whatever the language of the user.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "LC_ALL": "C"}
    with tempfile.TemporaryDirectory() as folder:
        log, outcomes = Path(folder, "log.csv"), Path(folder, "outcomes.json")
        line = command(ncu, log, request | {"outcomes": str(outcomes)})
        try:
            ended = _run(line, environment)
        except OSError as error:
            raise Unreadable(f"{ncu} cannot be run ({error.strerror})") from None
        logged = log.read_text(encoding="utf-8") if log.exists() else ""
        errors = [
            text.removeprefix(ERROR).strip()
            for text in (logged + "\n" + ended.stdout + "\n" + ended.stderr).splitlines()
            if text.startswith(ERROR)
        ]
        if ended.returncode != 0:
            errors += [f"exit status {ended.returncode}", *ended.stderr.strip().splitlines()[-1:]]
        if errors:
            raise Unreadable(f"ncu failed: {'; '.join(dict.fromkeys(errors))}")
        if not outcomes.exists():
            raise Unreadable("the program that ncu ran ended early, without a word")
        return json.loads(outcomes.read_text(encoding="utf-8")), logged


def _run(line: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a process group of its own, which is killed where it takes too long or this program is
    interrupted."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=environment, process_group=0, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIME_LIMIT)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unreadable(f"ncu had not ended after {TIME_LIMIT / 60:g} minutes") from None
            raise
    return subprocess.CompletedProcess(line, process.returncode, stdout, stderr)


def parse(log: str) -> list[Kernel]:
    """The kernels, in their order, in the raw page of ncu as CSV: headings, units, and a row for each, or nothing.

    Raises Unreadable for a unit other than the byte, and for a metric that is missing or no number.
    """
    table = [*csv.reader(line for line in log.splitlines() if line and not line.startswith("=="))]
    if not table:
        return []
    try:
        heading, units, *rows = table
        places = {metric: heading.index(metric) for metric in METRICS}
        name = heading.index("Kernel Name")
        if {units[place] for place in places.values()} != {"byte"}:
            raise Unreadable(f"ncu's units are {', '.join(units[place] for place in places.values())}, not bytes")
        return [Kernel(row[name], {metric: _number(row[place]) for metric, place in places.items()}) for row in rows]
    except (ValueError, IndexError) as error:
        raise Unreadable(f"ncu's table cannot be read ({error})") from None


def _number(text: str) -> int:
    return round(float(text.replace(",", "")))


def _attributed(outcomes: list[dict], kernels: list[Kernel], length: int) -> tuple[list[Counters], list[str]]:
    """The counters of every call, and why some have none."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if profiled.MARKER in kernel.name:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    calls, behind = groups[::2], groups[1::2]
    found, reasons = [], []
    for one in outcomes:
        if one["reason"] is not None:
            reasons.append(f"{one['variant']} {one['pass']} at {length:,} tokens was not counted: {one['reason']}")
            continue
        place = one["ranges"] - 1
        if place >= len(behind) or not calls[place] or not behind[place]:
            raise Unreadable(f"ncu's table lacks kernels of {one['variant']} {one['pass']}")
        left = _total(behind[place], DRAM_WRITTEN)
        read, written, l2 = (_total(calls[place], metric) for metric in METRICS)
        found.append(Counters(one["variant"], one["pass"], length, read, written + left, l2))
    return found, reasons


def _total(kernels: Iterable[Kernel], metric: str) -> int:
    return sum(kernel.bytes[metric] for kernel in kernels)
