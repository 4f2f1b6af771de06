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
    from nlpconvert import models, probes, source
    from nlpconvert.convert import cached, onnx

    loaded = source.load(directory)
    beside = {"companions": loaded.directory, "parameter_bytes": loaded.parameter_bytes}
    if loaded.facts.task in models.WRITING:  # a decoder, with its cache
        cached.convert(loaded.module, loaded.facts, out, **beside)
    else:
        example = probes.export_example(loaded.facts, loaded.encode)
        onnx.convert(loaded.module, example, loaded.facts, out, **beside)
