"""The loop that writes: the same tokens as transformers' own `generate`, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from nlpconvert import generation, source, writer
from nlpconvert.backends.writing import OnnxWriter, open_paths
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.generation import Settings
from nlpconvert.models import Facts
from nlpconvert.source import Loaded
from nlpconvert.writer import State, encodes
from tests import tiny, writers
from tests.asking import loaded


@dataclasses.dataclass(frozen=True)
class Scene:
    """A model, a writer on its graphs, and the checkpoint's generation config."""

    model: Loaded
    writer: OnnxWriter

    @property
    def config(self) -> dict[str, Any]:
        said: dict[str, Any] = self.model.module.generation_config.to_dict()  # type: ignore[operator,union-attr]
        return said

    def settings(self, **changes: Any) -> Settings:
        return generation.settings(self.model.facts, self.config, **changes)

    def theirs(self, batch: Mapping[str, np.ndarray], **settings: Any) -> np.ndarray:
        """The new tokens of transformers' own `generate`."""
        module: Any = self.model.module
        attached = vars(module).pop("forward")
        try:
            given = {name: torch.tensor(array) for name, array in batch.items()}
            plain = {"do_sample": False, "num_beams": 1, "pad_token_id": self.model.facts.pad_id}
            made = module.generate(**given, **{**plain, **settings}).numpy()
        finally:
            module.forward = attached
        return np.asarray(made[:, 1 if encodes(self.model.facts) else batch["input_ids"].shape[1] :])


def _scene(model: Loaded, directory: Path) -> Scene:
    return Scene(model, writers.onnx_writer(model, writers.export(model, directory)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tiny Llama with grouped queries."""
    directory = tmp_path_factory.mktemp("llama")
    return _scene(loaded(tiny.ROWS["llama"], directory / "model"), directory / "onnx")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tiny BART, whose generation config forces the last token."""
    directory = tmp_path_factory.mktemp("bart")
    return _scene(loaded(tiny.ROWS["bart"], directory / "model"), directory / "onnx")


MIXED = (9, 1, 5)


def test_greedy_tokens_are_those_of_generate(llama: Scene) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, MIXED))
    made = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=50))
    np.testing.assert_array_equal(made.tokens, llama.theirs(batch, max_new_tokens=50))
    own = generation.generate(writers.reference(llama.model), batch, llama.settings(max_new_tokens=50))
    np.testing.assert_array_equal(made.tokens, own.tokens)
    assert made.ended == ("length",) * 3 and made.lengths == (50,) * 3
    assert made.tokens_per_second > 0


@pytest.mark.slow
def test_greedy_tokens_of_an_encoder_decoder_are_those_of_generate(bart: Scene) -> None:
    batch = generation.pad_for(bart.model.facts, writers.prompts(bart.model, MIXED))
    settings = bart.settings(max_new_tokens=50)
    assert not settings.plain  # BART forces its last token
    made = generation.generate(bart.writer, batch, settings)
    np.testing.assert_array_equal(made.tokens, bart.theirs(batch, max_new_tokens=50))


def test_prompts_read_in_chunks_write_the_same(llama: Scene) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, MIXED))
    whole = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=20))
    for chunk in (1, 4):
        chunked = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=20, chunk=chunk))
        np.testing.assert_array_equal(whole.tokens, chunked.tokens)


def test_a_draw_with_a_seed_is_that_of_generate(llama: Scene) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, MIXED))
    asked = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
    drawn = []
    for seed in (0, 1):
        made = generation.generate(
            llama.writer, batch, llama.settings(max_new_tokens=20, sample=True, seed=seed, **asked)
        )
        torch.manual_seed(seed)
        np.testing.assert_array_equal(made.tokens, llama.theirs(batch, max_new_tokens=20, do_sample=True, **asked))
        drawn.append(made.tokens)
    assert not np.array_equal(*drawn)


