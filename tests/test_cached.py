"""The decoder with its cache: one graph for a prompt, chunks and single steps, against PyTorch without a cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from nlpconvert import cache_names, forward
from nlpconvert.artifact import Made, TensorSpec
from nlpconvert.cache_names import CacheLayer
from nlpconvert.convert import cached, cached_graph, onnx_graph
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.inputs import positions_from_mask
from nlpconvert.models import ARCHITECTURES
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import loaded

GROUPED = {**tiny.S, "num_key_value_heads": 2, "max_position_embeddings": 64, **tiny.PADS}
MORE: dict[str, tiny.Tiny] = {
    row.name: row
    for row in (
        tiny.Tiny("mistral", "MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 6}),
        tiny.Tiny("qwen2", "Qwen2ForCausalLM", "Qwen2Config", GROUPED),
        tiny.Tiny("gemma", "GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
        tiny.Tiny(
            "gemma2",
            "Gemma2ForCausalLM",
            "Gemma2Config",
            {**GROUPED, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
        ),
        tiny.Tiny("phi", "PhiForCausalLM", "PhiConfig", {**tiny.S, "max_position_embeddings": 64, **tiny.PADS}),
    )
}
ALL = ("gpt2", "gpt_neo", "opt", "llama", "qwen3", "gemma3", "bloom", "gpt_neox", *MORE)
# One of each kind: learned positions, local windows, grouped heads under rotary positions, alibi, sliding windows.
QUICK = ("gpt2", "gpt_neo", "llama", "bloom", "gemma2")

CLOSE = 1e-5
"""The largest difference over the largest logit. 5e-7 was the most when this was written."""

WRITTEN = 30


def row_of(name: str) -> tiny.Tiny:
    return MORE.get(name) or tiny.ROWS[name]


def each(names: Sequence[str], quick: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


class Writer:
    """A graph on disk, and the model that it was made of."""

    def __init__(self, row: tiny.Tiny, folder: Path, **values: Any) -> None:
        self.model: Loaded = loaded(row, folder / "model", **values)
        self.directory = folder / "onnx"
        self.directory.mkdir()
        self.made: Made = cached.convert(
            self.model.module,
            self.model.facts,
            self.directory,
            companions=self.model.directory,
            parameter_bytes=self.model.parameter_bytes,
        )
        self.session = session(self.directory / self.made.file)

    def feed(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        arrays = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_from_mask(mask)}
        return {name: arrays[name] for name in self.model.facts.inputs}

    def reference(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """PyTorch's logits of the whole, without a cache."""
        return forward.call(self.model.module, self.feed(ids, mask))["logits"]

    def steps(self, ids: np.ndarray, mask: np.ndarray, parts: Sequence[int]) -> np.ndarray:
        """The graph's logits of the whole, fed in parts of these lengths."""
        assert sum(parts) == ids.shape[1]
        whole, past, at, logits = self.feed(ids, mask), cache_names.empty(self.made.inputs, len(ids)), 0, []
        for length in parts:
            part = {name: array[:, at : at + length] for name, array in whole.items()}
            part["attention_mask"] = mask[:, : at + length]
            answer, past = run(self.session, {**part, **past})
            logits.append(answer["logits"])
            at += length
        assert next(iter(past.values())).shape[2] == at
        return np.concatenate(logits, axis=1)

    def write(self, ids: np.ndarray, mask: np.ndarray, count: int) -> np.ndarray:
        """`count` greedy tokens after left-padded prompts."""
        past, new, written = cache_names.empty(self.made.inputs, len(ids)), ids, []
        for _ in range(count):
            part = {name: array[:, -new.shape[1] :] for name, array in self.feed(new, mask).items()}
            answer, past = run(self.session, {**part, "input_ids": new, "attention_mask": mask, **past})
            new = answer["logits"][:, -1].argmax(-1)[:, None]
            mask = np.concatenate([mask, np.ones_like(new)], axis=1)
            written.append(new)
        return np.concatenate(written, axis=1)


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(session: Any, feed: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The answers by name, and of these the cache under the names of the next call's inputs."""
    names = [output.name for output in session.get_outputs()]
    answers = dict(zip(names, session.run(None, dict(feed)), strict=True))
    return answers, {cache_names.past_of(k): v for k, v in answers.items() if k.startswith(cache_names.PRESENT)}


def drawn(lengths: Sequence[int], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded rows of drawn ids (batch, width) and their mask; a row's tokens do not depend on its companions."""
    width = max(width, *lengths)
    ids, mask = np.zeros((len(lengths), width), dtype=np.int64), np.zeros((len(lengths), width), dtype=np.int64)
    for number, length in enumerate(lengths):
        ids[number, width - length :] = np.random.default_rng([number, length]).integers(6, 120, length)
        mask[number, width - length :] = 1
    return ids, mask


def off(candidate: np.ndarray, reference: np.ndarray, mask: np.ndarray) -> float:
    """The largest difference at real tokens over the largest logit there."""
    assert candidate.shape == reference.shape and np.isfinite(candidate).all()
    difference, scale = np.abs(candidate - reference)[mask == 1].max(), np.abs(reference[mask == 1]).max()
    return float(difference / scale)


def free(row: tiny.Tiny, model: Loaded) -> Any:
    """The checkpoint anew, so that its `generate` is transformers' own; it picks the likeliest token and nothing else:
    no stop, no token forced or suppressed."""
    fresh = getattr(transformers, row.model).from_pretrained(model.directory).eval()
    config = fresh.generation_config
    config.eos_token_id = config.forced_eos_token_id = config.forced_bos_token_id = None
    return fresh


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    return Writer(tiny.ROWS["gpt2"], tmp_path_factory.mktemp("gpt2"))


# -- every architecture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(ALL, QUICK))
def test_prompts_chunks_steps_and_what_is_written(name: str, tmp_path: Path) -> None:
    row = row_of(name)
    writer = Writer(row, tmp_path)
    assert_names(writer)
    worst = {}

    for lengths in ([1], [9], [40], [23, 4, 17], [2, 1], [12, 30, 1, 30, 5]):
        ids, mask = drawn(lengths)
        whole = writer.steps(ids, mask, [ids.shape[1]])
        worst[f"prompt {lengths}"] = off(whole, writer.reference(ids, mask), mask)
        if len(lengths) > 1:
            for number, length in enumerate(lengths):
                alone = writer.steps(ids[number : number + 1, -length:], mask[number : number + 1, -length:], [length])
                alone_off = off(whole[number : number + 1, -length:], alone, mask[number : number + 1, -length:])
                worst[f"row {number} of {lengths} alone"] = alone_off

    ids, mask = drawn([44, 39, 12])
    reference = writer.reference(ids, mask)
    for parts in ([3, 11, 1, 29], [16, 16, 12], [20] + [1] * 24, [1] * 44):
        worst[f"parts {parts[:5]}"] = off(writer.steps(ids, mask, parts), reference, mask)

    assert max(worst.values()) < CLOSE, worst
    assert reference[mask == 1].std() > 0.1  # the answers depend on the input

    ids, mask = drawn([3, 14, 9, 1])
    tensors = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    generated = free(row, writer.model).generate(**tensors, do_sample=False, max_new_tokens=WRITTEN)
    np.testing.assert_array_equal(writer.write(ids, mask, WRITTEN), generated[:, ids.shape[1] :].numpy())


def assert_names(writer: Writer) -> None:
    facts, made = writer.model.facts, writer.made
    tokens = ["input_ids", "attention_mask"]
    tokens += ["position_ids"] * (ARCHITECTURES[facts.model_type].positions == "mask")
    kinds = [f"{number}.{kind}" for number in range(2) for kind in ("key", "value")]
    assert [spec.name for spec in made.inputs] == [*tokens, *(f"past_key_values.{kind}" for kind in kinds)]
    assert [spec.name for spec in made.outputs] == ["logits", *(f"present.{kind}" for kind in kinds)]
    shapes = {spec.name: spec.shape for spec in (*made.inputs, *made.outputs)}
    assert shapes["input_ids"] == ("batch", "sequence")
    assert shapes["attention_mask"] == ("batch", "total_sequence")
    assert shapes.get("position_ids", ("batch", "sequence")) == ("batch", "sequence")
    assert shapes["logits"] == ("batch", "sequence", 120)
    (layer, _) = cache_names.layers_of(writer.model.module.config)
    assert shapes["past_key_values.1.value"] == ("batch", layer.heads, "past_sequence", layer.value_dim)
    assert shapes["present.0.key"] == ("batch", layer.heads, "total_sequence", layer.key_dim)
    graph = onnx.load(str(writer.directory / "model.onnx"), load_external_data=False).graph
    assert {value.name: shape(value) for value in (*graph.input, *graph.output)} == shapes


def shape(value: Any) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_nothing_of_this_machine_and_scopes_of_the_checkpoint(gpt2: Writer) -> None:
    path = gpt2.directory / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    content = path.read_bytes()
    words = ("site-packages", "/tmp", "/home/", "/root/", "/usr/", str(Path.cwd()), str(gpt2.directory))
    assert [word for word in words if word.encode() in content] == []
    graph = onnx.load(str(path), load_external_data=False).graph
    scopes = [prop.value for node in graph.node for prop in node.metadata_props if prop.key == onnx_graph.SCOPES]
    assert len(scopes) > 0.9 * len(graph.node)
    assert any("'transformer.h.1.mlp.c_proj'" in scope for scope in scopes)
    axes = {word for value in graph.value_info for size in shape(value) for word in re.findall(r"[a-z]\w*", str(size))}
    assert axes <= {"batch", "sequence", "past_sequence", "total_sequence", "mod", "floor", "max", "min"}
    assert {"config.json", "generation_config.json"} <= {each.name for each in gpt2.directory.iterdir()}


@pytest.mark.parametrize(("name", "values"), [("gpt2", {"n_embd": 64, "vocab_size": 5000})])
def test_weights_stand_once(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    """The tied head too, which exporters write a second time."""
    writer = Writer(tiny.ROWS[name], tmp_path, **values)
    path = writer.directory / "model.onnx"
    graph = onnx.load(str(path), load_external_data=False).graph
    inside = sum(len(tensor.raw_data) for tensor in graph.initializer)
    size = (writer.directory / "model.onnx.data").stat().st_size + inside
    assert 0.95 < size / writer.model.parameter_bytes < 1.05
    assert writer.made.notes == ()
    # What is left in the file are nodes and names.
    assert path.stat().st_size - inside < 300_000


def test_facts_of_the_cache(gpt2: Writer) -> None:
    assert gpt2.made.made_by["cache"] == {"layers": [[4, 8, 8], [4, 8, 8]], "bytes_per_token": 512}
    assert gpt2.made.made_by["exporter"] == "transformers.exporters" and gpt2.made.made_by["opset"] == 20


# -- the model afterwards ----------------------------------------------------------------------------------------------


def test_the_reference_is_left_as_it_was(tmp_path: Path) -> None:
    model = loaded(tiny.ROWS["gpt2"], tmp_path / "model")
    attached = vars(model.module)["forward"]
    ids, mask = drawn([9, 4])
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_from_mask(mask)}
    before = forward.call(model.module, feed)["logits"]
    cached.convert(model.module, model.facts, tmp_path)
    assert vars(model.module)["forward"] is attached
    assert [name for name, part in model.module.named_modules() if part.training] == []
    np.testing.assert_array_equal(forward.call(model.module, feed)["logits"], before)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Sum(torch.nn.Module):
    """A model of one weight, for calls that go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.GPT2Config(vocab_size=40)
        self.embed = torch.nn.Embedding(40, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        state: torch.Tensor = self.embed(input_ids)
        return state


@pytest.fixture
def summing() -> Iterator[torch.nn.Module]:
    with torch.no_grad():
        yield Sum().eval().requires_grad_(False)


INPUTS = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("past_key_values.0.key", "float32", ("batch", "past_sequence", 4)),
)
OUTPUTS = (TensorSpec("logits", "float32", ("batch", "sequence", 4)),)
EXAMPLE = {"input_ids": torch.arange(15).reshape(3, 5), "past_key_values.0.key": torch.ones(3, 7, 4)}


def state(self: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return Sum.forward(self, tensors["input_ids"])


def past(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors["past_key_values.0.key"]


LOST = "lost the input past_key_values.0.key: nothing of it counts for logits"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda self, tensors: state(self, tensors), LOST),
        (lambda self, tensors: state(self, tensors) + past(tensors).shape[1], LOST),
        (
            lambda self, tensors: state(self, tensors) + past(tensors)[:, :1] * int(past(tensors).shape[1]),
            r"froze axis 1 \(past_sequence\) of the input past_key_values.0.key at 7: the artifact would answer at",
        ),
        (
            lambda self, tensors: past(tensors)[:, :1].expand(-1, 5, -1) * state(self, tensors)[:, :1],
            r"froze axis 1 \(sequence\) of the output logits at 5",
        ),
        (
            lambda self, tensors: (state(self, tensors) + past(tensors)[:, :1])[:, :, :3],
            "axis 2 of the output logits came out of the exporter as 3, not 4",
        ),
        (
            lambda self, tensors: state(self, tensors) + past(tensors)[:, : int(past(tensors).sum())],
            "Sum could not be exported with its cache: ",
        ),
    ],
)
def test_what_exporters_lose_is_refused(summing: torch.nn.Module, wrong: Any, words: str) -> None:
    call = cached_graph.Call(lambda self, tensors: {"logits": wrong(self, tensors)}, INPUTS, OUTPUTS, EXAMPLE)
    with pytest.raises(ConversionError, match=words):
        cached_graph.export(summing, call, 20)
    assert "forward" not in vars(summing)


def test_a_call_that_is_right(summing: torch.nn.Module) -> None:
    def right(self: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"logits": state(self, tensors) + past(tensors).sum(1, keepdim=True)}

    program = cached_graph.export(summing, cached_graph.Call(right, INPUTS, OUTPUTS, EXAMPLE), 20)
    assert onnx_graph.specs(program.graph) == (INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bert", "BertForSequenceClassification takes no cache of keys and values, so it cannot write step by step"),
        ("xlnet", "XLNetForSequenceClassification takes no cache of keys and values"),
    ],
)
def test_models_without_such_a_cache(name: str, words: str, tmp_path: Path) -> None:
    model = loaded(tiny.ROWS[name], tmp_path / "model")
    with pytest.raises(ConversionError, match=words):
        cached.convert(model.module, model.facts, tmp_path)
    assert not list(tmp_path.glob("*.onnx"))


def test_opset_out_of_range(gpt2: Writer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--opset 17 is not between 18 and 23"):
        cached.convert(gpt2.model.module, gpt2.model.facts, tmp_path, opset=17)


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_of_a_cache() -> None:
    layers = (CacheLayer(2, 8, 8), CacheLayer(2, 8, 4))
    ins, outs = cache_names.past(layers), cache_names.present(layers)
    assert [spec.name for spec in ins[:2]] == ["past_key_values.0.key", "past_key_values.0.value"]
    assert ins[3].shape == ("batch", 2, "past_sequence", 4) and outs[3].shape == ("batch", 2, "total_sequence", 4)
    assert [cache_names.present_of(spec.name) for spec in ins] == [spec.name for spec in outs]
    assert [cache_names.past_of(spec.name) for spec in outs] == [spec.name for spec in ins]
    assert cache_names.is_past("past_key_values.0.key") and not cache_names.is_past("input_ids")
    cross = cache_names.past(layers, "sequence", "encoder")
    assert cross[0] == TensorSpec("past_key_values.0.encoder.key", "float32", ("batch", 2, "sequence", 8))
    nothing = cache_names.empty([*INPUTS[:1], *ins, *cross], batch=3)
    assert {name: array.shape for name, array in nothing.items()}["past_key_values.1.value"] == (3, 2, 0, 4)
    assert list(nothing) == [spec.name for spec in ins] and nothing["past_key_values.0.key"].dtype == np.float32
    assert cache_names.token_bytes(layers) == (2 * 16 + 2 * 12) * 4


@pytest.mark.parametrize(
    ("config", "layer", "count"),
    [
        ({"n_layer": 3, "n_head": 4, "n_embd": 32}, CacheLayer(4, 8, 8), 3),
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}, None, 2),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
            CacheLayer(1, 16, 16),
            2,
        ),
        (
            {"num_layers": 6, "num_decoder_layers": 4, "num_heads": 8, "d_kv": 64, "d_model": 512},
            CacheLayer(8, 64, 64),
            4,
        ),
        (
            {"encoder_layers": 6, "decoder_layers": 3, "decoder_attention_heads": 2, "d_model": 32},
            CacheLayer(2, 16, 16),
            3,
        ),
    ],
)
def test_layers_of_a_config(config: dict[str, Any], layer: CacheLayer | None, count: int) -> None:
    assert cache_names.layers_of(config) == (layer or CacheLayer(2, 8, 8),) * count


def test_a_config_that_does_not_say() -> None:
    with pytest.raises(UsageError, match="does not say its number of attention heads: none of decoder_attention_heads"):
        cache_names.layers_of({"n_layer": 2, "hidden_size": 4})
