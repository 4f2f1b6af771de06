"""Asking and judging what writes: an unbroken graph agrees; every way to break a cache is seen, and named."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from nlpconvert import exact, html_written, passages, passages_files, report_written, writing
from nlpconvert.backends.pytorch_writing import PytorchWriter
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.noise import Arithmetics
from nlpconvert.passages import Asked
from nlpconvert.progress import Silent
from nlpconvert.source import Loaded
from nlpconvert.validators.tolerance import parse
from tests import tiny, writers
from tests.asking import loaded


@dataclasses.dataclass(frozen=True)
class Scene:
    """A model, its graphs, and what the reference answered."""

    model: Loaded
    directory: Path | None
    asked: Asked

    def writer(self, fault: type | None = None, directory: Path | None = None) -> Any:
        """A writer on the graphs where there are some, else the reference's own; `fault` stands before its methods."""
        made: Any = writers.reference(self.model)
        if directory or self.directory:
            made = writers.onnx_writer(self.model, directory or self.directory)
        if fault is not None:
            made.__class__ = type(fault.__name__, (fault, type(made)), {})
        return made

    def judge(self, fault: type | None = None, directory: Path | None = None) -> tuple[bool, dict[str, Any]]:
        """The verdict on such a writer."""
        writer = self.writer(fault, directory)
        try:
            return writing.judge(writer, self.asked, "float32")
        finally:
            writer.close()


def _scene(name: str, directory: Path, *, graphs: bool) -> Scene:
    model = loaded(tiny.ROWS[name], directory / "model")
    asked = writing.ask(writers.reference(model), None, Silent())
    return Scene(model, writers.export(model, directory / "onnx") if graphs else None, asked)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tiny GPT-2 and its graph."""
    return _scene("gpt2", tmp_path_factory.mktemp("gpt2"), graphs=True)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tiny T5, judged through its own cache."""
    return _scene("t5", tmp_path_factory.mktemp("t5"), graphs=False)


