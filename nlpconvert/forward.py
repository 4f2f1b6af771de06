"""Floor 2: one calling convention for every model: named tensors in, named tensors out, pooling included.

The Hugging Face model itself gets a `forward` of its own, so that module scopes in an exported graph stay paths of the
checkpoint. What is computed is what its class computes, and after it what sentence-transformers would. How a checkpoint
becomes a model is `source`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType

import numpy as np
import torch

from nlpconvert.checkpoint import SentenceModule
from nlpconvert.errors import UsageError

Tensors = dict[str, torch.Tensor]
SentenceStep = Callable[[torch.nn.Module, torch.Tensor, Tensors], torch.Tensor]
"""A module after the transformer: the model, the state ((batch, sequence, hidden) or pooled) and the inputs go in."""


def attach(
    module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str], sentence: Sequence[SentenceStep] = ()
) -> None:
    """Replaces the instance's `forward`: it takes `inputs` by keyword (or in order), returns exactly `outputs`.

    `sentence` makes "sentence_embedding" of "last_hidden_state". Attaching again replaces what was attached.
    """
    keywords = _keywords(module)

    def forward(self: torch.nn.Module, *in_order: torch.Tensor, **tensors: torch.Tensor) -> Tensors:
        tensors.update(zip(inputs[: len(in_order)], in_order, strict=True))
        unknown, missing = sorted(set(tensors) - set(inputs)), sorted(set(inputs) - set(tensors))
        if unknown or missing:
            raise TypeError(f"the model takes {', '.join(inputs)}; missing: {missing}, unknown: {unknown}")
        answers = type(self).forward(self, **tensors, **keywords)
        if sentence:
            state = answers["last_hidden_state"]
            for step in sentence:
                state = step(self, state, tensors)
            answers = {**answers, "sentence_embedding": state}
        return {name: answers[name] for name in outputs}

    # Exporters and torch.jit.trace read the signature to learn the names of the inputs.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *inputs)]
    forward.__signature__ = inspect.Signature(parameters, return_annotation=Tensors)  # type: ignore[attr-defined]
    # A bound method, not a closure over the module: a deep copy of the model then calls itself and not the original.
    module.forward = MethodType(forward, module)


def given(module: torch.nn.Module, tensors: Tensors) -> frozenset[str]:
    """Names of the outputs that the class's own forward gives for these inputs (an optional one may be None)."""
    with torch.no_grad():
        answers = type(module).forward(module, **tensors, **_keywords(module))
    if not isinstance(answers, Mapping):
        raise UsageError(f"{type(module).__name__} returns a {type(answers).__name__}, not outputs with names")
    return frozenset(name for name, value in answers.items() if isinstance(value, torch.Tensor))


