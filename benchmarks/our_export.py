"""Benchmarks: nlpconvert's conversion by itself: load (weights proven), convert and save, without reference or verdict.

our_export.py MODEL OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from nlpconvert import memory

memory.leave_quickly()
directory, out = sys.argv[1], Path(sys.argv[2])
out.mkdir(parents=True)
with memory.uncollected():  # as pipeline.run has it
    from nlpconvert import probes, source
    from nlpconvert.convert import onnx

    loaded = source.load(directory)
    example = probes.export_example(loaded.facts, loaded.encode)
    onnx.convert(
        loaded.module,
        example,
        loaded.facts,
        out,
        companions=loaded.directory,
        parameter_bytes=loaded.parameter_bytes,
    )
