"""Engines of graphs with a cache, really built by TensorRT-RTX for every architecture.

Where there is no GPU, ONNX Runtime plays the engine that is written with.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nlpconvert.backends
from nlpconvert import cache_names, disk, engines, forward, generation, profiles, writing
from nlpconvert.artifact import Artifact, Made, TensorSpec
from nlpconvert.backends import tensorrt as backend
from nlpconvert.backends import trt_writing
from nlpconvert.convert import cached, cached_pair, tensorrt
from nlpconvert.errors import CannotRunHere, ConversionError, DriftError, OutOfProfile, UsageError
from nlpconvert.generation import Settings, pad_for
from nlpconvert.profiles import Profile
from nlpconvert.progress import Silent
from nlpconvert.source import Loaded
from nlpconvert.writer import encodes
from tests import writers
from tests.asking import batch, loaded
from tests.test_cached import ALL, CLOSE, each, row_of, session

PAIRS = ("t5", "bart", "marian", "m2m_100", "pegasus")
QUICK = ("gpt2", "t5")
NEW = 20
SHAPES = ("1x1", "2x8", "4x24")


@dataclasses.dataclass(frozen=True)
class Exported:
    """A model, its graphs with a cache, and the profiles of their engines: prompts of 24 tokens and 20 after them."""

    model: Loaded
    onnx: Artifact
    profiles: tuple[Profile, ...]


def exported(name: str, folder: Path, shapes: tuple[str, str, str] = SHAPES, new: int = NEW) -> Exported:
    model = loaded(row_of(name), folder / "model")
    (folder / "onnx").mkdir()
    convert = cached_pair.convert if encodes(model.facts) else cached.convert
    made = convert(model.module, model.facts, folder / "onnx", companions=model.directory)
    artifact = artifact_of(made, folder / "onnx", "onnx", "onnx", model.directory / "model.safetensors")
    axes = profiles.dynamic_axes(spec.shape for spec in artifact.inputs)
    return Exported(model, artifact, profiles.choose_all(*shapes, axes, model.facts.max_length, max_new_tokens=new))


def artifact_of(made: Made, directory: Path, step: str, format: str, parent: Path) -> Artifact:
    return Artifact(
        step=step,
        path=directory / made.file,
        format=format,
        precision="float32",
        task="text-generation",
        inputs=made.inputs,
        outputs=made.outputs,
        files=disk.hash_tree(directory),
        parent="source",
        parent_sha256=disk.sha256_file(parent),
        made_by=made.made_by,
    )


def built(graphs: Exported, folder: Path) -> Artifact:
    """The engines that TensorRT-RTX makes of them, for one compute capability, which is quicker."""
    (folder / "trt").mkdir()
    made = tensorrt.convert(
        graphs.onnx,
        folder / "trt",
        profile=graphs.profiles,
        max_length=graphs.model.facts.max_length,
        log=folder / "trt.log",
        runtime="tensorrt-rtx",
        compute_capabilities=["8.9"],
    )
    return artifact_of(made, folder / "trt", "trt", "tensorrt", graphs.onnx.path)


Make = Callable[[str], tuple[Exported, Artifact]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Graphs and engines of a tiny model, by its name, made once."""

    @functools.cache
    def make(name: str) -> tuple[Exported, Artifact]:
        folder = tmp_path_factory.mktemp(name)
        graphs = exported(name, folder)
        return graphs, built(graphs, folder)

    return make


@pytest.fixture(scope="module")
def gpt2(made: Make) -> Exported:
    return made("gpt2")[0]


@pytest.fixture(scope="module")
def t5(made: Make) -> Exported:
    return made("t5")[0]


@pytest.fixture(scope="module")
def pair(made: Make) -> Artifact:
    return made("t5")[1]


# -- an engine, played -------------------------------------------------------------------------------------------------


