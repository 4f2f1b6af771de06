"""Floor 2: a loaded model to TorchScript.

Traced with inputs bound by keyword and outputs by name, frozen, and rewritten without the paths of this machine.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.function import Function, FunctionCtx

from nlpconvert.artifact import Made, TensorSpec
from nlpconvert.errors import ConversionError, UsageError, first_line
from nlpconvert.models import Facts, input_axes

METHODS = ("trace", "script")


def convert(
    module: torch.nn.Module,
    example: Mapping[str, np.ndarray],
    facts: Facts,
    directory: Path,
    *,
    method: str = "trace",
) -> Made:
    """Writes `model.pt` into `directory`.

    `module`: a model whose forward takes keyword tensors and returns a dict of named tensors. `example`: int64 arrays
    by input name; its sizes do not bind the artifact. Raises ConversionError when torch cannot trace or script it.
    """
    if method not in METHODS:
        raise UsageError(f"--method {method} is not one of {', '.join(METHODS)}")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    inputs = {name: torch.from_numpy(array).to(device) for name, array in example.items()}
    if module.training:
        raise ConversionError("the model is in training mode: dropout would be baked into the trace")
    with torch.no_grad():
        compiled = _script(module) if method == "script" else _trace(module, inputs)
    # Into an open file: given a path, torch aborts the process when the disk is full.
    with (directory / "traced.pt").open("wb") as file:
        try:
            torch.jit.save(compiled, file)
        except RuntimeError as error:
            raise ConversionError(
                f"TorchScript cannot hold all of {type(module).__name__}: {first_line(error, 300)}", detail=str(error)
            ) from error
    _strip_paths(directory / "traced.pt", directory / "model.pt")
    (directory / "traced.pt").unlink()
    outputs = module(**inputs)
    return Made(
        file="model.pt",
        inputs=tuple(TensorSpec(name, "int64", input_axes(name, facts.task)) for name in inputs),
        outputs=tuple(
            TensorSpec(
                row.name, str(outputs[row.name].dtype).removeprefix("torch."), _shape(row.axes, outputs[row.name])
            )
            for row in facts.outputs
        ),
        made_by={"method": method, "torch": torch.__version__, "device": device.type},
    )


def _shape(axes: tuple[str, ...], tensor: torch.Tensor) -> tuple[int | str, ...]:
    dynamic = {"batch", "sequence", "decoder_sequence", "choices"}
    return tuple(axis if axis in dynamic else size for axis, size in zip(axes, tensor.shape, strict=True))


def _trace(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.jit.ScriptModule:
    # torch binds the example to parameters of `forward` by name, so it needs to see them: forward takes **kwargs.
    forward = module.forward
    names = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]

    def keywords(*args: torch.Tensor, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
        bound = {**dict(zip(inputs, args, strict=False)), **kwargs}
        answers: dict[str, torch.Tensor] = forward(**bound)
        return answers

    keywords.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    module.forward = keywords
    try:
        with warnings.catch_warnings(), _functions_in_line(), _names_that_can_be_read(module):
            # Tracer warnings name every place that might freeze; whether one did is what the verdict measures.
            warnings.simplefilter("ignore")
            traced: torch.jit.ScriptModule = torch.jit.trace(  # type: ignore[no-untyped-call]
                module, example_kwarg_inputs=dict(inputs), strict=False, check_trace=False
            )
            frozen: torch.jit.ScriptModule = torch.jit.freeze(traced.eval())
            return frozen
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ConversionError(
            f"torch.jit.trace could not trace {type(module).__name__}: {first_line(error, 300)}"
        ) from error
    finally:
        module.forward = forward


@contextmanager
def _functions_in_line() -> Iterator[None]:
    """Custom autograd functions (BLOOM's GELU) run as the plain code of their forward.

    A trace keeps them as calls into Python, which no file can hold. Only gradients need more than the forward.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A class with a setup_context has a forward without the context.
        context = () if cls.setup_context is not Function.setup_context else (FunctionCtx(),)
        return cls.forward(*context, *args, **kwargs)

    own = Function.__dict__["apply"]
    Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        Function.apply = own  # type: ignore[method-assign]


@contextmanager
def _names_that_can_be_read(module: torch.nn.Module) -> Iterator[None]:
    """Classes from a checkpoint's own code go by the name of their file alone.

    TorchScript writes a class's full Python name into the archive, and cannot read one with a part that starts with a
    digit: the hash under which transformers imports such code often does.
    """
    classes = {type(part) for part in module.modules()}
    odd = {each: each.__module__ for each in classes if not all(map(str.isidentifier, each.__module__.split(".")))}
    for each, name in odd.items():
        each.__module__ = name.rpartition(".")[2]
    try:
        yield
    finally:
        for each, name in odd.items():
            each.__module__ = name


def _script(module: torch.nn.Module) -> torch.jit.ScriptModule:
    plain = type(module).forward.__get__(module)
    forward, module.forward = module.forward, plain
    try:
        frozen: torch.jit.ScriptModule = torch.jit.freeze(torch.jit.script(module).eval())
        return frozen
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ConversionError(
            f"torch.jit.script does not take {type(module).__name__} ({first_line(error, 160)}); use --method trace, "
            "which is measured at other shapes than the example's"
        ) from error
    finally:
        module.forward = forward


def _strip_paths(source: Path, target: Path) -> None:
    """Copies an archive record by record without the debug records, which hold absolute paths of the exporting
    machine."""
    reader = torch._C.PyTorchFileReader(str(source))
    writer = torch._C.PyTorchFileWriter(str(target))
    written_by_itself = {".data/serialization_id", "version", "byteorder"}
    for name in reader.get_all_records():
        if name in written_by_itself or name.endswith(".debug_pkl"):
            continue
        data = reader.get_record(name)
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
