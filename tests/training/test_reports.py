"""What a run says: lines or a bar, CSV rows that survive a resume, TensorBoard scalars, and nothing else."""

import csv
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_training import GPU, LENGTH, ROWS, Steps, StopAt, make_module, make_trainer

from flashtrain.errors import UserError
from flashtrain.training.loggers import CsvLogger, build_loggers
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.progress import Bar, Lines, choose_display

NUM_STEPS = 20


def run(folder, num_steps=NUM_STEPS, ckpt=None, **changes):
    trainer = make_trainer(folder, num_steps, **changes)
    trainer.fit(make_module(NUM_STEPS), datamodule=Steps(num_steps), ckpt_path=ckpt)
    return trainer


def test_lines_where_there_is_no_terminal(tmp_path):
    file = io.StringIO()
    run(tmp_path, console=Console(file=file))
    lines = file.getvalue().splitlines()
    assert [re.match(r"step (\d+)/20  (\w+)", line).groups() for line in lines] == [
        ("5", "loss"),
        ("10", "loss"),
        ("10", "validation"),
        ("15", "loss"),
        ("20", "loss"),
        ("20", "validation"),
    ]
    assert re.fullmatch(r"step 15/20  loss \d\.\d{4}  lr \d\.\d\de-0\d  [\d,]+ tokens/s  0:00:0\d left", lines[3])
    assert re.fullmatch(r"step 20/20  validation loss \d\.\d{4}  \d\.\d{4} bits per byte", lines[5])
    assert not re.search(r"[^\n -~]", file.getvalue())  # no control characters


def test_a_line_is_not_wrapped_and_not_marked_up():
    file = io.StringIO()
    display = Lines(Console(file=file, width=20))
    display.start(0, 1000)
    display.report(7, "[red]a status that is longer than the console is wide")
    assert file.getvalue() == "step 7/1000  [red]a status that is longer than the console is wide\n"


def test_bar_on_a_terminal(tmp_path):
    file = io.StringIO()
    run(tmp_path, console=Console(file=file, force_terminal=True, width=120, color_system=None))
    text = file.getvalue()
    assert "20/20" in text and re.search(r"loss \d\.\d{4}  lr [-\de.]+  [\d,]+ tokens/s  0:00:0\d left", text)
    assert "validation loss" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden once and given back


def test_bar_gives_the_terminal_back_when_training_fails(tmp_path):
    def fail(step, batch):
        raise ValueError("no data")

    file = io.StringIO()
    trainer = make_trainer(tmp_path, NUM_STEPS, console=Console(file=file, force_terminal=True, width=120))
    with pytest.raises(ValueError, match="no data"):
        trainer.fit(make_module(NUM_STEPS), datamodule=Steps(NUM_STEPS, fail))
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize(
    ("terminal", "environment", "kind"),
    [
        pytest.param(True, {"TERM": "xterm"}, Bar, id="terminal"),
        pytest.param(True, {"TERM": "dumb"}, Lines, id="dumb-terminal"),
        pytest.param(False, {"TERM": "xterm"}, Lines, id="pipe"),
    ],
)
def test_display_fits_the_console(terminal, environment, kind):
    console = Console(file=io.StringIO(), force_terminal=terminal, _environ=environment)
    assert type(choose_display(console)) is kind


# Loggers


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def loggers(folder, **chosen):
    choices = {"csv": False, "tensorboard": False, "wandb": False} | chosen
    return build_loggers(folder, **choices, run_name="", settings={})


def test_csv_rows(tmp_path):
    run(tmp_path, loggers=loggers(tmp_path / "logs", csv=True))
    train = rows(tmp_path / "logs" / "train.csv")
    assert [row["step"] for row in train] == ["5", "10", "15", "20"]
    assert list(train[0]) == ["step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "data_wait"]
    assert all(float(value) > 0 for row in train for value in row.values())
    validation = rows(tmp_path / "logs" / "val.csv")
    assert [row["step"] for row in validation] == ["10", "20"]
    assert list(validation[0]) == ["step", "loss", "bits_per_byte"]


def test_csv_of_a_resumed_run_equals_the_straight_one(tmp_path):
    def logs(folder):
        return [
            [row | dict.fromkeys(("tokens_per_second", "data_wait"), "its own") for row in rows(path)]
            for path in sorted((folder / "logs").glob("*.csv"))
        ]

    for folder in (tmp_path / "straight", tmp_path / "resumed"):
        run(folder, loggers=loggers(folder / "logs", csv=True))
    # As after kill -9 at step 20 with a checkpoint of step 10: rows of 15 and 20 come again.
    run(tmp_path / "half", callbacks=[StopAt(10)])
    last = tmp_path / "half" / "checkpoints" / "last.ckpt"
    run(tmp_path / "resumed", loggers=loggers(tmp_path / "resumed" / "logs", csv=True), ckpt=last)
    assert logs(tmp_path / "resumed") == logs(tmp_path / "straight")


def test_csv_takes_a_column_that_comes_later(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"train/loss": 2.0}, 1)
    logger.log_metrics({"train/loss": 1.0, "train/mfu": 0.5}, 2)
    logger.log_metrics({"train/loss": 0.5}, 3)
    assert rows(tmp_path / "train.csv") == [
        {"step": "1", "loss": "2.0", "mfu": ""},
        {"step": "2", "loss": "1.0", "mfu": "0.5"},
        {"step": "3", "loss": "0.5", "mfu": ""},
    ]


