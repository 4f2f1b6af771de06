"""Floor 2: beam search by transformers' own `generate`, over any writer.

To transformers the writer is a decoder that keeps its masks and its cache to itself: beams are rows, and a change of
beams is the writer's `reorder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from nlpconvert.errors import UsageError, first_line
from nlpconvert.writer import State, Writer


class _Held:
    """What transformers takes for the cache: it asks for nothing but a change of rows."""

    is_compileable = False
    is_linear: tuple[bool, ...] = ()

    def __init__(self, writer: Writer, state: State) -> None:
        self._writer = writer
        self.state = state

    def get_seq_length(self) -> int:
        return self.state.length

    def reorder_cache(self, beams: torch.Tensor) -> None:
        self._writer.reorder(self.state, beams.numpy())


class _Decoder(GenerationMixin):
    """The writer as the model of one `generate`."""

    main_input_name = "input_ids"
    _is_stateful = False

    def __init__(self, writer: Writer, state: State, beams: int, config: Any) -> None:
        self.config = PreTrainedConfig(is_encoder_decoder=False)
        self.generation_config = config
        self._writer = writer
        self._state = state
        self._beams = beams

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def can_generate(self) -> bool:
        return True

    def prepare_inputs_for_generation(
        self, input_ids: Any, attention_mask: Any = None, cache: Any = None, **_: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "cache": cache}

    def forward(
        self, input_ids: Any, attention_mask: Any = None, cache: Any = None, **_: Any
    ) -> CausalLMOutputWithPast:
        if cache is None:
            # Prompts are read once, however many beams go on from each.
            logits = self._writer.step(self._state, self._state.first)[:, -1:]
            rows = np.repeat(np.arange(len(logits)), self._beams)
            self._writer.reorder(self._state, rows)
            logits, cache = logits[rows], _Held(self._writer, self._state)
        else:
            logits = self._writer.step(self._state, input_ids[:, -1:].numpy())
        return CausalLMOutputWithPast(logits=torch.from_numpy(logits), cache=cache)

    __call__ = forward


def search(writer: Writer, prompts: Mapping[str, np.ndarray], wanted: Mapping[str, Any]) -> np.ndarray:
    """The best text of each row by beam search: new tokens, int64 (batch, n), padded at their ends.

    `wanted`: entries of a generation config, `num_beams` among them. Raises UsageError where transformers refuses them,
    and as `Writer` does.
    """
    beams = int(wanted.get("num_beams") or 1)
    try:
        configure: Any = GenerationConfig
        config = configure(**{"do_sample": False, **wanted})
    except (ValueError, TypeError) as error:
        raise UsageError(f"transformers refuses the generation settings: {first_line(error)}") from error
    state = writer.begin(prompts)
    first = torch.from_numpy(state.first)
    # Only asked whether it is padded at the left: the writer has its own.
    mask = torch.ones_like(first) if state.encodes else torch.from_numpy(state.mask)
    decoder: Any = _Decoder(writer, state, beams, config)
    with torch.no_grad():
        made = decoder.generate(first, attention_mask=mask, generation_config=config)
    return np.asarray(made[:, first.shape[1] :])
