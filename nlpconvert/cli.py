"""Floor 5: the command line: a thin coat over `pipeline`. Signatures, help and exit codes; nothing is decided here.

Typer and rich stand at the top; everything else is imported by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlpconvert import __version__, memory
from nlpconvert.errors import EXIT_CODES, NlpconvertError, UsageError
from nlpconvert.terminal import Stop, Terminal, open_streams, table

if TYPE_CHECKING:
    from nlpconvert.artifact import Outcome
    from nlpconvert.pipeline import Options

# Typer carries a click of its own; the base of its errors is reached through one that it shows.
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

INTERRUPTED = 130  # what Typer makes of Ctrl-C

# Threads that spin while they wait take the cores from whatever else runs: on a busy machine PyTorch's passes cost four
# times as much. numpy only adds up here, which one thread does as fast. Read when a library is loaded; a user's own
# stay.
PATIENT_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}

EPILOG = "Exit codes: " + "; ".join(f"{row.code} {row.meaning}" for row in EXIT_CODES) + "."

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Convert a Hugging Face transformer, and after each step measure how far the answers moved from PyTorch.",
)

# ---- options that several commands share ---------------------------------------------------------------------------

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
Tf32 = Annotated[
    bool, typer.Option("--tf32/--no-tf32", help="Let float32 products round their inputs (faster, less exact).")
]
Workspace = Annotated[int | None, typer.Option(min=1, help="MiB of scratch memory for the builder.")]
Hardware = Annotated[
    bool, typer.Option("--hardware-compatibility", help="An engine for other GPUs too (tensorrt only).")
]
TimingCache = Annotated[Path | None, typer.Option(help="File of measured kernels to reuse (tensorrt only).")]
Capability = Annotated[list[str] | None, typer.Option(help="Build for this compute capability only, such as 8.9.")]


_PRECISIONS = ("fp16", "bf16", "int8", "int4")


def _options(
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


# ---- commands ------------------------------------------------------------------------------------------------------


@app.command(epilog=EPILOG)
def run(
    model: Model,
    out: Out,
    to: Annotated[
        str | None, typer.Option(help="Steps with commas: torchscript,onnx,onnx-int8. Parents are made too.")
    ] = None,
    task: Task = None,
    revision: Revision = None,
    device: Device = "cpu",
    provider: Provider = "cpu",
    threads: Threads = None,
    data: Data = None,
    columns: Columns = "",
    tolerance: Tolerance = None,
    golden_budget: Budget = 32,
    max_memory: MaxMemory = 4.0,
    allow_missing_weights: MissingWeights = False,
    trust_remote_code: RemoteCode = False,
    method: Method = "trace",
    opset: Opset = None,
    optimize: Annotated[str, typer.Option(help="What onnx-optimized is fused for: cpu or cuda.")] = "cpu",
    search_budget: SearchBudget = 180.0,
    recipe: Recipe = None,
    accept_clamped: Clamped = False,
    runtime: Runtime = None,
    minimum: Minimum = None,
    optimum: Optimum = None,
    maximum: Maximum = None,
    tf32: Tf32 = False,
    workspace: Workspace = None,
    keep_going: KeepGoing = False,
    allow_unverified: AllowUnverified = "",
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """The whole line: TorchScript, ONNX and a TensorRT engine, each judged before the next."""
    given = _given(locals(), "model", "out", "to", "allow_unverified", "quiet", "verbose", "json")
    _line(model, out, _names(to) if to is not None else None, given, allow_unverified, quiet, verbose, json)


@app.command(epilog=EPILOG)
def torchscript(
    model: Model,
    out: Out,
    method: Method = "trace",
    task: Task = None,
    revision: Revision = None,
    device: Device = "cpu",
    threads: Threads = None,
    data: Data = None,
    columns: Columns = "",
    tolerance: Tolerance = None,
    golden_budget: Budget = 32,
    max_memory: MaxMemory = 4.0,
    allow_missing_weights: MissingWeights = False,
    trust_remote_code: RemoteCode = False,
    allow_unverified: AllowUnverified = "",
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """A traced TorchScript file, judged."""
    given = _given(locals(), "model", "out", "allow_unverified", "quiet", "verbose", "json")
    _line(model, out, ["torchscript"], given, allow_unverified, quiet, verbose, json)


@app.command(epilog=EPILOG)
def onnx(
    model: Model,
    out: Out,
    fp16: Fp16 = False,
    bf16: Bf16 = False,
    int8: Int8 = False,
    int4: Int4 = False,
    optimize: Optimize = None,
    method: Int8Method = None,
    search_budget: SearchBudget = 180.0,
    recipe: Recipe = None,
    accept_clamped: Clamped = False,
    opset: Opset = None,
    task: Task = None,
    revision: Revision = None,
    device: Device = "cpu",
    provider: Provider = "cpu",
    threads: Threads = None,
    data: Data = None,
    columns: Columns = "",
    tolerance: Tolerance = None,
    golden_budget: Budget = 32,
    max_memory: MaxMemory = 4.0,
    allow_missing_weights: MissingWeights = False,
    trust_remote_code: RemoteCode = False,
    allow_unverified: AllowUnverified = "",
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """An ONNX model with its tokenizer beside it, fused or in lower precision where that is asked for; judged."""
    given = _given(
        locals(), *"model out allow_unverified quiet verbose json".split(), *_PRECISIONS, "optimize", "method"
    )
    asked = {"optimized": optimize is not None, "fp16": fp16, "bf16": bf16, "int8": int8, "int4": int4}
    steps = [f"onnx-{name}" for name, is_asked in asked.items() if is_asked] or ["onnx"]
    if method is not None and not int8:
        raise UsageError("--method chooses how --int8 is made, and --int8 is not asked for")
    given |= {"int8_method": method} | ({"optimize": optimize} if optimize is not None else {})
    _line(model, out, steps, given, allow_unverified, quiet, verbose, json)


@app.command(epilog=EPILOG)
def trt(
    model: Model,
    out: Out,
    fp16: Fp16 = False,
    bf16: Bf16 = False,
    int8: Int8 = False,
    search_budget: SearchBudget = 180.0,
    recipe: Recipe = None,
    accept_clamped: Clamped = False,
    runtime: Runtime = None,
    minimum: Minimum = None,
    optimum: Optimum = None,
    maximum: Maximum = None,
    tf32: Tf32 = False,
    workspace: Workspace = None,
    hardware_compatibility: Hardware = False,
    timing_cache: TimingCache = None,
    compute_capability: Capability = None,
    opset: Opset = None,
    task: Task = None,
    revision: Revision = None,
    device: Device = "cpu",
    provider: Provider = "cpu",
    threads: Threads = None,
    data: Data = None,
    columns: Columns = "",
    tolerance: Tolerance = None,
    golden_budget: Budget = 32,
    max_memory: MaxMemory = 4.0,
    allow_missing_weights: MissingWeights = False,
    trust_remote_code: RemoteCode = False,
    allow_unverified: AllowUnverified = "",
    force: Force = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """A strongly typed TensorRT engine (and the ONNX model it is built from), judged where a GPU is."""
    given = _given(locals(), *"model out compute_capability allow_unverified quiet verbose json".split(), *_PRECISIONS)
    given["compute_capabilities"] = tuple(compute_capability) if compute_capability else None
    asked = {"fp16": fp16, "bf16": bf16, "int8": int8}
    steps = [f"trt-{name}" for name, is_asked in asked.items() if is_asked] or ["trt"]
    _line(model, out, steps, given, allow_unverified, quiet, verbose, json)


@app.command(epilog=EPILOG)
def verify(
    out: OutArgument,
    step: Annotated[list[str] | None, typer.Option(help="Only this step.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this probe case.")] = None,
    tolerance: Tolerance = None,
    device: Device = "cpu",
    provider: Provider = "cpu",
    threads: Threads = None,
    allow_unverified: AllowUnverified = "",
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write JSON here; - is standard output.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Judge again what lies in OUT, on this machine; needs neither torch nor the model. Writes nothing into OUT."""
    from nlpconvert import pipeline

    options = _options(tolerance=tolerance, device=device, provider=provider, threads=threads)
    forgiven = pipeline.forgivable(_names(allow_unverified))
    with Terminal(quiet) as terminal:
        outcomes = pipeline.verify(out, steps=step, cases=case, options=options, progress=terminal)
        terminal.stop()
        _documents(outcomes, out, junit, json)
        _report(terminal, outcomes, out, forgiven, verbose, to_stdout=json is None or str(json) != "-")
    raise typer.Exit(pipeline.exit_code(outcomes, forgiven))


