"""The folder of a run: where each thing lies, and what is recorded so that its numbers can be traced.

    config.yaml  provenance.json  result.json  sample.txt  checkpoints/{last,best,step-N,milestone-N}.ckpt  logs/
    evaluation/  faults/step-N.pt

A run that was converted from a checkpoint of Hugging Face's format has its tokenizer.json, too.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from flashtrain.errors import UserError
from flashtrain.training.checkpoint import BEST, LAST, PARTIAL, milestones, newest_checkpoint, step_checkpoints

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"
CHECKPOINT_FOLDER = "checkpoints"
CHECKPOINTS = {"last": LAST, "best": BEST}
DEFAULT_CHECKPOINT = "last"
RESUME_WORDS = ("auto", "must", "never")
LOG_FOLDER = "logs"
FAULT_FOLDER = "faults"
EVALUATION_FOLDER = "evaluation"
SAMPLE_FILE = "sample.txt"
RESULT_FILE = "result.json"
LOCK_FILE = ".lock"
LOCK_SECONDS = 10
"""How long a lock is waited for: data workers of a process that was killed hold it for some seconds more."""
PACKAGES = ("torch", "triton", "lightning", "hydra-core", "datasets", "tokenizers", "numpy")


def new_folder(output: str | None, label: str) -> Path:
    """Make and return the folder of a new run: `output`, or runs/TIME_label; never one that exists."""
    if output is None:
        return stamped_folder(Path("runs"), label)
    with _writing(output):
        try:
            Path(output).mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"output={output} exists; name another, or say resume={output} to continue it") from None
    return Path(output)


@contextlib.contextmanager
def folder_made_whole(output: str | None, label: str) -> Iterator[Path]:
    """`new_folder`, which is removed with what is in it where the block fails."""
    folder = new_folder(output, label)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def folder_to_start_in(output: str) -> Path:
    """Make and return the folder of a run that may have started there before: new, empty, or with its settings."""
    folder = Path(output)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in folder.iterdir() if not path.name.endswith((PARTIAL, LOCK_FILE))}
    if found and CONFIG_FILE not in found:
        raise UserError(f"output={output} exists and is not the folder of a run; name another")
    return folder


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from training in `folder` meanwhile, of whatever end this one comes to.

    Raises UserError where another does.
    """
    lock = FileLock(folder / LOCK_FILE, timeout=LOCK_SECONDS)
    with _writing(folder):
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"another process trains in {folder}; wait for its end, or stop it") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # while it is held: none that gets it then loses it
            Path(lock.lock_file).unlink()
        lock.release()


def standing(output: str | None, resume: str | None) -> dict[str, int]:
    """What there is to continue from, arguments as in `checkpoint_to_resume`, and when each file was written."""
    if resume is None:
        return {}
    folder = Path(output) if resume in RESUME_WORDS else folder_of(resume)
    found = {}
    for path in [*folder.glob(f"{CHECKPOINT_FOLDER}/[!.]*"), *folder.glob(RESULT_FILE)]:
        with contextlib.suppress(FileNotFoundError):  # another process may remove it just now
            found[path.name] = path.stat().st_mtime_ns
    return found


def folder_of(place: str) -> Path:
    """The folder of the run that is named by it, or by one of its checkpoints."""
    return Path(place).parent.parent if _is_checkpoint(place) else Path(place)


def checkpoint_of(place: str) -> Path:
    """The last checkpoint of the run in that folder, or the checkpoint that is named."""
    return Path(place) if _is_checkpoint(place) else checkpoint(Path(place), DEFAULT_CHECKPOINT)


def _is_checkpoint(path: str) -> bool:
    return path.endswith(Path(LAST).suffix)


def checkpoint_to_resume(output: str | None, resume: str | None) -> Path | None:
    """The checkpoint that a run continues from, None for one that starts.

    `resume` is the folder of a run, one of its checkpoints, or, about the folder `output`, one of `RESUME_WORDS`.
    Raises UserError where the word forbids what is found.
    """
    if resume is None:
        return None
    if resume not in RESUME_WORDS:
        return checkpoint_of(resume)
    newest = newest_checkpoint(Path(output) / CHECKPOINT_FOLDER)
    if newest is None and resume == "must":
        raise UserError(f"resume=must, and {output} has no checkpoint; say resume=auto to start a run there")
    if newest is not None and resume == "never":
        raise UserError(f"resume=never, and {output} has {newest.name}; say resume=auto to continue, or another output")
    return newest


def remove_partial_files(folder: Path) -> None:
    """Remove from the folder of a run what a process was writing that was killed."""
    with _writing(folder):
        for part in (".", CHECKPOINT_FOLDER, LOG_FOLDER):
            for path in (folder / part).glob(f".*{PARTIAL}"):
                path.unlink()