def test_penalties_without_sampling_are_those_of_generate(llama: Scene) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, MIXED))
    asked = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    made = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=20, **asked))
    np.testing.assert_array_equal(made.tokens, llama.theirs(batch, max_new_tokens=20, **asked))


@pytest.mark.parametrize("asked", [{}, {"length_penalty": 2.0, "early_stopping": True, "repetition_penalty": 1.3}])
def test_beams_are_those_of_generate(llama: Scene, asked: dict[str, Any]) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, MIXED))
    made = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=20, beams=4, **asked))
    np.testing.assert_array_equal(made.tokens, llama.theirs(batch, max_new_tokens=20, num_beams=4, **asked))
    assert made.tokens_per_second > 0
    with pytest.raises(UsageError, match="neither samples nor stops"):
        llama.settings(beams=4, sample=True)


def test_a_row_ends_at_any_of_several_tokens_and_is_padded_from_there(llama: Scene) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, MIXED))
    plain = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=20, eos=()))
    ends = (int(plain.tokens[0, 4]), int(plain.tokens[2, 7]))
    made = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=20, eos=ends))
    np.testing.assert_array_equal(made.tokens, llama.theirs(batch, max_new_tokens=20, eos_token_id=list(ends)))
    assert made.ended[0] == "eos" and made.lengths[0] <= 5
    assert (made.tokens[0, made.lengths[0] :] == llama.model.facts.pad_id).all()


def test_a_stop_text_ends_a_row(llama: Scene) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, (5,)))
    plain = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=12, eos=()))

    def decode(ids: Any) -> str:
        return " ".join(map(str, ids))

    stop = decode(plain.tokens[0, 2:4].tolist())
    how = llama.settings(max_new_tokens=12, eos=(), stop=(stop,))
    made = generation.generate(llama.writer, batch, how, decode=decode)
    assert made.ended == ("stop",) and made.lengths[0] <= 4
    with pytest.raises(UsageError, match="stop texts need the model's tokenizer"):
        generation.generate(llama.writer, batch, how)


def test_rows_that_change_places_go_on_from_their_own_past(llama: Scene) -> None:
    batch = generation.pad_for(llama.model.facts, writers.prompts(llama.model, MIXED))
    for each in (llama.writer, writers.reference(llama.model)):
        state = each.begin(batch)
        each.step(state, state.first)
        more = np.array([[7, 8], [9, 10], [11, 12]])
        straight = each.step(state, more)
        state = each.begin(batch)
        each.step(state, state.first)
        rows = np.array([2, 0, 0, 1])
        each.reorder(state, rows)
        np.testing.assert_allclose(each.step(state, more[rows]), straight[rows], atol=2e-5)


def test_what_goes_past_the_limit_is_refused(llama: Scene) -> None:
    facts = llama.model.facts
    batch = generation.pad_for(facts, writers.prompts(llama.model, (60, 3)))
    fits = generation.generate(llama.writer, batch, llama.settings(max_new_tokens=5, eos=()))
    assert fits.lengths == (5, 5)
    with pytest.raises(UsageError, match=r"60 tokens, and 6 new ones would be 65 tokens long.*takes 64 at most"):
        generation.generate(llama.writer, batch, llama.settings(max_new_tokens=6, eos=()))
    with pytest.raises(UsageError, match="a prompt would be 65 tokens long"):
        llama.writer.begin(generation.pad_for(facts, writers.prompts(llama.model, (65,))))
    state = llama.writer.begin(generation.pad_for(facts, writers.prompts(llama.model, (64,))))
    llama.writer.step(state, state.first)
    with pytest.raises(UsageError, match="the text would be 65 tokens long"):
        llama.writer.step(state, np.array([[5]]))


def test_a_graph_without_a_cache_is_told(tmp_path: Path) -> None:
    ids = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "sequence"])
    logits = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.INT64, ["batch", "sequence"])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["input_ids"], ["logits"])], "g", [ids], [logits])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(DriftError, match="keeps no cache"):
        open_paths(tmp_path / "model.onnx", None, PLAIN, threads=1)


