"""Measure optimizer steps of our trainer under several attention variants, beside other trainers; exit 1 where none has
a speed.

`python -m flashtrain.bench_training [lengths=[...]] [variants=[...]] [peers=[module:function]]`, with the model, the
optimizer and the trainer as `train.py` takes them.
"""

import copy
import functools
import sys
from dataclasses import asdict, dataclass, replace

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from flashtrain import device as devices
from flashtrain import fit, ranks, runs
from flashtrain.assembly import assemble_training, open_tokenizer, resolve_model
from flashtrain.composition import Root, refuse
from flashtrain.composition import settle as settle_run
from flashtrain.config import Config
from flashtrain.contradictions import not_among, not_counts, not_found, not_measured, not_new
from flashtrain.data.random_tokens import RandomCorpus
from flashtrain.device import Device
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.kernels.attention import VARIANT_NAMES
from flashtrain.performance.achievable import product_rate
from flashtrain.performance.hardware import gpu_state
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.peers import TrainingPeer, versions_of
from flashtrain.performance.tables import terminal_table
from flashtrain.performance.timing import CudaClock
from flashtrain.performance.training_report import Cell, Conditions, as_row, describe, markdown, speed_table
from flashtrain.performance.training_steps import Steps, System, measure
from flashtrain.ranks import Ranks
from flashtrain.saved_settings import given_keys
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.timed import TimedSteps
from flashtrain.training.trainer import build_trainer

TAKEN = ("model", "optimizer", "schedule", "trainer", "seed", "output")
"""What of the settings of a run a step depends on, and where the result goes."""
TAKEN_OF_OTHERS = (
    *("train.sequence_length", "train.tokens_per_step", "attention.deterministic", "data.tokenizer"),
    "data.isolate_documents",  # is refused in words of its own, wherever it comes from
)
"""Of other groups these alone."""

PRODUCT = {"warmup": 3, "rounds": 9}
"""Of the matrix product that a GPU's rate is measured by, before each length."""


@dataclass
class BenchTrainingConfig(Config):
    lengths: list[int] | None
    """Tokens in a row, a column each; null: train.sequence_length alone. A step has `train.tokens_per_step` tokens, or
    one row where that is longer."""
    variants: list[str] | None
    """Variants of attention; null: all. One that cannot do a length says why."""
    peers: list[str]
    """Other trainers, as MODULE:FUNCTION: called as (sequence_length, tokens), gives (step, tokens), where step() takes
    one optimizer step of so many tokens."""
    warmup: int
    """Steps at the start of each round that are not timed; those of the first round are compiled."""
    steps: int
    """Steps of a round that are timed."""
    rounds: int
    """Readings of each variant and peer, one a round, in an order shuffled anew for each round."""
    relative_to: str | None
    """The variant or peer that the others' speed is also given as a multiple of; null: of none."""

    def validate(self) -> list[str]:
        """Return every problem of what is no setting of a run, one sentence each."""
        problems = [
            f"{name} is {value}; it must be at least {least}"
            for name, least in (("warmup", 0), ("steps", 1), ("rounds", 1))
            if (value := getattr(self, name)) < least
        ]
        if self.trainer.devices not in (None, 1):
            problems.append(f"trainer.devices is {self.trainer.devices} and one is measured; leave it out")
        if self.trainer.profile_steps is not None:
            problems.append("trainer.profile_steps is for a run and its logs; leave it out")
        if getattr(self.data, "isolate_documents", False):
            problems.append("data.isolate_documents=true is for text and random tokens are trained on; leave it out")
        return [
            *problems,
            *([] if self.lengths is None else not_counts("lengths", self.lengths)),
            *not_among("variants", self.variant_names, VARIANT_NAMES),
            *not_found("peers", self.peers, TrainingPeer.named),
            *not_measured("relative_to", self.relative_to, self.variant_names, self.peers),
            *not_new("output", self.output),
        ]

    @property
    def variant_names(self) -> list[str]:
        return list(VARIANT_NAMES) if self.variants is None else self.variants


def settle(composed: DictConfig, overrides: list[str]) -> list[BenchTrainingConfig]:
    """The settings of a run for each length. Raises UserError for what such a run has no use for."""
    given = given_keys(overrides)
    not_taken = Config.__dataclass_fields__.keys() - TAKEN
    if others := sorted(key for key in given if key.split(".")[0] in not_taken and key not in TAKEN_OF_OTHERS):
        own = [name for name in BenchTrainingConfig.__dataclass_fields__ if name not in Config.__dataclass_fields__]
        raise UserError(
            f"{', '.join(others)} is not for this command, whose own settings are {', '.join(own)}; leave it out"
        )
    if composed.lengths is not None and "train.sequence_length" in given:
        raise UserError("lengths and train.sequence_length are both given; leave one of them out")
    refuse(OmegaConf.to_object(composed).validate())
    lengths = [composed.train.sequence_length] if composed.lengths is None else composed.lengths
    return [settle_run(_of_length(composed, length), overrides) for length in lengths]


def _of_length(composed: DictConfig, length: int) -> DictConfig:
    """The settings of a round: its own steps, and nothing that its speed does not depend on."""
    settings = copy.deepcopy(composed)
    settings.train.sequence_length = length
    settings.train.tokens_per_step = max(composed.train.tokens_per_step, length)
    settings.train.steps = settings.train.log_every = composed.warmup + composed.steps
    settings.train.init_from = None
    rope = OmegaConf.to_object(composed.model.rope)  # what the length before scaling is costs nothing, so any will do
    settings.model.rope = rope.in_place_of(rope, composed.train.sequence_length)
    settings.eval.lengths, settings.eval.targets_per_anchor = None, 1  # what goes with any length
    return settings


