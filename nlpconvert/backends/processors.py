"""Floor 2: transformers' own logits processors, for choosing the next token of any writer's logits.

Temperature, top-k, top-p, penalties, forced and forbidden tokens: what a generation config asks for is put together by
transformers itself, in its order, and drawn as its `generate` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from nlpconvert.errors import UsageError, first_line

Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Tokens so far, int64 (batch, n), and the last logits (batch, vocabulary) to the next tokens, int64 (batch,)."""


class _Host(GenerationMixin):
    """What transformers asks when it puts processors together: the kind of model, and no model."""

    def __init__(self, encodes: bool) -> None:
        self.config = SimpleNamespace(is_encoder_decoder=encodes)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def chooser(
    wanted: Mapping[str, Any],
    *,
    sample: bool,
    seed: int,
    first: np.ndarray,
    source: np.ndarray | None = None,
) -> Choose:
    """How the next tokens are chosen: the processors that `wanted` (entries of a generation config) asks for, then the
    largest, or with `sample` a draw.

    `first`: what was read first, int64 (batch, n); `source`: an encoder's tokens. The same seed draws as
    `torch.manual_seed` before `generate` does. Raises UsageError where the entries are none of transformers', or
    contradict each other.
    """
    host: Any = _Host(source is not None)
    configure: Any = GenerationConfig
    try:
        config = configure(**{**wanted, "do_sample": sample, "decoder_start_token_id": int(first[0, 0])})
        if "max_new_tokens" in wanted:
            config.max_length = first.shape[1] + int(wanted["max_new_tokens"])
        host._prepare_special_tokens(config, True, device="cpu")
        processors: Any = host._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=first.shape[1],
            encoder_input_ids=torch.tensor(first if source is None else source),
            logits_processor=LogitsProcessorList(),
            device="cpu",
            model_kwargs={},
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"transformers refuses the generation settings: {first_line(error)}") from error
    generator = torch.Generator().manual_seed(seed)

    def choose(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        # A copy: processors write into what they are given.
        scores = processors(torch.tensor(tokens), torch.tensor(logits, dtype=torch.float32))
        if not sample:
            return np.asarray(scores.argmax(dim=-1))
        drawn = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1, generator=generator)
        return np.asarray(drawn.squeeze(1))

    return choose
