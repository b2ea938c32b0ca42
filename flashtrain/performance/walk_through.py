"""One setting in words: what each algorithm moves and computes, and why. Every sentence holds for any numbers."""

from flashtrain.kernels.attention import block_sizes
from flashtrain.performance.devices import Device
from flashtrain.performance.explanation import Case, Counted, Setting, at_length, data_size, duration, figure, noun
from flashtrain.performance.io import flash_elements, padded, standard_elements
from flashtrain.performance.roofline import Estimate, PassEstimate
from flashtrain.performance.traffic import total_elements


def walk_through(cases: list[Case], setting: Setting, counted: list[Counted]) -> list[str]:
    """The numbers of one length in words, a paragraph each, and what the hardware counted at any length."""
    here = at_length(cases, setting.shape.q_len)
    paragraphs = [_of_device(setting), _of_closed_forms(setting)]
    paragraphs += [_of_case(case, setting) for case in here]
    paragraphs += [_of_softmax(), *_of_comparison(here), *_of_counters(counted)]
    return paragraphs


def _of_device(setting: Setting) -> str:
    rates, nominal = setting.rates, setting.nominal
    text = (
        f"{setting.device.label}: {rates.flops / 1e12:,.0f} TFLOP/s and {rates.bandwidth / 1e12:.2f} TB/s"
        f" {'measured here' if rates.measured else 'by the data sheet'}, so that work of fewer than {rates.ridge:,.0f} "
        "FLOPs for each byte of HBM is bound by memory, and other work by compute."
    )
    if rates.measured:
        text += f" The data sheet says {nominal.flops / 1e12:,.0f} TFLOP/s and {nominal.bandwidth / 1e12:.2f} TB/s."
    return text


def _of_closed_forms(setting: Setting) -> str:
    N, d, M = setting.shape.q_len, setting.shape.head_dim, setting.launch.sram_elements
    heads = setting.shape.batch * setting.shape.num_q_heads
    once, order = standard_elements(N, d), flash_elements(N, d, M)
    scores = N * N * setting.dtype.itemsize
    of_all = f", {data_size(heads * scores)} for all {heads:,}" if heads > 1 else ""
    return (
        f"One head of the textbook's forward, unmasked, moves 4Nd + 4N^2 = {once:,} elements (N = {N:,}, d = {d}): "
        f"Q, K, V and O once, S and P twice each. S alone is {data_size(scores)} for a head{of_all}. FlashAttention's "
        f"order N^2 d^2 / M, with M = {M:,} elements of SRAM, is {figure(order)}, without its constant factor."
    )


def _of_case(case: Case, setting: Setting) -> str:
    found = case.estimate
    text = (
        f"{case.variant} {case.pass_name}: {found.flops / 1e9:,.4g} GFLOP, {data_size(found.asked_bytes)} asked for, "
        f"{data_size(found.compulsory_bytes)} if each matrix moved once. {_of_loops(case, setting)} "
    )
    text += f"{_of_l2(found, setting.device)} "
    sms = "" if found.share_of_sms == 1 else f" on the {found.share_of_sms:.0%} of the SMs that it has programs for"
    return text + (
        f"{figure(found.intensity)} FLOPs for each byte: bound by {found.bound}{sms}, at least "
        f"{duration(found.seconds)}."
    )


def _of_l2(found: Estimate, device: Device) -> str:
    """Why HBM sees as much as it does."""
    text = (
        f"Its matrices are {data_size(found.touched_bytes)} in all; half of L2, {data_size(device.l2_kept_bytes)}, is "
        "taken to keep what SMs of both halves use. "
    )
    if found.stays_in_l2:
        return text + f"All fit, so HBM need see each input and output once: {data_size(found.hbm_bytes)}."
    text += "Not all fit, so each pass takes its own from HBM. "
    again = [_of_reuse(one, device) for one in found.passes if one.reads_again]
    if not again:
        return text + f"No pass reads anything twice, so HBM sees all that is asked for: {data_size(found.hbm_bytes)}."
    if len(found.passes) > 1:
        again.append(f"With what other passes ask for, HBM sees {data_size(found.hbm_bytes)}.")
    return text + " ".join(again)


