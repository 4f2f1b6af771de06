"""Benchmarks: writes tokens greedily with one side, and nothing else.

    write_side.py SIDE MODEL OUT BATCH NEW REPEATS

SIDE: "onnx" (the artifact in OUT/onnx with its cache, through nlpconvert's loop), "uncached" (the same graph, the whole
text read anew for every token) or "pytorch" (`model.generate` of transformers, with its cache). Prompts are 32 drawn
ids. Prints, as JSON: tokens per second of every repeat after one that warms up, and a digest of what was written.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

side, model, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
batch, new, repeats = map(int, sys.argv[4:])
PROMPT = 32


def prompts(vocabulary: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocabulary, (batch, PROMPT))


def pytorch() -> Callable[[], np.ndarray]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(model)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    module = auto.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.from_numpy(prompts(config.vocab_size))
    mask = torch.ones_like(ids)

    def write() -> np.ndarray:
        with torch.no_grad():
            made = module.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new, eos_token_id=None
            )
        return made[:, -new:].numpy()

    return write


def onnx() -> Callable[[], np.ndarray]:
    from nlpconvert import generation, manifest, models
    from nlpconvert.backends import writing

    record = manifest.read(out)
    facts = models.facts_from_data(record.facts)
    writer = writing.open(record.artifact("onnx", out), facts, serving=True)
    ids = prompts(facts.vocab_size)
    how = generation.Settings(max_new_tokens=new, pad=facts.pad_id)

    def cached() -> np.ndarray:
        return generation.generate(writer, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, how).tokens

    def uncached() -> np.ndarray:
        """An encoder runs once: it is only the decoder's own cache that is done without."""
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        state = writer.begin(given)
        empty, said = dict(state.cache), state.first
        for _ in range(new):
            state.cache, state.length = dict(empty), 0
            state.mask = state.mask if state.encodes else np.ones_like(said)
            said = np.concatenate([said, writer.step(state, said)[:, -1].argmax(axis=-1)[:, None]], axis=1)
        return said[:, -new:]

    return cached if side == "onnx" else uncached


write = pytorch() if side == "pytorch" else onnx()
found = []
tokens = write()
for _ in range(repeats):
    started = time.perf_counter()
    tokens = write()
    found.append(batch * new / (time.perf_counter() - started))
print(json.dumps({"rates": found, "digest": hashlib.sha256(np.ascontiguousarray(tokens, np.int64)).hexdigest()}))
