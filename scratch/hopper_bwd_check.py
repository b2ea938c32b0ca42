"""First run of flash_hopper's backward on an H200: right on a grid against float64, repeatable, then timed beside its peers.

From the repository root, with this file and (if wanted) backward_early.py beside it anywhere:
    PYTHONPATH=.:tests:tests/attention python hopper_bwd_check.py [all|first|grid|extra|time|tries|profile] [--early] [--workers 12]

`all` runs first, grid, extra and time, each in processes of their own with a time limit, so that a hang costs a minute and
is named. --early checks and times backward_early.py (the scores of the next block before dQ is stored) in place of the
committed backward.py; `time` and `tries` take both where the file is there.
  first    one small problem per head dimension: dq, dk, dv beside float64.  Run this before anything else.   ~20 s
  grid     ~90 problems over 12 processes; one line each, failures in full.                                    ~90 s
  extra    repeats (dk, dv bitwise; spread of dq), large fp16 gradients, exact small integers, strides, flags.  ~30 s
  time     12 cells, interleaved: ours, early, cuDNN, flash_v2, FA4 if importable.                              ~120 s
  tries    the same for other launch records (SLOTS, NAMED, REGISTERS), ours and early alone.                   ~120 s
  profile  how long each of the three kernels takes.                                                            ~20 s
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
DEVICE = os.environ.get("DEVICE", "cuda")
EARLY = HERE / "backward_early.py"
PACKAGE = "flashtrain.kernels.attention.flash_hopper"


def backward_module(early):
    if not early:
        return importlib.import_module(PACKAGE + ".backward")
    name = PACKAGE + ".backward_early"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EARLY)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def attend_by(backward, intervals, scale, softcap):
    """Our forward with this backward, differentiable, as ops.py would make it; new memory holds NaN meanwhile."""
    from flashtrain.kernels.attention.flash_hopper.forward import forward

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            with nan_filled():
                out, lse = forward(q, k, v, intervals, scale, softcap)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            q, k, v, out, lse = ctx.saved_tensors
            with nan_filled():
                return backward(dout, dlse, q, k, v, out, lse, intervals, scale, softcap, True, True)

    return Attend.apply


@contextlib.contextmanager
def nan_filled():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------ the grid
# mask, B, Sq, Sk, Hq, Hkv, D, Dv, softcap, dtype, lse_gradient
def cases():
    plain = [
        (mask, 2, S, S, 2, 2, D, D, 0.0, dtype, False)
        for mask, S, D, dtype in itertools.product(("causal", "full"), (64, 128, 512, 1024), (64, 128), ("bf16", "fp16"))
    ]
    lengths = [
        (mask, 2, Sq, Sk, 2, 2, D, D, 0.0, "bf16", True)
        for mask, D, (Sq, Sk) in itertools.product(
            ("causal", "full", "window(20, 3)"), (64, 128), ((1, 1), (1, 129), (129, 1), (65, 200), (200, 65), (333, 1000))
        )
    ]
    masks = [
        (mask, 2, 200, 200, 4, 2, D, Dv, cap, dtype, True)
        for mask, (D, Dv, cap, dtype) in itertools.product(
            ("documents", "sequences", "prefix in documents", "chunks", "window(20, 3)"),
            ((64, 64, 0.0, "bf16"), (128, 128, 15.0, "fp16"), (128, 64, 0.0, "bf16"), (40, 72, 15.0, "bf16")),
        )
    ]
    heads = [
        ("causal", 3, 300, 300, 6, Hkv, D, Dv, 0.0, "bf16", False)
        for Hkv, (D, Dv) in itertools.product((1, 3), ((64, 64), (128, 128), (72, 16), (16, 128)))
    ]
    return plain + lengths + masks + heads


def run_case(case, early):
    from test_parity import MASKS

    from flashtrain.kernels.attention import make_qkv
    from flashtrain.kernels.attention.parity import Reference

    mask, B, Sq, Sk, Hq, Hkv, D, Dv, cap, dtype, lse_gradient = case
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    intervals = MASKS[mask](B, Sq, Sk).to(DEVICE)
    inputs = make_qkv(B, Sq, Sk, Hq, Hkv, D, Dv, dtype=dtype, device=DEVICE)
    scale = D**-0.5
    reference = Reference.of(inputs, intervals, softcap=cap, lse_gradient=lse_gradient)
    found = reference.deviations(attend_by(backward_module(early).backward, intervals, scale, cap))
    return {name: (round(d.ratio, 3), d.passes, str(d)) for name, d in found.items()}


def worker(arguments):
    for index in json.loads(arguments.cases):
        case = cases()[index]
        print(f"START {index}", flush=True)
        try:
            found = run_case(case, arguments.early)
            bad = [text for _, passes, text in found.values() if not passes]
            ratios = {name: ratio for name, (ratio, _, _) in found.items()}
            print(f"{'FAIL' if bad else 'ok  '} {index} {case} {ratios}", *bad, sep="\n     ", flush=True)
        except Exception as error:  # noqa: BLE001
            print(f"FAIL {index} {case}\n     {type(error).__name__}: {str(error)[-600:]}", flush=True)


def own_process(*words, limit):
    """Runs this script with other words; returns whether it ended well."""
    started = time.time()
    process = subprocess.Popen([sys.executable, __file__, *map(str, words)])
    try:
        status = process.wait(limit)
        print(f"== {words[0]}: rc {status}, {time.time() - started:.0f} s", flush=True)
        return status == 0
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"== {words[0]}: HANG, killed after {limit} s", flush=True)
        return False


def grid(arguments):
    # Cases with the same kernel go to one process, so that each is compiled once.
    groups = {}
    for index, case in enumerate(cases()):
        mask, _, Sq, Sk, Hq, Hkv, D, Dv, cap, dtype, _ = case
        key = (mask in ("documents", "sequences", "prefix in documents", "chunks"), max(D, 64) > 64, max(Dv, 64) > 64, cap > 0, dtype, Hq // Hkv, Sq % 16 == 0)
        groups.setdefault(key, []).append(index)
    lots = [[] for _ in range(arguments.workers)]
    for indices in sorted(groups.values(), key=len, reverse=True):
        min(lots, key=len).extend(indices)
    flags = ["--early"] if arguments.early else []
    started = time.time()
    logs = [open(f"/tmp/hopper_bwd_grid{n}.txt", "w+") for n in range(len(lots))]
    processes = [
        subprocess.Popen([sys.executable, __file__, "worker", "--cases", json.dumps(lot), *flags], stdout=log, stderr=subprocess.STDOUT)
        for lot, log in zip(lots, logs)
    ]
    for process in processes:
        try:
            process.wait(max(1, arguments.limit - (time.time() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
    passed = failed = 0
    worst = 0.0
    for log, lot in zip(logs, lots):
        log.seek(0)
        text = log.read()
        done = [line for line in text.splitlines() if line.startswith(("ok", "FAIL"))]
        passed += sum(line.startswith("ok") for line in done)
        failed += sum(line.startswith("FAIL") for line in done)
        for line in done:
            if "{" in line:
                worst = max([worst, *(v for k, v in eval(line[line.index("{") :], {"inf": math.inf}).items() if k.startswith("d"))])
        kept = "\n".join(line for line in text.splitlines() if not line.startswith(("START", "ok")))
        if kept.strip():
            print(kept[-4000:])
        if len(done) < len(lot):
            starts = [line for line in text.splitlines() if line.startswith("START")]
            print(f"UNFINISHED: {len(lot) - len(done)} of {len(lot)}; at {starts[-1] if starts else 'its start'}: {cases()[int(starts[-1].split()[1])] if starts else ''}")
            failed += len(lot) - len(done)
    print(f"grid: {passed} right, {failed} not; largest dq, dk, dv error {worst:.2f} of what is allowed; {time.time() - started:.0f} s", flush=True)
    sys.exit(failed > 0)


def first(arguments):
    good = True
    for D in (64, 128):
        for mask in ("full", "causal"):
            found = run_case((mask, 1, 256, 256, 2, 2, D, D, 0.0, "bf16", False), arguments.early)
            print(D, mask, {n: r for n, (r, _, _) in found.items()}, *(t for _, p, t in found.values() if not p), sep="\n     ", flush=True)
            good &= all(p for _, p, _ in found.values())
    sys.exit(not good)


# ------------------------------------------------------------------------------------------------ extra
def extra(arguments):
    from flashtrain.kernels.attention import Intervals, make_qkv
    from flashtrain.kernels.attention.flash_hopper.forward import forward
    from flashtrain.kernels.attention.flash_v2.backward import backward as backward_v2
    from flashtrain.kernels.attention.tiles import tiles

    backward = backward_module(arguments.early).backward
    good = True

    def say(what, right, more=""):
        nonlocal good
        good &= bool(right)
        print("ok  " if right else "FAIL", what, more, flush=True)

    for D, causal in itertools.product((64, 128), (True, False)):
        mask = Intervals.causal() if causal else Intervals.full()
        q, k, v = make_qkv(2, 2048, 2048, 8, 8, D, dtype=torch.bfloat16, device=DEVICE)
        out, lse = forward(q, k, v, mask, D**-0.5, 0.0)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        one = backward(dout, dlse, q, k, v, out, lse, mask, D**-0.5, 0.0, True, True)
        spread, same = torch.zeros_like(one[0], dtype=torch.float32), True
        for _ in range(300):
            again = backward(dout, dlse, q, k, v, out, lse, mask, D**-0.5, 0.0, True, True)
            same &= torch.equal(one[1], again[1]) and torch.equal(one[2], again[2])
            spread = torch.maximum(spread, (again[0].float() - one[0].float()).abs())
        step = torch.finfo(torch.bfloat16).eps * one[0].float().abs().clamp(min=one[0].float().abs().mean())
        say(f"300 launches D {D} causal {causal}: dk, dv bitwise", same, f"dq differs by at most {(spread / step).max():.2f} bf16 steps")
        launch = tiles("sm_90", D, q.dtype, not causal)
        other = backward_v2(dout, dlse, q, k, v, out, lse, mask, D**-0.5, 0.0, launch, True, True)
        relative = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(one, other)]
        say(f"   beside flash_v2: {['%.1e' % r for r in relative]}", max(relative) < 5e-3)

    # fp16 gradients as large as they come.
    q, k, v = make_qkv(1, 512, 512, 2, 2, 128, dtype=torch.float16, device=DEVICE)
    out, lse = forward(q, k, v, Intervals.causal(), 128**-0.5, 0.0)
    dout = 1000 * torch.randn_like(out)
    got = backward(dout, torch.zeros_like(lse), q, k, v, out, lse, Intervals.causal(), 128**-0.5, 0.0, True, True)
    say("fp16, dO ~ 1000: finite", all(x.isfinite().all() for x in got))

    # Exact: all keys of a head are the same small integers and the scale is ln 2, so P is 1 / S, a power of two, and
    # rounds to it in 16 bits. dv is the mean of dO. With dO = 0, dS is dLSE / S: dq and dk are sums of integers.
    for D, S, dtype in itertools.product((64, 128), (256, 1024), (torch.float16, torch.bfloat16)):
        generator = torch.Generator(DEVICE).manual_seed(0)

        def integers(low, high, *shape):
            return torch.randint(low, high + 1, shape, generator=generator, device=DEVICE).double()

        q64, k64 = integers(-1, 1, 2, S, 2, D), integers(-1, 1, 2, 1, 2, D).expand(2, S, 2, D)
        v64, dout64, dlse64 = integers(-4, 4, 2, S, 2, D), integers(-4, 4, 2, S, 2, D), integers(-4, 4, 2, 2, S)
        q, k, v, dout = (x.to(dtype).contiguous() for x in (q64, k64, v64, dout64))
        mask, scale = Intervals.full(), math.log(2)
        out, lse = forward(q, k, v, mask, scale, 0.0)
        _, _, dv = backward(dout, torch.zeros_like(lse), q, k, v, out, lse, mask, scale, 0.0, True, True)
        dq, dk, zero = backward(torch.zeros_like(dout), dlse64.float(), q, k, v, out, lse, mask, scale, 0.0, True, True)
        ds64 = dlse64.transpose(1, 2)[..., None]
        right = {
            "dv": (dv, dout64.mean(1, keepdim=True)),
            "dq": (dq, scale * ds64 * k64),
            "dk": (dk, scale * (ds64 * q64).mean(1, keepdim=True)),
            "zero dv": (zero, torch.zeros(1, dtype=torch.float64, device=DEVICE)),
        }
        wrong = {n: ((x.double() - y).abs() > y.abs() * (torch.finfo(dtype).eps / 2 + 2**-18) + 1e-7).sum().item() for n, (x, y) in right.items()}
        say(f"exact D {D} S {S} {dtype}", not any(wrong.values()), wrong)

    # Strides, broadcast dO, what is not needed, empty lengths.
    mask = Intervals.causal()
    for D in (64, 128):
        q, k, v = make_qkv(2, 200, 200, 4, 2, D, dtype=torch.bfloat16, device=DEVICE)
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        packed = torch.cat([q, k, v], 2)
        slices = [packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:]]
        out, lse = forward(q, k, v, mask, 0.1, 0.0)
        dout = torch.ones(1, 1, 1, 1, dtype=q.dtype, device=DEVICE).expand_as(out)
        zero = torch.zeros_like(lse)
        base = backward(dout.contiguous(), zero, q, k, v, out, lse, mask, 0.1, 0.0, True, True)
        for name, inputs in (("BHSD", views), ("packed", slices), ("broadcast dO", (q, k, v))):
            got = backward(dout, zero, *inputs, out, lse, mask, 0.1, 0.0, True, True)
            say(f"{name} D {D}", torch.equal(got[1], base[1]) and torch.equal(got[2], base[2]) and torch.allclose(got[0].float(), base[0].float(), rtol=2**-6, atol=1e-4) and all(x.is_contiguous() for x in got))
        dq, dk, dv = backward(dout, zero, q, k, v, out, lse, mask, 0.1, 0.0, True, False)
        say("dq alone", dk.numel() == dv.numel() == 0 and dq.shape == q.shape)
        dq, dk, dv = backward(dout, zero, q, k, v, out, lse, mask, 0.1, 0.0, False, True)
        say("dk, dv alone", dq.numel() == 0 and torch.equal(dk, base[1]) and torch.equal(dv, base[2]))
        nothing = k[:, :0], v[:, :0]
        out, lse = forward(q, *nothing, mask, 0.1, 0.0)
        dq, dk, dv = backward(dout, zero, q, *nothing, out, lse, mask, 0.1, 0.0, True, True)
        say("no keys", (dq == 0).all() and dk.shape == nothing[0].shape)
        # Keys that no query sees: dk and dv are written as zero.
        few = q[:, :20]
        out, lse = forward(few, k, v, Intervals.window(5, 0), 0.1, 0.0)
        with nan_filled():
            dq, dk, dv = backward(torch.ones_like(out), torch.zeros_like(lse), few, k, v, out, lse, Intervals.window(5, 0), 0.1, 0.0, True, True)
        say("keys unseen", (dk[:, :174] == 0).all() and (dv[:, :174] == 0).all() and dk.isfinite().all() and dq.isfinite().all())
    sys.exit(not good)


# ------------------------------------------------------------------------------------------------ time
def interleaved(functions, flops, rounds=5, ms=40):
    counts, times = {}, {name: [] for name in functions}
    for name, f in functions.items():
        f(), f()
        torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(), f(), f(), b.record(), b.synchronize()
        counts[name] = max(2, int(ms / (a.elapsed_time(b) / 2)))
    for _ in range(rounds):
        for name, f in functions.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            f()
            a.record()
            for _ in range(counts[name]):
                f()
            b.record()
            b.synchronize()
            times[name].append(a.elapsed_time(b) / counts[name])
    return {name: flops / sorted(t)[len(t) // 2] / 1e9 for name, t in times.items()}


def cells():
    for D, causal, S in itertools.product((128, 64), (True, False), (2048, 8192, 32768)):
        yield D, causal, S, 32768 // S, 2048 // D, 10 * 32768 * S * 2048 * (0.5 if causal else 1)


def problem(D, causal, S, B, H):
    from flashtrain.kernels.attention import Intervals
    from flashtrain.kernels.attention.flash_hopper.forward import forward

    q, k, v = (torch.randn(B, S, H, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    mask = Intervals.causal() if causal else Intervals.full()
    out, lse = forward(q, k, v, mask, D**-0.5, 0.0)
    return q, k, v, out, lse, torch.randn_like(out), torch.zeros_like(lse), mask


def show(title, rows, marks):
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n{title}: TFLOP/s, backward, bf16")
    print("| cell | " + " | ".join(names) + " | " + " | ".join(f"ours/{m}" for m in marks) + " |")
    for cell, row in rows.items():
        best = max(row[n] for n in row if n.startswith(("ours", "early")))
        print(f"| {cell} | " + " | ".join(f"{row.get(n, math.nan):.0f}" for n in names) + " | " + " | ".join(f"{best / row[m]:.2f}" if m in row else "-" for m in marks) + " |")
    for name in names:
        print(f"   geomean {name}: {math.exp(sum(math.log(r[name]) for r in rows.values() if name in r) / sum(name in r for r in rows.values())):.0f}")
    sys.stdout.flush()


def timing(arguments):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from flashtrain.kernels.attention.flash_v2.backward import backward as backward_v2
    from flashtrain.kernels.attention.tiles import tiles

    try:
        from flash_attn.cute import flash_attn_func
    except Exception:  # noqa: BLE001
        flash_attn_func = None
    # Measured elsewhere: FlashAttention-4, 128 causal, full, 64 causal, full at 2k, 8k, 32k.
    fa4_known = [453, 567, 615, 534, 593, 613, 388, 498, 535, 467, 518, 535]
    rows = {}
    for n, (D, causal, S, B, H, flops) in enumerate(cells()):
        q, k, v, out, lse, dout, dlse, mask = problem(D, causal, S, B, H)
        scale = D**-0.5
        functions = {}
        for early in (False, True) if EARLY.exists() else (False,):
            backward = backward_module(early).backward
            functions["early" if early else "ours"] = lambda backward=backward: backward(dout, dlse, q, k, v, out, lse, mask, scale, 0.0, True, True)
        launch = tiles("sm_90", D, q.dtype, not causal)
        functions["flash_v2"] = lambda: backward_v2(dout, dlse, q, k, v, out, lse, mask, scale, 0.0, launch, True, True)
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        do = dout.transpose(1, 2)
        functions["cudnn"] = lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)
        if flash_attn_func is not None:
            ls = [x.detach().requires_grad_() for x in (q, k, v)]
            o4 = flash_attn_func(*ls, causal=causal)
            o4 = o4[0] if isinstance(o4, tuple) else o4
            functions["fa4"] = lambda: torch.autograd.grad(o4, ls, dout, retain_graph=True)
        row = interleaved(functions, flops)
        row["fa4 known"] = fa4_known[n]
        rows[f"{D} {'causal' if causal else 'full'} {S}"] = row
        print({name: round(x) for name, x in row.items()}, D, causal, S, flush=True)
    show("time", rows, ["cudnn", "flash_v2", "fa4", "fa4 known"])


def tries(arguments):
    from flashtrain.kernels.attention.flash_hopper import launch as launches

    options = {
        128: {"": {}, "mbarriers": {"NAMED": False}, "232": {"REGISTERS": (232, 40)}, "3 slots": {"SLOTS": 3}},
        64: {"": {}, "named": {"NAMED": True}, "3 slots": {"SLOTS": 3}, "4 slots": {"SLOTS": 4}},
    }
    records = dict(launches.BACKWARD)
    rows = {}
    for D, causal, S, B, H, flops in cells():
        q, k, v, out, lse, dout, dlse, mask = problem(D, causal, S, B, H)

        def make(backward, record):
            def f():
                launches.BACKWARD[D] = record
                return backward(dout, dlse, q, k, v, out, lse, mask, D**-0.5, 0.0, True, True)

            return f

        functions = {}
        for early in (False, True) if EARLY.exists() else (False,):
            for name, changed in options[D].items():
                record = dataclasses.replace(records[D], **changed)
                f = make(backward_module(early).backward, record)
                try:
                    f()
                    functions[f"{'early' if early else 'ours'} {name}".strip()] = f
                except Exception as error:  # noqa: BLE001
                    print("no", D, early, name, str(error)[-200:], flush=True)
        rows[f"{D} {'causal' if causal else 'full'} {S}"] = interleaved(functions, flops, rounds=3, ms=30)
        print({n: round(x) for n, x in list(rows.values())[-1].items()}, D, causal, S, flush=True)
    for D in (128, 64):
        show("tries", {cell: row for cell, row in rows.items() if cell.startswith(f"{D} ")}, [])


def profile(arguments):
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    for D, causal, S, B, H, flops in cells():
        if S == 8192:
            q, k, v, out, lse, dout, dlse, mask = problem(D, causal, S, B, H)
            for early in (False, True) if EARLY.exists() else (False,):
                f = lambda: backward_module(early).backward(dout, dlse, q, k, v, out, lse, mask, D**-0.5, 0.0, True, True)  # noqa: B023, E731
                f()
                torch.cuda.synchronize()
                with profiler(activities=[ProfilerActivity.CUDA]) as p:
                    for _ in range(5):
                        f()
                    torch.cuda.synchronize()
                us = {e.key: round(e.self_device_time_total / 5, 1) for e in p.key_averages() if e.self_device_time_total > 0}
                print(D, "causal" if causal else "full", S, "early" if early else "ours", us, f"main {flops / us.get('_bwd_kernel', math.inf) / 1e6:.0f} TFLOP/s", flush=True)
    # What a call costs the host.
    q, k, v, out, lse, dout, dlse, mask = problem(64, True, 128, 1, 2)
    backward = backward_module(False).backward
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(200):
            backward(dout, dlse, q, k, v, out, lse, mask, 0.125, 0.0, True, True)
        host = time.perf_counter() - started
        torch.cuda.synchronize()
    print(f"host: {host / 200 * 1e6:.0f} us a call", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", nargs="?", default="all")
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--limit", type=float, default=240)
    parser.add_argument("--cases", default="[]")
    arguments = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    if arguments.stage == "all":
        flags = ["--early"] if arguments.early else []
        if own_process("first", *flags, limit=90):
            own_process("grid", *flags, "--workers", arguments.workers, limit=300)
            own_process("extra", *flags, limit=120)
            own_process("time", limit=300)
        return
    stages = {"first": first, "grid": grid, "extra": extra, "time": timing, "tries": tries, "profile": profile, "worker": worker}
    stages[arguments.stage](arguments)


if __name__ == "__main__":
    main()
