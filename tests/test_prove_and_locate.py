"""The gate proved on real artifacts: every break of a graph is located in the module that was broken, and every
artifact suffers at least twelve breaks of which the gross ones are seen.

How a break or a location works is tested in their own rooms; here they meet. What takes a trained model is slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from nlpconvert import breaks, cli, judging, locating, manifest, models, pairs, pipeline, proving, report_proof, source
from nlpconvert.artifact import Artifact
from nlpconvert.breaks import Asked, Break, Broken, NotApplicable
from nlpconvert.convert import breaking, tapping
from nlpconvert.inputs import Case
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.validators.located import NOISE, Located
from tests import tiny

ONE = Options(threads=1)
GRAPH = {row.name: row for row in breaks.BREAKS if row.kind == "graph" and "onnx" in row.formats}
del GRAPH["batch-frozen"]  # it is done to the inputs, and no module is broken


@dataclass
class Subject:
    """An ONNX step of an OUT, and the cases that `locate` would choose of its goldens."""

    artifact: Artifact
    cases: Sequence[Case]
    special: Sequence[int]
    checkpoint: Path

    def broken(self, row: Break, directory: Path) -> tuple[Artifact, Broken]:
        """A copy of the step in `directory`, broken."""
        shutil.copytree(self.artifact.directory, directory, copy_function=os.link)
        token = breaks.token_to_zero(self.cases, self.special) if row.way == "row-zeroed" else 0
        done = breaking.break_file(self.artifact.path, row.way, directory, Asked(row.factor, token))
        assert done.path is not None
        return replace(self.artifact, path=done.path), done

    @cached_property
    def module(self) -> torch.nn.Module:
        """The model it was made from, as `locate` loads it."""
        return source.load(str(self.checkpoint), task=self.artifact.task, allow_missing_weights=True).module


def subject(out: Path, step: str) -> Subject:
    record = manifest.read(out)
    probes = judging.stored_probes(record, out)
    cases = locating.choose([case for case in probes.cases if case.name not in probes.not_applicable], None)
    facts = models.facts_from_data(record.facts)
    return Subject(record.artifact(step, out), cases, facts.special_ids, Path(record.source["path"]))


def made(checkpoint: Path, out: Path, *steps: str) -> Path:
    outcomes = pipeline.run(str(checkpoint), out, to=list(steps), options=ONE)
    assert {each.status for each in outcomes} == {"agrees"}, [(each.step, each.reason) for each in outcomes]
    return out


def introduced(found: Located, module: str) -> float:
    answer = found.of(module)
    return 0.0 if answer is None else answer.introduced


# -- the module that was broken: small models --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(classifier_out: Path) -> Subject:
    """A tiny BERT classifier."""
    return subject(classifier_out, "onnx")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A tiny GPT-2."""
    directory = tmp_path_factory.mktemp("gpt2")
    return subject(made(tiny.save(tiny.ROWS["gpt2"], directory / "model"), directory / "out", "onnx"), "onnx")


