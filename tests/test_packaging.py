"""What is installed: every folder with code, the data, nothing at the top level but nlpconvert, and a light start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("convert", "validators")
HEAVY = {
    "jinja2",
    "matplotlib",
    "numpy",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "polygraphy",
    "safetensors",
    "scipy",
    "tensorrt",
    "tensorrt_rtx",
    "tokenizers",
    "torch",
    "transformers",
}


def python_files() -> list[Path]:
    """Every Python file of the three folders, relative to the repository (rglob does not follow the links)."""
    return sorted(path.relative_to(ROOT) for folder in ("nlpconvert", *LINKS) for path in (ROOT / folder).rglob("*.py"))


def installed_at(path: Path) -> str:
    """Where a file of the repository lies once installed."""
    return f"nlpconvert/{path.as_posix()}" if path.parts[0] in LINKS else path.as_posix()


def data_files() -> set[str]:
    """The package's data files: probe texts and the mark that it is typed."""
    data = {
        path for path in (ROOT / "nlpconvert/data").rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    return {path.relative_to(ROOT).as_posix() for path in data} | {"nlpconvert/py.typed"}


@pytest.mark.parametrize("name", LINKS)
def test_link_is_there_and_relative(name: str) -> None:
    link = ROOT / "nlpconvert" / name
    assert link.is_symlink(), f"nlpconvert/{name} must be a link: ln -s ../{name} nlpconvert/{name}"
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", LINKS)
def test_folder_is_no_package_of_its_own(name: str) -> None:
    assert (ROOT / name).is_dir()
    assert not (ROOT / name / "__init__.py").exists(), (
        f"with {name}/__init__.py the checkout shadows an installed {name}"
    )


def test_every_folder_with_code_is_a_package() -> None:
    packages = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(Path(installed_at(path)).parent.parts) for path in python_files()}
    assert found <= packages, f"add to packages in pyproject.toml: {', '.join(sorted(found - packages))}"


def test_probe_texts_are_there() -> None:
    assert len(data_files()) > 1, "nlpconvert/data holds no file"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that is built from a copy, so that no build folder is left in the tree or taken from it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for path in ("pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / path, source)
    for folder in ("nlpconvert", *LINKS):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(work),
        ".",
    ]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = work.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return set(archive.namelist())


def test_wheel_holds_all_code_and_data(wheel: set[str]) -> None:
    expected = {installed_at(path) for path in python_files()} | data_files()
    assert expected - wheel == set()


def test_wheel_holds_nothing_else(wheel: set[str]) -> None:
    assert {name.split("/")[0].partition("-")[0] for name in wheel} == {"nlpconvert"}
    assert not [name for name in wheel if name.endswith(".pyc")]


def test_help_loads_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "nlpconvert", "--help"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # "import time:  self [us] | cumulative | imported package", the name indented by depth.
    lines = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in ran.stderr.splitlines() if not line.startswith("import time:")]
    assert ran.returncode == 0, "\n".join(said)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"nlpconvert", "typer"} <= loaded, "the list of imports was not read"
    assert loaded & HEAVY == set()
