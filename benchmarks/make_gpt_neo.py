"""Benchmarks: writes a random GPT-Neo of about so many parameters, without a tokenizer.

    make_gpt_neo.py OUT PARAMETERS

Prints, as JSON: its parameters, the bytes of its weights, and its shape in words.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

VOCABULARY = 50257
SIZES: tuple[tuple[int, int], ...] = (  # hidden, layers
    (32, 2),
    (768, 12),
    (896, 12),
    (1024, 24),
    (2048, 24),
    (2560, 32),
)


def parameters(hidden: int, layers: int, vocabulary: int, positions: int) -> int:
    """Of a GPT-Neo, biases and norms left out: embeddings, and 12 hidden^2 in a layer."""
    return (vocabulary + positions) * hidden + 12 * layers * hidden**2


def main(out: Path, wanted: int) -> None:
    """The size nearest to what is wanted; a small vocabulary where the usual one would outweigh it."""
    positions = 2048 if wanted > 10**7 else 64
    vocabulary = VOCABULARY if wanted > 10**7 else 512
    hidden, layers = min(SIZES, key=lambda size: abs(parameters(size[0], size[1], vocabulary, positions) - wanted))
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=max(2, hidden // 128),
        attention_types=[[["global", "local"], layers // 2]],
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
    )
    model = transformers.GPTNeoForCausalLM(config)
    model.save_pretrained(out)
    count = sum(parameter.numel() for parameter in model.parameters())
    words = f"{layers} layers of {hidden}, vocabulary {vocabulary:,}"
    print(json.dumps({"parameters": count, "weights": 4 * count, "words": words}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
