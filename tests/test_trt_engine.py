"""What stays on the GPU between two calls of an engine; the host's memory plays the GPU's."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


class Memory:
    """The CUDA runtime's memory functions, on the host."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}

    def malloc(self, size: int) -> int:
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, pointer: int) -> None:
        self.blocks.pop(pointer, None)

    def memcpy(self, dst: int, src: int, nbytes: int, kind: Any, stream_ptr: Any = None) -> None:
        ctypes.memmove(dst, src, nbytes)


class Summing:
    """A runner as polygraphy's: `present` is `past` with one more, in memory that it uses again at every call."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.profiles: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.context = SimpleNamespace(set_input_shape=lambda name, shape: self.shapes.append(shape))

    def activate(self) -> None:
        from polygraphy import cuda

        self.output = cuda.DeviceArray((64,), engine_type())

    def set_profile(self, index: int) -> None:
        self.profiles.append(index)

    def infer(self, feed: Mapping[str, Any], copy_outputs_to_host: bool = True) -> dict[str, Any]:
        given = feed["past"]
        past = given if isinstance(given, np.ndarray) else given.numpy()
        present = np.concatenate([past, [np.float32(past.sum() + 1)]]).astype(np.float32)
        self.output.resize(present.shape)
        self.output.copy_from(present)
        return {"present": present if copy_outputs_to_host else self.output.view()}

    def deactivate(self) -> None:
        self.output.free()


def engine_type() -> Any:
    from polygraphy.datatype import DataType

    return DataType.FLOAT32


@pytest.fixture
def trt_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module on a played GPU, imported anew."""
    monkeypatch.setenv("POLYGRAPHY_USE_TENSORRT_RTX", "1")
    for name in [name for name in sys.modules if name.split(".")[0] == "polygraphy" or name.endswith(".trt_engine")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("nlpconvert.backends.trt_engine")
    from polygraphy.cuda import cuda

    monkeypatch.setattr(cuda, "G_CUDA", Memory())
    engine = SimpleNamespace(
        num_optimization_profiles=2,
        num_io_tensors=2,
        get_tensor_name=("past", "present").__getitem__,
        get_tensor_mode=lambda name: getattr(module.trt.TensorIOMode, "INPUT" if name == "past" else "OUTPUT"),
        get_tensor_dtype=lambda name: module.trt.DataType.FLOAT,
    )
    monkeypatch.setattr(module, "engine_from_bytes", lambda content: engine)
    monkeypatch.setattr(module, "TrtRunner", Summing)
    return module


def test_what_is_kept_stays_as_it_was(trt_engine: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model.engine").write_bytes(b"")
    engine = trt_engine.Loaded(tmp_path / "model.engine")
    memory = sys.modules["polygraphy.cuda.cuda"].G_CUDA
    assert engine.profiles == 2 and engine.dtypes == {"past": np.dtype("float32")}
    first = engine.infer({"past": np.ones(2, np.float32)}, 1, keep=("present",))["present"]
    second = engine.infer({"past": first}, 1, keep=("present",))["present"]
    third = engine.infer({"past": second}, 0)["present"]
    assert engine._runner.profiles == [1, 0] and engine._runner.shapes == [(2,), (4,)]  # set only where it changes
    assert first.numpy().tolist() == [1, 1, 3] and second.shape == (4,)
    assert second.numpy().tolist() == [1, 1, 3, 6] and third.tolist() == [1, 1, 3, 6, 12]
    blocks = len(memory.blocks)
    for _ in range(20):  # memory that nobody speaks of any more is used again
        second = engine.infer({"past": second}, 1, keep=("present",))["present"]
    assert len(memory.blocks) < blocks + 8
    engine.close()
    assert memory.blocks == {}
