"""Floor 2: the reference with another arithmetic: in float64, and with another number of threads.

What float32 answers differ by from these is the noise that no artifact can be asked to be below. The module is changed
in place and given back bit by bit as it was: a float32 survives the way to float64 and back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def float64(module: torch.nn.Module) -> Iterator[None]:
    """The whole module computes in float64 inside; its weights take twice their memory."""
    with _given_back(module):
        module.double()
        yield


@contextlib.contextmanager
def float64_by_layer(module: torch.nn.Module) -> Iterator[None]:
    """Each layer with weights computes in float64 and rounds its answer to float32; one at a time is widened.

    What lies between the layers (softmax, residual sums) stays in float32.
    """
    hooks: list[Any] = []
    with _given_back(module):
        for part in module.modules():
            own = any(True for _ in part.parameters(recurse=False))
            # A table is only read, which is exact.
            if own and not isinstance(part, torch.nn.Embedding) and not any(True for _ in part.children()):
                hooks.append(part.register_forward_pre_hook(_widen, with_kwargs=True))
                hooks.append(part.register_forward_hook(_round))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextlib.contextmanager
def other_threads() -> Iterator[None]:
    """One thread where there were several, two where there was one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _given_back(module: torch.nn.Module) -> Iterator[None]:
    """Afterwards every weight and buffer has the element type it had."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    before = {name: tensor.dtype for name, tensor in tensors}
    try:
        yield
    finally:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.dtype != before[name]:
                tensor.data = tensor.data.to(before[name])


def _widen(part: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    part.double()
    return tuple(map(_double, args)), {name: _double(value) for name, value in kwargs.items()}


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _round(part: torch.nn.Module, _: Any, answer: Any) -> Any:
    part.float()
    if isinstance(answer, torch.Tensor):
        return answer.float() if answer.dtype == torch.float64 else answer
    if isinstance(answer, tuple):
        return tuple(_round(part, None, each) for each in answer)
    return answer
