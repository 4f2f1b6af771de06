"""Benchmarks: peak memory of localisation, against the model and between two ONNX files, against the bytes of the
weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from measure import HERE, Result, Row, Settings, child, seconds

TITLE = "Localisation"
TARGET = 1.5

# With random weights and unscaled attention PyTorch's own float32 differs from its float64 by 3e-4.
TOLERANCE = "rel<=1e-3"

AGAINST_MODEL = """
import sys
from nlpconvert import locating, plan
found = locating.locate(sys.argv[1], "onnx", model=sys.argv[2], options=plan.Options(threads=int(sys.argv[3]) or None))
"""
BETWEEN = """
import sys
from dataclasses import replace
from pathlib import Path
from nlpconvert import judging, locating, manifest, plan
out = Path(sys.argv[1])
record = manifest.read(out)
mine = record.artifact("onnx", out)
other = replace(mine, step="copy", path=Path(sys.argv[2]) / mine.path.name)
cases = locating.choose(judging.stored_probes(record, out).cases, None)
found = locating.between(mine, other, cases, options=plan.Options(threads=int(sys.argv[3]) or None))
"""
REPORT = """
import json
print(json.dumps({"tensors": len(found.modules), "first": found.first, "cases": list(found.cases),
                  "noise": max(each.introduced for each in found.modules)}))
"""


def measure(settings: Settings) -> Result:
    """Makes a random GPT-Neo in the scratch directory, converts it once, and locates in the unbroken file."""
    checkpoint, out = settings.scratch / "gpt-neo", settings.scratch / "gpt-neo-converted"
    made = child([HERE / "make_gpt_neo.py", checkpoint, str(settings.parameters)], threads=settings.threads).data()
    own: list[str | Path] = [] if settings.threads is None else ["--threads", str(settings.threads)]
    child(
        ["-m", "nlpconvert", "onnx", checkpoint, "-o", out, "-q", "--tolerance", TOLERANCE, *own],
        threads=settings.threads,
    )
    copy = shutil.copytree(out / "onnx", settings.scratch / "copy")
    weights, threads = made["weights"], str(settings.threads or 0)
    rows, notes = [], []
    for what, script, other in (
        ("the model in PyTorch", AGAINST_MODEL, checkpoint),
        ("another ONNX file", BETWEEN, copy),
    ):
        sample = child(["-c", script + REPORT, out, other, threads], threads=settings.threads)
        rows.append(
            Row(
                f"peak against {what} / bytes of the weights",
                f"{sample.peak / 1e9:.2f} GB",
                f"{weights / 1e9:.2f} GB",
                sample.peak / weights,
                TARGET,
            )
        )
        found = sample.data()
        notes.append(
            f"Against {what}: {seconds(sample.wall, sample.cpu)}, {found['tensors']} tensors, none of which introduced "
            f"more than {found['noise']:.1e} of its size."
        )
    parameters = f"GPT-Neo of {made['parameters']:,} random parameters in float32 ({made['words']}), unbroken."
    return Result(tuple(rows), (" ".join([parameters, *notes]),))