@pytest.mark.parametrize("name", [name for name in GRAPH if name != "scale-doubled"])
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_what_was_broken_is_named(model: str, name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Against the unbroken file and against the model in PyTorch."""
    whole: Subject = request.getfixturevalue(model)
    candidate, done = whole.broken(GRAPH[name], tmp_path / "broken")
    assert done.module
    for found in (
        locating.between(candidate, whole.artifact, whole.cases, options=ONE),
        locating.with_model(candidate, lambda: whole.module, whole.cases, options=ONE),
    ):
        assert (found.first, found.most, found.stands_out) == (done.module, done.module, True), found.against
        others = max(each.introduced for each in found.modules if each.module != done.module)
        assert others < NOISE < introduced(found, done.module), "what follows adds nothing of its own"


def test_the_mask_is_taken_from_one_attention_alone(bert: Subject, tmp_path: Path) -> None:
    _, done = bert.broken(GRAPH["mask-unread"], tmp_path / "broken")
    assert done.path is not None
    before, after = (onnx.load(str(path), load_external_data=False) for path in (bert.artifact.path, done.path))
    changed = [(a.input, b.input) for a, b in zip(before.graph.node, after.graph.node, strict=True) if a != b]
    assert len(changed) == 1
    assert done.what.endswith(" no longer added to the scores")


def test_a_model_without_a_mask_has_none_to_ignore(tmp_path: Path) -> None:
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "x"], ["scores"]),
        onnx.helper.make_node("Softmax", ["scores"], ["y"]),
    ]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(nodes, "graph", ends[:1], ends[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(NotApplicable, match="no attention was found that a mask is added to"):
        breaking.break_file(tmp_path / "model.onnx", "mask-unread", tmp_path, Asked())


def quantized(path: Path) -> None:
    """A normalization whose answer is quantized, times integer weights: what static int8 makes of a projection."""
    rng = np.random.default_rng(0)
    weights = {
        "one": np.ones(32, np.float32),
        "zero": np.zeros(32, np.float32),
        "step": np.float32(0.02),
        "middle": np.int8(0),
        "dense.weight": rng.integers(-127, 128, (32, 32)).astype(np.int8),
        "dense.scale": rng.uniform(1e-3, 2e-3, 32).astype(np.float32),
        "dense.zero": np.zeros(32, np.int8),
    }
    rows = (
        ("norm", "LayerNormalization", ["x", "one", "zero"], "normal", {}),
        ("norm", "QuantizeLinear", ["normal", "step", "middle"], "coarse", {}),
        ("norm", "DequantizeLinear", ["coarse", "step", "middle"], "again", {}),
        ("dense", "DequantizeLinear", ["dense.weight", "dense.scale", "dense.zero"], "matrix", {"axis": 1}),
        ("dense", "MatMul", ["again", "matrix"], "y", {}),
    )
    nodes = []
    for module, kind, inputs, output, given in rows:
        node = onnx.helper.make_node(kind, inputs, [output], **given)
        node.metadata_props.add(key=tapping.SCOPES, value=str(["", module, "node"]))
        nodes.append(node)
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 32]) for name in ("x", "y")]
    tensors = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    graph = onnx.helper.make_graph(nodes, "graph", ends[:1], ends[1:], tensors)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)


def test_a_quantized_graph_computes_in_pieces_what_it_computes_whole(bert: Subject, tmp_path: Path) -> None:
    """Cut before a product of integer weights, ONNX Runtime would round its other operand to 8 bits once more."""
    quantized(tmp_path / "model.onnx")
    artifact = replace(bert.artifact, path=tmp_path / "model.onnx", precision="int8", step="onnx-int8")
    case = Case("drawn", {"x": np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)})
    found = locating.between(artifact, artifact, [case], options=ONE)
    assert [each.module for each in found.modules] == ["norm", "dense"]
    assert max(each.introduced for each in found.modules) < 1e-6


# -- through the command -----------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    return cli._main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["weight-nudged-1%", "row-zeroed"])
def test_a_broken_file_that_is_verified_is_located_at_once(
    bert: Subject, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded broken, its hash is right: the answers alone tell, and the model which module moved."""
    candidate, done = bert.broken(GRAPH[name], tmp_path / "broken")
    model, out = bert.checkpoint, tmp_path / "out"
    assert run("verify", candidate.path, "--reference", model, "-o", out, "--threads", 1, "--quiet") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert f"first to move {done.module} (introduced" in told
    assert f"of it), against {locating.PYTORCH}" in told
    kept = manifest.read(out).record("foreign").outcome.verdict
    assert kept is not None
    assert (kept["localisation"]["first"], kept["localisation"]["most"]) == (done.module, done.module)
    assert run("locate", out, "--step", "foreign", "--model", model, "--threads", 1, "--json", "--quiet") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["first"], found["most"], found["against"]) == (done.module, done.module, "pytorch")
    assert run("locate", out, "--step", "foreign", "--model", model, "--threads", 1, "--quiet") == 0
    assert capsys.readouterr().out.startswith(f"foreign against pytorch: {done.module} moved first\n")


# -- trained models ----------------------------------------------------------------------------------------------------

FIXTURES = {"bert-text-classifier": 9, "gpt2-lm": 9, "t5-seq2seq": 8}
"""Fixtures, and how many of the graph's breaks apply to their float32 files: T5 has no bias."""
FLOAT32 = ("torchscript", "onnx", "onnx-optimized")
LOWER = ("onnx-fp16", "onnx-int8", "onnx-qdq")
FORMATS = {
    "bert-text-classifier": (*FLOAT32, *LOWER),
    "minilm": (*FLOAT32, *LOWER, "onnx-int4"),
}
"""Models in every format that agrees by the table's tolerances: the small classifier in int4 changes 3 % of what it
decides, so nothing of it can be proved."""
DERIVED = [(name, step) for name, steps in FORMATS.items() for step in steps if step not in ("torchscript", "onnx")]


