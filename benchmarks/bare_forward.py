"""Benchmarks: ONNX Runtime's forward passes of an OUT's probe inputs, and nothing else.

    bare_forward.py OUT [THREADS]

Prints, as JSON: seconds of the imports, of opening the session, of the passes, and how many there were.
"""

from __future__ import annotations

import sys
import time

started = time.perf_counter()
import json  # noqa: E402 (what comes now is measured)
from pathlib import Path  # noqa: E402

import onnxruntime  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

imported = time.perf_counter()
out = Path(sys.argv[1])
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
if len(sys.argv) > 2:
    options.intra_op_num_threads = int(sys.argv[2])
session = onnxruntime.InferenceSession(str(out / "onnx" / "model.onnx"), options, providers=["CPUExecutionProvider"])
names = {value.name for value in session.get_inputs()}
arrays = load_file(out / "golden" / "inputs.safetensors")
# Only the cases that the reference could answer are asked.
answered = [
    case["name"]
    for case in json.loads((out / "golden" / "golden.json").read_text(encoding="utf-8"))["cases"]
    if case["outputs"]
]
opened = time.perf_counter()
for case in answered:
    session.run(None, {name: arrays[f"{case}/{name}"] for name in names})
ended = time.perf_counter()
print(
    json.dumps(
        {
            "imports": imported - started,
            "open": opened - imported,
            "passes": ended - opened,
            "cases": len(answered),
        }
    )
)