# -- the loop alone ----------------------------------------------------------------------------------------------------

PLAIN = Facts("fake", "text-generation", ("input_ids", "attention_mask"), (), 10, 0, 1, None, 20, "own", 0, (), False)


class Counting:
    """Says the token after the last one, from 9 on 2 again."""

    facts, provider, precision = PLAIN, "none", "float32"

    def begin(self, prompts: Mapping[str, np.ndarray]) -> State:
        return writer.start(prompts, self.facts)

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        tokens = writer.check_step(state, tokens, self.facts)
        state.length += tokens.shape[1]
        following = np.where(tokens >= 9, 2, tokens + 1)
        logits: np.ndarray = np.eye(10, dtype=np.float32)[following]
        return logits

    def reorder(self, state: State, rows: np.ndarray) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def test_greedy_needs_neither_torch_nor_a_runtime() -> None:
    batch = generation.pad_left([[3], [5, 7]], 0)
    made = generation.generate(Counting(), batch, Settings(max_new_tokens=4, eos=(9,)))
    assert made.tokens.tolist() == [[4, 5, 6, 7], [8, 9, 0, 0]]
    assert made.lengths == (4, 2) and made.ended == ("length", "eos")


def test_settings_come_from_a_generation_config_and_changes() -> None:
    config = {"eos_token_id": [4, 5], "pad_token_id": 3, "max_new_tokens": 7, "top_k": 50, "do_sample": True}
    made = generation.settings(PLAIN, config)
    assert (made.eos, made.pad, made.max_new_tokens, made.sample) == ((4, 5), 3, 7, False)
    assert made.plain  # greedy reads nothing of sampling
    assert not generation.settings(PLAIN, config, sample=True).plain
    assert not generation.settings(PLAIN, {"repetition_penalty": 1.3}).plain
    assert generation.settings(PLAIN, {"repetition_penalty": 1.0, "suppress_tokens": []}).plain
    assert generation.settings(PLAIN).eos == (1,)
    with pytest.raises(UsageError, match="no such setting of generation: topk"):
        generation.settings(PLAIN, topk=3)
    with pytest.raises(UsageError, match="give 1 or more"):
        generation.settings(PLAIN, max_new_tokens=0)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda batch: {**batch, "attention_mask": batch["attention_mask"][:, ::-1]}, "padded at the left"),
        (lambda batch: {**batch, "attention_mask": 0 * batch["attention_mask"]}, "prompt 0 holds no token"),
        (lambda batch: {"input_ids": batch["input_ids"][:, :0]}, "prompts are"),
    ],
)
def test_prompts_that_cannot_be_gone_on_from_are_refused(
    change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        writer.start(change(generation.pad_left([[3], [5, 7]], 0)), PLAIN)


# -- trained models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-lm", "llama-lm", "t5-seq2seq"])
def test_200_greedy_tokens_of_a_trained_model_are_those_of_generate(
    name: str, fixtures_dir: Path, tmp_path: Path
) -> None:
    scene = _scene(source.load(str(fixtures_dir / name)), tmp_path)
    encode = scene.model.encode
    assert encode is not None
    texts = [json.loads(line)["text"] for line in (fixtures_dir / name / "eval.jsonl").read_text().splitlines()[:8]]
    rows = [list(encode(text, None)["input_ids"]) for text in texts]
    if not encodes(scene.model.facts):
        rows = [row[:length] for row, length in zip(rows, (40, 3, 17, 1, 29, 8, 55, 12), strict=True)]
    batch = generation.pad_for(scene.model.facts, rows)
    new = 200
    made = generation.generate(scene.writer, batch, scene.settings(max_new_tokens=new))
    np.testing.assert_array_equal(made.tokens, scene.theirs(batch, max_new_tokens=new))
