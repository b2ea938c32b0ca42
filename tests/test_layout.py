"""The shape of the house: import directions, what a wheel holds, and that no top-level `kernels` is ever ours."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERBS = {"fit", "evaluate", "generate", "replay", "convert"}

DOOR = "kernels.attention"
CROSS_ENTROPY, SWIGLU = "kernels.cross_entropy", "kernels.swiglu"
NOUNS = {"model", "data", "training", "evaluation", "performance", "interop"}
SETTINGS = {"config", "composition", "saved_settings"}

# folder or module of flashtrain -> the parts of flashtrain that it may import, beside `errors`
ALLOWED = {
    "errors": set(),
    "charts": set(),
    "accuracy": {DOOR, "device"},
    "performance": {DOOR, "charts"},
    "data": set(),
    "evaluation": {"charts", "device", "ranks"},
    "model": {DOOR, CROSS_ENTROPY, SWIGLU},
    "training": {"model", "performance", "device", "ranks"},
    "interop": {"model"},
    "runs": {"training"},
    "device": set(),
    "ranks": set(),
    "config": {"data", "model", "training", "evaluation"},
    "contradictions": {"config", "runs", "data", "model"},
    "saved_settings": {"config", "runs", "model", "training"},
    "composition": {"config", "contradictions", "saved_settings", "runs", "data", "evaluation"},
    "assembly": {*SETTINGS, "ranks", "runs", "device", DOOR, *NOUNS},
    "entry": {"composition", "ranks", DOOR},
    "check": {"composition", "contradictions", "runs", "device", "entry", "accuracy", DOOR},
    "explain": {"composition", "contradictions", "runs", "device", "entry", "performance", DOOR},
    "bench": {"composition", "contradictions", "runs", "device", "entry", "performance", DOOR},
    **{verb: {"assembly", *SETTINGS, "device", "ranks", "runs", "entry", *NOUNS, *VERBS} for verb in VERBS},
    "bench_training": {
        *("assembly", *SETTINGS, "contradictions", "device", "ranks", "runs", "entry", "fit"),
        *("data", "performance", "training", DOOR),
    },
}


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imported_modules(path: Path) -> list[str]:
    """Absolute names of everything that a file imports, at its top or inside a function."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "flashtrain":
            names += [f"flashtrain.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module)
    return names


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_flashtrain_imports_run_one_way(part):
    place = ROOT / "flashtrain" / part
    files = python_files(place) if place.is_dir() else [place.with_suffix(".py")]
    assert files
    for path in files:
        for name in imported_modules(path):
            if not name.startswith("flashtrain."):
                continue
            target = name.removeprefix("flashtrain.")
            target = target if target.startswith("kernels") else target.split(".")[0]
            assert target in {part, "errors", *ALLOWED[part]}, f"{path.relative_to(ROOT)} imports {name}"


def test_every_module_of_flashtrain_has_a_direction():
    modules = {path.stem for path in (ROOT / "flashtrain").glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / "flashtrain").glob("*/__init__.py")}
    assert modules | folders == set(ALLOWED)


def test_kernels_import_torch_and_triton_only():
    allowed = {"torch", "triton"} | set(sys.stdlib_module_names)
    for path in python_files(ROOT / "kernels"):
        outside = {name.split(".")[0] for name in imported_modules(path)} - allowed
        assert not outside, f"{path.relative_to(ROOT)} imports {sorted(outside)}"


def relative_imports(path: Path) -> set[str]:
    """First names of the sibling modules that a file of kernels/attention imports."""
    names = set()
    depth = len(path.relative_to(ROOT / "kernels" / "attention").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return names


def test_attention_implementations_never_import_one_another():
    implementations = {"standard", "sdpa", "flex", "flash_v1", "flash_v2", "flash_hopper"}
    for path in python_files(ROOT / "kernels" / "attention"):
        own = path.relative_to(ROOT / "kernels" / "attention").parts[0].removesuffix(".py")
        if own in implementations:
            assert not relative_imports(path) & (implementations - {own} | {"api", "variants"}), path


def test_no_folder_named_kernels_is_a_package():
    assert [str(path) for path in ROOT.rglob("kernels/__init__.py") if ".venv" not in path.parts] == []


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """The tracked files as a clean checkout would hold them, links included."""
    tree = tmp_path_factory.mktemp("checkout")
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if not (ROOT / name).exists():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    return tree


def test_wheel_installs_flashtrain_alone_and_whole(source_tree, tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, "."]
    subprocess.run(build, cwd=source_tree, check=True)
    (wheel,) = tmp_path.glob("flashtrain-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"flashtrain"}
    tracked = subprocess.check_output(["git", "ls-files", "kernels", "conf"], cwd=ROOT, text=True).splitlines()
    assert tracked
    assert {f"flashtrain/{name}" for name in tracked if (ROOT / name).exists()} <= set(names)


def test_import_kernels_finds_the_package_of_that_name_and_not_our_folder(tmp_path):
    stand_in = tmp_path / "kernels" / "__init__.py"
    stand_in.parent.mkdir()
    stand_in.write_text("")
    found = subprocess.check_output(
        [sys.executable, "-c", "import kernels; print(kernels.__file__)"],
        cwd=ROOT, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert Path(found.strip()) == stand_in
