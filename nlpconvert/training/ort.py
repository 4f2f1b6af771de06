"""Floor 2: gradients by ONNX Runtime: the gradient graph in an inference session, on the tensors that PyTorch holds.

Weights go in from where the parameters are and gradients come out where `.grad` is, without a copy, so that any
optimizer, clipping and all-reduce of PyTorch works on them. Import this file late: it needs ONNX Runtime's flavour for
training (`engines.require_ort` says what to do without).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from nlpconvert.errors import ConversionError, UsageError, first_line
from nlpconvert.training import Batch, gathers, operators
from nlpconvert.training.graph import DROPOUT, LOSS, Hook, build
from nlpconvert.training.losses import Objective

TYPES = {torch.float32: np.float32, torch.int64: np.int64, torch.bool: np.bool_}
"""Element types of weights and buffers that a graph may read."""


class OrtEngine:
    """The objective's gradients by ONNX Runtime on the CPU, in float32.

    `threads`: as many as PyTorch has where it is None. `hooks` change the finished graph, in order. `dropout` may be
    turned off, as the comparison of gradients does: the graph stays the one that trains.
    """

    name = "ort"

    def __init__(
        self, objective: Objective, *, threads: int | None = None, hooks: Sequence[Hook] = (gathers.take_out,)
    ) -> None:
        self.objective = objective
        self.dropout = True
        self._trained = objective.parameters_trained
        wrong = {f"{each.dtype} on {each.device}" for each in self._trained.values()} - {"torch.float32 on cpu"}
        if wrong:
            raise UsageError(
                f"the engine ort trains float32 on the CPU and the model is {wrong.pop()}: use --engine torch"
            )
        self.graph = build(objective, hooks)
        self._session = _open(self.graph.model, threads or torch.get_num_threads())
        self._given = {value.name for value in self._session.get_inputs()}
        self._read = dict.fromkeys(each for s in self.graph.scatters for each in (s.indices, s.values))
        self._free = [LOSS, *(name for name in self._read if name not in self._given)]
        self._bound: tuple[int, ...] = ()
        self._binding: Any = None
        self._padding = _padding_rows(objective)
        self._largest = (0, 0)
        self._letting_go = onnxruntime.RunOptions()
        self._letting_go.log_severity_level = 4
        self._letting_go.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What is trained, by the names of the checkpoint's module."""
        return self._trained

    def step(self, batch: Batch, seed: int) -> float:
        """The mean loss, gradients into `.grad` (see Engine). A batch without a target: 0.0 and gradients of 0.

        Seeds ONNX Runtime's own generator, which is the process's.
        """
        arrays = dict(zip(self.objective.names, self.objective.arrays(batch), strict=True))
        arrays[DROPOUT] = np.array(float(self.dropout), np.float32)
        binding = self._bind()
        if batch.targets == 0:
            torch._foreach_zero_([each.grad for each in self._trained.values() if each.grad is not None])
            return 0.0
        for name in arrays.keys() & self._given:
            binding.bind_cpu_input(name, arrays[name])
        for name in self._free:
            binding.bind_output(name, "cpu")  # of another shape from batch to batch
        onnxruntime.set_seed(seed)
        try:
            self._session.run_with_iobinding(binding, self._letting_go if self._is_larger(arrays) else None)
        except Exception as error:  # the runtime's own classes of errors have no common name
            raise ConversionError(f"ONNX Runtime failed in a training step: {first_line(error)}") from error
        # What is bound comes back in the order of binding.
        made = dict(zip(self._free, (value.numpy() for value in binding.get_outputs()[: len(self._free)]), strict=True))
        self._scatter(arrays | made)
        return float(made[LOSS])

    def _bind(self) -> Any:
        """The binding of weights and gradients to where they are; anew where one has moved since the last step."""
        weights = _tensors(self.objective)
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        at = tuple(
            tensor.data_ptr()
            for tensor in (*weights.values(), *(each.grad for each in self._trained.values()))
            if tensor is not None
        )
        if at == self._bound:
            return self._binding
        self._binding, self._bound = self._session.io_binding(), at
        for name in self._free:
            self._binding.bind_output(name, "cpu")
        for name, tensor in weights.items():
            if name in self._given:
                kind = TYPES[tensor.dtype]
                self._binding.bind_input(name, "cpu", 0, kind, list(tensor.shape), _address(tensor, name))
        for name, output in self.graph.gradients.items():
            gradient = self._trained[name].grad
            assert gradient is not None
            address = _address(gradient, output)
            self._binding.bind_output(output, "cpu", 0, np.float32, list(gradient.shape), address)
        return self._binding

    def _is_larger(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether no batch before had as many tokens, or pairs of tokens: what smaller ones left in pieces is let go of
        then, or lengths that grow from batch to batch would each keep their memory."""
        tokens = sum(arrays[name].size for name in self.objective.inputs)
        pairs = sum(arrays[name].size * arrays[name].shape[-1] for name in self.objective.inputs)
        before, self._largest = self._largest, (max(tokens, self._largest[0]), max(pairs, self._largest[1]))
        return self._largest != before

    def _scatter(self, values: Mapping[str, np.ndarray]) -> None:
        """Adds what the graph leaves to be added, in the order of the batch."""
        started = set(self.graph.gradients)
        for scatter in self.graph.scatters:
            gradient = self._trained[scatter.parameter].grad
            assert gradient is not None
            if scatter.parameter not in started:
                gradient.zero_()
                started.add(scatter.parameter)
            indices = torch.from_numpy(values[scatter.indices]).reshape(-1)
            rows = torch.from_numpy(values[scatter.values]).reshape(len(indices), -1)
            padding = self._padding.get(scatter.parameter)
            kept = None if padding is None else gradient[padding].clone()
            gradient.view(len(gradient), -1).index_add_(0, indices, rows)
            if kept is not None:
                gradient[padding] = kept


def _tensors(objective: Objective) -> dict[str, torch.Tensor]:
    """Weights and buffers by their names in the graph."""
    return {**dict(objective.named_parameters()), **dict(objective.named_buffers())}


def _address(tensor: torch.Tensor, name: str) -> int:
    if not tensor.is_contiguous():
        raise UsageError(f"{name} is not contiguous in memory, which the engine ort needs: make it so (.contiguous())")
    return tensor.data_ptr()


def _padding_rows(objective: Objective) -> dict[str, int]:
    """Parameter to the row that stands for padding, to which PyTorch adds nothing when it is looked up."""
    names = {id(parameter): name for name, parameter in objective.parameters_trained.items()}
    return {
        names[id(part.weight)]: part.padding_idx
        for part in objective.model.modules()
        if isinstance(part, torch.nn.Embedding) and part.padding_idx is not None and id(part.weight) in names
    }


@functools.cache
def _own_arena() -> None:
    """Memory for all sessions of training in this process, taken as it is asked for: the usual arena doubles what it
    takes each time, which is a fifth of the peak."""
    where = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    no_limit, as_asked_for, usual = 0, 1, -1
    onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg(no_limit, as_asked_for, usual, usual))


def _open(model: onnx.ModelProto, threads: int) -> onnxruntime.InferenceSession:
    _own_arena()
    options = operators.quiet()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # PyTorch's threads work between the steps: those of ONNX Runtime stop waiting for work when a step ends.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # as above
        raise ConversionError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run the gradient graph: {first_line(error)}; train with "
            "--engine torch"
        ) from error
