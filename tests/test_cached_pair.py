"""Encoder and decoder with a cache: two graphs on one file of weights, against PyTorch's pass without a cache."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from nlpconvert import cache_names, forward
from nlpconvert.artifact import Made
from nlpconvert.convert import cached_pair, onnx_graph
from nlpconvert.errors import ConversionError
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import loaded
from tests.test_cached import CLOSE, WRITTEN, drawn, each, free, off, run, session, shape

MORE: dict[str, tiny.Tiny] = {
    row.name: row
    for row in (
        tiny.Tiny("mbart", "MBartForConditionalGeneration", "MBartConfig", tiny.BART),
        # T5 1.1's kind: a gated feed-forward and a head of its own.
        tiny.Tiny(
            "t5-gated",
            "T5ForConditionalGeneration",
            "T5Config",
            {**tiny.ROWS["t5"].values, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
            factor=1.0,
        ),
    )
}
ALL = ("t5", "bart", "marian", "m2m_100", "pegasus", *MORE)
QUICK = ("t5", "bart")


class Pair:
    """The two graphs on disk, and the model that they were made of."""

    def __init__(self, row: tiny.Tiny, folder: Path, **values: Any) -> None:
        self.model: Loaded = loaded(row, folder / "model", **values)
        self.directory = folder / "onnx"
        self.directory.mkdir()
        self.made: Made = cached_pair.convert(
            self.model.module,
            self.model.facts,
            self.directory,
            companions=self.model.directory,
            parameter_bytes=self.model.parameter_bytes,
        )
        self.encoder = session(self.directory / self.made.made_by["encoder"]["file"])
        self.decoder = session(self.directory / self.made.file)

    def reference(self, ids: np.ndarray, mask: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
        """PyTorch's logits and encoder states, without a cache."""
        feed = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}
        return forward.call(self.model.module, {**feed, "decoder_attention_mask": np.ones_like(target)})

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The encoder's states, and what every call of the decoder takes of this source."""
        answers, cross = run(self.encoder, {"input_ids": ids, "attention_mask": mask})
        return answers["last_hidden_state"], {**cross, "encoder_attention_mask": mask}

    def steps(self, source: dict[str, np.ndarray], target: np.ndarray, parts: Sequence[int]) -> np.ndarray:
        """The decoder's logits of the whole target, fed in parts of these lengths."""
        assert sum(parts) == target.shape[1]
        past, at, logits = cache_names.empty(self.made.inputs, len(target)), 0, []
        for length in parts:
            answers, past = run(self.decoder, {"input_ids": target[:, at : at + length], **source, **past})
            logits.append(answers["logits"])
            at += length
        assert next(iter(past.values())).shape[2] == at
        return np.concatenate(logits, axis=1)

    def write(self, source: dict[str, np.ndarray], count: int) -> np.ndarray:
        """`count` greedy tokens after the decoder's start token."""
        mask = source["encoder_attention_mask"]
        past, written = cache_names.empty(self.made.inputs, len(mask)), []
        new = np.full((len(mask), 1), self.model.facts.decoder_start_id)
        for _ in range(count):
            answers, past = run(self.decoder, {"input_ids": new, **source, **past})
            new = answers["logits"][:, -1].argmax(-1)[:, None]
            written.append(new)
        return np.concatenate(written, axis=1)