def accepts(module: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters of the class's own forward."""
    return frozenset(inspect.signature(type(module).forward).parameters)


def _keywords(module: torch.nn.Module) -> dict[str, bool]:
    """Outputs by name and no key-value cache, as far as the class's forward takes such wishes."""
    parameters = inspect.signature(type(module).forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    keywords = {"return_dict": True} if takes_any or "return_dict" in parameters else {}
    return keywords | ({"use_cache": False} if "use_cache" in parameters else {})


def embedding(module: torch.nn.Module) -> np.ndarray | None:
    """The table that input ids are looked up in, (ids, width) float32; None where it is no plain one."""
    try:
        found = module.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError, TypeError):
        return None
    weight = getattr(found, "weight", None)
    if not isinstance(found, torch.nn.Embedding) or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return None
    return weight.detach().cpu().numpy()


def call(module: torch.nn.Module, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One pass of an attached model: arrays in by name (ids int64), float32 arrays out by name.

    Raises RuntimeError when any part of the model is in training mode: its answers would be drawn, not computed.
    """
    training = [name or type(module).__name__ for name, part in module.named_modules() if part.training]
    if training:
        raise RuntimeError(f"the reference is in training mode ({training[0]}): an exporter may have left it so")
    device = next(module.parameters()).device
    # no_grad and not inference_mode: a model that keeps a buffer for later must still be exportable afterwards.
    with torch.no_grad():
        answers = module(**{name: torch.tensor(array, device=device) for name, array in batch.items()})
    return {name: value.cpu().numpy() for name, value in answers.items()}


# -- sentence-transformers ---------------------------------------------------------------------------------------------

_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


def sentence_steps(
    module: torch.nn.Module, chain: Sequence[SentenceModule], read: Callable[[Path], Tensors]
) -> list[SentenceStep]:
    """The modules after the transformer as functions; one with weights becomes the model's submodule `sentence_<n>`.

    `read` gives the tensors of such a module's folder. Raises UsageError for a pooling mode or layer that is not known.
    """
    steps: list[SentenceStep] = []
    for number, each in enumerate(chain, start=1):
        if each.kind == "Pooling":
            steps.append(_pooling(each))
        elif each.kind == "Normalize":
            steps.append(lambda _, state, __: torch.nn.functional.normalize(state, p=2.0, dim=1))
        else:
            module.add_module(f"sentence_{number}", _layer(each, read(each.directory)).eval().requires_grad_(False))
            steps.append(_named_layer(f"sentence_{number}"))
    return steps


def _named_layer(name: str) -> SentenceStep:
    return lambda model, state, _: model.get_submodule(name)(state)


def _layer(each: SentenceModule, weights: Tensors) -> torch.nn.Module:
    """A Dense (linear and activation) or a LayerNorm with the weights of its folder, in float32."""
    settings = each.settings
    try:
        if each.kind == "LayerNorm":
            layer: torch.nn.Module = torch.nn.LayerNorm(int(settings["dimension"]))
            layer.load_state_dict({name.removeprefix("norm."): value for name, value in weights.items()})
            return layer
        activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
        if activation not in _ACTIVATIONS:
            raise UsageError(
                f"{each.directory}: the activation {activation} is not supported: {', '.join(_ACTIVATIONS)} are"
            )
        linear = torch.nn.Linear(
            int(settings["in_features"]), int(settings["out_features"]), bias=bool(settings.get("bias", True))
        )
        linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
        return torch.nn.Sequential(linear, getattr(torch.nn, activation)())
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{each.directory}: its weights do not fit its config.json", detail=str(error)) from error


# Names of the modes in older settings ("pooling_mode_" + name: true) and in newer ones ("pooling_mode": name), in the
# order in which sentence-transformers concatenates them.
_MODES = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}


def _modes(each: SentenceModule) -> list[str]:
    said = each.settings.get("pooling_mode")
    if said is not None:
        wanted = [said] if isinstance(said, str) else list(said)
    else:
        wanted = [
            _MODES.get(key.removeprefix("pooling_mode_"), key)
            for key, value in each.settings.items()
            if key.startswith("pooling_mode_") and value is True
        ]
    unknown = [mode for mode in wanted if mode not in _MODES.values()]
    if unknown or not wanted:
        raise UsageError(
            f"{each.directory}: the pooling {', '.join(map(str, unknown)) or '(none)'} is not supported: "
            f"{', '.join(_MODES.values())} are"
        )
    return [mode for mode in _MODES.values() if mode in wanted]


def _pooling(each: SentenceModule) -> SentenceStep:
    """Pooling over the positions where the mask is 1, as sentence_transformers.models.Pooling computes it."""
    modes = _modes(each)

    def pool(_: torch.nn.Module, states: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        mask = tensors["attention_mask"]
        pooled = [POOLINGS[mode](states, mask.unsqueeze(-1).to(states.dtype)) for mode in modes]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    return pool


def _clamped(total: torch.Tensor) -> torch.Tensor:
    # sentence-transformers' own guard: a row without a real token answers 0, not NaN.
    return torch.clamp(total, min=1e-9)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """1, 2, 3, ... at the mask's ones, 0 elsewhere: (batch, sequence, 1)."""
    return mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype).reshape(1, -1, 1)


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    last = _positions(mask).argmax(dim=1, keepdim=True).expand(-1, 1, states.shape[-1])
    return torch.gather(states * mask, 1, last).squeeze(1)


# States (batch, sequence, hidden) and mask (batch, sequence, 1), both float32, to (batch, hidden).
POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": lambda states, mask: states[:, 0],
    "max": lambda states, mask: states.masked_fill(mask == 0, -1e9).amax(dim=1),
    "mean": lambda states, mask: (states * mask).sum(1) / _clamped(mask.sum(1)),
    "mean_sqrt_len": lambda states, mask: (states * mask).sum(1) / _clamped(mask.sum(1)).sqrt(),
    "weightedmean": lambda states, mask: (states * _positions(mask)).sum(1) / _clamped(_positions(mask).sum(1)),
    "lasttoken": _last,
}
