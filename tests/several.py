"""Ranks for tests: processes with what torchrun gives them and its way to end them, but without the time to import."""

import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from commands import run_command
from lightning.pytorch import Callback
from presets import preset
from tiny_training import CPU, ROWS, Steps, make_module, make_trainer
from torch.distributed import TCPStore

from flashtrain import ranks
from flashtrain.assembly import build_model, scorer
from flashtrain.errors import UserError
from flashtrain.evaluation import recall, scoring
from flashtrain.evaluation.scoring import Documents, score
from flashtrain.evaluation.windows import documents_of, strided_windows
from flashtrain.ranks import Ranks
from flashtrain.training.callbacks import Reporter
from flashtrain.training.module import TrainingModule

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["several"])
SECONDS = 60


class Ended(NamedTuple):
    """How a rank did."""

    result: Any
    """What the function returned; None where the process ended otherwise."""
    exitcode: int
    said: str
    """On stdout and stderr."""


def on_ranks(world_size: int, folder: Path, function: Callable, *arguments: object, **options: object) -> list[Ended]:
    """Call the function on each rank, in `folder`; where one fails the others get a SIGTERM."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Python 3.11 forgets it where modules are preloaded
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as aside:
        files = [(Path(aside, f"said-{rank}"), Path(aside, f"result-{rank}")) for rank in range(world_size)]
        processes = []
        for rank, (said, result) in enumerate(files):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            task = (environment, folder, said, result, function, arguments, options)
            processes.append(PROCESSES.Process(target=_run, args=task))
            processes[-1].start()
        _await(processes)
        return [
            Ended(pickle.loads(result.read_bytes()) if result.exists() else None, process.exitcode, said.read_text())
            for process, (said, result) in zip(processes, files, strict=True)
        ]


def _await(processes: list) -> None:
    while running := [process for process in processes if process.is_alive()]:
        if not wait([process.sentinel for process in running], SECONDS):
            for process in running:
                process.kill()
            pytest.fail("a rank hangs")
        if any(process.exitcode for process in processes):
            time.sleep(0.1)  # torchrun looks as often
            for process in running:
                process.terminate()


def _run(environment, folder, said, result, function, arguments, options) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    try:
        result.write_bytes(pickle.dumps(function(*arguments, **options)))
    except SystemExit as end:
        print(end.code, file=sys.stderr)
        sys.exit(1)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def train(*words, at_step=None, on_rank=None, happens=None, never_waits=False):
    """Run the command with these words; return the inputs of each step. On one rank something `happens` when a step
    is taken; None: on each. With `never_waits` a step fails that waits for its GPU."""
    seen, take_step, told = {}, TrainingModule.training_step, Reporter.on_train_batch_end

    def note(self, trainer, pl_module, outputs, batch, *rest):
        seen[trainer.global_step] = batch["inputs"].numpy()
        told(self, trainer, pl_module, outputs, batch, *rest)

    def take_or_fail(self, batch, batch_idx):
        if self.global_step + 1 == at_step and on_rank in (None, ranks.rank()):
            happens(batch)
        if never_waits:
            torch.cuda.set_sync_debug_mode("error")
        outputs = take_step(self, batch, batch_idx)
        if never_waits:
            torch.cuda.set_sync_debug_mode("default")
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "on_train_batch_end", note)
        patch.setattr(TrainingModule, "training_step", take_or_fail)
        run_command("python train.py", *words)
    return seen


def count_batches(command, *words, at_batch=None, on_rank=None, happens=None):
    """Run a command that evaluates; return how many batches this rank scored. On one rank something `happens` before
    its batch of that number."""
    scored = itertools.count(1)

    def counted(score_batch):
        def score_or_fail(model, documents, batch):
            if next(scored) == at_batch and on_rank == ranks.rank():
                happens(batch)
            return score_batch(model, documents, batch)

        return score_or_fail

    with pytest.MonkeyPatch.context() as patch:
        for module in (scoring, recall):
            patch.setattr(module, "_score_batch", counted(module._score_batch))
        run_command(command, *words)
    return next(scored) - 1


def score_tables(cases):
    """The table of each case (arguments of `table_of`), scored by these ranks together."""
    mine = ranks.resolve(None, "cpu")
    with ranks.together("start again"):
        ranks.start(mine)
        return [table_of(*case) for case in cases]


def table_of(variant, lengths, window, stride, prefix, batch_tokens, chunk, piece):
    """Whole documents of these numbers of random tokens, scored by a random GPT: the columns of the table."""
    options = preset("nano", num_layers=2, hidden_size=32, num_heads=2, vocab_size=257).resolve()
    torch.manual_seed(0)
    model = build_model(options, variant, CPU, "none").eval()
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)  # far from uniform
    offsets = np.cumsum([0, *lengths])
    tokens = np.random.default_rng(0).integers(0, 256, offsets[-1])
    tokens[offsets[:-1]] = 256
    documents = Documents(SimpleNamespace(tokens=tokens, offsets=offsets), prefix)
    num_tokens = documents.num_tokens
    table = score(
        scorer(model, CPU, chunk, None, piece),
        documents,
        strided_windows(documents_of(num_tokens, 2), num_tokens, window, stride),
        bytes_per_token=np.r_[np.ones(256, np.int64), 0],
        batch_tokens=batch_tokens,
        advance=lambda tokens: None,
    )
    return vars(table)


def terminated(batch) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def killed(batch) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def without_targets(batch) -> None:
    batch["labels"][:] = -100


def half_without_targets(batch) -> None:
    batch["labels"][len(batch["labels"]) // 2 :] = -100


def cannot_read(batch) -> None:
    raise UserError(f"rank {ranks.rank()} cannot read its data; mend it")


def _shares(mine: Ranks, num_steps: int) -> Steps:
    """This rank's rows of each step."""
    share = slice(mine.rank * ROWS // mine.world_size, (mine.rank + 1) * ROWS // mine.world_size)
    names = {"rows": torch.arange(ROWS)}
    return Steps(num_steps, lambda step, batch: {name: rows[share] for name, rows in (batch | names).items()})


def fault_on_the_second() -> str:
    """What each of two ranks says where in step 3 the loss of the second rank's second micro-batch is NaN."""
    mine, calls = ranks.resolve(None, "cpu"), itertools.count(1)
    module = make_module(6, micro_batch_rows=2, fault_folder=Path("faults"))
    sum_nll = module._sum_nll

    def spoiled(*arguments):
        return sum_nll(*arguments) * (math.nan if next(calls) == 2 * 2 + 2 and mine.rank == 1 else 1.0)

    module._sum_nll = spoiled
    with pytest.raises(UserError) as told:
        make_trainer(Path("."), 6, ranks=mine).fit(module, datamodule=_shares(mine, 6))
    return str(told.value)


def exchanges(micro_batch_rows: int) -> tuple[int, int]:
    """How many reductions the last two of three steps of `ROWS` rows take, and in how many places gradients lie."""

    class Count(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 1:
                self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self.profile.start()

    count = Count()
    mine = ranks.resolve(None, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), 3, ranks=mine, validate_every=2, callbacks=[count])
        data = _shares(mine, 3)
        module = make_module(3, micro_batch_rows=micro_batch_rows)
        trainer.fit(module, datamodule=data)
    count.profile.stop()
    reductions = sum(event.name == "gloo:all_reduce" for event in count.profile.events())
    return reductions, len({parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()})