def padded(lengths: Sequence[int], *, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of drawn ids padded with 1 or 0 at one side, and their mask."""
    ids, mask = drawn(lengths)
    if not left:
        for row, length in enumerate(lengths):
            ids[row], mask[row] = np.roll(ids[row], length), np.roll(mask[row], length)
    return ids, mask


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tiny.ROWS["t5"], tmp_path_factory.mktemp("t5"))


# -- every architecture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(ALL, QUICK))
def test_sources_steps_and_what_is_written(name: str, tmp_path: Path) -> None:
    row = MORE.get(name) or tiny.ROWS[name]
    pair = Pair(row, tmp_path)
    assert_names(pair)
    worst: dict[str, float] = {}
    spread = []

    for number, (lengths, count, left) in enumerate(
        [([1], 9, True), ([13], 1, True), ([23, 4, 60], 12, False), ([2, 17], 33, True), ([5, 40, 1, 40, 3], 3, False)]
    ):
        ids, mask = padded(lengths, left=left)
        target = np.random.default_rng(number).integers(6, 120, (len(lengths), count))
        reference = pair.reference(ids, mask, target)
        states, source = pair.encode(ids, mask)
        worst[f"states {lengths}"] = off(states, reference["encoder_last_hidden_state"], mask)
        whole = pair.steps(source, target, [count])
        everywhere = np.ones_like(target)
        worst[f"whole {lengths}"] = off(whole, reference["logits"], everywhere)
        parts = [part for part in (2, 7, count - 9) if count > 9]
        for steps in (parts or [count], [1] * count):
            worst[f"{steps[:4]} {lengths}"] = off(pair.steps(source, target, steps), reference["logits"], everywhere)
        # Positions that are counted from the left edge move with padding there: PyTorch's own answers do so too.
        alone_is_same = not left or name.startswith("t5")
        for one in range(len(lengths) if alone_is_same else 0):
            here = mask[one : one + 1] == 1
            _, alone = pair.encode(ids[one : one + 1][here][None], np.ones((1, lengths[one]), dtype=np.int64))
            answer = pair.steps(alone, target[one : one + 1], [count])
            worst[f"row {one} of {lengths} alone"] = off(answer, whole[one : one + 1], everywhere[:1])
        spread.append(float(reference["logits"].std()))

    assert max(worst.values()) < CLOSE, worst
    assert max(spread) > 0.1  # the answers depend on the input

    ids, mask = padded([3, 21, 9, 1], left=False)
    tensors = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    generated = free(row, pair.model).generate(**tensors, do_sample=False, num_beams=1, max_new_tokens=WRITTEN)
    np.testing.assert_array_equal(pair.write(pair.encode(ids, mask)[1], WRITTEN), generated[:, 1:].numpy())


def assert_names(pair: Pair) -> None:
    kinds = ("key", "value")
    own, cross = ([f"{n}.{part}.{kind}" for n in range(2) for kind in kinds] for part in ("decoder", "encoder"))
    (layer, _) = cache_names.layers_of(pair.model.module.config)
    width = pair.model.module.config.d_model

    def of(names: Sequence[str], stem: str, axis: str) -> dict[str, tuple[int | str, ...]]:
        return {f"{stem}.{each}": ("batch", layer.heads, axis, layer.key_dim) for each in names}

    assert {spec.name: spec.shape for spec in pair.made.inputs} == {
        "input_ids": ("batch", "decoder_sequence"),
        "encoder_attention_mask": ("batch", "sequence"),
        **of(own, "past_key_values", "past_decoder_sequence"),
        **of(cross, "past_key_values", "sequence"),
    }
    assert {spec.name: spec.shape for spec in pair.made.outputs} == {
        "logits": ("batch", "decoder_sequence", 120),
        **of(own, "present", "total_decoder_sequence"),
    }
    graph = onnx.load(str(pair.directory / "encoder_model.onnx"), load_external_data=False).graph
    assert {value.name: shape(value) for value in graph.input} == {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "sequence"),
    }
    assert {value.name: shape(value) for value in graph.output} == {
        "last_hidden_state": ("batch", "sequence", width),
        **of(cross, "present", "sequence"),
    }
    said = pair.made.made_by["encoder"]
    assert {spec["name"]: tuple(spec["shape"]) for spec in said["outputs"]} == {
        value.name: shape(value) for value in graph.output
    }


@pytest.mark.parametrize("name", ALL)
def test_the_layers_that_read_the_source_are_found(name: str, tmp_path: Path) -> None:
    model = loaded(MORE.get(name) or tiny.ROWS[name], tmp_path / "model")
    with torch.no_grad():
        found = cached_pair._projections(model.module, model.facts)
    stem = (
        "decoder.block.{}.layer.1.EncDecAttention."
        if name.startswith("t5")
        else "model.decoder.layers.{}.encoder_attn."
    )
    ends = ("k", "v") if name.startswith("t5") else ("k_proj", "v_proj")
    assert found == [tuple(stem.format(number) + end for end in ends) for number in range(2)]
    assert not [part for part in model.module.modules() if part._forward_hooks]


@pytest.mark.slow
def test_where_they_are_not_found_the_whole_model_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_pair, "_projections", lambda *_: [])
    pair = Pair(tiny.ROWS["bart"], tmp_path)
    assert_names(pair)
    ids, mask = padded([9, 5, 7], left=False)
    target = np.random.default_rng(0).integers(6, 120, (3, 12))
    states, source = pair.encode(ids, mask)
    reference = pair.reference(ids, mask, target)
    assert off(states, reference["encoder_last_hidden_state"], mask) < CLOSE
    assert off(pair.steps(source, target, [1] * 12), reference["logits"], np.ones_like(target)) < CLOSE
    graph = onnx.load(str(pair.directory / "encoder_model.onnx"), load_external_data=False).graph
    assert not [tensor.name for tensor in graph.initializer if "self_attn" in tensor.name and "decoder" in tensor.name]


def test_a_source_of_nothing_but_padding(t5: Pair) -> None:
    """PyTorch weighs all of the padding alike; transformers.exporters would answer zeros there."""
    ids, mask = padded([9, 5, 7], left=True)
    mask[1] = 0
    target = np.random.default_rng(0).integers(6, 120, (3, 12))
    states, source = t5.encode(ids, mask)
    assert np.isfinite(states).all()
    reference = t5.reference(ids, mask, target)["logits"]
    assert off(t5.steps(source, target, [1] * 12), reference, np.ones_like(target)) < CLOSE


# -- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("t5", {"d_model": 64, "d_ff": 128, "vocab_size": 5000}),
        pytest.param("bart", {"d_model": 64, "vocab_size": 5000}, marks=pytest.mark.slow),
    ],
)
def test_weights_stand_once_for_both(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    """Embeddings serve the encoder, the decoder and the head, and stand on disk once."""
    pair = Pair(tiny.ROWS[name], tmp_path, **values)
    files = ("encoder_model.onnx", "decoder_model.onnx")
    graphs = [onnx.load(str(pair.directory / file), load_external_data=False).graph for file in files]
    inside = sum(len(tensor.raw_data) for graph in graphs for tensor in graph.initializer)
    size = (pair.directory / "model.onnx.data").stat().st_size + inside
    assert 0.95 < size / pair.model.parameter_bytes < 1.05
    assert pair.made.notes == ()
    places = [
        {next(each.value for each in tensor.external_data if each.key == "offset") for tensor in external(graph)}
        for graph in graphs
    ]
    assert len(places[0] & places[1]) == 1
    assert {each.value for graph in graphs for tensor in external(graph) for each in tensor.external_data[:1]} == {
        "model.onnx.data"
    }


def external(graph: Any) -> list[Any]:
    return [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]


def test_each_graph_has_its_own_half_only(t5: Pair) -> None:
    def modules(file: str) -> str:
        graph = onnx.load(str(t5.directory / file), load_external_data=False).graph
        return "\n".join(p.value for node in graph.node for p in node.metadata_props if p.key == onnx_graph.SCOPES)

    encoder, decoder = modules("encoder_model.onnx"), modules("decoder_model.onnx")
    assert "'encoder.block.1.layer.0.SelfAttention.q'" in encoder and "'encoder.block." not in decoder
    assert "'decoder.block.1.layer.1.EncDecAttention.k'" in encoder
    assert "SelfAttention" not in encoder.replace("encoder.block", "").split("'decoder.")[-1]
    assert "EncDecAttention.k'" not in decoder and "'decoder.block.1.layer.1.EncDecAttention.q'" in decoder
    assert "lm_head" not in encoder and "'lm_head'" in decoder


def test_nothing_of_this_machine(t5: Pair) -> None:
    words = ("site-packages", "/tmp", "/home/", "/root/", "/usr/", str(Path.cwd()), str(t5.directory))
    for file in ("encoder_model.onnx", "decoder_model.onnx"):
        path = t5.directory / file
        onnx.checker.check_model(str(path), full_check=True)
        assert [word for word in words if word.encode() in path.read_bytes()] == []
    assert {"config.json", "generation_config.json"} <= {each.name for each in t5.directory.iterdir()}


def test_moved_and_opened_from_elsewhere(t5: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(t5.directory, tmp_path / "first" / "model")
    (tmp_path / "first").rename(tmp_path / "second")
    monkeypatch.chdir(tmp_path)
    session(Path("second/model/encoder_model.onnx"))
    session(Path("second/model/decoder_model.onnx"))


# -- the model afterwards, and what is refused -------------------------------------------------------------------------


def test_the_reference_is_left_as_it_was(t5: Pair, tmp_path: Path) -> None:
    model = loaded(tiny.ROWS["t5"], tmp_path / "model")  # never converted
    ids, mask = padded([9, 4], left=True)
    target = np.random.default_rng(0).integers(6, 120, (2, 6))
    feed = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}
    feed["decoder_attention_mask"] = np.ones_like(target)
    assert [name for name, part in t5.model.module.named_modules() if part.training] == []
    fresh, after = (forward.call(each.module, feed) for each in (model, t5.model))
    assert list(fresh) == list(after)
    for output, value in fresh.items():
        np.testing.assert_array_equal(after[output], value)


def test_a_decoder_alone_is_refused(tmp_path: Path) -> None:
    model = loaded(tiny.ROWS["gpt2"], tmp_path / "model")
    with pytest.raises(ConversionError, match="GPT2LMHeadModel is no encoder-decoder: it takes no decoder_input_ids"):
        cached_pair.convert(model.module, model.facts, tmp_path)
