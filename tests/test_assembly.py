"""Which attention a model gets, for all that its layers ask for, and what is bound to it."""

from functools import partial

import pytest
import torch
from presets import preset

from flashtrain.assembly import build_model, choose_attention
from flashtrain.device import PRECISIONS, Device
from flashtrain.kernels.attention import Unsupported, attention
from flashtrain.model.gpt import GPT

CPU = Device("cpu", PRECISIONS["fp32"], compile=False)


def options(**changes):
    return preset("nano", vocab_size=257, **changes).resolve()


def chosen(variant="auto", lengths=(128, 256), packed_length=None, pieces=(), **changes):
    return choose_attention(
        variant, options(**changes), CPU, lengths, packed_length=packed_length, trains=True, pieces=pieces
    )


def test_deterministic_attention_is_asked_for_and_bound():
    gpu = Device("cuda", PRECISIONS["fp32"], compile=False)
    asked = {"packed_length": None, "trains": True}
    assert choose_attention("standard", options(), gpu, [128], **asked) == "standard"
    with pytest.raises(Unsupported, match="standard is deterministic with CUBLAS_WORKSPACE_CONFIG"):
        choose_attention("standard", options(), gpu, [128], **asked, deterministic=True)
    for deterministic in (False, True):
        model = build_model(options(), "standard", CPU, "none", deterministic=deterministic)
        assert all(block.attention.attention.keywords["deterministic"] is deterministic for block in model.blocks)


def test_auto_serves_every_mask_and_length_that_is_asked_for():
    assert chosen() == "sdpa_flash"
    assert chosen(windows=[None, 64]) == "sdpa_math"
    assert chosen(packed_length=128) == "sdpa_math"
    assert chosen(lengths=(256, 16_384), packed_length=8192) == "sdpa_math"
    assert chosen(lengths=(256, 16_384), packed_length=8192, windows=[64]) == "standard"
    assert chosen(attention_softcap=30.0) == "standard"
    assert chosen(pieces=[(64, 128)]) == "sdpa_math"
    assert chosen(pieces=[(64, 16_384)]) == "standard"
    assert chosen(pieces=[(64, 16_384)], windows=[64]) == "sdpa_math"


@pytest.mark.parametrize(
    ("variant", "asked", "sentence"),
    [
        ("sdpa_flash", {"windows": [None, 64]}, r"sdpa_flash takes .*, not window\(63, 0\); .*sdpa_math.* would do"),
        ("sdpa_flash", {"packed_length": 128}, "sdpa_flash takes .*, not documents, .*; .*sdpa_math.* would do"),
        ("sdpa_math", {"packed_length": 16_384}, "sdpa_math writes .* up to 8192 keys, not for 16384; .* would do"),
        ("sdpa_math", {"attention_softcap": 30.0}, "sdpa_math caps no scores, .*; standard.* would do"),
    ],
    ids=["window", "documents", "long documents", "softcap"],
)
def test_a_variant_that_cannot_serve_one_of_them_is_refused(variant, asked, sentence):
    with pytest.raises(Unsupported, match=sentence):
        chosen(variant, **asked)


def test_the_models_softcap_caps_its_scores():
    def hidden(model):
        with torch.no_grad():
            for block in model.blocks:
                torch.nn.init.normal_(block.attention.qkv.weight)
            return model(torch.arange(64)[None])

    results = []
    for softcap in (None, 0.5):
        torch.manual_seed(0)
        built = hidden(build_model(options(attention_softcap=softcap), "standard", CPU, "none"))
        torch.manual_seed(0)
        made = hidden(GPT(options(), partial(attention, variant="standard", softcap=softcap or 0.0)))
        assert torch.equal(built, made)
        results.append(built)
    assert (results[0] - results[1]).norm() > 0.01 * results[0].norm()
