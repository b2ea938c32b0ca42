"""Every command of the README runs, at a small size; every variant and path that it names exists."""

import re
from pathlib import Path

import pytest
from commands import (
    SMALL,
    SMALL_BENCH,
    SMALL_BENCH_TRAINING,
    SMALL_CHECK,
    SMALL_EXPLAIN,
    SMALL_RECALL,
    VERBS,
    run_command,
)
from tiny_checkpoint import save_checkpoint

from flashtrain.kernels.attention import markdown, support_table

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMMANDS = [line.removeprefix("pip install -r requirements.txt && ") for line in LINES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "books").mkdir()
    for number in range(4):
        text = f"Chapter {number}. " + "The road goes on. " * 50 * (number + 1)
        (folder / "books" / f"{number}.txt").write_text(text)
    save_checkpoint(folder / "SmolLM2-135M")
    return folder


def test_the_two_commands_come_first():
    assert COMMANDS[:2] == ["python train.py", "python -m pytest"]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "python -m pytest"])
def test_command_runs(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    if "flashtrain.bench_training" in command:
        small = SMALL_BENCH_TRAINING
    elif "flashtrain.bench" in command:
        small = SMALL_BENCH
    elif "flashtrain.check" in command:
        small = SMALL_CHECK
    elif "flashtrain.explain" in command:
        small = SMALL_EXPLAIN
    elif "flashtrain.generate" in command:
        small = ["generate.num_tokens=4"]
    elif "recall" in command:
        small = SMALL_RECALL if "train.py" in command else ["eval.lengths=[64]"]
    elif "train.py" in command and "resume=" not in command:
        small = [*SMALL, "model.vocab_size=257"]
    elif "runs=[" in command or "convert run=" in command:
        small = []
    else:
        small = ["generate.num_tokens=4", "eval.lengths=[65]"]
    if "sdpa_cudnn" in command and "train.py" in command:
        with pytest.raises(SystemExit, match="sdpa_cudnn runs on cuda, not on cpu"):
            run_command(command, *small)
    else:
        run_command(command, *small)


def test_all_commands_are_ours():
    for command in COMMANDS:
        assert command == "python -m pytest" or any(command.startswith(f"python {verb}") for verb in VERBS)


def test_the_table_is_what_the_limits_say():
    """`python -m flashtrain.check` prints it."""
    assert f"\n\n{markdown(support_table())}\n" in README
