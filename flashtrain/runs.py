"""The folder of a run: where each thing lies, and what is recorded so that its numbers can be traced.

    config.yaml  provenance.json  checkpoints/{last,best}.ckpt  logs/  evaluation/  sample.txt
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import torch

from flashtrain.errors import UserError

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"
PACKAGES = ("torch", "triton", "lightning", "hydra-core", "datasets", "tokenizers", "numpy")


def new_folder(output: str | None, label: str) -> Path:
    """Make and return the folder of a new run: `output`, or runs/TIME_label; never one that exists."""
    if output is not None:
        try:
            Path(output).mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"output={output} exists; name another folder, or say resume={output} to continue it") from None
        return Path(output)
    stem = Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{label}"
    stem.parent.mkdir(exist_ok=True)
    for folder in (stem, *(stem.with_name(f"{stem.name}-{number}") for number in range(2, 1000))):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise UserError(f"{stem} and 998 folders after it exist; say output=DIR")


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees all of it or none."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def provenance(**facts: object) -> dict[str, object]:
    """What a number of this run depends on besides its settings: code, packages, machine, and the caller's facts."""
    return {
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        **facts,
    }


def read_provenance(folder: Path) -> dict[str, object]:
    return json.loads((folder / PROVENANCE_FILE).read_text(encoding="utf-8"))


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
