"""Sample text from a finished run.

`python -m flashtrain.generate run=DIR [generate.prompt=TEXT] [generate.num_tokens=N]`
"""

import sys

import numpy as np
import torch
from omegaconf import DictConfig

from flashtrain import ranks
from flashtrain.assembly import Assembly, assemble_run
from flashtrain.composition import Root, given_keys
from flashtrain.composition import settle as settle_run
from flashtrain.config import Config, GenerateConfig
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.model.sampling import generate


def settle(composed: DictConfig, overrides: list[str]) -> Config:
    """The settings of the run, as `flashtrain.composition.settle` says. Raises UserError for those of an evaluation."""
    of_evaluation = (key for key in given_keys(overrides) if key.split(".")[0] == "eval" or key == "trainer.devices")
    if given := sorted(of_evaluation):
        raise UserError(f"{', '.join(given)} is for an evaluation and changes no sample; leave it out")
    return settle_run(composed, overrides)


def run(config: Config) -> None:
    """Print the prompt and its continuation."""
    ranks.refuse_torchrun("a sample", "python -m flashtrain.generate ..., which takes one process")
    made, _ = assemble_run(config)
    sys.stdout.write(sample(made, config.generate, config.train.sequence_length, config.seed) + "\n")


def sample(made: Assembly, options: GenerateConfig, context_length: int, seed: int) -> str:
    """The prompt and its continuation, as a document begins; the same for the same seed and device."""
    tokenizer = made.tokenizer
    prompt = np.concatenate([[tokenizer.prefix_id], tokenizer.encode(options.prompt)]).astype(np.int64)
    with made.device.autocast():
        tokens = generate(
            made.model,
            torch.from_numpy(prompt).to(made.device.type),
            options.num_tokens,
            options.temperature,
            options.top_k,
            torch.Generator(made.device.type).manual_seed(seed),
            context_length,
        )
    return options.prompt + tokenizer.decode(tokens.tolist())


ROOT = Root("config", Config, settle)

if __name__ == "__main__":
    main(run, ROOT)