@pytest.fixture(scope="module")
def t5_graphs(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tiny T5 and its two graphs."""
    return _scene("t5", tmp_path_factory.mktemp("t5-graphs"), graphs=True)


def _failing(verdict: dict[str, Any]) -> set[str]:
    return {each["name"] for each in verdict["phases"] if not each["agrees"]}


# -- what is right -----------------------------------------------------------------------------------------------------


SLOW_T5 = pytest.param("t5_graphs", marks=pytest.mark.slow)  # two exports


@pytest.mark.parametrize("name", ["gpt2", "t5", SLOW_T5])
def test_an_unbroken_graph_agrees(name: str, request: pytest.FixtureRequest) -> None:
    scene: Scene = request.getfixturevalue(name)
    agrees, verdict = scene.judge()
    assert agrees, verdict["problems"]
    assert verdict["why"] == []
    assert {each["name"] for each in verdict["phases"]} == set(writing._ORDER)
    assert all(each["kept"] == each["positions"] > 0 for each in verdict["phases"])
    assert verdict["texts"]["identical"] == verdict["texts"]["rows"] == 5
    perplexity = verdict["perplexity"]  # of a model of random weights few texts are likelier than a guess
    assert perplexity["ratio"] == pytest.approx(1, abs=1e-6) or (not perplexity["tokens"] and perplexity["left_out"])
    assert "error grows" not in verdict["curve"]["sentence"]


def test_the_reference_judged_by_itself_shows_no_error(gpt2: Scene) -> None:
    agrees, verdict = writing.judge(writers.reference(gpt2.model), gpt2.asked, "float32")
    whole = next(each for each in verdict["phases"] if each["name"] == writing.WHOLE)
    assert agrees and whole["worst_abs"] == 0


def test_a_golden_is_read_as_it_was_written_and_damage_is_told(gpt2: Scene, tmp_path: Path) -> None:
    passages_files.write(tmp_path / "a", gpt2.asked)
    passages_files.write(tmp_path / "b", gpt2.asked)
    again = passages_files.read(tmp_path / "a")
    assert passages.sha256(again.passages) == passages.sha256(gpt2.asked.passages)
    assert (again.noise, again.scale, again.eos) == (gpt2.asked.noise, gpt2.asked.scale, gpt2.asked.eos)
    for name, known in gpt2.asked.known.items():
        for field in dataclasses.fields(known.seen):
            np.testing.assert_array_equal(getattr(known.seen, field.name), getattr(again.known[name].seen, field.name))
    for file in (passages_files.WORDS, passages_files.ARRAYS):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    words = tmp_path / "b" / passages_files.WORDS
    words.write_text(words.read_text().replace('"prompt": 9', '"prompt": 8'))
    with pytest.raises(DriftError, match="not those that the answers are about"):
        passages_files.read(tmp_path / "b")
    arrays = tmp_path / "a" / passages_files.ARRAYS
    arrays.write_bytes(arrays.read_bytes()[:-100])
    with pytest.raises(DriftError, match="damaged"):
        passages_files.read(tmp_path / "a")
    with pytest.raises(UsageError, match="convert again"):
        passages_files.read(tmp_path / "nowhere")


def test_few_positions_are_kept_where_the_budget_is_small_and_breaks_are_still_seen(gpt2: Scene) -> None:
    few = writing.ask(writers.reference(gpt2.model), None, Silent(), budget=4 * gpt2.model.facts.vocab_size * 40)
    kept = {name: len(each.seen.index) for name, each in few.known.items()}
    assert sum(kept.values()) <= 40 and min(kept.values()) >= passages.LEAST
    for kind, agrees in ((None, True), (Late, False), (Unmasked, False), (FiveThenNan, False)):
        assert writing.judge(gpt2.writer(kind), few, "float32")[0] is agrees


def test_the_noise_of_other_arithmetics_is_measured(gpt2: Scene) -> None:
    module = gpt2.model.module
    arithmetics = Arithmetics(lambda: exact.float64(module), exact.other_threads, False)
    asked = writing.ask(writers.reference(gpt2.model), None, Silent(), arithmetics=arithmetics)
    assert set(asked.noise) == {"float64", "threads", "steps", "company", "floor"}
    assert 0 < asked.noise["float64"] <= asked.noise["floor"] < 1e-5
    assert asked.own == () and asked.notes == ()


def test_passages_stand_on_both_sides_of_constants_and_at_the_limit(t5: Scene, gpt2: Scene) -> None:
    by_name = {each.name: each for each in gpt2.asked.passages}
    assert by_name["limit"].tokens.shape == (1, 64)
    assert by_name["mixed"].pads.tolist() == [0, 12, 20, 22]
    assert by_name["from-one"].prompt == 1
    assert {"past-8", "past-16"} <= {each.name for each in t5.asked.passages}


# -- what is broken on purpose -----------------------------------------------------------------------------------------


Faulty: Any = object
"""What a fault stands before is known when it is put before a writer: an ONNX one, or the reference's own."""


class Late(Faulty):
    """Positions off by one after the prompt."""

    def step(self, state: Any, tokens: np.ndarray) -> np.ndarray:
        own = type(state).positions
        later = state.length > 0
        state.positions = lambda more: own(state, more) + later
        return super().step(state, tokens)


class Unmasked(Faulty):
    """The mask over the padding is ignored."""

    def step(self, state: Any, tokens: np.ndarray) -> np.ndarray:
        state.seen_mask = lambda more: np.ones((state.rows, state.length + more), np.int64)
        own = state.mask
        state.positions = lambda more: passages_positions(own, state.length, more)
        return super().step(state, tokens)


def passages_positions(mask: np.ndarray, length: int, more: int) -> np.ndarray:
    """The right positions, whatever the mask that goes in."""
    whole = np.concatenate([mask, np.ones((len(mask), length + more), np.int64)], axis=1)[:, : length + more]
    return np.maximum(np.cumsum(whole, axis=1) - 1, 0)[:, length:]


class FiveThenNan(Faulty):
    """NaN at the fifth step after the prompt."""

    def step(self, state: Any, tokens: np.ndarray) -> np.ndarray:
        state.calls = getattr(state, "calls", -1) + 1
        logits = super().step(state, tokens)
        return np.full_like(logits, np.nan) if state.calls == 5 else logits


class WrongRows(Faulty):
    """A reorder that leaves the cache where it was."""

    def reorder(self, state: Any, rows: np.ndarray) -> None:
        held = self.cache(state)
        super().reorder(state, rows)
        self.replace(state, held)


class NoSource(Faulty):
    """The cross-attention's cache is made anew from nothing after the first step."""

    def step(self, state: Any, tokens: np.ndarray) -> np.ndarray:
        if state.length:
            held = self.cache(state)
            self.replace(state, {name: 0 * array for name, array in held.items() if ".encoder." in name})
        return super().step(state, tokens)


class LosesSource(Faulty):
    """The cross-attention's cache is right for one step and lost then."""

    def step(self, state: Any, tokens: np.ndarray) -> np.ndarray:
        logits = super().step(state, tokens)
        held = self.cache(state)
        self.replace(state, {name: 0 * array for name, array in held.items() if ".encoder." in name})
        return logits


class NeverSource(Faulty):
    """The source is never read: every row answers to the first one's."""

    def begin(self, prompts: Any) -> Any:
        first = {name: np.repeat(array[:1], len(array), axis=0) for name, array in prompts.items()}
        return super().begin(first)


class ShortSight(Faulty):
    """Single steps see the last eight tokens alone."""

    WINDOW: ClassVar[int] = 8

    def step(self, state: Any, tokens: np.ndarray) -> np.ndarray:
        own = type(state).seen_mask
        if state.length and tokens.shape[1] == 1:
            positions = state.positions(1)

            def seen(more: int) -> np.ndarray:
                mask = own(state, more)
                mask[:, : -self.WINDOW] = 0
                return mask

            state.seen_mask, state.positions = seen, lambda more: positions
            try:
                return super().step(state, tokens)
            finally:
                del state.seen_mask, state.positions
        return super().step(state, tokens)


@pytest.mark.parametrize(
    "name, kind, words, failing",
    [
        ("gpt2", Late, "positions after the prompt are too large by 1", {writing.STEPS, writing.CHUNKED}),
        ("gpt2", Unmasked, "the mask over the padding is ignored", {writing.PROMPT, writing.WHOLE, writing.COMPANY}),
        ("gpt2", FiveThenNan, "not finite from single step 5 after the prompt on", {writing.STEPS}),
        ("gpt2", WrongRows, "the reorder takes the cache of another row", {writing.MOVED}),
        ("gpt2", ShortSight, "off from 8 on by single steps: attention reaches back 8 tokens", {writing.STEPS}),
        ("t5", NoSource, "whatever the cross-attention's cache holds", {writing.STEPS, writing.CHUNKED}),
        pytest.param(
            "t5_graphs",
            LosesSource,
            "the cross-attention's cache is lost after the first step",
            {writing.STEPS},
            marks=pytest.mark.slow,
        ),
        ("t5", NeverSource, "the cross-attention's cache is not what the encoder gave", {writing.WHOLE}),
        ("t5", WrongRows, "the reorder takes the cache of another row", {writing.MOVED}),
    ],
)
def test_a_broken_cache_fails_with_a_sentence_that_says_which(
    name: str, kind: type, words: str, failing: set[str], request: pytest.FixtureRequest
) -> None:
    scene: Scene = request.getfixturevalue(name)
    agrees, verdict = scene.judge(kind)
    assert not agrees
    assert len(verdict["why"]) == 1 and words in verdict["why"][0], verdict["why"]
    assert failing <= _failing(verdict)


@pytest.mark.parametrize(
    "name, pairs, words",
    [
        ("gpt2", [("0.key", "1.key"), ("0.value", "1.value")], "the caches of layers 0 and 1 are swapped"),
        ("gpt2", [("0.key", "1.key")], "the keys of layers 0 and 1 are swapped"),
        ("gpt2", [("1.key", "1.value")], "key and value of layer 1 are swapped"),
        ("gpt2", [("0.key", "0.value"), ("1.key", "1.value")], "keys and values of all layers are swapped"),
        pytest.param(
            "t5_graphs",
            [("0.decoder.key", "1.decoder.key"), ("0.decoder.value", "1.decoder.value")],
            "the caches of layers 0 and 1 are swapped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "t5_graphs",
            [("0.decoder.key", "0.decoder.value")],
            "key and value of layer 0 are swapped",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_graph_whose_cache_is_wired_wrongly_is_named(
    name: str, pairs: list[tuple[str, str]], words: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    scene: Scene = request.getfixturevalue(name)
    assert scene.directory is not None
    names = {}
    for one, other in pairs:
        names |= {f"present.{one}": f"present.{other}", f"present.{other}": f"present.{one}"}
    agrees, verdict = scene.judge(directory=writers.rewired(scene.directory, tmp_path / "onnx", names))
    assert not agrees
    assert words in verdict["why"][0], verdict["why"]
    assert writing.WHOLE not in _failing(verdict) and {writing.STEPS, writing.CACHED} <= _failing(verdict)


def test_a_window_shorter_than_the_text_is_named_read_at_once_too(tmp_path: Path) -> None:
    wide = loaded(tiny.ROWS["gpt_neo"], tmp_path / "wide", window_size=64)
    asked = writing.ask(writers.reference(wide), None, Silent())
    narrow = loaded(tiny.ROWS["gpt_neo"], tmp_path / "narrow", window_size=8)
    agrees, verdict = writing.judge(writers.reference(narrow), asked, "float32")
    assert not agrees
    assert "agrees up to position 7 and is off from 8 on: attention reaches back 8 tokens" in verdict["why"][0]


def test_another_model_is_no_matter_of_the_cache(gpt2: Scene) -> None:
    module = copy.deepcopy(gpt2.model.module)
    module.transformer.h[0].mlp.c_fc.weight.data.mul_(1.01)  # type: ignore[union-attr,index]
    agrees, verdict = writing.judge(PytorchWriter(module, gpt2.model.facts), gpt2.asked, "float32")
    assert not agrees
    assert "not the cache but the model itself" in verdict["why"][0]


def test_a_writer_that_raises_counts_against_itself_and_nothing_compared_is_a_failure(gpt2: Scene) -> None:
    class Raising(Faulty):
        def step(self, state: Any, tokens: np.ndarray) -> np.ndarray:
            raise RuntimeError("no kernel")

    agrees, verdict = gpt2.judge(Raising)
    assert not agrees
    assert any("RuntimeError: no kernel" in each for each in verdict["problems"])
    assert any("nothing was compared" in each for each in verdict["problems"])


# -- lower precisions --------------------------------------------------------------------------------------------------


def test_lower_precisions_are_judged_by_divergence_and_perplexity(gpt2: Scene) -> None:
    module = copy.deepcopy(gpt2.model.module).half().float()
    writer = PytorchWriter(module, gpt2.model.facts)
    agrees, verdict = writing.judge(writer, gpt2.asked, "float16")
    steps = next(each for each in verdict["phases"] if each["name"] == writing.STEPS)
    assert agrees, verdict["problems"]
    assert verdict["tolerance"]["measure"] == "kl" and 0 < steps["kl"] <= 1e-4
    assert verdict["allowed"] == {"perplexity": 1.001, "identical": None}
    strict, told = writing.judge(writer, gpt2.asked, "float16", parse("kl<=1e-12"))
    assert not strict and any("allowed kl<=1e-12" in each for each in told["problems"])
    assert not writing.judge(writer, gpt2.asked, "float32")[0]


def test_a_report_says_what_was_measured_and_what_is_wrong(gpt2: Scene) -> None:
    _, good = gpt2.judge()
    text = "\n".join(report_written.lines(good))
    assert "5 of 5 free texts are the reference's" in text and "DRIFT" not in text
    _, bad = gpt2.judge(Late)
    text = "\n".join(report_written.lines(bad))
    assert "single steps" in text and "DRIFT" in text and "positions after the prompt are too large by 1" in text
    page = html_written.written(bad, "s1")
    assert page is not None and page["why"] == bad["why"]
    told = {row["name"]: row["word"] for row in page["rows"]}
    assert told["prompt"] == "agrees" and told["single steps"] == "DRIFT"
    assert page["svg"].startswith("<svg") and html_written.written({}, "s1") is None
    page = html_written.written(good, "s1")
    assert page is not None and {row["word"] for row in page["rows"]} == {"agrees"} and not page["why"]
