"""Floor 2: a TorchScript file's inner tensors.

A frozen trace records no modules. What can be told is its operations in order: the n-th `linear` of the trace is the
n-th call of a linear module in the model. So each of these operations gives what it reads and what it makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nlpconvert.artifact import Artifact
from nlpconvert.backends import Batch
from nlpconvert.errors import CannotRunHere, DriftError, first_line

READS: dict[str, int] = {"linear": 0, "layer_norm": 0, "addmm": 1, "embedding": 1}
"""Operations that are modules, and which of their arguments is the input (an embedding's holds ids, no numbers)."""
WEIGHT: dict[str, int] = {"linear": 1, "layer_norm": 2, "addmm": 2, "embedding": 0}
"""Which of their arguments is the weight."""


@dataclass(frozen=True)
class Operation:
    """One operation of the trace: its kind, the names of the tensors it reads and makes, and its weight's shape and a
    few of its numbers.
    """

    kind: str
    reads: str | None
    gives: str
    weight: tuple[object, ...] = ()


class TracedTaps:
    """An opened trace whose inner tensors can be had by name."""

    def __init__(self, module: Any, artifact: Artifact) -> None:
        self._module = module
        self._inputs = [spec.name for spec in artifact.inputs]
        self._graph = module.graph
        self.operations = tuple(_operations(self._graph, _named(self._graph)))
        """In order of execution."""
        self.outputs = dict(_outputs(self._graph, _named(self._graph)))
        """The tensors that the trace returns, by the output's name."""

    def tap(self, batch: Batch, names: Sequence[str]) -> dict[str, np.ndarray]:
        """One forward pass that returns the inner tensors `names` as float32."""
        graph = self._graph.copy()
        values = {name: value for value, name in _named(graph).values()}
        unique = list(dict.fromkeys(names))
        together = graph.create("prim::TupleConstruct", [values[name] for name in unique], 1)
        together.output().setType(torch._C.TupleType([values[name].type() for name in unique]))
        graph.appendNode(together)
        graph.eraseOutput(0)
        graph.registerOutput(together.output())
        function = torch._C._create_function_from_graph("taps", graph)
        tensors = [torch.from_numpy(np.ascontiguousarray(batch[name])) for name in self._inputs]
        with torch.inference_mode():
            answers = function(self._module._c, *tensors)
        return {name: tensor.float().cpu().numpy() for name, tensor in zip(unique, answers, strict=True)}

    def largest(self, batch: Batch) -> int:
        """About how many numbers the largest of its tensors holds for a batch: a row of the widest weight a token."""
        widths = [
            max(value.type().sizes() or [1])
            for node in self._graph.nodes()
            if node.kind() == "aten::linear"
            for value in (node.inputsAt(1),)
            if value.type().kind() == "TensorType"
        ]
        return max(array.size for array in batch.values()) * max(widths, default=4096)

    def close(self) -> None:
        """Frees the module."""
        del self._module, self._graph


def open(artifact: Artifact, *, threads: int | None = None) -> TracedTaps:
    """Opens a traced file on the CPU. DriftError where it cannot be read, CannotRunHere where it is no flat trace, or
    was traced elsewhere.
    """
    traced_on = str(artifact.made_by.get("device", "cpu"))
    if traced_on != "cpu":
        raise CannotRunHere(f"it was traced on {traced_on} and holds that device as constants; locate runs on the CPU")
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        module = torch.jit.load(str(artifact.path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise DriftError(f"torch cannot open {artifact.path.name}: {first_line(error)}") from error
    torch.jit.set_fusion_strategy([("DYNAMIC", 0)])
    found = TracedTaps(module, artifact)
    if not found.operations:
        raise CannotRunHere(
            f"{artifact.path.name} is no frozen trace: it holds no operations that modules can be told by"
        )
    return found


def _named(graph: Any) -> dict[str, tuple[Any, str]]:
    """The values that nodes make, by the name they have in this copy of the graph: (value, a name all copies share)."""
    found: dict[str, tuple[Any, str]] = {}
    for at, node in enumerate(graph.nodes()):
        for nth, value in enumerate(node.outputs()):
            found[value.debugName()] = value, f"{node.kind().rpartition('::')[2]}.{at}{f'.{nth}' if nth else ''}"
    return found


def _operations(graph: Any, named: dict[str, tuple[Any, str]]) -> Iterator[Operation]:
    for node in graph.nodes():
        kind = node.kind().removeprefix("aten::")
        if node.kind().startswith("aten::") and kind in READS:
            reads = named.get(node.inputsAt(READS[kind]).debugName()) if kind != "embedding" else None
            weight = node.inputsAt(WEIGHT[kind]).toIValue()
            yield Operation(
                kind,
                None if reads is None else reads[1],
                named[node.output().debugName()][1],
                sample(weight) if isinstance(weight, torch.Tensor) else (),
            )


def sample(weight: torch.Tensor) -> tuple[object, ...]:
    """A weight's shape and 16 of its numbers: what tells it from the others."""
    flat = weight.detach().reshape(-1)
    return (tuple(weight.shape), *flat[:: max(1, flat.numel() // 16)][:16].tolist())


def _outputs(graph: Any, named: dict[str, tuple[Any, str]]) -> Iterator[tuple[str, str]]:
    """What a trace returns as a dict: (output, tensor)."""
    made = next(iter(graph.outputs())).node()
    if made.kind() == "prim::DictConstruct":
        given = list(made.inputs())
        for key, value in zip(given[::2], given[1::2], strict=True):
            if value.debugName() in named and key.toIValue() is not None:
                yield str(key.toIValue()), named[value.debugName()][1]


def names(operations: Iterable[Operation]) -> list[str]:
    """Every tensor that operations read or make, once, in order."""
    return list(dict.fromkeys(name for each in operations for name in (each.reads, each.gives) if name is not None))
