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
    """The model, and a random BERT of bert-base's size beside it."""
    base = settings.scratch / "bert-base"
    made = child([HERE / "make_bert.py", base, settings.model], threads=settings.threads).data()
    small, note = _measured(settings, settings.model, settings.model.parent.name.removeprefix("gt_"), settings.times(7))
    large, beside = _measured(settings, base, "bert-base", settings.times(3))
    said = (
        f"bert-base: {made['parameters']:,} random parameters. Verify also hashes every file, runs one case twice and "
    )
    return Result((*small, *large), (note, beside, said + "twice and judges every element."))


def _measured(settings: Settings, model: Path, name: str, times: int) -> tuple[tuple[Row, ...], str]:
    """Converts once, then verifies and passes in turns."""
    threads, out = settings.threads, settings.scratch / f"verified-{name}"
    own: list[str | Path] = [] if threads is None else ["--threads", str(threads)]
    child(["-m", "nlpconvert", "onnx", model, "-o", out, "-q", *own], threads=threads)
    bare: list[str | Path] = [HERE / "bare_forward.py", out, *([] if threads is None else [str(threads)])]
    found = in_turns(
        {
            "verify": lambda: child(["-m", "nlpconvert", "verify", out, "--step", "onnx", "-q", *own], threads=threads),
            "bare": lambda: child(bare, threads=threads),
            "start": lambda: child(["-c", START]),
        },
        times,
    )
    parts = [sample.data() for sample in found["bare"]]
    passes, opening, imports = (
        statistics.median(part[name] for part in parts) for name in ("passes", "open", "imports")
    )
    starting = wall(found["start"]) + opening
    whole = wall(found["verify"])
    return (
        row(f"{name}: `nlpconvert verify` / bare script over ONNX Runtime", found["verify"], found["bare"]),
        Row(
            f"{name}: `nlpconvert verify` / its start-up and the passes",
            seconds(whole),
            seconds(starting + passes),
            whole / (starting + passes),
            target=1.15,
        ),
    ), (
        f"{name}: {parts[0]['cases']} cases, their passes {passes:.2f} s. Start-up is the imports, "
        f"{wall(found['start']):.2f} s (the bare script's {imports:.2f} s), and opening the session, {opening:.2f} s."
    )
