"""The README under test: its commands run, its Python example runs, its tables are what the code says, its links lead
somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nlpconvert.errors import EXIT_CODES
from nlpconvert.plan import DEFAULT_STEPS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def marked(name: str) -> str:
    """What stands between two markers."""
    found = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", README, re.DOTALL)
    assert found, f"README.md has no {name} markers"
    return found.group(1)


def test_exit_codes_are_the_codes_of_the_program() -> None:
    rows = "".join(f"| {row.code} | {row.name} | {row.meaning} |\n" for row in EXIT_CODES)
    assert marked("exit-codes") == f"| code | name | meaning |\n|---|---|---|\n{rows}"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_picture_shows_every_step_of_a_default_run() -> None:
    picture = marked("demo")
    assert all(re.search(rf"^{step}\s", picture, re.MULTILINE) for step in DEFAULT_STEPS)
    assert "not run" in picture


def test_the_failure_names_a_case_and_how_to_see_it_again() -> None:
    failure = marked("failure")
    assert "DRIFT" in failure
    assert "would pass at" in failure
    assert re.search(r"nlpconvert verify \S+ --step onnx --case \S+", failure)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the fixtures in it, as a reader's checkout has them."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    return folder


def test_console_commands_run(desk: Path) -> None:
    commands = re.findall(r"^\$ nlpconvert (.*)$", README, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "nlpconvert", *shlex.split(command)], cwd=desk, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_python_example_runs(desk: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        done = subprocess.run([sys.executable, "-c", example], cwd=desk, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "agrees" in done.stdout
