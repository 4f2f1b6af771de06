"""Floor 2: writes with the reference itself, through the cache that its own class makes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nlpconvert import cache_names
from nlpconvert.errors import UsageError
from nlpconvert.models import Facts
from nlpconvert.writer import State, check_step, encodes, start


class PytorchWriter:
    """A `Writer` on a model with a language-modelling head: its class's forward, whatever is attached to the model."""

    def __init__(self, module: torch.nn.Module, facts: Facts) -> None:
        taken = inspect.signature(type(module).forward).parameters
        self._module: Any = module
        self._keyword = next((word for word in ("cache", "past_key_values") if word in taken), "")
        if not self._keyword:
            raise UsageError(
                f"{type(module).__name__} takes no cache of keys and values, so it cannot write step by step"
            )
        self._positions = "position_ids" in facts.inputs
        self._device = next(module.parameters()).device
        self.facts = facts
        self.provider = str(self._device)
        self.precision = str(next(module.parameters()).dtype).removeprefix("torch.")

    def begin(self, prompts: Mapping[str, np.ndarray]) -> State:
        """As `Writer.begin`. Raises RuntimeError when the model is in training mode."""
        if any(part.training for part in self._module.modules()):
            raise RuntimeError("the reference is in training mode: an exporter may have left it so")
        state = start(prompts, self.facts)
        state.cache = {"cache": None}
        if encodes(self.facts):
            with torch.no_grad():
                state.cache["encoder_outputs"] = self._module.get_encoder()(
                    input_ids=self._tensor(prompts["input_ids"]),
                    attention_mask=self._tensor(state.mask),
                    return_dict=True,
                )
        return state

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        """As `Writer.step`."""
        tokens = check_step(state, tokens, self.facts)
        count = tokens.shape[1]
        if state.encodes:
            given = {"decoder_input_ids": tokens, "attention_mask": state.mask}
        else:
            given = {"input_ids": tokens, "attention_mask": state.seen_mask(count)}
            if self._positions:
                given["position_ids"] = state.positions(count)
        tensors: dict[str, Any] = {name: self._tensor(array) for name, array in given.items()}
        if state.encodes:
            tensors["encoder_outputs"] = state.cache["encoder_outputs"]
        if state.cache["cache"] is not None:
            tensors[self._keyword] = state.cache["cache"]
        with torch.no_grad():
            answers = type(self._module).forward(self._module, **tensors, use_cache=True, return_dict=True)
        state.cache["cache"] = answers[self._keyword]
        state.length += count
        logits: np.ndarray = answers["logits"].float().cpu().numpy()
        return logits

    def reorder(self, state: State, rows: np.ndarray) -> None:
        """As `Writer.reorder`, by the cache's own method."""
        index = self._tensor(rows)
        if state.cache["cache"] is not None:
            state.cache["cache"].reorder_cache(index)
        if state.encodes:
            kept = state.cache["encoder_outputs"]
            state.cache["encoder_outputs"] = type(kept)(last_hidden_state=kept.last_hidden_state[index])
        state.mask, state.first = state.mask[rows], state.first[rows]

    def cache(self, state: State) -> dict[str, np.ndarray]:
        """As `Amendable.cache`."""
        return {each: self._held(state, each).detach().cpu().numpy().copy() for each in self._names(state)}

    def replace(self, state: State, cache: Mapping[str, np.ndarray]) -> None:
        """As `Amendable.replace`."""
        for each, array in cache.items():
            layer, kind = self._where(state, each)
            setattr(layer, kind, self._tensor(array))

    def _names(self, state: State) -> list[str]:
        """What the cache holds, under the names that a graph would give it."""
        kept = state.cache["cache"]
        if kept is None:
            return []
        parts = {"decoder": "self_attention_cache", "encoder": "cross_attention_cache"} if state.encodes else {"": ""}
        return [
            cache_names.name(cache_names.PAST, number, kind, part)
            for part, attribute in parts.items()
            for number in range(len((getattr(kept, attribute) if attribute else kept).layers))
            for kind in cache_names.KINDS
        ]

    def _where(self, state: State, name: str) -> tuple[Any, str]:
        """The layer that holds what a name means, and the attribute."""
        number, *part, kind = name.removeprefix(f"{cache_names.PAST}.").split(".")
        kept = state.cache["cache"]
        if part:
            kept = kept.self_attention_cache if part == ["decoder"] else kept.cross_attention_cache
        return kept.layers[int(number)], f"{kind}s"

    def _held(self, state: State, name: str) -> Any:
        layer, kind = self._where(state, name)
        return getattr(layer, kind)

    def close(self) -> None:
        """Nothing is held: the model is the caller's."""

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.asarray(array), device=self._device)
