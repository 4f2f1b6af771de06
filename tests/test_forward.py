"""The calling convention: names in, names out, pooling as sentence-transformers does it."""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nlpconvert import forward
from nlpconvert.checkpoint import SentenceModule
from nlpconvert.errors import UsageError
from tests import tiny

INPUTS = ("input_ids", "token_type_ids", "attention_mask")


@pytest.fixture
def bert() -> torch.nn.Module:
    return tiny.build(tiny.Tiny("bert", "BertModel", "BertConfig", {**tiny.S, "max_position_embeddings": 64}))


def batch(rows: int = 3, length: int = 7) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 120, (rows, length))
    mask = np.ones_like(ids)
    mask[1, 4:], mask[2, :3] = 0, 0
    return {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": mask}


def module(kind: str, **settings: Any) -> SentenceModule:
    return SentenceModule(kind, settings, Path("1_" + kind))


def test_same_answers_as_the_class(bert: torch.nn.Module) -> None:
    tensors = {name: torch.tensor(array) for name, array in batch().items()}
    with torch.no_grad():
        expected = bert(**tensors)
    forward.attach(bert, INPUTS, ("pooler_output", "last_hidden_state"))
    answers = forward.call(bert, batch())
    assert list(answers) == ["pooler_output", "last_hidden_state"]
    for name, answer in answers.items():
        np.testing.assert_array_equal(answer, expected[name].numpy())
    assert list(inspect.signature(bert.forward).parameters) == list(INPUTS)
    in_order = bert(*tensors.values())
    assert torch.equal(in_order["pooler_output"], expected["pooler_output"])


def test_inputs_go_by_name(bert: torch.nn.Module) -> None:
    """Tokenizer order is not forward's order: bound by position the two would be swapped without a word."""
    forward.attach(bert, INPUTS, ("last_hidden_state",))
    shuffled = dict(reversed(batch().items()))
    np.testing.assert_array_equal(*(forward.call(bert, each)["last_hidden_state"] for each in (batch(), shuffled)))
    with pytest.raises(TypeError, match=r"missing: \['token_type_ids'\], unknown: \['position_ids'\]"):
        forward.call(bert, {("position_ids" if "type" in name else name): array for name, array in batch().items()})


def test_deep_copy_calls_itself(bert: torch.nn.Module) -> None:
    forward.attach(bert, INPUTS, ("last_hidden_state",))
    copied = copy.deepcopy(bert)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not forward.call(copied, batch())["last_hidden_state"].any()
    assert forward.call(bert, batch())["last_hidden_state"].any()


def test_training_mode_is_refused(bert: torch.nn.Module) -> None:
    forward.attach(bert, INPUTS, ("last_hidden_state",))
    bert.encoder.layer[1].train()  # type: ignore[union-attr, index, operator]
    with pytest.raises(RuntimeError, match=r"training mode \(encoder\.layer\.1\)"):
        forward.call(bert, batch())


def test_traces_with_names(bert: torch.nn.Module) -> None:
    forward.attach(bert, INPUTS, ("last_hidden_state", "pooler_output"))
    bert.requires_grad_(False)
    tensors = {name: torch.tensor(array) for name, array in batch().items()}
    traced = torch.jit.trace(bert, example_kwarg_inputs=tensors, strict=False, check_trace=False)
    longer = {name: np.concatenate([array, array], 1) for name, array in batch().items()}
    expected = forward.call(bert, longer)
    answers = traced(**{name: torch.tensor(array) for name, array in longer.items()})
    assert list(answers) == list(expected)
    np.testing.assert_allclose(answers["last_hidden_state"].numpy(), expected["last_hidden_state"], atol=1e-5)


def test_outputs_need_names() -> None:
    class Nameless(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
            return (input_ids,)

    with pytest.raises(UsageError, match="returns a tuple"):
        forward.given(Nameless(), {"input_ids": torch.zeros(1, 1)})


# -- pooling: each mode against the formula, row by row, in plain numpy ------------------------------------------------


def by_hand(mode: str, states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    rows = []
    for state, bits in zip(states, mask, strict=True):
        real = state[bits == 1]
        position = np.flatnonzero(bits) + 1
        rows.append(
            {
                "cls": lambda state=state, **_: state[0],
                "max": lambda real=real, **_: real.max(0),
                "mean": lambda real=real, **_: real.mean(0),
                "mean_sqrt_len": lambda real=real, **_: real.sum(0) / math.sqrt(len(real)),
                "weightedmean": lambda real=real, w=position, **_: (real * w[:, None]).sum(0) / w.sum(),
                "lasttoken": lambda real=real, **_: real[-1],
            }[mode]()
        )
    return np.stack(rows)


@pytest.mark.parametrize("mode", list(forward.POOLINGS))
def test_pooling(bert: torch.nn.Module, mode: str) -> None:
    old = next(key for key, name in forward._MODES.items() if name == mode)
    for settings in ({"pooling_mode": mode}, {f"pooling_mode_{old}": True, "word_embedding_dimension": 32}):
        steps = forward.sentence_steps(bert, [module("Pooling", **settings)], lambda _: {})
        forward.attach(bert, INPUTS, ("sentence_embedding", "last_hidden_state"), steps)
        answers = forward.call(bert, batch())
        expected = by_hand(mode, answers["last_hidden_state"], batch()["attention_mask"])
        np.testing.assert_allclose(answers["sentence_embedding"], expected, atol=1e-5)


def test_pooling_of_a_row_without_tokens_is_finite(bert: torch.nn.Module) -> None:
    empty = batch()
    empty["attention_mask"][0] = 0
    for mode in forward.POOLINGS:
        steps = forward.sentence_steps(bert, [module("Pooling", pooling_mode=mode)], lambda _: {})
        forward.attach(bert, INPUTS, ("sentence_embedding",), steps)
        assert np.isfinite(forward.call(bert, empty)["sentence_embedding"]).all(), mode


def test_chain(bert: torch.nn.Module) -> None:
    """Two modes side by side, layers that are the model's own submodules, a normalisation; a deep copy keeps them."""
    weight, bias = torch.randn(8, 64), torch.randn(8)
    chain = [
        module("Pooling", pooling_mode_mean_tokens=True, pooling_mode_cls_token=True, pooling_mode_max_tokens=False),
        module("Dense", in_features=64, out_features=8, activation_function="torch.nn.modules.activation.Tanh"),
        module("LayerNorm", dimension=8),
        module("Normalize"),
    ]
    stored = {
        "1_Dense": {"linear.weight": weight, "linear.bias": bias},
        "1_LayerNorm": {"norm.weight": torch.arange(8.0), "norm.bias": torch.ones(8)},
    }
    steps = forward.sentence_steps(bert, chain, lambda folder: stored[folder.name])
    forward.attach(bert, INPUTS, ("sentence_embedding", "last_hidden_state"), steps)
    answers = forward.call(bert, batch())
    states, mask = answers["last_hidden_state"], batch()["attention_mask"]
    pooled = np.concatenate([by_hand("cls", states, mask), by_hand("mean", states, mask)], 1)
    dense = np.tanh(pooled @ weight.numpy().T + bias.numpy())
    normed = (dense - dense.mean(1, keepdims=True)) / np.sqrt(dense.var(1, keepdims=True) + 1e-5) * np.arange(8) + 1
    expected = normed / np.linalg.norm(normed, axis=1, keepdims=True)
    np.testing.assert_allclose(answers["sentence_embedding"], expected, atol=1e-5)
    assert "sentence_2.0.weight" in dict(bert.named_parameters())
    copied = copy.deepcopy(bert)
    with torch.no_grad():
        bert.get_submodule("sentence_2")[0].weight.zero_()  # type: ignore[index, union-attr, operator]
    np.testing.assert_array_equal(forward.call(copied, batch())["sentence_embedding"], answers["sentence_embedding"])


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (module("Pooling", pooling_mode="attention"), "pooling attention is not supported"),
        (module("Pooling", pooling_mode_own_tokens=True), "pooling_mode_own_tokens is not supported"),
        (module("Pooling"), r"pooling \(none\)"),
        (module("Dense", in_features=1, out_features=1, activation_function="own.Evil"), "activation Evil"),
        (module("Dense", in_features=1), "do not fit"),
        (module("Dense", in_features=1, out_features=2), "do not fit"),
    ],
)
def test_modules_that_are_not_known(bert: torch.nn.Module, each: SentenceModule, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        forward.sentence_steps(bert, [each], lambda _: {"linear.weight": torch.zeros(1, 1)})
