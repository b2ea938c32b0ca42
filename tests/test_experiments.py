"""Each experiment composes to the run that its name says, and fits the GPU that it is for."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from commands import compose

from flashtrain.assembly import Assembly, open_tokenizer, resolve_model
from flashtrain.device import PRECISIONS, Device
from flashtrain.fit import predicted_peak, step_shape
from flashtrain.kernels.attention import attention
from flashtrain.model.gpt import GPT
from flashtrain.performance.devices import DEVICES
from flashtrain.saved_settings import to_yaml

LENGTHS = {
    "gpt2_2k": 2**11,
    "gpt2_8k": 2**13,
    "gpt2_32k": 2**15,
    "gpt2_64k": 2**16,
    "gpt2_128k": 2**17,
    "gpt2_1m": 2**20,
}
H200 = Device("cuda", PRECISIONS["bf16"], compile=True)


def peak(config):
    tokenizer = open_tokenizer(config.data)
    with torch.device("meta"):
        model = GPT(
            resolve_model(config.model, tokenizer),
            partial(attention, variant="flash_v2"),
            config.trainer.activation_checkpointing,
        )
    shape = step_shape(config.train, config.trainer.micro_batch_tokens, world_size=1)
    return predicted_peak(config, Assembly(H200, tokenizer, "flash_v2", model), shape)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_long_experiment_is_gpt2_with_rope_at_its_length_and_fits_an_h200(name, tmp_path, monkeypatch):
    """An eighth is left for what the prediction leaves out."""
    monkeypatch.chdir(tmp_path)
    config = compose(f"experiment={name}")
    assert (config.model.name, config.model.positions) == ("gpt2", "rope")
    assert config.train.sequence_length == LENGTHS[name] and max(config.eval.lengths) >= LENGTHS[name]
    assert config.train.tokens_per_step == max(LENGTHS[name], 2**19)
    print(peak(config))
    assert peak(config).total < 7 / 8 * DEVICES["h200"].hbm_bytes


def test_the_longest_row_does_not_fit_without_checkpointing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose("experiment=gpt2_1m", "trainer.activation_checkpointing=none")
    assert peak(config).total > 2 * DEVICES["h200"].hbm_bytes


@pytest.mark.parametrize(("name", "rope", "theta"), [("extend", "yarn", 1e4), ("extend_theta", "default", 5e5)])
def test_an_extension_takes_the_short_experiment_to_16k_and_fits_an_h200(name, rope, theta, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = compose("experiment=gpt2_2k")
    (tmp_path / "runs/short/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/short/config.yaml").write_text(to_yaml(short))
    torch.save({"state_dict": {}, "global_step": 5, "loops": {}}, tmp_path / "runs/short/checkpoints/last.ckpt")
    config = compose(f"experiment={name}")
    assert (config.train.sequence_length, config.train.pretrained_length) == (2**14, 2**11)
    assert (config.model.rope.type, config.model.rope.theta) == (rope, theta)
    scaling = (8.0, 2048) if rope == "yarn" else (None, None)
    assert (config.model.rope.factor, config.model.rope.original_length) == scaling
    assert replace(config.model, rope=short.model.rope) == short.model
    assert peak(config).total < 7 / 8 * DEVICES["h200"].hbm_bytes


def test_recall_is_evaluated_beyond_its_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose("experiment=recall")
    assert (config.model.num_layers, config.model.positions, config.data.source) == (2, "rope", "recall")
    assert config.train.sequence_length in config.eval.lengths[:-1]
    assert peak(config).total < 7 / 8 * DEVICES["h200"].hbm_bytes
