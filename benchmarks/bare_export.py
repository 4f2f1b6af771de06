"""Benchmarks: what a person writes without nlpconvert: load a model, export it, save it. No check of any kind.

bare_export.py MODEL OUT
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter  # type: ignore[attr-defined]

directory, out = sys.argv[1:]
model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(directory)
inputs = dict(tokenizer(["hello world", "a longer sentence for the example"], padding=True, return_tensors="pt"))
with torch.no_grad():
    exported = OnnxExporter().export(model, inputs, OnnxConfig(dynamic=True))  # type: ignore[no-untyped-call]
exported.save_pretrained(out)
