"""Benchmarks: where the time of one `nlpconvert` command goes.

    phases.py onnx MODEL -o OUT ...        the arguments of the command line

Runs the command in this process with a clock around the functions named in PHASES, and prints, as the last line, a
JSON list of [depth, words, seconds, seconds of processor, calls], in the order in which they first began.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Spent:
    """What a phase has taken so far; `first` is when it first began."""

    first: float
    depth: int
    wall: float = 0.0
    cpu: float = 0.0
    calls: int = 0


# (words, module, object in it): functions, and methods with a dot. Those inside others are shown below them.
PHASES: tuple[tuple[str, str, str], ...] = (
    ("load", "nlpconvert.source", "load"),
    ("prove the weights", "nlpconvert.weights", "compare"),
    ("reference", "nlpconvert.reference", "ask"),
    ("convert", "nlpconvert.convert.onnx", "convert"),
    ("trace (torch.export)", "torch.export", "export"),
    ("to ONNX (torch.onnx)", "torch.onnx", "export"),
    ("decompose", "torch.onnx._internal.exporter._core", "_prepare_exported_program_for_export"),
    ("translate", "torch.onnx._internal.exporter._core", "_exported_program_to_onnx_program"),
    ("optimise", "torch.onnx._internal.exporter._onnx_program", "ONNXProgram.optimize"),
    ("put in order", "nlpconvert.convert.onnx_graph", "share_weights"),
    ("save", "nlpconvert.convert.onnx_graph", "save"),
    ("let go of the graph", "nlpconvert.convert.onnx", "forget_last_graph"),
    ("free the model", "nlpconvert.line", "Line._make_room"),
    ("hash", "nlpconvert.disk", "sha256_file"),
    ("open the candidate", "nlpconvert.runtimes", "open_artifact"),
    ("judge", "nlpconvert.judging", "judge"),
    ("passes", "nlpconvert.backends.onnxruntime", "OnnxSession.run"),
)
IMPORTS = ("torch", "transformers", "nlpconvert.source", "nlpconvert.convert.onnx", "nlpconvert.backends.onnxruntime")

_found: dict[str, Spent] = {}
_depth = 0


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def clock(words: str) -> Iterator[None]:
    """Adds what happens inside to the phase of that name."""
    global _depth
    wall, cpu = time.perf_counter(), _processor()
    spent = _found.setdefault(words, Spent(wall, _depth))
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        spent.wall += time.perf_counter() - wall
        spent.cpu += _processor() - cpu
        spent.calls += 1


def clocked(words: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a clock around it."""

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with clock(words):
            return function(*arguments, **keywords)

    return run


def put_clocks() -> None:
    """Replaces every function of PHASES by a clocked one."""
    for words, module, name in PHASES:
        holder: Any = importlib.import_module(module)
        *above, last = name.split(".")
        for part in above:
            holder = getattr(holder, part)
        setattr(holder, last, clocked(words, getattr(holder, last)))


def main(arguments: list[str]) -> int:
    """Runs the command, prints the phases; the command's own exit code."""
    with clock("command line"):
        from nlpconvert import cli
    # As the command sets them before anything is imported: the libraries read them when they are loaded.
    os.environ.update({name: value for name, value in cli.PATIENT_THREADS.items() if name not in os.environ})
    with clock("imports"):
        for name in IMPORTS:
            with clock(f"import {name}"):
                importlib.import_module(name)
    put_clocks()
    code = 0
    # What the command says is not what is asked for here.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            cli.main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    phases = sorted(_found.items(), key=lambda item: item[1].first)
    print(json.dumps([[spent.depth, words, spent.wall, spent.cpu, spent.calls] for words, spent in phases]))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
