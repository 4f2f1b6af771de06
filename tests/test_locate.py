"""Which module was broken: named, in every case where one was, against the model and between two files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nlpconvert import locating, pieces, plan
from nlpconvert.artifact import Artifact
from nlpconvert.errors import CannotRunHere, DriftError
from nlpconvert.inputs import Case
from nlpconvert.source import Loaded
from nlpconvert.validators import located
from nlpconvert.validators.located import Located
from tests import asking, breaking, tiny

ONE = plan.Options(threads=1)


class Model:
    """A tiny model with its artifacts, made once."""

    def __init__(self, row: str, directory: Path) -> None:
        self.loaded: Loaded = asking.loaded(tiny.ROWS[row], directory / "model")
        self.onnx: Artifact = asking.make("onnx", self.loaded, directory / "onnx")
        self.trace: Artifact = asking.make("torchscript", self.loaded, directory / "torchscript")
        self.cases = [
            Case("padded", asking.batch(self.loaded.facts, [7, 3, 12])),
            Case("left", asking.batch(self.loaded.facts, [5, 9], left=True)),
        ]

    def module(self) -> torch.nn.Module:
        """The model, as `with_model` loads it."""
        return self.loaded.module


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny BERT classifier."""
    return Model("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny GPT-2."""
    return Model("gpt2", tmp_path_factory.mktemp("gpt2"))


def both(model: Model, candidate: Artifact) -> list[Located]:
    """A file held against the unbroken file, and against the model."""
    return [
        locating.between(candidate, model.onnx, model.cases, options=ONE),
        locating.with_model(candidate, model.module, model.cases, options=ONE),
    ]


BERT = "bert.encoder.layer.1"
BREAKS: list[tuple[str, breaking.Break, str, str]] = [
    ("10 %", breaking.nudged(f"{BERT}.output.dense.weight.T", 0.1), f"{BERT}.output.dense", "weight"),
    ("1 %", breaking.nudged(f"{BERT}.attention.self.value.weight.T", 0.01), f"{BERT}.attention.self.value", "weight"),
    ("0.1 %", breaking.nudged("bert.pooler.dense.weight", 0.001), "bert.pooler.dense", "weight"),
    ("a word", breaking.nudged("bert.embeddings.word_embeddings.weight", 0.01), "bert.embeddings.word_embeddings", ""),
    ("bias", breaking.zeroed(f"{BERT}.intermediate.dense.bias"), f"{BERT}.intermediate.dense", "bias"),
    (
        "epsilon",
        breaking.epsilon(f"{BERT}.output.LayerNorm", 1e-3),
        f"{BERT}.output.LayerNorm",
        "epsilon is 0.001, not 1e-12",
    ),
    ("mask", breaking.mask_ignored(1), f"{BERT}.attention.self", ""),
    (
        "heads",
        breaking.swapped_heads(f"{BERT}.attention.self.query.weight.T", 4),
        f"{BERT}.attention.self.query",
        "weight",
    ),
]


@pytest.mark.parametrize(("how", "module", "hint"), [each[1:] for each in BREAKS], ids=[each[0] for each in BREAKS])
def test_the_broken_module_of_a_bert_is_named(
    bert: Model, how: breaking.Break, module: str, hint: str, tmp_path: Path
) -> None:
    candidate = breaking.broken(bert.onnx, tmp_path / "broken", how)
    for found in both(bert, candidate):
        assert (found.first, found.most) == (module, module), found.against
        assert found.stands_out
        others = [each.introduced for each in found.modules if each.module != module]
        assert max(others) < located.NOISE, "what follows adds nothing of its own"
        assert found.outputs["logits"] > 1e-5
        if found.against == "onnx" and hint:
            assert any(hint in note for note in found.notes), found.notes


@pytest.mark.parametrize(
    ("how", "module"),
    [
        (breaking.nudged("transformer.h.1.mlp.c_proj.weight", 0.01), "transformer.h.1.mlp.c_proj"),
        (breaking.zeroed("transformer.h.0.attn.c_attn.bias"), "transformer.h.0.attn.c_attn"),
        (breaking.epsilon("transformer.h.1.ln_1", 1e-2), "transformer.h.1.ln_1"),
        (breaking.mask_ignored(0), "transformer.h.0.attn"),
        (breaking.nudged("transformer.wpe.weight", 0.1), "transformer.wpe"),
    ],
    ids=["1 %", "bias", "epsilon", "mask", "positions"],
)
def test_the_broken_module_of_a_gpt2_is_named(gpt2: Model, how: breaking.Break, module: str, tmp_path: Path) -> None:
    for found in both(gpt2, breaking.broken(gpt2.onnx, tmp_path / "broken", how)):
        assert (found.first, found.most) == (module, module), found.against


def test_what_is_unbroken_moves_nowhere(bert: Model, gpt2: Model) -> None:
    for model in (bert, gpt2):
        for found in both(model, model.onnx):
            assert (found.first, found.most, found.stands_out) == (None, None, False), found.against
            assert len(found.modules) > 20
            assert not found.unmatched
            assert max(each.introduced for each in found.modules) < located.NOISE / 10
        trace = locating.with_model(model.trace, model.module, model.cases, options=ONE)
        assert trace.first is None
        assert len(trace.modules) > 20
        assert not trace.unmatched


def test_a_broken_trace_is_located(bert: Model, tmp_path: Path) -> None:
    """The trace stays, the model moves: the same to whoever holds them against each other."""
    other = tiny.build(tiny.ROWS["bert"])
    other.load_state_dict(bert.loaded.module.state_dict())
    with torch.no_grad():
        other.get_submodule(f"{BERT}.output.dense").weight.mul_(1.01)
    changed = asking.loaded(tiny.ROWS["bert"], tmp_path)
    changed.module.load_state_dict(other.state_dict())
    found = locating.with_model(bert.trace, lambda: changed.module, bert.cases, options=ONE)
    assert (found.first, found.most) == (f"{BERT}.output.dense", f"{BERT}.output.dense")


def test_in_small_pieces_and_from_disk_the_answer_is_the_same(
    bert: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = breaking.broken(bert.onnx, tmp_path / "broken", BREAKS[0][1])
    whole = both(bert, candidate)
    monkeypatch.setattr(pieces, "PIECE", 20_000)
    monkeypatch.setattr(locating.against_model, "PIECE", 20_000)
    monkeypatch.setattr(pieces, "IN_MEMORY", 0)
    opened: list[int] = []
    piece = pieces.Work._run
    monkeypatch.setattr(pieces.Work, "_run", lambda *given: (opened.append(1), piece(*given))[1])
    monkeypatch.setattr(pieces.Store.__init__, "__defaults__", (0,))
    parts = both(bert, candidate)
    assert len(opened) > 10
    for one, other in zip(whole, parts, strict=True):
        assert one.first == other.first
        assert [each.module for each in one.modules] == [each.module for each in other.modules]
        for a, b in zip(one.modules, other.modules, strict=True):
            assert b.introduced == pytest.approx(a.introduced, rel=1e-2, abs=1e-6)
            assert b.arrives == pytest.approx(a.arrives, rel=1e-2, abs=1e-6)


def test_a_file_without_names_says_what_could_not_be_matched(bert: Model, tmp_path: Path) -> None:
    found = locating.between(
        breaking.broken(bert.onnx, tmp_path / "theirs", breaking.unnamed), bert.onnx, bert.cases, options=ONE
    )
    assert [each.module for each in found.modules] == ["classifier"], "its output alone has a name that both know"
    assert found.first is None
    assert f"{BERT}.output.dense" in found.unmatched
    assert len(found.unmatched) > 25
    with pytest.raises(CannotRunHere, match="no inner tensor of onnx can be matched to a module"):
        unnamed = breaking.broken(bert.onnx, tmp_path / "unnamed", breaking.unnamed)
        locating.with_model(unnamed, bert.module, bert.cases, options=ONE)


def test_weights_in_a_file_of_another_exporter_name_its_modules(bert: Model, tmp_path: Path) -> None:
    """No modules are recorded and inner tensors have other names; a weight says whose it is."""
    named = breaking.broken(bert.onnx, tmp_path / "theirs", breaking.only_weights_named)
    nudged = breaking.broken(named, tmp_path / "nudged", BREAKS[0][1])
    found = locating.between(nudged, named, bert.cases, options=ONE)
    assert (found.first, found.most) == (BREAKS[0][2], BREAKS[0][2])


def test_a_case_that_the_candidate_cannot_answer_is_left_out(bert: Model) -> None:
    bad = Case("bad", {**bert.cases[0].inputs, "input_ids": bert.cases[0].inputs["input_ids"] + 10**6})
    found = locating.between(bert.onnx, bert.onnx, [bad, *bert.cases], options=ONE)
    assert found.cases == ("padded", "left")
    assert any(note.startswith("case bad is left out: candidate raised") for note in found.notes)
    with pytest.raises(DriftError, match="onnx answered none of the cases"):
        locating.between(bert.onnx, bert.onnx, [bad], options=ONE)


def test_a_tensor_that_is_not_finite_is_where_it_starts(bert: Model, tmp_path: Path) -> None:
    nan = breaking.broken(bert.onnx, tmp_path / "nan", breaking.nudged(f"{BERT}.intermediate.dense.bias", float("nan")))
    for found in both(bert, nan):
        assert (found.first, found.most) == (f"{BERT}.intermediate.dense",) * 2
        answer = found.of(found.first)
        assert answer is not None
        assert answer.nonfinite > 0
