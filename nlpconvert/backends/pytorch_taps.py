"""Floor 2: a loaded model's inner tensors, seen and replaced while it runs.

One pass visits every float tensor that a module hands on, once, in order of execution. Whoever visits may put another
tensor in its place: all that is computed afterwards reads that one. What does not belong here: whose tensors those are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nlpconvert.backends import Batch

KINDS: Mapping[str, str] = {
    "Linear": "linear",
    "Conv1D": "addmm",
    "LayerNorm": "layer_norm",
    "Embedding": "embedding",
}
"""Classes of modules that are one operation each in a trace, and that operation's name."""


@dataclass(frozen=True)
class Point:
    """One tensor of a pass: its number, the module that made it ("" is the model itself), and its shape."""

    number: int
    module: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of a module that is a single operation (KINDS): the numbers of the points it reads and gives, and its
    weight's shape and a few of its numbers.
    """

    module: str
    kind: str
    reads: int | None
    gives: int | None
    weight: tuple[object, ...] = ()


@dataclass
class Passed:
    """What a pass met: points in order of execution, calls in order, and the points that are the model's outputs."""

    points: list[Point] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)


Visit = Callable[[Point, np.ndarray], np.ndarray | None]
"""Gets a point and its float32 tensor (a view: not to be kept); gives what is to stand in its place, or None."""


def run(module: torch.nn.Module, batch: Batch, visit: Visit) -> Passed:
    """One pass of a model in eval mode. The same model and shapes give the same points in every pass.

    A tensor that several modules hand on is the innermost one's; one that a module computes between its parts and hands
    to one of them is the module's own.
    """
    watch = _Watch(module, visit)
    handles = [module.register_forward_hook(watch.outputs)]
    for path, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(watch.before(path), with_kwargs=True))
        handles.append(part.register_forward_hook(watch.after(path, type(part).__name__)))
    device = next(module.parameters()).device
    try:
        with torch.no_grad():
            module(**{name: torch.tensor(array, device=device) for name, array in batch.items()})
    finally:
        for handle in handles:
            handle.remove()
    return watch.passed


class _Watch:
    """The hooks of one pass, and the tensors they have seen."""

    def __init__(self, module: torch.nn.Module, visit: Visit) -> None:
        self.passed = Passed()
        self._visit = visit
        self._stack: list[tuple[str, int | None]] = []
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # A weight that is handed on as it is must not be written to.
        owned = (*module.parameters(), *module.buffers())
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in owned}

    def before(self, path: str) -> Callable[..., tuple[Any, Any] | None]:
        """A hook for the tensor that a module is given: its maker is whoever is running."""

        def hook(_: torch.nn.Module, given: Any, keywords: Any) -> None:
            tensor = next(_tensors((given, keywords)), None)
            number = None
            if tensor is not None and self._stack:
                number = self._number(tensor)
                if number is None:
                    number, other = self._met(tensor, self._stack[-1][0])
                    del other  # what a module is given can only be written to in place
            self._stack.append((path, number))

        return hook

    def after(self, path: str, name: str) -> Callable[..., Any]:
        """A hook for the first tensor that a module returns."""

        def hook(part: Any, _: Any, output: Any) -> Any:
            reads = self._stack.pop()[1]
            tensor = next(_tensors(output), None)
            number, other = None, None
            if tensor is not None:
                number = self._number(tensor)
                if number is None:
                    number, other = self._met(tensor, path)
            if name in KINDS:
                self.passed.calls.append(Call(path, KINDS[name], reads, number, _sample(part.weight)))
            return other if other is not None and isinstance(output, torch.Tensor) else None

        return hook

    def outputs(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        """A hook for all that the model itself returns, by name."""
        if isinstance(output, Mapping):
            for name, value in output.items():
                for tensor in _tensors(value):
                    number = self._number(tensor)
                    self.passed.outputs[name] = self._met(tensor, "")[0] if number is None else number

    def _number(self, tensor: torch.Tensor) -> int | None:
        """The point that a tensor already is."""
        known = self._seen.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _met(self, tensor: torch.Tensor, path: str) -> tuple[int, torch.Tensor | None]:
        """A new point: its number, and a tensor to be returned instead where it could not be written to in place."""
        number = len(self.passed.points)
        point = Point(number, path, tuple(tensor.shape))
        self.passed.points.append(point)
        self._seen[id(tensor)] = (weakref.ref(tensor), number)
        instead = self._visit(point, tensor.detach().float().cpu().numpy())
        if instead is None:
            return number, None
        replacement = torch.from_numpy(np.ascontiguousarray(instead).reshape(point.shape))
        shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        if not shared and tensor.untyped_storage().data_ptr() not in self._weights:
            tensor.copy_(replacement)
            return number, None
        other = replacement.to(tensor.device, tensor.dtype)
        self._seen[id(other)] = (weakref.ref(other), number)
        return number, other


def _sample(weight: torch.Tensor) -> tuple[object, ...]:
    flat = weight.detach().reshape(-1)
    return (tuple(weight.shape), *flat[:: max(1, flat.numel() // 16)][:16].tolist())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Float tensors in what a module takes or returns, in order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.ndim:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
