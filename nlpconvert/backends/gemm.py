"""Floor 2: how fast this machine multiplies matrices through ONNX Runtime: the limit that a transformer cannot pass."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

SIDE = 1024
"""Rows, columns and inner size of the products: large enough that nothing but arithmetic counts, and still in cache."""


def rates(threads: int | None = None, seconds: float = 1.0) -> Mapping[str, float]:
    """Operations a second (two for each multiplication and addition) of "float32" and "int8" products of a constant
    weight, the best of passes for `seconds` each, in turns."""
    sessions = {"float32": _session("float32", threads), "int8": _session("int8", threads)}
    rng = np.random.default_rng(0)
    inputs = {
        "float32": rng.standard_normal((SIDE, SIDE), np.float32),
        "int8": rng.integers(0, 256, (SIDE, SIDE)).astype(np.uint8),
    }
    best = {name: float("inf") for name in sessions}
    for session, name in ((sessions[name], name) for name in sessions):
        session.run(None, {"x": inputs[name]})
    began = time.perf_counter()
    while time.perf_counter() - began < seconds * len(sessions):
        for name, session in sessions.items():
            time.sleep(0.005)
            for _ in range(3):
                start = time.perf_counter()
                session.run(None, {"x": inputs[name]})
                best[name] = min(best[name], time.perf_counter() - start)
    return {name: 2 * SIDE**3 / taken for name, taken in best.items()}


def _session(kind: str, threads: int | None) -> onnxruntime.InferenceSession:
    weight = np.random.default_rng(1).standard_normal((SIDE, SIDE), np.float32)
    if kind == "int8":
        node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
        kept: np.ndarray = np.clip(weight * 30, -64, 63).astype(np.int8)
        given, out = TensorProto.UINT8, TensorProto.INT32
    else:
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        kept, given, out = weight, TensorProto.FLOAT, TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", given, [SIDE, SIDE])],
        [helper.make_tensor_value_info("y", out, [SIDE, SIDE])],
        [numpy_helper.from_array(kept, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(
        onnx.ModelProto.SerializeToString(model), options, providers=["CPUExecutionProvider"]
    )