@app.command(epilog=EPILOG)
def doctor(json: Json = False) -> None:
    """What this machine can make and run, and which extra is missing."""
    from nlpconvert import doctor as rooms

    facts, findings = rooms.machine(), rooms.findings()
    if json:
        import dataclasses
        import json as format_json

        print(format_json.dumps({**facts, "steps": [dataclasses.asdict(row) for row in findings]}, indent=2))
        return
    from nlpconvert import report

    for line in report.doctor_lines(facts, [(row.step, row.make, row.run) for row in findings]):
        print(line)


# ---- what the commands have in common ------------------------------------------------------------------------------


def _given(arguments: dict[str, Any], *others: str) -> dict[str, Any]:
    """A command's arguments without those that are not options of the pipeline."""
    return {name: value for name, value in arguments.items() if name not in others}


def _line(
    model: str,
    out: Path,
    to: Sequence[str] | None,
    given: dict[str, Any],
    allow_unverified: str,
    quiet: bool,
    verbose: bool,
    json: bool,
) -> None:
    from nlpconvert import pipeline, report

    forgiven = pipeline.forgivable(_names(allow_unverified))
    with Terminal(quiet) as terminal:
        outcomes = pipeline.run(model, out, to=to, options=_options(**given), progress=terminal)
        terminal.stop()
        if json:
            print(report.to_json(outcomes), end="")
        _report(terminal, outcomes, out, forgiven, verbose, to_stdout=not json)
    raise typer.Exit(pipeline.exit_code(outcomes, forgiven))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _documents(outcomes: Sequence[Outcome], out: Path, junit: Path | None, json: Path | None) -> None:
    from nlpconvert import disk, report

    if junit is not None:
        disk.write_text_atomic(junit, report.junit(outcomes, out=shlex.quote(str(out))))
    if json is not None and str(json) == "-":
        print(report.to_json(outcomes), end="")
    elif json is not None:
        disk.write_text_atomic(json, report.to_json(outcomes))