def test_csv_drops_a_row_that_a_crash_has_cut(tmp_path):
    logger, path = CsvLogger(tmp_path), tmp_path / "train.csv"
    for step in (1, 2):
        logger.log_metrics({"train/loss": 0.125}, step)
    path.write_bytes(path.read_bytes()[:-4])
    CsvLogger(tmp_path).log_metrics({"train/loss": 0.5}, 3)
    assert rows(path) == [{"step": "1", "loss": "0.125"}, {"step": "3", "loss": "0.5"}]


@pytest.mark.parametrize("text", ["step,loss\nfour,0.5\n", "loss\n0.5\n", "step,loss\n\0\0\0\n"])
def test_a_damaged_csv_is_named(tmp_path, text):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(UserError, match="train.csv has a row without the number of its step: .*; mend or remove"):
        CsvLogger(tmp_path).log_metrics({"train/loss": 0.5}, 3)
    assert (tmp_path / "train.csv").read_text() == text


def test_tensorboard_scalars(tmp_path):
    run(tmp_path, loggers=loggers(tmp_path / "logs", tensorboard=True))
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens_per_second",
        "train/data_wait",
        "val/loss",
        "val/bits_per_byte",
    }
    assert [event.step for event in events.Scalars("val/loss")] == [10, 20]


def test_no_logger_is_no_file(tmp_path):
    assert loggers(tmp_path) == []
    run(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoints"]


# Speed


class Time(Callback):
    """A clock that only moves where it is told to: batches, steps, the first two of which compile, and validations."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def load(self, step, batch):
        self.now += 0.125
        return batch

    def on_train_batch_start(self, trainer, *_):
        self.now += 60.0 if trainer.global_step < 2 else 0.375

    def on_validation_batch_start(self, *_):
        self.now += 100.0


def test_speed_mfu_and_data_wait_leave_out_the_first_steps_and_validation(tmp_path, monkeypatch):
    monkeypatch.setattr("flashtrain.training.callbacks.peak_memory_gib", lambda: 1.5)
    clock, file = Time(), io.StringIO()
    trainer = make_trainer(
        tmp_path,
        NUM_STEPS,
        callbacks=[clock],
        console=Console(file=file),
        meter=SpeedMeter(ROWS * LENGTH, clock),
        loggers=[CsvLogger(tmp_path)],
        flops_per_token={"mfu": 10.0, "mfu_visible": 5.0},
        peak_flops=10_000.0,
    )
    trainer.fit(make_module(NUM_STEPS), datamodule=Steps(NUM_STEPS, clock.load))
    for row in rows(tmp_path / "train.csv"):
        assert float(row["tokens_per_second"]) == ROWS * LENGTH / 0.5
        assert (float(row["mfu"]), float(row["mfu_visible"])) == pytest.approx((0.192, 0.096))
        assert (float(row["data_wait"]), float(row["peak_memory_gib"])) == (0.25, 1.5)
    assert "  192 tokens/s  0:00:02 left  mfu 19.2%  mfu_visible 9.6%\n" in file.getvalue()


class Rows(Logger):
    """Notes how many steps had been taken when a row came."""

    name, version = "rows", ""

    def __init__(self):
        self.trainer, self.came = None, []

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step):
        if "train/loss" in metrics:
            self.came.append((step, self.trainer.global_step, dict(metrics)))


def test_a_row_is_read_when_the_next_step_is_queued_or_something_waits_for_its_own(tmp_path):
    losses = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *_):
            losses.append(outputs["loss"].item())

    logger = Rows()
    trainer = make_trainer(
        tmp_path, 8, log_every=1, validate_every=3, checkpoint_every=5, loggers=[logger], callbacks=[Losses()]
    )
    logger.trainer = trainer
    trainer.fit(make_module(8), datamodule=Steps(8))
    # Validated after 3, 6 and 8, the last; saved after 5.
    assert [(step, by) for step, by, _ in logger.came] == [
        (1, 2), (2, 3), (3, 3), (4, 5), (5, 5), (6, 6), (7, 8), (8, 8),
    ]  # fmt: skip
    assert [metrics["train/loss"] for _, _, metrics in logger.came] == losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_no_report_waits_for_the_gpu(tmp_path):
    class First(Callback):
        def on_train_batch_start(self, *_):
            torch.cuda.set_sync_debug_mode("error")

    class Last(Callback):
        def on_train_batch_end(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    gpu = {"device_type": "cuda", "loggers": [CsvLogger(tmp_path)]}
    trainer = make_trainer(tmp_path, 6, log_every=1, callbacks=[First()], **gpu)
    trainer.callbacks.append(Last())
    trainer.fit(make_module(6, device=GPU), datamodule=Steps(6))
    assert [row["step"] for row in rows(tmp_path / "train.csv")] == [str(step) for step in range(1, 7)]
    assert float(rows(tmp_path / "train.csv")[-1]["peak_memory_gib"]) > 0


def test_lightning_is_silent(tmp_path):
    tests = Path(__file__).parent.parent
    script = f"""
import sys; sys.path.insert(0, {str(tests)!r})
from pathlib import Path
from rich.console import Console
from tiny_training import Steps, make_module, make_trainer
folder = Path({str(tmp_path)!r})
make_trainer(folder, 10, console=Console()).fit(make_module(10), datamodule=Steps(10))
make_trainer(folder, 20, console=Console()).fit(
    make_module(20), datamodule=Steps(20), ckpt_path=folder / "checkpoints" / "last.ckpt")
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert all(line.startswith("step ") for line in result.stdout.splitlines())
    assert len(result.stdout.splitlines()) == 6