def located(whole: Subject, directory: Path, locate: Callable[[Artifact], Located]) -> dict[str, tuple[Located, str]]:
    """By break: what was found in the broken file, and the module that was broken."""
    found = {}
    for name, row in GRAPH.items():
        with tempfile.TemporaryDirectory(dir=directory) as place, contextlib.suppress(NotApplicable):
            candidate, done = whole.broken(row, Path(place) / "broken")
            found[name] = locate(candidate), done.module
    return found


def check_exact(found: dict[str, tuple[Located, str]]) -> None:
    for name, (each, module) in found.items():
        assert (each.first, each.most, each.stands_out) == (module, module, True), (name, each.against)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FIXTURES))
def test_a_trained_model_broken_anywhere_is_located(fixtures_dir: Path, tmp_path: Path, name: str) -> None:
    whole = subject(made(fixtures_dir / name, tmp_path / "out", "onnx"), "onnx")
    with pairs.as_one(whole.artifact) as whole.artifact:
        between = located(
            whole, tmp_path, lambda file: locating.between(file, whole.artifact, whole.cases, options=ONE)
        )
        by_model = located(
            whole, tmp_path, lambda file: locating.with_model(file, lambda: whole.module, whole.cases, options=ONE)
        )
    assert len(between) == len(by_model) == FIXTURES[name]
    check_exact(between)
    check_exact(by_model)


@pytest.fixture(scope="module")
def outs(fixtures_dir: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The text classifier and MiniLM in every format that runs here, each made when it is first asked for."""
    kept: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in kept:
            model = minilm if name == "minilm" else fixtures_dir / name
            kept[name] = made(model, tmp_path_factory.mktemp(name) / "out", *FORMATS[name])
        return kept[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), DERIVED)
def test_a_derived_file_broken_anywhere_is_located(
    outs: Callable[[str], Path], tmp_path: Path, name: str, step: str
) -> None:
    """Against the unbroken file of the step itself, the float32 file that it was made from, and the model.

    A break that introduces less than the precision does somewhere by itself cannot be told from it: nudges alone are as
    small. The others are where most is introduced.
    """
    whole, parent = subject(outs(name), step), subject(outs(name), "onnx").artifact
    ways: list[Callable[[Artifact], Located]] = [
        lambda file: locating.between(file, whole.artifact, whole.cases, options=ONE),
        lambda file: locating.between(file, parent, whole.cases, options=ONE),
        lambda file: locating.with_model(file, lambda: whole.module, whole.cases, names=parent, options=ONE),
    ]
    for locate in ways:
        unbroken = locate(whole.artifact)
        noise = max(each.introduced for each in unbroken.modules)
        found = located(whole, tmp_path, locate)
        assert len(found) >= 9
        if noise <= NOISE:
            check_exact(found)
        for broken, (each, module) in found.items():
            share = introduced(each, module) / max(noise, NOISE)
            print(f"{name} {step} against {each.against}: {broken}, {share:.3g} times what the unbroken introduces")
            if share > 1:
                assert each.most == module, broken
            else:
                assert broken in (f"{breaks.NUDGE}-0.1%", f"{breaks.NUDGE}-1%"), (broken, share)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in FORMATS.items() for step in steps])
def test_every_format_suffers_a_dozen_breaks_and_the_gross_are_seen(
    outs: Callable[[str], Path], name: str, step: str
) -> None:
    out = outs(name)
    proof = proving.prove(out, manifest.read(out), step, ONE, Silent())
    told = "\n".join(report_proof.lines(proof))
    print(told)
    assert proof.holds, told
    applied = len(proof.seen) + len(proof.unseen)
    assert applied == {"torchscript": 19, "onnx": 21, "onnx-optimized": 21}.get(step, 20), told
    if step in FLOAT32:
        assert not proof.unseen, told
    gross = [trial for trial in proof.trials if trial.gross and trial.status != "does not apply"]
    assert len(gross) >= 8, told
    assert proof.smallest is not None
    assert proof.smallest.share is not None, told