def _of_reuse(one: PassEstimate, device: Device) -> str:
    """Why HBM sees as much as it does of a pass that reads something again and again."""
    if one.fits_l2:
        why = "that fits, so HBM need see each matrix once in it"
    elif one.sharers > 1:
        why = (
            f"that does not fit, but up to {one.sharers} programs side by side read the same blocks, so HBM need see "
            "them once for all of these"
        )
    else:
        why = "that does not fit, so HBM sees all that is asked for"
        why += ", but for what the other half of L2 serves" if one.reused_bytes <= device.l2_bytes else ""
    reused = f"What programs at work at a time read again and again in the pass {one.name} is "
    return f"{reused}{data_size(one.reused_bytes)} at most; {why}: {data_size(one.hbm_bytes)}."


def _of_loops(case: Case, setting: Setting) -> str:
    shape, launch = setting.shape, setting.launch
    if case.variant == "standard":
        return f"Passes: {', '.join(dict.fromkeys(one.pass_name for one in case.work.transfers))}."
    if case.variant == "flash_v1":
        B_r, B_c = block_sizes(launch.sram_elements, padded(shape.head_dim))
        carried = "O, l and m travel" if case.pass_name == "forward" else "dQ travels"
        order = flash_elements(shape.q_len, shape.head_dim, launch.sram_elements)
        elements = total_elements(case.work.transfers) / (shape.batch * shape.num_q_heads)
        blocks = -(-shape.kv_len // B_c)
        return (
            f"The keys, in {blocks:,} {noun('block', blocks)} of {B_c}, meet the queries that see them, {B_r} at a "
            f"time; {carried} to memory and back each time. A head's {elements:,.0f} elements are "
            f"{figure(elements / order)} times N^2 d^2 / M."
        )
    if case.pass_name == "forward":
        tile = launch.tiles.forward
        tiles = -(-shape.q_len // tile.BLOCK_M)
        return (
            f"The queries, in {tiles:,} {noun('tile', tiles)} of {tile.BLOCK_M}, each with O on chip, read the keys "
            f"that they see, {tile.BLOCK_N} at a time."
        )
    dkdv, dq = launch.tiles.dkdv, launch.tiles.dq
    return (
        f"Three kernels: delta; dK and dV by tiles of {dkdv.BLOCK_N} keys; dQ by tiles of {dq.BLOCK_M} queries. S and "
        "P are computed anew, twice."
    )


def _of_softmax() -> str:
    return (
        "What makes blocks possible is the incremental softmax. With m(x) the largest of x, f(x) = exp(x - m(x)) and "
        "l(x) = sum f(x), two parts a and b of a row give m = max(m(a), m(b)), f = [exp(m(a) - m) f(a), "
        "exp(m(b) - m) f(b)] and l = exp(m(a) - m) l(a) + exp(m(b) - m) l(b); softmax = f / l: the numerator is f, "
        "the denominator l. In the textbook's third pass, O = P V, what is read is P, not S."
    )


def _of_comparison(here: list[Case]) -> list[str]:
    by_pass: dict[str, dict[str, Estimate]] = {}
    for case in here:
        by_pass.setdefault(case.pass_name, {})[case.variant] = case.estimate
    texts = []
    for pass_name, found in by_pass.items():
        base = found.get("standard")
        for variant, other in found.items():
            if base is None or variant == "standard":
                continue
            flops, hbm, time = (
                getattr(other, name) / getattr(base, name) for name in ("flops", "hbm_bytes", "seconds")
            )
            texts.append(
                f"{variant} {pass_name} against standard: {figure(flops)} times the FLOPs, {figure(hbm)} times the "
                f"bytes of HBM, {figure(time)} times the least time."
            )
    return texts


def _of_counters(counted: list[Counted]) -> list[str]:
    if not counted:
        return []
    sentences = ["Counted by the hardware, beside the model."]
    for variant in dict.fromkeys(one.counters.variant for one in counted):
        found = [one for one in counted if one.counters.variant == variant]
        furthest = max(found, key=lambda one: abs(one.ratio - 1))
        shares = [one.counters.dram / one.counters.l2 for one in found]
        sentences.append(
            f"{variant}: DRAM moved {figure(furthest.ratio)} times the model's bytes where they differ most "
            f"({furthest.counters.pass_name}, {furthest.counters.length:,} "
            f"{noun('token', furthest.counters.length)}), and {min(shares):.1%} to "
            f"{max(shares):.1%} as many bytes as went through L2."
        )
    sentences.append(
        "What is asked for again while L2 still holds it is served there, and DRAM does not see it. The model counts "
        "on half of L2, and on nothing that an earlier pass left there unless all matrices fit that half: where L2 "
        "keeps more, DRAM moves less than the model says."
    )
    return [" ".join(sentences)]
