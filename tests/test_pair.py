"""Two graphs made one and two again; every converter through it; and what a quantized pair then writes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

from nlpconvert import cache_names, disk, forward, generation, judging, making, pairs, plan, probes, reference, source
from nlpconvert.artifact import STEPS, Artifact, Made
from nlpconvert.backends import onnxruntime, writing
from nlpconvert.backends.pytorch_writing import PytorchWriter
from nlpconvert.convert import cached_pair, onnx_graph, pair
from nlpconvert.errors import ConversionError
from nlpconvert.generation import Settings
from nlpconvert.making import Work
from nlpconvert.progress import Silent
from nlpconvert.source import Loaded
from nlpconvert.writer import Writer
from tests import tiny
from tests.asking import loaded
from tests.test_cached import each
from tests.test_cached_pair import padded

CLOSE = 2e-6
"""The largest difference over the largest logit. ONNX Runtime fuses one graph otherwise than two: 3e-7 was the most."""

ALL = ("t5", "bart", "marian", "m2m_100", "pegasus")
HELD_OUT = 300
"""Sources that the fixture is asked: the 200 that were kept back from it, and more of the same rule."""


class Scene:
    """A model, its pair on disk, and the pair as an artifact."""

    def __init__(self, model: Loaded, directory: Path) -> None:
        self.model, self.directory = model, directory
        directory.mkdir(parents=True)
        made = cached_pair.convert(model.module, model.facts, directory, companions=model.directory)
        self.artifact = self._artifact(made)

    def _artifact(self, made: Made) -> Artifact:
        task, files = self.model.facts.task, disk.hash_tree(self.directory)
        path = self.directory / made.file
        return Artifact(
            "onnx", path, "onnx", "float32", task, made.inputs, made.outputs, files, "source", "", made.made_by
        )

    def work(self, step: str, new: Path, **options: Any) -> Work:
        """What making a step of this pair may ask for."""
        facts = self.model.facts
        cases = probes.probe_cases(facts, self.model.encode)[:3]
        asked = reference.ask(lambda each: forward.call(self.model.module, each), cases, facts.outputs, 2**26, Silent())
        new.mkdir(parents=True)
        return Work(
            row=STEPS[step],
            options=plan.Options(threads=1, **options),
            record=None,  # type: ignore[arg-type]  # read for engines alone
            loaded=None,
            parent=self.artifact,
            new=new,
            log=new.parent / "log",
            probes=judging.Probes(cases, asked.answers, {}, ""),
            tolerances=(),
            progress=Silent(),
            facts=facts,
            encode=self.model.encode,
        )

    def make(self, step: str, new: Path, **options: Any) -> Made:
        """A step of the pair, in `new`."""
        maker = making.MAKERS.get(step, making.MAKERS["onnx"])
        return pairs.through(self.work(step, new, **options), maker)


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    """The pair of a tiny model, made once."""
    scenes: dict[str, Scene] = {}

    def scene(name: str) -> Scene:
        if name not in scenes:
            folder = tmp_path_factory.mktemp(name)
            scenes[name] = Scene(loaded(tiny.ROWS[name], folder / "model"), folder / "onnx")
        return scenes[name]

    return scene


@pytest.fixture(scope="module")
def fixture(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """The trained T5."""
    return Scene(source.load(str(fixtures_dir / "t5-seq2seq")), tmp_path_factory.mktemp("t5-seq2seq") / "onnx")


def asked(encoder: Any, decoder: Any, feed: Mapping[str, np.ndarray], past: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The encoder's graph and then the decoder's, all outputs by the merged graph's names."""
    made = dict(zip([o.name for o in encoder.get_outputs()], _run(encoder, feed), strict=True))
    cross = {cache_names.past_of(name): array for name, array in made.items() if cache_names.is_present(name)}
    given = {"input_ids": feed["decoder_input_ids"], "encoder_attention_mask": feed["attention_mask"], **cross, **past}
    answers = dict(zip([o.name for o in decoder.get_outputs()], _run(decoder, given), strict=True))
    return answers | {pair.MERGED_STATES: made.pop("last_hidden_state"), **made}