class Kept:
    """What an engine keeps of an output; nothing but an engine may look into it."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape = array.shape
        self.array = array

    def numpy(self) -> np.ndarray:
        return self.array.copy()


class Played:
    """ONNX Runtime on the graph that an engine is built of. Like an engine, it takes what its profile takes."""

    version = "1.7.1"

    def __init__(self, path: Path, inputs: Sequence[TensorSpec], chosen: Sequence[Profile]) -> None:
        self._session = session(path)
        self._inputs, self._profiles = inputs, chosen
        self.dtypes = {spec.name: np.dtype(spec.dtype) for spec in inputs}
        self.profiles = len(chosen)
        self.calls: list[tuple[str, int]] = []
        self.closed = False

    def infer(self, feed: Mapping[str, Any], profile: int = 0, keep: Collection[str] = ()) -> dict[str, Any]:
        reason = profiles.outside(self._profiles[profile], self._inputs, {k: tuple(v.shape) for k, v in feed.items()})
        if reason:
            raise RuntimeError(reason)
        self.calls.append((self._profiles[profile].name, feed["input_ids"].shape[1]))
        names = [output.name for output in self._session.get_outputs()]
        arrays = {name: value.array if isinstance(value, Kept) else value for name, value in feed.items()}
        answers = dict(zip(names, self._session.run(names, arrays), strict=True))
        return {name: Kept(array) if name in keep else array for name, array in answers.items()}

    def close(self) -> None:
        self.closed = True


def opened(graphs: Exported) -> tuple[backend.EngineSession | backend.EnginePair, list[Played]]:
    """A session on played engines, and these."""
    played: list[Played] = []
    sessions: list[backend.EngineSession] = []
    for part in (graphs.onnx, *tensorrt_encoder(graphs.onnx)):
        chosen = graphs.profiles
        if played:
            chosen = (graphs.profiles[0].of(("batch", "sequence")),)
        played.append(Played(part.path, part.inputs, chosen))
        sessions.append(
            backend.EngineSession(
                played[-1], part.inputs, chosen, provider="tensorrt-rtx 1.7.1 on a GPU, played", precision="float32"
            )
        )
    return (sessions[0] if len(sessions) == 1 else backend.EnginePair(sessions[0], sessions[1])), played


def tensorrt_encoder(onnx: Artifact) -> list[Artifact]:
    found = tensorrt._encoder(onnx)
    return [] if found is None else [found]


# -- every architecture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each((*ALL, *PAIRS), QUICK))
def test_engines_are_built_and_what_is_written_is_pytorchs(name: str, made: Make) -> None:
    graphs, engine = made(name)
    sidecar = engines.read_sidecar(engine.path)
    assert [profile.name for profile in sidecar.profiles] == ["prefill", "steps"]
    assert sidecar.profiles == graphs.profiles
    assert engine.inputs == graphs.onnx.inputs and engine.outputs == graphs.onnx.outputs
    log = (engine.directory.parent / "trt.log").read_text()
    assert "2 profile(s)" in log and "[E]" not in log

    prompts = pad_for(graphs.model.facts, writers.prompts(graphs.model, (3, 24, 9)))
    how = Settings(max_new_tokens=NEW)
    expected = generation.generate(writers.reference(graphs.model), prompts, how)
    found, played = opened(graphs)
    written = generation.generate(trt_writing.writer(found, graphs.model.facts), prompts, how)
    np.testing.assert_array_equal(written.tokens, expected.tokens)
    first = ("steps", 1) if encodes(graphs.model.facts) else ("prefill", 24)
    assert played[0].calls == [first] + [("steps", 1)] * (NEW - 1)


# -- building ----------------------------------------------------------------------------------------------------------


def test_two_engines_of_a_pair(t5: Exported, pair: Artifact) -> None:
    files = {"decoder_model.engine", "encoder_model.engine"}
    assert {path.name for path in pair.directory.iterdir()} == files | {f"{name}.json" for name in files}
    own = pair.made_by["encoder"]
    assert pair.path.name == "decoder_model.engine" and own["file"] == "encoder_model.engine"
    for kind in ("inputs", "outputs"):
        known = {each["name"]: each for each in t5.onnx.made_by["encoder"][kind]}
        assert {each["name"]: each for each in own[kind]} == known
    (encoder,) = backend.encoder_of(pair)
    sidecar = engines.read_sidecar(encoder.path)
    assert set(sidecar.onnx) == {"encoder_model.onnx", "model.onnx.data"}
    assert own["onnx_sha256"] == encoder.parent_sha256 == t5.onnx.files["encoder_model.onnx"]
    assert [str(profile) for profile in sidecar.profiles] == ["1x1 / 2x8 / 4x24"]
    assert set(engines.read_sidecar(pair.path).onnx) == {"decoder_model.onnx", "model.onnx.data"}
    assert (pair.directory.parent / "trt-encoder.log").is_file()


def test_a_pair_that_is_not_what_was_built_is_refused(pair: Artifact, tmp_path: Path) -> None:
    for path in pair.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    moved = dataclasses.replace(pair, path=tmp_path / pair.path.name)
    if engines.find_gpu()[0] is None:
        with pytest.raises(CannotRunHere, match="no NVIDIA GPU"):
            backend.open(moved)
    content = bytearray((tmp_path / "encoder_model.engine").read_bytes())
    content[-1] ^= 1
    (tmp_path / "encoder_model.engine").write_bytes(content)
    with pytest.raises(DriftError, match=r"encoder_model\.engine is not the engine that was built"):
        backend.open(moved)
    lost = dataclasses.replace(moved, made_by={"encoder": {"file": "encoder_model.engine"}})
    with pytest.raises(DriftError, match="does not say what the encoder of trt is"):
        backend.open(lost)
    other = {**pair.made_by["encoder"], "onnx_sha256": "0" * 64}
    with pytest.raises(DriftError, match="was built from another ONNX file"):
        backend.open(dataclasses.replace(pair, made_by={"encoder": other}))


def test_nothing_is_left_of_half_a_pair(t5: Exported, tmp_path: Path) -> None:
    """The decoder's engine is whole when the encoder's builder dies."""
    code = (
        "import json, pathlib, sys; request = json.load(open(sys.argv[1])); "
        "sys.exit('no more') if 'encoder_model.onnx' in request['onnx'] else None; "
        "pathlib.Path(request['engine']).write_text('an engine'); "
        "plain = json.load(open(sys.argv[3])); json.dump({'builder': '1', 'polygraphy': '1', 'seconds': 1.0, "
        "'compute_capabilities': ['8.9'], **plain}, open(sys.argv[2], 'w'))"
    )
    plain = {"inputs": tensorrt._plain(t5.onnx.inputs), "outputs": tensorrt._plain(t5.onnx.outputs)}
    for spec in (*plain["inputs"], *plain["outputs"]):
        spec["shape"] = [-1 if isinstance(size, str) else size for size in spec["shape"]]
    disk_copy = tmp_path / "plain.json"
    disk_copy.write_text(json.dumps(plain))
    (tmp_path / "trt").mkdir()
    with pytest.raises(ConversionError, match="could not build: it left no result, its last words: no more"):
        tensorrt.convert(
            t5.onnx,
            tmp_path / "trt",
            profile=t5.profiles,
            max_length=None,
            log=tmp_path / "trt.log",
            here=engines.Here({"tensorrt-rtx": "1.7.1"}, None, "no GPU"),
            command=lambda request, result: [sys.executable, "-c", code, str(request), str(result), str(disk_copy)],
        )
    assert list((tmp_path / "trt").iterdir()) == []


def test_profiles_past_the_limit_start_no_builder(gpt2: Exported, tmp_path: Path) -> None:
    beyond = dataclasses.replace(gpt2.profiles[1], max={**gpt2.profiles[1].max, "past_sequence": 512})
    for chosen, words in (
        ((gpt2.profiles[0], beyond), "--max has past_sequence 512, over this model's limit of 64 tokens"),
        ((), "no profile was given"),
    ):
        with pytest.raises(UsageError, match=words):
            tensorrt.convert(gpt2.onnx, tmp_path, profile=chosen, max_length=64, log=tmp_path / "trt.log")
    assert list(tmp_path.iterdir()) == []


# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_with_another_number_of_profiles_is_not_opened(
    gpt2: Exported, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (played,) = opened(gpt2)
    played.profiles = count
    module = SimpleNamespace(Loaded=lambda path: played)
    monkeypatch.setitem(sys.modules, "nlpconvert.backends.trt_engine", module)
    monkeypatch.setattr(nlpconvert.backends, "trt_engine", module, raising=False)
    monkeypatch.delitem(sys.modules, "polygraphy.config", raising=False)
    monkeypatch.setenv("POLYGRAPHY_USE_TENSORRT_RTX", "1")
    sidecar = sidecar_of(gpt2.profiles)
    with pytest.raises(
        DriftError, match=rf"has {count} optimisation profiles, its sidecar speaks of 2: build it again"
    ):
        backend._load(gpt2.onnx, sidecar)
    assert played.closed
    played.profiles = 2
    assert backend._load(gpt2.onnx, sidecar) is played


def sidecar_of(chosen: tuple[Profile, ...]) -> engines.Sidecar:
    return engines.Sidecar("tensorrt-rtx", "1.7.1", ("8.9",), False, "float32", False, chosen, {"a": "b"}, "c")


def test_a_sidecar_of_several_profiles_comes_back(gpt2: Exported, tmp_path: Path) -> None:
    engines.write_sidecar(tmp_path / "model.engine", sidecar_of(gpt2.profiles))
    assert engines.read_sidecar(tmp_path / "model.engine") == sidecar_of(gpt2.profiles)


# -- the ordinary session ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_a_probe_without_a_past(name: str, request: pytest.FixtureRequest) -> None:
    graphs: Exported = request.getfixturevalue(name)
    found, played = opened(graphs)
    asked = batch(graphs.model.facts, [5, 9, 2], left=name == "gpt2", target=6)
    answers, expected = found.run(asked), forward.call(graphs.model.module, asked)
    assert set(answers) == {"logits", *(["encoder_last_hidden_state"] if name == "t5" else [])}
    real = asked["attention_mask"] == 1 if name == "gpt2" else np.ones((3, 6), bool)
    reference = expected["logits"][real]
    assert np.abs(answers["logits"][real] - reference).max() < CLOSE * np.abs(reference).max()
    assert [call[0] for call in played[0].calls] == ["prefill"]
    with pytest.raises(OutOfProfile, match=r"25 is over the engine's profile 24"):
        found.run(batch(graphs.model.facts, [25]))
    with pytest.raises(OutOfProfile, match="batch 5 is over the engine's profile 4"):
        found.run(batch(graphs.model.facts, [3] * 5))
    found.close()
    assert all(each.closed for each in played)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_chunks_are_read_by_the_profile_that_takes_them(gpt2: Exported) -> None:
    """24 tokens after a past of 20 is the most; past that, token by token. The logits are those of the whole."""
    found, (played,) = opened(gpt2)
    writer = trt_writing.writer(found, gpt2.model.facts)
    prompts = pad_for(gpt2.model.facts, writers.prompts(gpt2.model, (40, 31)))
    reference = writers.reference(gpt2.model)
    whole = reference.step(reference.begin(prompts), prompts["input_ids"])
    state = writer.begin(prompts)
    parts = [writer.step(state, prompts["input_ids"][:, at:to]) for at, to in ((0, 20), (20, 33), (33, 40))]
    real = prompts["attention_mask"] == 1
    difference = np.abs(np.concatenate(parts, axis=1) - whole)[real].max()
    assert difference < CLOSE * np.abs(whole[real]).max()
    assert played.calls == [("prefill", 20), ("prefill", 13)] + [("steps", 1)] * 7
    writer.step(state, np.full((2, 4), 7))  # 44 in all is what the engine was built for
    with pytest.raises(OutOfProfile, match=r"^past and new together 45 is over the engine's profile 44$"):
        writer.step(state, np.full((2, 1), 7))


def test_a_prompt_past_the_longest_is_read_in_parts(gpt2: Exported) -> None:
    found, (played,) = opened(gpt2)
    writer = trt_writing.writer(found, gpt2.model.facts)
    prompts = pad_for(gpt2.model.facts, writers.prompts(gpt2.model, (30,)))
    reference = writers.reference(gpt2.model)
    expected = generation.generate(reference, prompts, Settings(max_new_tokens=9))
    written = generation.generate(writer, prompts, Settings(max_new_tokens=9))
    np.testing.assert_array_equal(written.tokens, expected.tokens)
    assert played.calls[0] == ("prefill", 24) and {call[0] for call in played.calls[1:]} == {"steps"}


@pytest.mark.parametrize("name", QUICK)
def test_rows_change_places_and_the_cache_can_be_looked_into(name: str, request: pytest.FixtureRequest) -> None:
    graphs: Exported = request.getfixturevalue(name)
    facts = graphs.model.facts
    writer = trt_writing.writer(opened(graphs)[0], facts)
    prompts = pad_for(facts, writers.prompts(graphs.model, (7, 12, 5)))
    state, other = writer.begin(prompts), writer.begin(prompts)
    token = np.array([[11], [12], [13]])
    writer.step(state, state.first)
    writer.step(other, other.first)
    rows = np.array([2, 0, 0])
    writer.reorder(state, rows)
    found, expected = writer.step(state, token), writer.step(other, np.array([[12], [13], [11]]))
    np.testing.assert_allclose(found[1], expected[0], atol=1e-5)  # the first row stands second now, and reads 12
    np.testing.assert_allclose(found[0], expected[2], atol=1e-5)
    cache = writer.cache(state)
    assert set(cache) == {spec.name for spec in graphs.onnx.inputs if cache_names.is_past(spec.name)}
    before = writer.step(dataclasses.replace(state, cache=dict(state.cache)), token)
    swapped = {key: array[::-1] for key, array in cache.items() if ".encoder." not in key}
    writer.replace(state, swapped)
    assert np.abs(writer.step(state, token) - before).max() > 1e-3


def test_beams_are_pytorchs(t5: Exported) -> None:
    writer = trt_writing.writer(opened(t5)[0], t5.model.facts)
    prompts = pad_for(t5.model.facts, writers.prompts(t5.model, (7,)))
    how = Settings(max_new_tokens=8, beams=3, eos=(t5.model.facts.eos_id or 1,))
    expected = generation.generate(writers.reference(t5.model), prompts, how)
    np.testing.assert_array_equal(generation.generate(writer, prompts, how).tokens, expected.tokens)


@pytest.mark.parametrize("name", QUICK)
def test_the_verdict_of_what_writes(name: str, request: pytest.FixtureRequest) -> None:
    """Every phase is run by an engine of the usual profiles; what a smaller one cannot take is told."""
    graphs: Exported = request.getfixturevalue(name)
    facts = graphs.model.facts
    asked = writing.ask(writers.reference(graphs.model), None, Silent())
    axes = profiles.dynamic_axes(spec.shape for spec in graphs.onnx.inputs)
    whole = dataclasses.replace(graphs, profiles=profiles.choose_all(None, None, None, axes, facts.max_length))
    agrees, verdict = writing.judge(trt_writing.writer(opened(whole)[0], facts), asked, "float32")
    assert agrees, verdict["problems"]
    _, verdict = writing.judge(trt_writing.writer(opened(graphs)[0], facts), asked, "float32")
    assert any("over the engine's profile" in str(each) for each in verdict["not_applicable"].values())


def test_an_engine_without_a_cache_writes_nothing(gpt2: Exported) -> None:
    spec = TensorSpec("input_ids", "int64", ("batch", "sequence"))
    plain = Profile({"batch": 1, "sequence": 1}, {"batch": 1, "sequence": 1}, {"batch": 1, "sequence": 1})
    played: Any = SimpleNamespace(dtypes={"input_ids": np.dtype("int64")}, version="1", profiles=1)
    found = backend.EngineSession(played, (spec,), (plain,), provider="", precision="float32")
    assert not trt_writing.keeps(found) and not trt_writing.keeps(object())
    with pytest.raises(DriftError, match="the engine keeps no cache"):
        trt_writing.writer(found, gpt2.model.facts)