def remove_result(folder: Path) -> None:
    """Let the run in `folder` be unfinished again, whose last steps are to be taken anew."""
    with _writing(folder):
        (folder / RESULT_FILE).unlink(missing_ok=True)


def stamped_folder(parent: Path, label: str) -> Path:
    """Make and return parent/TIME_label, with a number behind it where another process has just taken that name."""
    stem = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{label}"
    with _writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = parent / (stem if number == 1 else f"{stem}-{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder


def evaluation_folder(folder: Path) -> Path:
    """Make and return the folder of a run's evaluations, where it may be."""
    evaluations = folder / EVALUATION_FOLDER
    with _writing(evaluations):
        evaluations.mkdir(exist_ok=True)
    return evaluations


def require_new_file(path: str) -> None:
    """Raise UserError unless a file can be made at `path`, where there is nothing; none is left there."""
    with _writing(path):
        try:
            Path(path).open("x").close()
        except FileExistsError:
            raise UserError(f"output={path} exists; name another") from None
        Path(path).unlink()


def checkpoint(folder: Path, name: str) -> Path:
    """The path of a run's checkpoint: one of `CHECKPOINTS`, or the number of a step.

    Raises UserError where nothing is kept of that step.
    """
    checkpoints = folder / CHECKPOINT_FOLDER
    if name in CHECKPOINTS:
        return checkpoints / CHECKPOINTS[name]
    kept = dict(sorted((step_checkpoints(checkpoints) | milestones(checkpoints)).items()))
    if int(name) not in kept:
        others = ", ".join(map(str, [*CHECKPOINTS, *kept]))
        raise UserError(f"{folder} has no weights of step {name}; say checkpoint= with one of {others}")
    return kept[int(name)]


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees all of it or none."""
    aside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    with _writing(path):
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)


def copy(source: Path | str, path: Path) -> None:
    """Copy a file. Raises UserError where the disk refuses."""
    with _writing(path):
        shutil.copyfile(source, path)


@contextlib.contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); say output=DIR with another place") from None


def provenance(**facts: object) -> dict[str, object]:
    """What a number of this run depends on besides its settings: code, packages, machine, and the caller's facts."""
    return {
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        **facts,
    }


def device_name(kind: str) -> str:
    """What the device of that type, cpu or cuda, is called here."""
    return torch.cuda.get_device_name() if kind == "cuda" else f"CPU ({platform.machine()})"


def versions(facts: dict[str, object]) -> str:
    """The versions and the commit that a kernel's figures depend on, in words, from `provenance`."""
    named = {name: facts["packages"][name] for name in ("torch", "triton")}
    named |= {"CUDA": facts["cuda"], "cuDNN": facts["cudnn"]}
    if commit := facts["commit"]:
        named["commit"] = commit[:7] + "+" * commit.endswith("+")
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)


def made_with(module: str, facts: dict) -> str:
    """What figures were made with, in words, from `provenance`: versions, those of peers too, commit and command."""
    command = shlex.join(["python", "-m", f"flashtrain.{module}", *facts["command"][1:]])
    peers = dict.fromkeys(found for peer in facts.get("peers", {}).values() for found in peer)
    return f"({', '.join([versions(facts), *peers])}; `{command}`)"


def write_json(path: Path, values: dict[str, object]) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")


def written(folder: Path) -> list[Path]:
    """What training left in the folder of a run, its evaluations apart."""
    files = [folder / name for name in (CONFIG_FILE, PROVENANCE_FILE, RESULT_FILE, SAMPLE_FILE)]
    files += [path for part in (CHECKPOINT_FOLDER, LOG_FOLDER) for path in sorted((folder / part).glob("*"))]
    return [path for path in files if path.exists()]


def last_fault(folder: Path) -> Path | None:
    """What a run has saved when it last found a NaN or Inf; None where it has found none."""
    return max((folder / FAULT_FOLDER).glob("step-*.pt"), key=lambda path: path.stat().st_mtime, default=None)


def read_provenance(folder: Path) -> dict[str, object]:
    """The recorded facts of a run. Raises UserError where they are missing or damaged."""
    path = folder / PROVENANCE_FILE
    with contextlib.suppress(OSError, ValueError):
        if isinstance(facts := json.loads(path.read_text(encoding="utf-8")), dict):
            return facts
    raise UserError(f"{path} is missing or damaged; start a new run")


def require_same(folder: Path, what: str, found: str) -> None:
    """Raise UserError unless the run in `folder` was made with this fingerprint of `what`, corpus or tokenizer."""
    recorded = read_provenance(folder).get(what)
    if recorded != found:
        raise UserError(
            f"{folder} was made with {what} {recorded} and now there is {found}; bring the old files back, or start "
            "a new run"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this code runs from, with a + where files differ from it; None outside one."""
    checkout = Path(__file__).parent.parent
    if not (checkout / ".git").exists():
        return None
    git = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + "+" * bool(changed.strip())