def _run(session: Any, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    taken = {value.name for value in session.get_inputs()}
    found: list[np.ndarray] = session.run(None, {name: array for name, array in feed.items() if name in taken})
    return found


def opened(path: Path) -> Any:
    return onnxruntime.open_file(path, threads=1).inner


def feeds(scene: Scene) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Sources and targets of several lengths, each with no past and with one of drawn numbers."""
    found = []
    for number, (lengths, target) in enumerate([([5, 3], 4), ([1], 1), ([17, 2, 30], 9)]):
        ids, mask = padded(lengths, left=False)
        rng = np.random.default_rng(number)
        feed = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": rng.integers(6, 120, (len(ids), target))}
        empty = cache_names.empty(scene.artifact.inputs, len(ids))
        past = {
            name: rng.standard_normal((*array.shape[:2], 6, array.shape[3]), dtype=np.float32)
            for name, array in empty.items()
        }
        found += [(feed, empty), (feed, past)]
    return found


def assert_alike(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        assert array.shape == theirs[name].shape, name
        assert np.abs(array - theirs[name]).max() <= CLOSE * np.abs(array).max(), name


# -- merging and cutting apart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", each(ALL, ("t5",)))
def test_merged_and_split_answer_as_the_pair(name: str, tiny_pair: Callable[[str], Scene], tmp_path: Path) -> None:
    scene = tiny_pair(name)
    path = pair.merge(scene.directory, tmp_path / "merged")
    encoder, decoder = pair.split(path, tmp_path / "pair", pairs.boundary(scene.artifact.inputs))
    first, second = (opened(scene.directory / file) for file in (pair.ENCODER_FILE, pair.DECODER_FILE))
    again, one = (opened(encoder), opened(decoder)), opened(path)
    for feed, past in feeds(scene):
        expected = asked(first, second, feed, past)
        merged = dict(zip([o.name for o in one.get_outputs()], _run(one, {**feed, **past}), strict=True))
        assert_alike(expected, merged)
        for output, array in asked(again[0], again[1], feed, past).items():
            np.testing.assert_array_equal(array, expected[output])


def test_names_scopes_and_weights_are_as_they_were(tiny_pair: Callable[[str], Scene], tmp_path: Path) -> None:
    scene = tiny_pair("t5")
    path = pair.merge(scene.directory, tmp_path / "merged")
    inputs, outputs = pair.specs(path)
    assert [spec.name for spec in inputs[:3]] == ["input_ids", "attention_mask", "decoder_input_ids"]
    assert {spec.name for spec in outputs} >= {"logits", "encoder_last_hidden_state", "present.1.decoder.value"}
    files = pair.split(path, tmp_path / "pair", pairs.boundary(scene.artifact.inputs))
    for file in files:
        before, after = (pair.specs(folder / file.name) for folder in (scene.directory, file.parent))
        assert before == after
        assert _scopes(scene.directory / file.name) == _scopes(file)
        assert _names(scene.directory / file.name) == _names(file)
    data = [(folder / pair.DATA_FILE).stat().st_size for folder in (scene.directory, path.parent, files[0].parent)]
    assert data[0] == data[1] and abs(data[2] - data[0]) <= 4096  # aligned anew
    graph = onnx.load(str(path), load_external_data=False).graph
    assert len({node.name for node in graph.node}) == len(graph.node)
    places = [
        next(entry.value for entry in tensor.external_data if entry.key == "offset")
        for tensor in graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL and tensor.external_data
        if any(entry.key == "offset" for entry in tensor.external_data)
    ]
    assert len(set(places)) == len(places)  # the embeddings of both stand once


def _scopes(path: Path) -> list[str]:
    return sorted(node.metadata_props.get(onnx_graph.SCOPES, "") for node in onnx_ir.load(path).graph)


def _names(path: Path) -> set[str | None]:
    graph = onnx_ir.load(path).graph
    cross = {f"past_key_values.{n}.encoder.{kind}" for n in range(2) for kind in cache_names.KINDS}
    values = {value.name for node in graph for value in node.outputs} | set(graph.initializers)
    return values - cross


def test_a_decoder_that_reads_the_source_is_refused(tiny_pair: Callable[[str], Scene], tmp_path: Path) -> None:
    scene = tiny_pair("t5")
    path = pair.merge(scene.directory, tmp_path / "merged")
    program = onnx_ir.load(path)
    graph = program.graph
    (taker,) = [node for node in graph if node.op_type == "Gather" and node.inputs[1] is graph.inputs[2]]
    taker.replace_input_with(1, graph.inputs[0])
    path.write_bytes(onnx_ir.to_proto(program).SerializeToString())
    with pytest.raises(ConversionError, match="the decoder reads input_ids, the source's tokens, past what the enc"):
        pair.split(path, tmp_path / "pair", pairs.boundary(scene.artifact.inputs))


def test_a_boundary_that_is_gone_is_refused(tiny_pair: Callable[[str], Scene], tmp_path: Path) -> None:
    scene = tiny_pair("t5")
    path = pair.merge(scene.directory, tmp_path / "merged")
    program = onnx_ir.load(path)
    (node,) = [node for node in program.graph if node.outputs[0].name == "past_key_values.1.encoder.key"]
    made = node.inputs[0]
    assert made is not None
    onnx_ir.convenience.replace_all_uses_with(node.outputs[0], made)
    program.graph.remove(node, safe=True)
    path.write_bytes(onnx_ir.to_proto(program).SerializeToString())
    with pytest.raises(ConversionError, match=r"past_key_values\.1\.encoder\.key, where encoder and decoder meet"):
        pair.split(path, tmp_path / "pair", pairs.boundary(scene.artifact.inputs))


def test_what_is_no_pair_is_refused(tiny_pair: Callable[[str], Scene], tmp_path: Path) -> None:
    scene = tiny_pair("t5")
    with pytest.raises(ConversionError, match=r"encoder_model\.onnx cannot be read"):
        pair.merge(tmp_path, tmp_path / "merged")
    decoder = onnx_ir.load(scene.artifact.path)
    decoder.graph.inputs[1].name = "mask"
    onnx_ir.save(decoder, tmp_path / pair.DECODER_FILE)
    (tmp_path / pair.ENCODER_FILE).write_bytes((scene.directory / pair.ENCODER_FILE).read_bytes())
    with pytest.raises(ConversionError, match="do not fit together at encoder_attention_mask"):
        pair.merge(tmp_path, tmp_path / "merged")


# -- converters --------------------------------------------------------------------------------------------------------


def test_a_step_is_whole_and_nothing_is_left_over(fixture: Scene, tmp_path: Path) -> None:
    made = fixture.make("onnx-fp16", tmp_path / "out" / "onnx-fp16")
    new = tmp_path / "out" / "onnx-fp16"
    assert [path.name for path in new.parent.iterdir() if path.name != "log"] == ["onnx-fp16"]
    before = {path.name for path in fixture.directory.iterdir()}
    assert {path.name for path in new.iterdir()} == before
    assert made.file == pair.DECODER_FILE and made.made_by["format"] == "float16"
    for name in pairs.KEPT:
        assert made.made_by[name] == fixture.artifact.made_by[name]
    assert made.made_by["encoder"] == fixture.artifact.made_by["encoder"]  # the cache stays float32
    assert (made.inputs, made.outputs) == (fixture.artifact.inputs, fixture.artifact.outputs)
    graphs = [onnx.load(str(new / name), load_external_data=False).graph for name in (pair.ENCODER_FILE, made.file)]
    halves = [sum(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer) for graph in graphs]
    assert min(halves) > 10
    casts = [node for node in graphs[1].node if node.op_type == "Cast" and node.input[0].startswith("past_key_values.")]
    assert len(casts) == 8
    size = sum((new / name).stat().st_size for name in (pair.DATA_FILE,))
    assert size < 0.55 * (fixture.directory / pair.DATA_FILE).stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("step", ["onnx-optimized", "onnx-fp16", "onnx-qdq", "onnx-int4"])
@pytest.mark.parametrize("name", ALL[1:])
def test_every_architecture_goes_through(
    name: str, step: str, tiny_pair: Callable[[str], Scene], tmp_path: Path
) -> None:
    scene = tiny_pair(name)
    new = tmp_path / "out" / step
    made = scene.make(step, new, search_budget=20)
    two = [[opened(folder / file) for file in (pair.ENCODER_FILE, made.file)] for folder in (scene.directory, new)]
    for feed, past in feeds(scene)[::2]:
        before, after = (asked(encoder, decoder, feed, past) for encoder, decoder in two)
        assert set(before) == set(after)
        moved = np.abs(before["logits"] - after["logits"]).max() / np.abs(before["logits"]).max()
        assert moved < {"onnx-optimized": 1e-5, "onnx-fp16": 0.02}.get(step, 0.5), moved


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_out(fixture: Scene, fixtures_dir: Path) -> tuple[list[str], list[tuple[int, ...]]]:
    """Sources that the fixture never saw, and what PyTorch writes to them."""
    spec = importlib.util.spec_from_file_location("texts", fixtures_dir / "texts.py")
    assert spec is not None and spec.loader is not None
    texts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(texts)
    lines = (fixtures_dir / "t5-seq2seq" / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    sources = [json.loads(line)["text"] for line in lines]
    rng = Random(4711)
    while len(sources) < HELD_OUT:
        text = texts.order_in_talk(rng)["text"]
        sources += [] if text in sources else [text]
    model = fixture.model
    return sources, written(PytorchWriter(model.module, model.facts), model, sources)


def written(writer: Writer, model: Loaded, sources: Sequence[str]) -> list[tuple[int, ...]]:
    """Greedy tokens of each source."""
    assert model.encode is not None
    how: Settings = generation.settings(model.facts, None, max_new_tokens=64)
    found: list[tuple[int, ...]] = []
    for at in range(0, len(sources), 50):
        ids = [model.encode(text, None)["input_ids"] for text in sources[at : at + 50]]
        made = generation.generate(writer, generation.pad_for(model.facts, ids), how)
        found += [tuple(row[:size]) for row, size in zip(made.tokens.tolist(), made.lengths, strict=True)]
    return found


def share_alike(scene: Scene, new: Path, made: Made, held_out: tuple[list[str], list[tuple[int, ...]]]) -> float:
    """Share of the sources to which the pair in `new` writes what PyTorch does."""
    sources, expected = held_out
    writer = writing.open_paths(new / made.file, new / pair.ENCODER_FILE, scene.model.facts, threads=1)
    ours = written(writer, scene.model, sources)
    return float(np.mean([one == other for one, other in zip(ours, expected, strict=True)]))


WRITES: list[Any] = [
    ("onnx-optimized", {}, 1.0),
    ("onnx-fp16", {}, 1.0),
    ("onnx-qdq", {}, 0.99),
    pytest.param("onnx-int8", {"int8_method": "static"}, 0.99, marks=pytest.mark.slow),
    pytest.param("onnx-int8", {"int8_method": "weight-only"}, 0.99, marks=pytest.mark.slow),
    pytest.param("onnx-int8", {}, 0.99, marks=pytest.mark.slow),
    pytest.param("onnx-int4", {}, 0.98, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("step", "options", "least"), WRITES)
def test_a_step_writes_what_pytorch_writes(
    step: str,
    options: dict[str, Any],
    least: float,
    fixture: Scene,
    held_out: tuple[list[str], list[tuple[int, ...]]],
    tmp_path: Path,
) -> None:
    """int8 without a single text of the user's: the model answers the shipped ones itself."""
    made = fixture.make(step, tmp_path / "out" / step, **options)
    assert share_alike(fixture, tmp_path / "out" / step, made, held_out) >= least
    if STEPS[step].precision == "int8":
        assert made.made_by["share_of_linear_flops"] > 0.9
        assert (tmp_path / "out" / step / "recipe.json").is_file()
    if step == "onnx-qdq":
        made_from = json.loads((tmp_path / "out" / step / "recipe.json").read_text(encoding="utf-8"))
        assert made_from["parent_sha256"] == fixture.artifact.sha256
        fixture.make(step, tmp_path / "again" / step, recipe=tmp_path / "out" / step / "recipe.json")
        files = [tmp_path / out / step / made.file for out in ("out", "again")]
        assert files[0].read_bytes() == files[1].read_bytes()
