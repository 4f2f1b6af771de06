"""`recover`: what int8 lost comes back, the record says how, and whatever goes wrong leaves the step as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import (
    cli,
    disk,
    inputs,
    manifest,
    models,
    pipeline,
    plan,
    recipe,
    recover_texts,
    recovering,
    report_recover,
)
from nlpconvert.errors import DriftError, NlpconvertError, UsageError
from nlpconvert.inputs import Item, Row
from nlpconvert.models import Facts
from nlpconvert.progress import Silent
from nlpconvert.recovered import Recovered, Wishes
from tests import tiny

OPTIONS = plan.Options(threads=1)
TOO_WIDE = 24
"""Scales so many times wider than what was seen: five of eight bits are thrown away."""
SCALES = Wishes(train="scales", steps=30, rate=200.0)
STEP = "onnx-qdq"


@pytest.fixture(scope="session")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model` (a tiny BERT encoder), `texts.jsonl` and `out`, whose int8 has scales far too wide."""
    home = tmp_path_factory.mktemp("harmed")
    model = replace(tiny.ROWS["bert"], model="BertModel")
    tiny.add_tokenizer(tiny.save(model, home / "model"))
    words = "quick brown foxes jump over lazy dogs while seven wizards pack five dozen jugs of liquid gold".split()
    rows = [" ".join(words[n % 11 : n % 11 + 3 + n % 5]) + f" {n}" for n in range(60)]
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pipeline.run(str(home / "model"), home / "out", to=[STEP], options=replace(OPTIONS, keep_going=True))
    made = recipe.read(home / "out" / STEP / recipe.FILE)
    wide = {name: replace(site, scale=site.scale * TOO_WIDE) for name, site in made.sites.items()}
    recipe.write(replace(made, sites=wide), home)
    again = replace(OPTIONS, force=True, recipe=home / recipe.FILE)
    (*_, outcome) = pipeline.convert_step(STEP, str(home / "model"), home / "out", options=again)
    assert outcome.verdict is not None
    return home


@pytest.fixture
def home(harmed: Path, tmp_path: Path) -> Path:
    shutil.copytree(harmed / "out", tmp_path / "out")
    return tmp_path


def recover(out: Path, wishes: Wishes = SCALES, progress: Any = None, **options: Any) -> Recovered:
    return recovering.recover(out, STEP, wishes, replace(OPTIONS, **options), progress or Silent())


