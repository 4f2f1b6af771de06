"""Floor 5: what several commands share: the options' words, how they become `Options`, and how outcomes are told."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlpconvert.errors import UsageError
from nlpconvert.terminal import Terminal, table

if TYPE_CHECKING:
    from nlpconvert.artifact import Outcome
    from nlpconvert.pipeline import Options

Model = Annotated[str, typer.Argument(help="A local checkpoint directory or a hub id.", show_default=False)]
Out = Annotated[Path, typer.Option("-o", "--out", help="The directory of this source's artifacts.", show_default=False)]
OutArgument = Annotated[Path, typer.Argument(help="A directory that nlpconvert has made.", show_default=False)]
Task = Annotated[str | None, typer.Option(help="The task, instead of the one config.json's architecture stands for.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Device = Annotated[str, typer.Option(help="Where to trace and where the reference runs: cpu or cuda.")]
Provider = Annotated[str, typer.Option(help="What ONNX Runtime runs on: cpu, cuda or tensorrt.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the runtimes.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a step that exists, when the new one is whole.")]
Data = Annotated[Path | None, typer.Option(help="Your own text as well: .txt, .jsonl or .csv.")]
Columns = Annotated[str, typer.Option(help="Names of your columns: text=body,label=y.")]
Tolerance = Annotated[
    list[str] | None,
    typer.Option(help='"cosine>=0.995", "changed<=0.5%", "kl<=0.02", "abs<=1e-3", "rel<=1e-3" or "noise<=10".'),
]
Budget = Annotated[int, typer.Option(min=1, help="MB of reference answers to keep.")]
MaxMemory = Annotated[
    float, typer.Option(min=0, help="GB that the reference may take in float64; past it, layer by layer.")
]
MissingWeights = Annotated[
    bool, typer.Option("--allow-missing-weights", help="Accept weights that were never trained.")
]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code from the model's directory.")]
AllowUnverified = Annotated[str, typer.Option(help="Steps that may end as 'not run here', with commas.")]
KeepGoing = Annotated[bool, typer.Option("--keep-going", help="Do not stop at the first step that fails or drifts.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only what went wrong.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="The details of agreeing outputs too.")]
Json = Annotated[bool, typer.Option("--json", help="The outcomes as JSON on standard output.")]
Method = Annotated[str, typer.Option(help="trace or script.")]
Fp16 = Annotated[bool, typer.Option("--fp16", help="Half precision, with float32 where the measured range needs it.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="bfloat16.")]
Int8 = Annotated[bool, typer.Option("--int8", help="8-bit integers, as many as the tolerance allows.")]
Int4 = Annotated[bool, typer.Option("--int4", help="4-bit weights, as many as the tolerance allows.")]
Int8Method = Annotated[
    str | None,
    typer.Option(
        "--method", help="int8 by static, weight-only or dynamic; else the fastest in tolerance.", show_default=False
    ),
]
Optimize = Annotated[
    str | None, typer.Option(help="Fused for ONNX Runtime on cpu or cuda (onnx-optimized).", show_default=False)
]
SearchBudget = Annotated[float, typer.Option(help="Seconds that the search for precision may take.")]
Recipe = Annotated[
    Path | None, typer.Option(help="A recipe.json of an earlier run: the same again, nothing is chosen anew.")
]
Clamped = Annotated[
    bool, typer.Option("--accept-clamped", help="Accept constants that the lower precision cannot hold.")
]
Opset = Annotated[int | None, typer.Option(help="ONNX opset (20).")]
Runtime = Annotated[
    str | None, typer.Option(help="tensorrt or tensorrt-rtx; else the one installed that fits the GPU.")
]
Minimum = Annotated[str | None, typer.Option("--min", help="Smallest shape of the profile: 1x1 (batch x sequence).")]
Optimum = Annotated[str | None, typer.Option("--opt", help="Shape to optimise for: 8x128.")]
Maximum = Annotated[str | None, typer.Option("--max", help="Largest shape: 32x512.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens that an engine can write after the longest prompt (the checkpoint's own, or 256)."
    ),
]
Tf32 = Annotated[
    bool, typer.Option("--tf32/--no-tf32", help="Let float32 products round their inputs (faster, less exact).")
]
Workspace = Annotated[int | None, typer.Option(min=1, help="MiB of scratch memory for the builder.")]
Hardware = Annotated[
    bool, typer.Option("--hardware-compatibility", help="An engine for other GPUs too (tensorrt only).")
]
TimingCache = Annotated[Path | None, typer.Option(help="File of measured kernels to reuse (tensorrt only).")]
Capability = Annotated[list[str] | None, typer.Option(help="Build for this compute capability only, such as 8.9.")]


def options(
    columns: str = "", tolerance: Sequence[str] | None = None, golden_budget: int | None = None, **given: Any
) -> Options:
    from nlpconvert.pipeline import Options

    if any(not text.strip() for text in tolerance or ()):
        raise UsageError('--tolerance is empty; write for example "cosine>=0.995", or leave it out')
    if golden_budget is not None:
        given["golden_budget"] = golden_budget * 2**20
    if "max_memory" in given:
        given["max_memory"] = max(int(given["max_memory"] * 10**9), 1)
    return Options(columns=columns, tolerance=",".join(tolerance or ()), **given)


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def tell(
    terminal: Terminal,
    outcomes: Sequence[Outcome],
    out: Path | str,
    forgiven: Sequence[str],
    verbose: bool,
    to_stdout: bool,
) -> None:
    """The verdicts and the table; with --json the person's half goes to standard error."""
    from nlpconvert import report

    stream = sys.stdout if to_stdout else sys.stderr
    said = out if isinstance(out, str) else shlex.quote(str(out))
    for outcome in outcomes:
        # The table says why a step was not run; without it, a line does.
        untold = terminal.quiet and outcome.status == "not run" and outcome.step not in forgiven
        asked = outcome.verdict is not None and bool({"proof", "scores"} & set(outcome.verdict)) and not terminal.quiet
        if outcome.status in ("drift", "failed") or untold or asked or (verbose and not terminal.quiet):
            for line in report.verdict_lines(outcome, out=said, verbose=verbose):
                print(line, file=stream)
            print(file=stream)
    for outcome in outcomes if terminal.quiet else ():
        # What makes a gate on labelled rows worth less than it looks is said even so.
        for warning in ((outcome.verdict or {}).get("scores") or {}).get("warnings", ()):
            print(f"{outcome.step}: {warning}", file=sys.stderr)
    if not terminal.quiet:
        for outcome in outcomes:
            if outcome.status == "agrees" and not verbose:
                for line in report.warnings(outcome):
                    print(line, file=stream)
        table(stream, report.HEADER, report.table_rows(outcomes))
