"""Floor 2: the reference with another arithmetic: in float64, and with another number of threads.

What float32 answers differ by from these is the noise that no artifact can be asked to be below. The module is changed
in place and gets its own tensors back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def float64(module: torch.nn.Module) -> Iterator[None]:
    """The whole module computes in float64 inside; its weights take twice their memory beside those they have."""
    widened = _Widened()
    try:
        for part in module.modules():
            widened.add(part)
        yield
    finally:
        widened.give_back()


@contextlib.contextmanager
def float64_by_layer(module: torch.nn.Module) -> Iterator[None]:
    """Each layer with weights computes in float64 and rounds its answer to float32; one at a time is widened.

    What lies between the layers (softmax, residual sums) stays in float32.
    """
    hooks: list[Any] = []
    widened = _Widened()

    def widen(part: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        widened.add(part)
        return tuple(map(_double, args)), {name: _double(value) for name, value in kwargs.items()}

    def narrow(part: torch.nn.Module, _: Any, answer: Any) -> Any:
        widened.give_back()
        return _rounded(answer)

    try:
        for part in module.modules():
            own = any(True for _ in part.parameters(recurse=False))
            # A table is only read, which is exact.
            if own and not isinstance(part, torch.nn.Embedding) and not any(True for _ in part.children()):
                hooks.append(part.register_forward_pre_hook(widen, with_kwargs=True))
                hooks.append(part.register_forward_hook(narrow))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        widened.give_back()


class _Widened:
    """Modules whose own tensors are float64 for a while. The old ones are kept, not converted back: they are mapped
    from the checkpoint's file, and a copy would stand beside that for good."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def add(self, part: torch.nn.Module) -> None:
        for parameter in part.parameters(recurse=False):
            # A tied one is met twice.
            if parameter.is_floating_point() and id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = (parameter, parameter.data)
                parameter.data = parameter.data.double()
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                self._buffers.append((part._buffers, name, buffer))
                part._buffers[name] = buffer.double()

    def give_back(self) -> None:
        for parameter, data in self._parameters.values():
            parameter.data = data
        for buffers, name, buffer in reversed(self._buffers):
            buffers[name] = buffer
        self._parameters.clear()
        self._buffers.clear()


@contextlib.contextmanager
def other_threads() -> Iterator[None]:
    """One thread where there were several, two where there was one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _rounded(answer: Any) -> Any:
    if isinstance(answer, torch.Tensor):
        return answer.float() if answer.dtype == torch.float64 else answer
    return tuple(map(_rounded, answer)) if isinstance(answer, tuple) else answer
