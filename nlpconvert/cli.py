"""Floor 5: the command line: a thin coat over `pipeline`. Signatures, help and exit codes; nothing is decided here.

Typer and rich stand at the top; everything else is imported by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nlpconvert import (
    __version__,
    bench_command,
    gate,
    generate_command,
    memory,
    recover_command,
    train_command,
    triton_command,
)
from nlpconvert.errors import EXIT_CODES, NlpconvertError, UsageError
from nlpconvert.options import (
    AllowUnverified,
    Bf16,
    Budget,
    Capability,
    Clamped,
    Columns,
    Data,
    Device,
    Force,
    Fp16,
    Hardware,
    Int4,
    Int8,
    Int8Method,
    Json,
    KeepGoing,
    Maximum,
    MaxMemory,
    MaxNewTokens,
    Method,
    Minimum,
    MissingWeights,
    Model,
    Opset,
    Optimize,
    Optimum,
    Out,
    Provider,
    Quiet,
    Recipe,
    RemoteCode,
    Revision,
    Runtime,
    SearchBudget,
    Task,
    Tf32,
    Threads,
    TimingCache,
    Tolerance,
    Verbose,
    Workspace,
    names,
    options,
    tell,
)
from nlpconvert.terminal import Stop, Terminal, open_streams

# Typer carries a click of its own; the base of its errors is reached through one that it shows.
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

INTERRUPTED = 130  # what Typer makes of Ctrl-C

# Threads that spin while they wait take the cores from whatever else runs: on a busy machine PyTorch's passes cost four
# times as much. numpy only adds up here, which one thread does as fast. Read when a library is loaded; a user's own
# stay.
PATIENT_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}

# Options that say by themselves what an empty text lacks.
OWN_WORDS = (["--tolerance"], ["--fail-if"])

EPILOG = "Exit codes: " + "; ".join(f"{row.code} {row.meaning}" for row in EXIT_CODES) + "."

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Convert a Hugging Face transformer, and after each step measure how far the answers moved from PyTorch.",
)

_PRECISIONS = ("fp16", "bf16", "int8", "int4")


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
    max_new_tokens: MaxNewTokens = None,
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
    _line(model, out, names(to) if to is not None else None, given, allow_unverified, quiet, verbose, json)


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
    max_new_tokens: MaxNewTokens = None,
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


GATE = (gate.verify, gate.locate, gate.diff)
TRAINING = (train_command.train, recover_command.recover)
for command in (*GATE, generate_command.generate, bench_command.bench, *TRAINING, triton_command.triton):
    app.command(epilog=EPILOG)(command)


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
    from nlpconvert import documents, pipeline

    chosen = pipeline.read_settings()
    forgiven = pipeline.forgivable([*names(allow_unverified), *chosen.allow_unverified])
    given["threads"] = given.get("threads") or chosen.threads
    if given.get("provider") == "cpu" and chosen.provider:
        given["provider"] = chosen.provider
    with Terminal(quiet) as terminal:
        outcomes = pipeline.run(model, out, to=to, options=options(**given), progress=terminal, settings=chosen)
        terminal.stop()
        if json:
            print(documents.to_json(outcomes), end="")
        tell(terminal, outcomes, out, forgiven, verbose, to_stdout=not json)
    raise typer.Exit(pipeline.exit_code(outcomes, forgiven))


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
    empty = [n for n, word in enumerate(arguments) if not word and arguments[n - 1 : n] not in OWN_WORDS]
    if empty:
        before = arguments[empty[0] - 1] if empty[0] else "the program's name"
        return _told(f"an argument is empty (after {before}): is a variable not set?", UsageError.exit_code)
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
