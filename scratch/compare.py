import torch, tut06, random, statistics
from flashtrain.kernels.attention import Intervals, attention
flush = torch.empty(256*2**20, dtype=torch.int8, device="cuda")
def t(f):
    s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_(); s.record(); f(); e.record(); return s, e
for D in (128,):
    for causal in (False,):
        for S in (2048, 8192, 32768):
            B, H = 32768 // S, 2048 // D
            q, k, v = (torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            qt, kt, vt = (x.transpose(1, 2).contiguous().half() for x in (q, k, v))
            fl = 4 * B * H * S * S * D * (0.5 if causal else 1)
            m = Intervals.causal() if causal else Intervals.full()
            fs = {"v2": lambda: attention(q, k, v, m, variant="flash_v2"), "tut": lambda: tut06.attention(qt, kt, vt, causal, D ** -0.5, False)}
            with torch.no_grad():
                for _ in range(3):
                    for f in fs.values(): f()
                r = {n: [] for n in fs}
                for _ in range(15):
                    for n in random.sample(list(fs), 2): r[n].append(t(fs[n]))
                torch.cuda.synchronize()
            o = {n: fl / statistics.median(s.elapsed_time(e) for s, e in x) / 1e9 for n, x in r.items()}
            print(D, "causal" if causal else "full", S, {n: round(x) for n, x in o.items()}, round(o["v2"] / o["tut"], 3), flush=True)
