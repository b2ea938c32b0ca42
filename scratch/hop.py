import sys, torch, random, statistics, math, os, time
from flashtrain.kernels.attention import Intervals, attention
from flashtrain.kernels.attention.standard import standard
from flashtrain.kernels.attention.flash_hopper.forward import forward as hop
from flashtrain.kernels.attention.flash_v2.forward import forward as v2
from flashtrain.kernels.attention.tiles import tiles
torch.manual_seed(0)
def docs(B, S, n):
    return (torch.rand(B, S) < n / S).cumsum(1).cuda()
def run_checks():
    bad = 0
    for D, Dv in ((64, 64), (128, 128), (72, 72), (128, 64), (40, 40)):
        for Sq, Sk, Hq, Hkv in ((128, 128, 2, 2), (1, 1, 1, 1), (7, 300, 2, 1), (300, 7, 4, 2), (1000, 1000, 6, 3), (4097, 4097, 2, 2), (513, 2000, 4, 1), (2000, 513, 4, 4)):
            for name, m in {"full": Intervals.full(), "causal": Intervals.causal(), "win": Intervals.window(100, 7), "win2": Intervals.window(300, 0), "docs": None}.items():
                if m is None:
                    if Sq != Sk: continue
                    m = Intervals.causal().in_documents(docs(2, Sq, 6))
                for dt in (torch.bfloat16, torch.float16):
                    for cap in ((0.0, 5.0) if Sq == 1000 else (0.0,)):
                        q = torch.randn(2, Sq, Hq, D, device="cuda", dtype=dt); k = torch.randn(2, Sk, Hkv, D, device="cuda", dtype=dt); v = torch.randn(2, Sk, Hkv, Dv, device="cuda", dtype=dt)
                        o, l = hop(q, k, v, m, D ** -0.5, cap)
                        r, rl = standard(q.double(), k.double(), v.double(), m, D ** -0.5, cap)
                        s, sl = standard(q, k, v, m, D ** -0.5, cap)
                        e = (o.double() - r).abs().max().item(); es = (s.double() - r).abs().max().item()
                        inf = torch.isinf(rl); le = (l - rl)[~inf].abs().max().item() if (~inf).any() else 0.0
                        ok = e <= 2 * es + 1e-2 * 0.8 and not math.isnan(e) and le < 1e-4 and bool((l[inf] == -math.inf).all())
                        if not ok:
                            bad += 1
                            if bad < 12: print("BAD", D, Dv, Sq, Sk, Hq, Hkv, name, dt, cap, "err", e, "std", es, "lse", le, flush=True)
    print("checks bad", bad, flush=True)
def exact():
    for D in (64, 128):
        for causal in (True, False):
            for S in (256, 2048, 3000):
                q, k = (torch.randint(-1, 2, (2, S, 4, D), device="cuda").bfloat16() for _ in range(2)); v = torch.randint(-4, 5, (2, S, 4, D), device="cuda").bfloat16()
                m = Intervals.causal() if causal else Intervals.full()
                o, l = hop(q, k, v, m, math.log(2), 0.0)
                r, rl = standard(q.double(), k.double(), v.double(), m, math.log(2), 0.0)
                n = ((o.double() - r).abs() > r.abs() * 2**-8 + 1e-30).sum().item()
                print("exact", D, causal, S, "beyond one rounding", n, "of", o.numel(), flush=True)
flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
def t(f):
    s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_(); s.record(); f(); e.record(); return s, e
def bench(cells, extra={}, rounds=11):
    try:
        from flash_attn_interface import flash_attn_func as fa3
    except Exception as e: fa3 = None; print("no fa3", repr(e)[:200])
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import torch.nn.functional as F
    g = {}
    for D, causal, S in cells:
        B, H = 32768 // S, 2048 // D
        q, k, v = (torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        m = Intervals.causal() if causal else Intervals.full()
        fl = 4 * B * H * S * S * D * (0.5 if causal else 1)
        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal)
        fs = {"cudnn": cudnn}
        if fa3: fs["fa3"] = lambda: fa3(q, k, v, causal=causal)
        if not extra: fs["v2"] = lambda: v2(q, k, v, m, D ** -0.5, 0.0, tiles("sm_90", D, q.dtype, m.is_full))
        for n, h in (extra or {"hop": hop}).items(): fs[n] = (lambda h: lambda: h(q, k, v, m, D ** -0.5, 0.0))(h)
        with torch.no_grad():
            for _ in range(3):
                for f in fs.values(): f()
            r = {n: [] for n in fs}
            for _ in range(rounds):
                for n in random.sample(list(fs), len(fs)): r[n].append(t(fs[n]))
            torch.cuda.synchronize()
        o = {n: fl / statistics.median(s.elapsed_time(e) for s, e in x) / 1e9 for n, x in r.items()}
        ref = "fa3" if fa3 else "cudnn"
        for n in o: g.setdefault(n, []).append(o[n] / o[ref])
        print(D, "causal" if causal else "full", S, {n: f"{x:.0f} {x / o[ref]:.3f}" for n, x in o.items()}, flush=True)
    print("geomean vs", ref, {n: round(math.exp(statistics.mean(map(math.log, x))), 3) for n, x in g.items()}, flush=True)
CELLS = [(D, c, S) for D in (128, 64) for c in (True, False) for S in (2048, 8192, 32768)]
def overhead():
    q, k, v = (torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)); m = Intervals.causal(); T = tiles("sm_90", 64, q.dtype, False)
    for n, f in (("v2", lambda: v2(q, k, v, m, 0.125, 0.0, T)), ("hop", lambda: hop(q, k, v, m, 0.125, 0.0))) * 3:
        for _ in range(20): f()
        torch.cuda.synchronize(); t0 = time.perf_counter()
        for _ in range(300): f()
        t1 = time.perf_counter(); torch.cuda.synchronize(); print("overhead", n, round((t1 - t0) / 300 * 1e6, 1), "us", flush=True)
if __name__ == "__main__":
    for a in sys.argv[1:]: globals()[a](*([CELLS] if a == "bench" else []))
