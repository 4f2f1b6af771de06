"""Tests of nlpconvert/github.py and action.yml: the summary, the annotations, and what the action's script does."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from nlpconvert import github, report
from nlpconvert.artifact import Outcome
from tests.test_report import DRIFTED, FAILING, STATE, agreeing, outcome

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = Outcome("trt", "not run", reason="no NVIDIA GPU with a driver here")


def test_where_github_is() -> None:
    assert github.here({"GITHUB_ACTIONS": "true"})
    assert not github.here({})
    assert not github.here({"GITHUB_ACTIONS": "false"})


# -- the summary -------------------------------------------------------------------------------------------------------

SUMMARY = f"""\
## nlpconvert verify `out`

| step | size | verdict | worst | tried | seconds |
| --- | --- | --- | --- | --- | --- |
| onnx | 90.4 MB | ❌ DRIFT | abs 3.1e-02 | 2 cases, 5,812 tokens | 3.2 |
| trt |  | ⚠️ not run: no NVIDIA GPU with a driver here |  |  | 0.0 |

### ❌ onnx

```text
{FAILING}
```

### Not run

- `trt`: not run, no NVIDIA GPU with a driver here

<details><summary>Cases that were not applicable</summary>

- `empty-string`: the reference raised RuntimeError: no tokens