class TrainerSteps:
    """A run of `train.py` on random tokens, without a folder, validation and checkpoints, as a `System`.

    A round is a fit of its own, with a new optimizer; the model stays compiled. Between rounds it is on the CPU, where
    Lightning leaves it.
    """

    def __init__(self, config: BenchTrainingConfig, variant: str) -> None:
        self._config = replace(config, attention=replace(config.attention, variant=variant))
        self._made = assemble_training(self._config)
        self._made.model.to("cpu")
        self._shape = fit.step_shape(config.train, config.trainer.micro_batch_tokens, world_size=1)
        self._corpus = RandomCorpus(self._made.model.options.vocab_size, config.seed)
        self.tokens = config.train.tokens_per_step
        self.flops_per_token = fit.training_flops(config, self._made.model, self._corpus)["mfu_visible"]
        self.predicted_bytes = fit.predicted_peak(config, self._made, self._shape).total

    def take_round(self) -> float:
        """Raises KeyboardInterrupt where a signal has asked for the end."""
        config, steps = self._config, self._config.train.steps
        timed = TimedSteps(config.warmup, config.steps, self._made.device.type)
        trainer = build_trainer(
            device_type=self._made.device.type,
            ranks=Ranks(rank=0, world_size=1, local_rank=0, per_machine=1),
            num_steps=steps,
            validate_every=None,
            log_every=config.train.log_every,
            checkpoints=None,
            loggers=[],
            meter=SpeedMeter(self.tokens),
            flops_per_token={},
            peak_flops=None,
            callbacks=[timed],
            console=Console(quiet=True),
        )
        module = fit.training_module(config, self._made, self._shape, fault_folder=None)
        try:
            trainer.fit(module, fit.data_module(config, self._corpus, self._shape))
        finally:
            if module.stop_requested:  # in the last step, too, or in one that fails
                raise KeyboardInterrupt
        return timed.seconds / config.steps


def run(configs: list[BenchTrainingConfig]) -> None:
    """Measure every length: tables here as they are done, files in a new folder; SystemExit(1) where no variant and no
    peer has a speed on any."""
    ranks.refuse_torchrun("a measurement", "python -m flashtrain.bench_training ..., which takes one process")
    first, *_ = configs
    console = Console()
    device = devices.resolve(first.trainer.device, first.trainer.precision, first.trainer.compile)
    resolve_model(first.model, open_tokenizer(first.data))  # or a mistake in them would leave an empty folder
    folder = runs.new_folder(first.output, "bench_training")
    facts = runs.provenance(
        device=runs.device_name(device.type), peers={name: versions_of(name) for name in first.peers}
    )
    given = _conditions(configs, device, facts)
    console.print(describe(given), highlight=False)

    cells: list[Cell] = []
    states = [{"after": None, "gpu": gpu_state()}]
    for config in configs:
        length = config.train.sequence_length
        console.print(f"rows of {length:,} tokens", highlight=False)
        rate = _product_rate(device, config.seed)
        found = measure(_builders(config, device), device_type=device.type, rounds=config.rounds, seed=config.seed)
        cells += [Cell(length, name, result, rate) for name, result in found.items()]
        states.append({"after": length, "gpu": gpu_state()})
        # Whole after each length, so that an interrupted command leaves what it has measured.
        runs.write_json(
            folder / "bench_training.json",
            {
                "settings": _settings(first),
                "lengths": [one.train.sequence_length for one in configs],
                "provenance": facts,
                "gpu_states": states,
                "measurements": [as_row(cell) for cell in cells],
            },
        )
        runs.write_whole(folder / "bench_training.md", markdown(cells, given))
    console.print("", terminal_table(speed_table(cells, given)))
    for path in sorted(folder.iterdir()):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if all(isinstance(cell.result, NoSpeed) for cell in cells):
        sys.exit(1)


def _builders(config: BenchTrainingConfig, device: Device) -> dict[str, functools.partial[System]]:
    """What builds each system, by its name."""
    ours = {name: functools.partial(TrainerSteps, config, name) for name in config.variant_names}
    return ours | {name: functools.partial(_peer_steps, config, device, name) for name in config.peers}


def _peer_steps(config: BenchTrainingConfig, device: Device, name: str) -> Steps:
    train = config.train
    step, tokens = TrainingPeer.named(name).build(train.sequence_length, train.tokens_per_step)
    device.set_tf32()  # it may have set that for all
    return Steps(step, tokens, device.type, config.warmup, config.steps)


def _product_rate(device: Device, seed: int) -> float | None:
    """FLOP/s of a large matrix product in the dtype that the model computes in; None on a CPU."""
    if device.type != "cuda":
        return None
    device.set_tf32()
    return product_rate(CudaClock(), device.dtype, device=device.type, seed=seed, **PRODUCT)


def _settings(config: BenchTrainingConfig) -> dict[str, object]:
    """Those that were taken, of all lengths."""
    values = asdict(config)
    own = {name: value for name, value in values.items() if name in TAKEN or name not in Config.__dataclass_fields__}
    return own | {"deterministic": config.attention.deterministic}


def _conditions(configs: list[BenchTrainingConfig], device: Device, facts: dict) -> Conditions:
    first, *_ = configs
    return Conditions(
        model=first.model.name,
        device=facts["device"],
        computing=str(device),
        on_gpu=device.type == "cuda",
        tokens=min(config.train.tokens_per_step for config in configs),
        warmup=first.warmup,
        steps=first.steps,
        rounds=first.rounds,
        relative_to=first.relative_to,
        made_with=runs.made_with("bench_training", facts),
    )


ROOT = Root("bench_training", BenchTrainingConfig, settle)

if __name__ == "__main__":
    main(run, ROOT)