def _report(
    terminal: Terminal,
    outcomes: Sequence[Outcome],
    out: Path,
    forgiven: Sequence[str],
    verbose: bool,
    to_stdout: bool,
) -> None:
    """The verdicts and the table; with --json the person's half goes to standard error."""
    from nlpconvert import report

    stream = sys.stdout if to_stdout else sys.stderr
    for outcome in outcomes:
        # The table says why a step was not run; without it, a line does.
        untold = terminal.quiet and outcome.status == "not run" and outcome.step not in forgiven
        if outcome.status in ("drift", "failed") or untold or (verbose and not terminal.quiet):
            for line in report.verdict_lines(outcome, out=shlex.quote(str(out)), verbose=verbose):
                print(line, file=stream)
            print(file=stream)
    if not terminal.quiet:
        for outcome in outcomes:
            if outcome.status == "agrees" and not verbose:
                for line in report.warnings(outcome):
                    print(line, file=stream)
        table(stream, report.HEADER, report.table_rows(outcomes))


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: every error is one line and an exit code."""
    memory.leave_quickly()
    os.environ.update({name: value for name, value in PATIENT_THREADS.items() if name not in os.environ})
    open_streams()
    code = _main(arguments)
    if code == INTERRUPTED:
        # Python ends itself by the signal where that came during an exec(): 130 is what was promised.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _main(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    verbose = bool({"-v", "--verbose"} & set(arguments))
    Terminal.stop_asked = Stop()
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="nlpconvert")
        sys.stdout.flush()
    except NlpconvertError as error:
        return _told(str(error), error.exit_code, error.detail if verbose else "")
    except ClickException as error:
        return _told(error.format_message(), UsageError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        # Whoever read our output has gone (`| head`). Click would exit with 1, which means "drift" here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except OSError as error:
        return _told(str(error), UsageError.exit_code, traceback.format_exc() if verbose else "")
    except Exception:
        # Python's own exit code for this is 1, which a CI job would read as "drift".
        traceback.print_exc()
        return _told("this is a fault of nlpconvert itself, not of the model; please report it", 3)
    if code == INTERRUPTED:
        return _told("interrupted; what was finished before is whole, nothing half-made is left", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _told(line: str, code: int, detail: str = "") -> int:
    print(f"nlpconvert: {line}", file=sys.stderr)
    if detail:
        print(detail.rstrip(), file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"nlpconvert {__version__}")
        raise typer.Exit
