"""Floor 2: model and loss as one module, with all of its names and axes derived from the task and the model's facts.

What a task's loss is and what it reads is a row of LOSSES. Which parameters are trained is decided here too: those that
the loss reads and that transformers itself trains. How gradients are made of it is the engines' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nlpconvert.errors import UsageError, first_line
from nlpconvert.models import Facts, input_axes
from nlpconvert.training import Batch
from nlpconvert.training.batches import targets as targets_of
from nlpconvert.validators.metrics import IGNORED

Tensors = Mapping[str, torch.Tensor]
cross_entropy = torch.nn.functional.cross_entropy


def _classes(answers: Tensors, labels: Tensors) -> torch.Tensor:
    logits = answers["logits"]
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels["labels"].reshape(-1), ignore_index=IGNORED)


def _next_tokens(answers: Tensors, labels: Tensors) -> torch.Tensor:
    """A place answers for the token after it. The labels are shifted and not the logits, which are large to copy."""
    shifted = torch.nn.functional.pad(labels["labels"][:, 1:], (0, 1), value=IGNORED)
    return _classes(answers, {"labels": shifted})


def _span(answers: Tensors, labels: Tensors) -> torch.Tensor:
    ends = (("start_logits", "start_positions"), ("end_logits", "end_positions"))
    start, end = (cross_entropy(answers[said], labels[right], ignore_index=IGNORED) for said, right in ends)
    return (start + end) / 2


@dataclass(frozen=True)
class LossRow:
    """One row: a task's labels by name with their axes, and the mean loss over its targets.

    `classes`: the axis of the answer that labels number ("labels" and "vocabulary" are as large as the model has them,
    "sequence" and "choices" as the batch has them).
    """

    task: str
    labels: Mapping[str, tuple[str, ...]]
    classes: str
    loss: Callable[[Tensors, Tensors], torch.Tensor]


_TOKENS = {"labels": ("batch", "sequence")}
LOSSES: dict[str, LossRow] = {
    row.task: row
    for row in (
        LossRow("text-classification", {"labels": ("batch",)}, "labels", _classes),
        LossRow("token-classification", _TOKENS, "labels", _classes),
        LossRow("fill-mask", _TOKENS, "vocabulary", _classes),
        LossRow("multiple-choice", {"labels": ("batch",)}, "choices", _classes),
        LossRow(
            "question-answering", dict.fromkeys(("start_positions", "end_positions"), ("batch",)), "sequence", _span
        ),
        LossRow("text-generation", _TOKENS, "vocabulary", _next_tokens),
        LossRow("text2text-generation", {"labels": ("batch", "decoder_sequence")}, "vocabulary", _classes),
    )
}


class Objective(torch.nn.Module):
    """Model and loss. `forward` takes `names` in order (the model's inputs, then labels) and returns (loss, *answers).

    `axes`: those of every name and answer, "batch", "sequence", "decoder_sequence" and "choices" being dynamic.
    `parameters_trained`: by the names of the model, tied ones once. `notes`: what is not trained, and why.
    """

    def __init__(self, model: torch.nn.Module, facts: Facts) -> None:
        super().__init__()
        row = LOSSES[facts.task]
        self.model = model
        self.facts = facts
        self.inputs = facts.inputs
        self.labels = tuple(row.labels)
        self.names = (*self.inputs, *self.labels)
        outputs = [output for output in facts.outputs if not output.secondary]
        self.answers = tuple(output.name for output in outputs)
        self.axes: dict[str, tuple[str, ...]] = {
            **{name: input_axes(name, facts.task) for name in self.inputs},
            **row.labels,
            **{output.name: output.axes for output in outputs},
        }
        self.notes: tuple[str, ...] = ()
        self._row = row
        self._size = 0
        self._choose()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The mean loss over the targets, and the model's answers."""
        given = dict(zip(self.names, tensors, strict=True))
        answers = self.model(**{name: given[name] for name in self.inputs})
        return self._row.loss(answers, given), *(answers[name] for name in self.answers)

    @property
    def parameters_trained(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by the names of the model."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def arrays(self, batch: Batch) -> list[np.ndarray]:
        """The batch's arrays in the order of `names`, int64.

        Raises UsageError for one that is missing and for a label that is none: below 0 (but for -100) or too large,
        which an engine without a check of its own would read memory with.
        """
        missing = [n for n in self.names if n not in (batch.labels if n in self.labels else batch.inputs)]
        if missing:
            raise UsageError(
                f"a batch for {self.facts.task} has no {', '.join(missing)}; it needs {', '.join(self.names)}"
            )
        arrays = [
            np.ascontiguousarray((batch.labels if name in self.labels else batch.inputs)[name], np.int64)
            for name in self.names
        ]
        size = self._size or arrays[0].shape[{"choices": 1, "sequence": -1}[self._row.classes]]
        for name, array in zip(self.labels, arrays[len(self.inputs) :], strict=True):
            wrong = array[((array < 0) & (array != IGNORED)) | (array >= size)]
            if wrong.size:
                raise UsageError(
                    f"{name} holds {wrong[0]}, which is no class of {self.facts.task}: they are 0 to {size - 1}, and "
                    f"{IGNORED} where there is no target; look at the labels of the data"
                )
        return arrays

    def tensors(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """The same as tensors where the model is."""
        device = next(self.model.parameters()).device
        return tuple(torch.from_numpy(array).to(device) for array in self.arrays(batch))

    def example(self, rows: int = 3, tokens: int = 7, targets: int = 5, seed: int = 0) -> Batch:
        """A batch of drawn ids with padding, as a graph is traced with: sizes that no model has for another reason."""
        facts = self.facts
        tokens = max(min(tokens, facts.max_length or tokens), facts.trace_length)
        sizes = {"batch": rows, "choices": 2, "sequence": tokens, "decoder_sequence": targets}
        drawn = np.random.default_rng(seed)
        plain = np.array([each for each in range(facts.vocab_size) if each not in facts.special_ids] or [0])
        made: dict[str, np.ndarray] = {}
        for name in self.inputs:
            shape = tuple(sizes[axis] for axis in self.axes[name])
            if name.endswith("input_ids"):
                made[name] = drawn.choice(plain, shape)
            elif name == "position_ids":
                made[name] = np.broadcast_to(np.arange(shape[-1]), shape).copy()
            elif name == "token_type_ids":
                made[name] = np.zeros(shape, np.int64)
            else:
                made[name] = np.ones(shape, np.int64)
                made[name][0, ..., -1] = 0  # without padding some models leave their mask out
                if (ids := made.get(name.replace("attention_mask", "input_ids"))) is not None:
                    ids[0, ..., -1] = facts.pad_id
        if facts.required_token is not None:
            made["input_ids"][..., -2] = facts.required_token
        labels = {}
        for name in self.labels:
            shape = tuple(sizes[axis] for axis in self.axes[name])
            labels[name] = drawn.integers(0, self._size or sizes[self._row.classes], shape)
            if len(shape) > 1:
                labels[name][0, -1] = IGNORED
        return Batch(made, labels, targets_of(facts.task, labels))

    def _choose(self) -> None:
        """Marks what is trained: what transformers' own class does not freeze and the loss of an example depends on."""
        frozen, untold = _frozen(self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen and parameter.is_floating_point())
        was = self.model.training
        self.model.eval()
        if self._row.classes in ("labels", "vocabulary"):
            self._size = 1
            with torch.no_grad():
                self._size = int(self(*self.tensors(self.example()))[1].shape[-1])
        named = self.parameters_trained
        with torch.enable_grad():
            loss = self(*self.tensors(self.example()))[0]
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        unread = [name for (name, each), gradient in zip(named.items(), found, strict=True) if gradient is None]
        for name in unread:
            named[name].requires_grad_(False)
        self.model.train(was)
        left_out = (("fixed by the architecture", sorted(frozen)), ("the loss does not read them", unread))
        notes = (f"not trained, {why}: {_few(names)}" for why, names in left_out if names)
        self.notes = (*notes, *([untold] if untold else []))


def with_loss(module: torch.nn.Module, task: str, facts: Facts) -> Objective:
    """A model as `source.load` gives it, with the loss of its task around it. Its parameters become trainable.

    Raises UsageError for a task without a loss, and for heads whose labels are not one class each.
    """
    if task not in LOSSES:
        raise UsageError(f"{task} has no loss to train with: {', '.join(LOSSES)} have")
    if task != facts.task:
        raise UsageError(f"the model is loaded for {facts.task}, not {task}: load it with --task {task}")
    kind = getattr(getattr(module, "config", None), "problem_type", None)
    if any(output.measure == "score" for output in facts.outputs):
        words = "several labels at once" if kind == "multi_label_classification" else "a number and not a class"
        raise UsageError(
            f"the model's head answers {words} (problem_type {kind!r} in config.json): training knows one class for "
            "each text; train it elsewhere and convert the result"
        )
    return Objective(module, facts)


def _frozen(model: Any) -> tuple[frozenset[str], str]:
    """Names of parameters that the model's own class does not train (tables of sines), from an empty one of its kind.

    With them a note where such an empty one cannot be made: then all are trained.
    """
    try:
        with torch.device("meta"):
            empty = type(model)(model.config)
    except Exception as error:  # whatever a class raises that cannot do without data
        return frozenset(), f"what {type(model).__name__} freezes could not be told: {first_line(error)}"
    return frozenset(name for name, each in empty.named_parameters() if not each.requires_grad), ""


def _few(names: Sequence[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
