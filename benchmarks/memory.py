"""Benchmarks: peak memory of `nlpconvert onnx`, verification included, against the bytes of the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from measure import HERE, Result, Row, Settings, child, seconds

TITLE = "Peak memory"
TARGET = 1.3

# With random weights and unscaled attention PyTorch's own float32 differs from its float64 by 3e-4.
TOLERANCE = "rel<=1e-3"


def measure(settings: Settings) -> Result:
    """Makes a random GPT-Neo in the scratch directory and converts it once."""
    checkpoint, out = settings.scratch / "gpt-neo", settings.scratch / "gpt-neo-converted"
    made = child([HERE / "make_gpt_neo.py", checkpoint, str(settings.parameters)], threads=settings.threads).data()
    own: list[str | Path] = [] if settings.threads is None else ["--threads", str(settings.threads)]
    command: list[str | Path] = [
        "-m",
        "nlpconvert",
        "onnx",
        checkpoint,
        "-o",
        out,
        "-q",
        "--tolerance",
        TOLERANCE,
        *own,
    ]
    alone = child([HERE / "our_export.py", checkpoint, settings.scratch / "exported"], threads=settings.threads)
    shutil.rmtree(settings.scratch / "exported")
    ours = child(command, threads=settings.threads)
    weights, started = made["weights"], child(["-c", f"import {IMPORTED}"]).peak
    ratio = ours.peak / weights
    return Result(
        (
            Row(
                "peak of load, export with the cache and save / bytes of the weights",
                _gigabytes(alone.peak),
                _gigabytes(weights),
                alone.peak / weights,
                TARGET,
            ),
            Row("peak / bytes of the weights", _gigabytes(ours.peak), _gigabytes(weights), ratio, TARGET),
            Row(
                "peak without the libraries / bytes of the weights",
                _gigabytes(ours.peak - started),
                _gigabytes(weights),
                (ours.peak - started) / weights,
            ),
        ),
        (
            f"GPT-Neo of {made['parameters']:,} random parameters in float32 ({made['words']}), reference and verdict "
            f"included, one run of {seconds(ours.wall, ours.cpu)}. The libraries alone, imported, hold "
            f"{_gigabytes(started)}.",
        ),
    )


IMPORTED = "nlpconvert.source, nlpconvert.convert.onnx, nlpconvert.backends.onnxruntime"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
