"""Benchmarks: trains with one side, and nothing else.

    train_side.py SIDE MODEL STEPS ROUNDS THREADS

SIDE: "ort" (nlpconvert's engine of ONNX Runtime), "eager" (PyTorch's own loop) or "compiled" (the same through
torch.compile). MODEL: a checkpoint's directory, or "minilm-size" for a random BERT of its size. Batches of 16 texts of
64 drawn ids, dropout as the model's config has it, fused AdamW. Prints, as JSON: steps per second of every round after
steps that warm up, the last loss, and the number of parameters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from nlpconvert import forward, source
from nlpconvert.models import TASKS, Facts
from nlpconvert.training import Batch, losses

side, model = sys.argv[1], sys.argv[2]
steps, rounds, threads = map(int, sys.argv[3:])
ROWS, TOKENS, WARM_UP, LEARNING_RATE = 16, 64, 3, 2e-5
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def objective() -> losses.Objective:
    if model != "minilm-size":
        loaded = source.load(model)
        return losses.with_loss(loaded.module, loaded.facts.task, loaded.facts)
    torch.manual_seed(0)
    config = transformers.BertConfig(**MINILM, num_labels=4)
    task = TASKS["text-classification"]
    inputs = ("input_ids", "attention_mask")
    limits = (config.vocab_size, 0, None, None, config.max_position_embeddings, "own", config.type_vocab_size)
    facts = Facts("bert", task.name, inputs, task.outputs, *limits, (), False)
    module = transformers.BertForSequenceClassification(config)
    forward.attach(module, inputs, ["logits"])
    return losses.with_loss(module, task.name, facts)


def batches(facts: Facts) -> list[Batch]:
    drawn = np.random.default_rng(0)
    made = []
    for _ in range(8):
        inputs = {name: np.ones((ROWS, TOKENS), np.int64) for name in facts.inputs}
        inputs["input_ids"] = drawn.integers(5, facts.vocab_size, (ROWS, TOKENS))
        if "token_type_ids" in inputs:
            inputs["token_type_ids"] = np.zeros((ROWS, TOKENS), np.int64)
        made.append(Batch(inputs, {"labels": drawn.integers(0, 4, ROWS)}, ROWS))
    return made


def by_pytorch(wanted: losses.Objective) -> Callable[[Batch, int], float]:
    """As a loop in PyTorch is written: gradients let go of, one forward, one backward, one step."""
    optimizer = torch.optim.AdamW(wanted.parameters_trained.values(), lr=LEARNING_RATE, fused=True)
    wanted.train()
    call = torch.compile(wanted) if side == "compiled" else wanted
    torch.manual_seed(0)

    def step(batch: Batch, _: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = call(*wanted.tensors(batch))[0]
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def by_onnx_runtime(wanted: losses.Objective) -> Callable[[Batch, int], float]:
    from nlpconvert.training import engines

    engine = engines.make("ort", wanted, threads=threads)
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=LEARNING_RATE, fused=True)

    def step(batch: Batch, number: int) -> float:
        loss = engine.step(batch, number)
        optimizer.step()
        return loss

    return step


torch.set_num_threads(threads)
wanted = objective()
data = batches(wanted.facts)
step = by_onnx_runtime(wanted) if side == "ort" else by_pytorch(wanted)
loss = 0.0
for number in range(WARM_UP):
    loss = step(data[number % len(data)], number)
rates = []
for _ in range(rounds):
    started = time.perf_counter()
    for number in range(steps):
        loss = step(data[number % len(data)], number)
    rates.append(steps / (time.perf_counter() - started))
parameters = sum(each.numel() for each in wanted.parameters_trained.values())
print(json.dumps({"rates": rates, "loss": loss, "parameters": parameters}))
