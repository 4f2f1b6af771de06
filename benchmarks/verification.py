"""Benchmarks: `nlpconvert verify` against ONNX Runtime's bare forward passes of the same inputs."""

from __future__ import annotations

import statistics
from pathlib import Path

from measure import HERE, Result, Row, Settings, child, in_turns, row, seconds, wall

TITLE = "Verification"
START = """
import onnx, typer._adapters
import nlpconvert.cli, nlpconvert.verifying, nlpconvert.backends.onnxruntime
"""
"""What `verify` imports before it can begin; typer brings its adapters when a command is parsed."""


def measure(settings: Settings) -> Result:
    """Converts once, then verifies and passes in turns."""
    threads, out = settings.threads, settings.scratch / "verified"
    own: list[str | Path] = [] if threads is None else ["--threads", str(threads)]
    child(["-m", "nlpconvert", "onnx", settings.model, "-o", out, "-q", *own], threads=threads)
    bare: list[str | Path] = [HERE / "bare_forward.py", out, *([] if threads is None else [str(threads)])]
    found = in_turns(
        {
            "verify": lambda: child(["-m", "nlpconvert", "verify", out, "--step", "onnx", "-q", *own], threads=threads),
            "bare": lambda: child(bare, threads=threads),
            "start": lambda: child(["-c", START]),
        },
        settings.times(7),
    )
    parts = [sample.data() for sample in found["bare"]]
    passes, opening, imports = (
        statistics.median(part[name] for part in parts) for name in ("passes", "open", "imports")
    )
    starting = wall(found["start"]) + opening
    whole = wall(found["verify"])
    return Result(
        (
            row("`nlpconvert verify` / bare script over ONNX Runtime", found["verify"], found["bare"]),
            Row(
                "`nlpconvert verify` / its start-up and the passes",
                seconds(whole),
                seconds(starting + passes),
                whole / (starting + passes),
                target=1.15,
            ),
            Row(
                "verify without its start-up / the passes",
                seconds(whole - starting),
                seconds(passes),
                (whole - starting) / passes,
                target=1.15,
            ),
        ),
        (
            f"{parts[0]['cases']} cases. Start-up is the imports, {wall(found['start']):.2f} s (the bare script's "
            f"{imports:.2f} s), and opening the session, {opening:.2f} s. Verify also hashes every file, runs one case "
            "twice and judges every element.",
        ),
    )