def state(out: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The step's files, and what the manifest says of it."""
    return disk.hash_tree(out / STEP), json.loads((out / manifest.FILE).read_text())["steps"][STEP]


def lost(numbers: Any) -> float:
    """Squared relative error, over the outputs."""
    return sum(float(each["relative_l2"]) ** 2 for each in numbers.values())


# -- it comes back -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def recovered(harmed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recovered]:
    """The harmed one with its scales trained on the user's texts and the shipped ones."""
    home = tmp_path_factory.mktemp("recovered")
    shutil.copytree(harmed / "out", home / "out")
    return home / "out", recover(home / "out", data=harmed / "texts.jsonl")


def test_too_wide_scales_come_back(recovered: tuple[Path, Recovered], harmed: Path) -> None:
    out, found = recovered
    facts = found.record
    assert found.replaced and found.exit_code == 0 and found.after.status == "agrees"
    assert lost(facts["after"]) < lost(facts["before"]) / 4
    before, after = recipe.read(harmed / recipe.FILE), recipe.read(out / STEP / recipe.FILE)
    assert all(after.sites[name].scale < 0.7 * site.scale for name, site in before.sites.items())


def test_the_verdict_is_everybodys_and_the_record_says_what_was_trained(
    recovered: tuple[Path, Recovered], harmed: Path
) -> None:
    """The same goldens and tolerance as the float32 step's, asked again from disk; what, on which data, how long."""
    out, found = recovered
    (again,) = pipeline.verify(out, steps=[STEP], options=OPTIONS)
    assert again.status == "agrees" and again.verdict is not None and found.after.verdict is not None
    assert again.verdict["probe_sha256"] == found.after.verdict["probe_sha256"]
    kept = manifest.read(out).artifact(STEP, out)
    facts = kept.made_by["recovered"]
    data = harmed / "texts.jsonl"
    assert facts["data"] == {"name": "texts.jsonl", "sha256": disk.sha256_file(data)}
    assert (facts["trained"], facts["steps"], facts["batch"], facts["seed"]) == ("scales", 30, 16, 0)
    assert facts["seconds"] >= facts["training_seconds"] > 0 and 0 < facts["best_step"] <= 30
    assert facts["parity"]["layers"] == facts["parity"]["of"] == 13 and facts["parity"]["worst_layer"] < 1e-4
    assert 0 < facts["texts_of_data"] < 60 and facts["texts"] > facts["texts_of_data"]
    assert recipe.read(out / STEP / recipe.FILE).search["recovered"]["steps"] == 30


def test_nothing_that_is_judged_was_trained_on(recovered: tuple[Path, Recovered], harmed: Path) -> None:
    """Not the judge part of the texts, and no row of the goldens."""
    from nlpconvert import calibration, golden, source

    out, _ = recovered
    record = manifest.read(out)
    facts = models.facts_from_data(record.facts)
    cases, _ = golden.read(out / manifest.GOLDEN)
    judged = {item.rows for item in inputs.items_of(cases, facts)}
    options = replace(OPTIONS, data=harmed / "texts.jsonl")
    encode = source.load(str(harmed / "model")).encode
    own = inputs.items_of(calibration.data_cases(options, facts, encode, "judge"), facts)
    trained = inputs.items_of(calibration.cases(options, facts, encode, "calibrate"), facts)
    assert {item.rows for item in own} <= judged
    assert len([item for item in trained if item.rows not in judged]) == _facts(out)["texts"]


def _facts(out: Path) -> Any:
    return manifest.read(out).artifact(STEP, out).made_by["recovered"]


def test_trained_scales_are_a_recipe_like_any_other(
    recovered: tuple[Path, Recovered], harmed: Path, home: Path
) -> None:
    """Replayed on the checkpoint's own weights it makes the same file to the bit."""
    out, _ = recovered
    options = replace(OPTIONS, force=True, recipe=out / STEP / recipe.FILE)
    pipeline.convert_step(STEP, str(harmed / "model"), home / "out", options=options)
    for name in ("model.onnx", "model.onnx.data"):
        assert disk.sha256_file(home / "out" / STEP / name) == disk.sha256_file(out / STEP / name)


def test_trained_weights_make_a_recipe_that_is_not_replayed(harmed: Path, home: Path) -> None:
    out = home / "out"
    before = state(out)[0]
    found = recover(out, Wishes(train="all", steps=12, batch=8, rate=20.0))
    assert found.replaced and lost(found.record["after"]) < lost(found.record["before"])
    after, kept = state(out)
    assert after != before and after == kept["artifact"]["files"]
    options = replace(OPTIONS, force=True, recipe=out / STEP / recipe.FILE)
    with pytest.raises(UsageError, match=r"is a recipe for onnx-qdq \(static, trained weights\), not for onnx-qdq"):
        pipeline.convert_step(STEP, str(harmed / "model"), out, options=options)
    with pytest.raises(UsageError, match="the weights of onnx-qdq were trained before"):
        recover(out)
    assert state(out) == (after, kept)


def test_the_command_tells_what_came_back(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recover", str(home / "out"), "--train", "scales", "--steps", "8", "--rate", "400", "--threads", "1"]
    assert cli._main([*words, "--batch", "8"]) == 0
    told = capsys.readouterr().out
    assert "onnx-qdq was recovered by training scales alone (the weights are the checkpoint's)" in told
    assert "of last_hidden_state's squared error" in told and "13 of 13 layers as ONNX Runtime computes them" in told


# -- it is no better ---------------------------------------------------------------------------------------------------


def test_what_is_no_better_replaces_nothing(home: Path) -> None:
    """A rate at which training only does harm: no step is better than none."""
    out = home / "out"
    before = state(out)
    found = recover(out, Wishes(train="weights", steps=4, batch=8, rate=5000.0))
    assert not found.replaced and found.exit_code == 1 and found.record["best_step"] == 0
    assert state(out) == before
    (line, *_) = report_recover.lines(found.to_dict())
    assert line.startswith("onnx-qdq was not replaced: no step of the training was better")


def test_what_is_judged_worse_replaces_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Better on the select part, and worse where it is judged: the verdict decides."""
    out = home / "out"
    before = state(out)
    places: list[tuple[float, float]] = [(2.0, 0.1), (1.0, 0.2)]
    monkeypatch.setattr(recovering, "far", lambda outcome: places.pop(0))
    found = recover(out, replace(SCALES, steps=6, batch=8))
    assert not places and not found.replaced and found.exit_code == 1
    assert state(out) == before and sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []
    (line, *_) = report_recover.lines(found.to_dict())
    assert line == "onnx-qdq was not replaced: what was trained is further from PyTorch than what lies there"


class Stops(Silent):
    """Ctrl-C at a step of the training."""

    def __init__(self, at: int) -> None:
        self.left = at

    def start(self, what: str, total: int | None = None) -> None:
        self.training = "train" in what

    def advance(self, by: int = 1) -> None:
        self.left -= self.training
        if not self.left:
            raise KeyboardInterrupt


def test_an_interrupted_run_leaves_the_step_as_it_was(home: Path) -> None:
    out = home / "out"
    before = state(out)
    with pytest.raises(KeyboardInterrupt):
        recover(out, replace(SCALES, batch=8), Stops(3))
    assert state(out) == before
    assert not [path for path in out.iterdir() if disk.is_bookkeeping(path.name)]


def test_a_loss_that_is_no_number_leaves_the_step_as_it_was(home: Path) -> None:
    out = home / "out"
    before = state(out)
    with pytest.raises(DriftError, match=r"the loss is no number at step \d+ of 9 \(loss .*\): try a smaller --rate"):
        recover(out, Wishes(train="all", steps=9, batch=8, rate=1e30))
    assert state(out) == before


# -- it is refused -----------------------------------------------------------------------------------------------------


def lie(out: Path, change: Callable[[recipe.Recipe], recipe.Recipe]) -> None:
    """Another recipe beside the artifact, and a manifest that says it was always there."""
    made = recipe.read(out / STEP / recipe.FILE)
    recipe.write(change(made), out / STEP)
    data = json.loads((out / manifest.FILE).read_text())
    data["steps"][STEP]["artifact"]["files"] = disk.hash_tree(out / STEP)
    (out / manifest.FILE).write_text(json.dumps(data))


def test_a_recipe_that_is_not_the_artifacts_is_seen(home: Path) -> None:
    """The simulation is held against ONNX Runtime before anything is trained."""
    name = "encoder.layer.1.output.dense"
    lie(
        home / "out",
        lambda made: replace(
            made, sites={**made.sites, name: replace(made.sites[name], scale=made.sites[name].scale * 1.1)}
        ),
    )
    with pytest.raises(DriftError, match=rf"PyTorch does not compute {name} as ONNX Runtime does: \S+ apart"):
        recover(home / "out")


def _gone(home: Path) -> None:
    data = json.loads((home / "out" / manifest.FILE).read_text())
    data["source"]["path"] = str(home / "nowhere")
    (home / "out" / manifest.FILE).write_text(json.dumps(data))


def _changed(home: Path) -> None:
    (home / "out" / STEP / "config.json").write_text("{}")


def _pair(home: Path) -> None:
    data = json.loads((home / "out" / manifest.FILE).read_text())
    data["steps"][STEP]["artifact"]["made_by"]["encoder"] = {"file": "model.onnx"}
    (home / "out" / manifest.FILE).write_text(json.dumps(data))


REFUSALS: dict[str, tuple[Callable[[Path], None], dict[str, Any], type[NlpconvertError], str]] = {
    "gone": (_gone, {}, UsageError, r"the model is not where it was \(.*nowhere\): give --model DIR"),
    "changed": (
        _changed,
        {},
        DriftError,
        "onnx-qdq/config.json has changed since it was recorded: nothing was trained",
    ),
    "weight-only": (
        lambda home: lie(home / "out", lambda made: replace(made, kind="weight-only")),
        {},
        UsageError,
        "onnx-qdq is weight-only: recover trains static int8",
    ),
    "pair": (
        _pair,
        {},
        UsageError,
        "onnx-qdq is an encoder and a decoder in two graphs: recover trains what is one graph",
    ),
    "too few": (lambda home: None, {"batch": 100_000}, UsageError, "texts to train on are fewer than one batch"),
    "words": (lambda home: None, {"train": "biases"}, UsageError, '--train "biases" is unknown'),
    "rate": (lambda home: None, {"rate": 0.0}, UsageError, "--rate 0: more than 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_trained_is_told_in_a_line(name: str, home: Path) -> None:
    change, wishes, kind, words = REFUSALS[name]
    change(home)
    before = state(home / "out")
    with pytest.raises(kind, match=words) as caught:
        recover(home / "out", replace(SCALES, **wishes))
    assert "\n" not in str(caught.value) and state(home / "out") == before


def test_a_step_that_is_not_int8_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="onnx is float32, onnx: recover trains onnx-qdq and onnx-int8"):
        recovering.recover(home / "out", "onnx", SCALES, OPTIONS, Silent())
    with pytest.raises(UsageError, match="there is no step 'onnx-int8'"):
        recovering.recover(home / "out", "onnx-int8", SCALES, OPTIONS, Silent())


def test_another_model_is_refused(home: Path, classifier: Path) -> None:
    with pytest.raises(UsageError, match="holds feature-extraction of checkpoint"):
        recover(home / "out", replace(SCALES, model=str(classifier)))


def test_texts_that_leave_a_part_empty_are_refused(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text('{"text": "one"}\n')
    with pytest.raises(UsageError, match=r"1 rows with 1 different texts leave nothing to .* on; give more"):
        recover(home / "out", data=data)


# -- texts -------------------------------------------------------------------------------------------------------------


def facts_of(home: Path) -> Facts:
    return models.facts_from_data(manifest.read(home / "out").facts)


def test_rows_come_out_of_their_cases_and_go_into_batches(harmed: Path) -> None:
    facts = facts_of(harmed)
    items = [Item((Row(tuple(range(5, 5 + n)), (0,) * n),)) for n in range(1, 41)]
    case = inputs.Case("c", inputs.collate(facts, items))
    assert inputs.items_of([case], facts) == items
    plain = recover_texts.Texts(facts, items, batch=8, seed=0, varied=False)
    seen: list[Item] = []
    for batch in plain.batches():
        assert len(batch["input_ids"]) <= 8 and batch["input_ids"].size <= 8 * recover_texts.BATCH_TOKENS
        seen += inputs.items_of([inputs.Case("b", batch)], facts)
        if len(seen) >= len(items):
            break
    assert sorted(seen, key=lambda each: len(each.rows[0].ids)) == items


def test_a_varied_text_keeps_its_special_tokens_and_the_seed_decides(harmed: Path) -> None:
    facts = facts_of(harmed)
    cls, sep = 2, 3
    items = [Item((Row((cls, *range(10, 30), sep), (0,) * 22),))] * 40
    shown = []
    for seed in (0, 0, 1):
        batches = recover_texts.Texts(facts, items, batch=40, seed=seed).batches()
        shown.append([item.rows[0].ids for item in inputs.items_of([inputs.Case("b", next(batches))], facts)])
    assert shown[0] == shown[1] != shown[2]
    lengths = {len(ids) for ids in shown[0]}
    assert len(lengths) > 3 and max(lengths) == 22
    assert all(ids[0] == cls and ids[-1] == sep for ids in shown[0])
    others = np.array([set(ids[1:-1]) - set(range(10, 30)) != set() for ids in shown[0]])
    assert 0 < others.sum() < 30 and all(0 <= i < facts.vocab_size for ids in shown[0] for i in ids)


# -- everything in integers --------------------------------------------------------------------------------------------


def test_what_stayed_in_float_goes_to_integers_first(harmed: Path, home: Path) -> None:
    """One layer was given back: with --all-int8 it is fitted anew, and trained with the others."""
    out, name = home / "out", "encoder.layer.1.output.dense"
    made = recipe.read(harmed / recipe.FILE)
    layers = [replace(each, precision="float32", bias=None) if each.name == name else each for each in made.layers]
    sites = {each: site for each, site in made.sites.items() if each != name}
    recipe.write(replace(made, layers=tuple(layers), sites=sites), home)
    pipeline.convert_step(
        STEP, str(harmed / "model"), out, options=replace(OPTIONS, force=True, recipe=home / recipe.FILE)
    )
    assert recipe.read(out / STEP / recipe.FILE).layer(name).precision == "float32"
    found = recover(out, Wishes(train="scales", steps=4, batch=8, rate=5.0, all_int8=True))
    assert found.record["parity"]["of"] == 13 and found.record["all_int8"]
    now = recipe.read(out / STEP / recipe.FILE)
    assert now.layer(name).precision == ("int8" if found.replaced else "float32")
    assert found.replaced == (found.record["best_step"] > 0)