</details>
"""


def test_the_words_of_a_summary() -> None:
    assert github.summary([outcome(DRIFTED), NOT_RUN], out="out") == SUMMARY


def test_a_summary_of_what_agrees_is_the_table() -> None:
    found = github.summary([agreeing()], out="out", title="Nightly")
    assert found.startswith("## Nightly\n\n| step |")
    assert "✅ agrees" in found and "❌" not in found and "```" not in found


def test_a_summary_of_nothing_says_so() -> None:
    assert "Nothing was verified." in github.summary([])


def test_what_a_stranger_wrote_stays_text() -> None:
    reason = "<img src=x> | `a` ```\n# b [c](d) ::error::e @all"
    found = github.summary([Outcome("onnx", "failed", reason=reason), Outcome("a|b", "not run", reason=reason)])
    table = [line for line in found.splitlines() if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(report.HEADER) + 1 for line in table), table
    fence = next(line for line in found.splitlines() if line.endswith("text")).removesuffix("text")
    assert fence == "````", "the text must not close its fence"
    outside = found.split(fence)[0] + found.split(fence)[2]
    assert "<img" not in outside and "[c](d)" not in outside and "\n#  b" not in outside


def test_a_summary_fits_into_what_github_takes() -> None:
    found = github.summary([Outcome(f"step-{n}", "failed", reason="ö" * 200_000) for n in range(5)])
    assert len(found.encode()) < 2**20
    assert found.endswith("(cut here: the whole text is in the job's log)\n")


# -- the annotations ---------------------------------------------------------------------------------------------------


def test_the_words_of_annotations() -> None:
    assert github.annotations([agreeing(), NOT_RUN, outcome(DRIFTED)], file="out/nlpconvert.json") == [
        "::error file=out/nlpconvert.json,title=onnx%3A logits drifted from pytorch::rel 1.0e-02, allowed rel<=5e-05; "
        "worst 3.1e-02 at [1, 0, 1] (reference 1, candidate 1.031) in case left-padded",
        "::warning file=out/nlpconvert.json,title=trt%3A not run::no NVIDIA GPU with a driver here",
    ]


def test_each_failing_output_has_its_own_worst_first() -> None:
    moved = {**DRIFTED, ("alone", "last_hidden_state", (0, 0, 0)): 2.0}
    lines = github.annotations([outcome(moved)])
    assert [line.partition("::")[2].partition("::")[0] for line in lines] == [
        "error title=onnx%3A last_hidden_state drifted from pytorch",
        "error title=onnx%3A logits drifted from pytorch",
    ]


def test_a_step_that_fails_without_an_output_is_told() -> None:
    changed = Outcome("onnx", "drift", reason="onnx/model.onnx has changed since it was verified; it was not opened")
    failed = Outcome("trt", "failed", reason="50% done,\nthen: no memory\r")
    found = agreeing()
    frozen = dataclasses.replace(
        found, status="drift", verdict={**(found.verdict or {}), "structure": ["input_ids: axis 1 is frozen at 16"]}
    )
    assert github.annotations([changed, failed, frozen]) == [
        "::error title=onnx%3A DRIFT::onnx/model.onnx has changed since it was verified; it was not opened",
        "::error title=trt%3A FAILED::50%25 done,%0Athen: no memory%0D",
        "::error title=onnx%3A DRIFT::input_ids: axis 1 is frozen at 16",
    ]


def test_what_was_forgiven_or_skipped_is_no_warning() -> None:
    assert github.annotations([NOT_RUN, Outcome("trt-fp16", "skipped", reason="no")], forgiven=["trt"]) == []


def test_an_output_with_a_problem_says_it() -> None:
    found = outcome({("left-padded", "last_hidden_state", (0, 1, 0)): float("nan")}, rows=(STATE,))
    (line,) = github.annotations([found])
    assert "not finite" in line


# -- action.yml --------------------------------------------------------------------------------------------------------


def script(name: str) -> str:
    """The shell script of a step of action.yml, as it stands there."""
    text = (ROOT / "action.yml").read_text("utf-8")
    _, _, rest = text.partition(f"    - name: {name}\n")
    lines = rest.partition("      run: |\n")[2].splitlines()
    body = [line.removeprefix(" " * 8) for line in lines]
    stop = next((n for n, line in enumerate(lines) if line.strip() and not line.startswith(" " * 8)), len(lines))
    return "\n".join(body[:stop])


def run_action(tmp_path: Path, code: int = 0, **inputs: str) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """Runs the Verify step with a command that only notes its arguments: the result, those, and the step's outputs."""
    command = tmp_path / "nlpconvert"
    command.write_text(f"#!/bin/bash\nprintf '<%s>' \"$@\" > {tmp_path}/said\nexit {code}\n", "utf-8")
    command.chmod(0o755)
    names = ("DIRECTORY", "STEPS", "TOLERANCE", "BASELINE", "ARGUMENTS")
    environment = {**dict.fromkeys(names, ""), "DIRECTORY": "out", "REPORTS": str(tmp_path / "reports"), **inputs}
    environment |= {"NLPCONVERT": str(command), "GITHUB_OUTPUT": str(tmp_path / "outputs"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script("Verify")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = tmp_path / "said"
    outputs = tmp_path / "outputs"
    return done, *(file.read_text("utf-8") if file.exists() else "" for file in (said, outputs))


def test_the_action_passes_its_inputs_on(tmp_path: Path) -> None:
    done, said, outputs = run_action(
        tmp_path,
        DIRECTORY="my out",
        STEPS="onnx, onnx-int8",
        TOLERANCE="cosine>=0.995",
        BASELINE="main/nlpconvert.json",
        ARGUMENTS="--threads 2 --case 'a b'",
    )
    assert done.returncode == 0, done.stderr
    reports = tmp_path / "reports"
    assert said == (
        "<verify><my out><--step><onnx><--step><onnx-int8><--tolerance><cosine>=0.995><--baseline>"
        "<main/nlpconvert.json><--threads><2><--case><a b>"
        f"<--junit><{reports}/verdict.xml><--html><{reports}/verdict.html><--json><{reports}/verdict.json>"
    )
    assert f"html={reports}/verdict.html\n" in outputs and "exit-code=0\n" in outputs


def test_the_action_fails_as_verify_does(tmp_path: Path) -> None:
    done, said, outputs = run_action(tmp_path, code=4)
    assert said.startswith("<verify><out><--junit>")
    assert done.returncode == 4 and "exit-code=4\n" in outputs


def test_the_action_refuses_a_quote_left_open(tmp_path: Path) -> None:
    done, said, _ = run_action(tmp_path, ARGUMENTS="--tolerance 'kl<=1")
    assert done.returncode != 0 and said == "", "verify must not run with half of its arguments"


@pytest.mark.parametrize("name", ["DIRECTORY", "STEPS", "TOLERANCE", "BASELINE", "ARGUMENTS"])
def test_the_action_reads_no_input_as_shell(tmp_path: Path, name: str) -> None:
    run_action(tmp_path, **{name: "$(touch taken) `touch taken` ; touch taken"})
    assert not (tmp_path / "taken").exists()


def test_the_action_puts_no_input_into_a_script() -> None:
    for name in ("Install nlpconvert", "Verify"):
        assert script(name).startswith("set -euo pipefail") and "${{" not in script(name)


def test_the_actions_options_are_those_of_verify() -> None:
    import inspect

    from nlpconvert import cli

    (verify,) = (
        row.callback for row in cli.app.registered_commands if getattr(row.callback, "__name__", "") == "verify"
    )
    assert verify is not None
    known = set(inspect.signature(verify).parameters)
    used = {word.replace("-", "_") for word in re.findall(r"--([a-z-]+) \"\$", script("Verify"))}
    assert {"junit", "html", "json", "baseline", "step", "tolerance"} == used
    assert used <= known, f"verify does not take {sorted(used - known)}"
