"""A step on labelled data beside its reference: what passes, what trips, and what a person reads."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from nlpconvert import disk, golden, manifest, pipeline, probes, reference, report_scores, scoring, source
from nlpconvert.artifact import STEPS, Outcome
from nlpconvert.errors import UsageError
from nlpconvert.manifest import Golden, Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.validators.scores import Scores
from tests import asking
from tests.test_verify_alone import BLOCKER, ROOT

GATE = "accuracy drops by 0.5% at 95%"


@dataclasses.dataclass(frozen=True)
class Made:
    """An OUT with the float32 ONNX of the trained classifier, its record and its labelled rows."""

    out: Path
    record: Manifest
    data: Path


@pytest.fixture(scope="module")
def reviews(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory, out = fixtures_dir / "bert-text-classifier", tmp_path_factory.mktemp("reviews") / "out"
    loaded = source.load(str(directory))
    cases = probes.probe_cases(loaded.facts, loaded.encode)[:3]
    from nlpconvert import forward

    asked = reference.ask(
        lambda batch: forward.call(loaded.module, batch), cases, loaded.facts.outputs, 2**20, Silent()
    )
    artifact = asking.make("onnx", loaded, out / "onnx")
    (out / "golden").mkdir()
    golden.write(out / "golden", cases, asked.answers)
    record = Manifest(loaded.description, asdict(loaded.facts), Golden(disk.hash_tree(out / "golden")))
    record = record.with_step(Outcome("onnx", "agrees", artifact=artifact))
    return Made(out, record, directory / "eval.jsonl")


@pytest.fixture
def mine(reviews: Made, tmp_path: Path) -> Made:
    """A copy that a test may change."""
    shutil.copytree(reviews.out, tmp_path / "out")
    return dataclasses.replace(reviews, out=tmp_path / "out")


def derive(made: Made, step: str, change: Callable[[dict[str, np.ndarray]], None] = lambda weights: None) -> Made:
    """OUT with one step more: the ONNX file with its weights changed."""
    directory = made.out / step
    shutil.copytree(made.out / "onnx", directory)
    model = onnx.load(str(directory / "model.onnx"))
    weights = {each.name: onnx.numpy_helper.to_array(each).copy() for each in model.graph.initializer}
    change(weights)
    for each in model.graph.initializer:
        each.CopyFrom(onnx.numpy_helper.from_array(weights[each.name], each.name))
    (directory / "model.onnx.data").unlink()
    onnx.save_model(model, str(directory / "model.onnx"))
    artifact = made.record.artifact("onnx", made.out)
    new = dataclasses.replace(
        artifact, step=step, path=directory / "model.onnx", precision=STEPS[step].precision, parent="onnx",
        files=disk.hash_tree(directory), parent_sha256=artifact.sha256,
    )  # fmt: skip
    return dataclasses.replace(made, record=made.record.with_step(Outcome(step, "agrees", artifact=new)))


def rounded(weights: dict[str, np.ndarray]) -> None:
    """As half precision would have them."""
    for name, array in weights.items():
        if name.endswith("weight"):
            weights[name] = array.astype(np.float16).astype(np.float32)


def broken(weights: dict[str, np.ndarray]) -> None:
    """The head's rows change places: every label is another."""
    (head,) = (name for name in weights if name.endswith("classifier.weight"))
    weights[head] = np.roll(weights[head], 1, axis=int(np.argmin(weights[head].shape)))


def score(made: Made, step: str, metric: str = "accuracy", **values: Any) -> Scores:
    return scoring.score(
        made.out,
        made.record,
        step,
        data=values.pop("data", made.data),
        metric=metric,
        options=Options(threads=1),
        **values,
    )


# -- what the gate says ------------------------------------------------------------------------------------------------


def test_an_unbroken_step_passes_beside_the_onnx(mine: Made) -> None:
    made = derive(mine, "onnx-optimized", rounded)
    found = score(made, "onnx-optimized", fail_if=GATE)
    assert (found.status, found.exit_code, found.rows, found.reference) == ("scored", 0, 200, "onnx, float32")
    (accuracy,) = found.scores
    assert accuracy.reference == 0.905, "the model card's"
    assert accuracy.worse is not None and accuracy.better is not None and accuracy.worse + accuracy.better <= 1
    assert found.changed is not None and found.changed.rows == 200
    assert f"{found.changed.unseen:.1%}" == "1.5%"
    (tripped,) = found.fail_if
    assert not tripped.failed and tripped.warning.startswith("200 rows cannot show a drop below 3.1 % at 95 %")
    assert found.notes == ()
    assert Scores.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    assert found.data_sha256 == disk.sha256_file(made.data)


def test_a_broken_step_trips_the_gate(mine: Made) -> None:
    made = derive(mine, "onnx-int8", broken)
    found = score(made, "onnx-int8", fail_if=GATE)
    assert found.exit_code == 1
    (accuracy,) = found.scores
    assert accuracy.candidate < 0.4 and accuracy.chance is not None and accuracy.chance < 1e-20
    assert found.fail_if[0].failed and not found.fail_if[0].warning
    said = "\n".join(report_scores.lines(found))
    assert said.startswith(f"onnx-int8 FAILS on eval.jsonl (200 rows): {GATE}\n")
    assert f"\n  FAILS {GATE}: it dropped by " in said and "Again:" not in said, "one such line is the caller's"
    assert found.arguments == f"--data {made.data} --metric accuracy --fail-if '{GATE}'"
    by_f1 = score(made, "onnx-int8", "f1", fail_if="f1 drops by 1% at 95%")
    assert by_f1.exit_code == 1
    told = "\n".join(report_scores.lines(by_f1))
    assert "   macro over labels\n    labels         4 of onnx-int8/config.json; one that no row has" in told
    without = score(made, "onnx-int8")
    assert without.exit_code == 0, "without --fail-if the numbers are told and nothing is judged"


def test_what_answers_nothing_drifts(mine: Made) -> None:
    def lost(weights: dict[str, np.ndarray]) -> None:
        (head,) = (name for name in weights if name.endswith("classifier.bias"))
        weights[head] = np.full_like(weights[head], np.nan)

    found = score(derive(mine, "onnx-int8", lost), "onnx-int8", fail_if=GATE)
    assert (found.status, found.exit_code, found.broken) == ("drift", 1, 200)
    assert list(report_scores.lines(found)) == [
        "onnx-int8: DRIFT on eval.jsonl (200 rows): its answers are not finite in 200 of 200 rows"
    ]


def test_several_steps_share_one_reference(mine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made = derive(derive(mine, "onnx-optimized"), "onnx-int8", broken)
    opened: list[str] = []
    real = scoring.runtimes.open_artifact
    monkeypatch.setattr(
        scoring.runtimes,
        "open_artifact",
        lambda artifact, options: opened.append(artifact.step) or real(artifact, options),
    )
    found = scoring.score_steps(
        made.out, made.record, ["onnx", "onnx-optimized", "onnx-int8"], data=made.data, metric="accuracy",
        options=Options(threads=1), fail_if=GATE,
    )  # fmt: skip
    assert [each.failed for each in found] == [False, False, True]
    assert found[0].fail_if[0].status == "not judged"
    assert next(report_scores.lines(found[0])).startswith("onnx scored on eval.jsonl")
    assert f"  not judged {GATE}: it is what the others are held against" in list(report_scores.lines(found[0]))
    assert opened == ["onnx", "onnx", "onnx-optimized", "onnx-int8"]
    assert [each.reference for each in found] == ["", "onnx, float32", "onnx, float32"]
    assert found[0].scores[0].difference is None
    assert found[1].scores[0].difference == 0.0


def test_a_file_that_was_changed_is_not_opened(mine: Made) -> None:
    made = derive(mine, "onnx-optimized")
    with (made.out / "onnx-optimized" / "model.onnx").open("ab") as file:
        file.write(b"\0")
    found = score(made, "onnx-optimized")
    assert (found.status, found.exit_code) == ("drift", 1)
    assert found.reason == "onnx-optimized/model.onnx has changed since it was verified; it was not opened"
    shutil.rmtree(made.out / "onnx-optimized")
    again = derive(dataclasses.replace(made, record=mine.record), "onnx-optimized")
    (made.out / "onnx" / "config.json").write_text("{}")
    other = score(again, "onnx-optimized")
    assert other.status == "drift"
    assert other.reason.startswith("the reference (onnx, float32) cannot answer: onnx/config.json has changed")


def test_what_cannot_run_here_is_not_run(mine: Made) -> None:
    made = derive(mine, "onnx-optimized")
    found = scoring.score(
        made.out, made.record, "onnx-optimized", data=made.data, metric="accuracy", options=Options(provider="cuda")
    )
    assert (found.status, found.exit_code) == ("not run", 4)
    assert found.reason.startswith("ONNX Runtime here has no CUDAExecutionProvider")
    assert next(report_scores.lines(found)).startswith("onnx-optimized: not run on eval.jsonl (200 rows): ONNX Runtime")


def test_without_a_reference_there_is_the_score_alone(reviews: Made) -> None:
    found = score(reviews, "onnx", fail_if="accuracy below 0.8 at 95%")
    assert found.exit_code == 0 and found.reference == "" and found.changed is None
    assert score(reviews, "onnx", fail_if="accuracy below 0.95").exit_code == 1
    with pytest.raises(UsageError, match=r"needs a reference, and onnx has none but itself: give --reference DIR"):
        score(reviews, "onnx", fail_if=GATE)


def test_pytorch_is_the_reference_where_the_model_is_given(reviews: Made, fixtures_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text("".join(reviews.data.read_text().splitlines(keepends=True)[:24]))
    found = score(reviews, "onnx", data=data, fail_if=GATE, model=str(fixtures_dir / "bert-text-classifier"))
    assert found.reference == "pytorch, float32"
    assert found.scores[0].difference == 0.0 and found.exit_code == 0
    assert found.arguments.endswith(f"--reference {fixtures_dir / 'bert-text-classifier'}")
    with pytest.raises(UsageError, match="is another checkpoint"):
        score(reviews, "onnx", data=data, model=str(fixtures_dir / "bert-token-classifier"))


def test_other_columns_and_rows_that_are_cut(reviews: Made, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("body,y\n" + "".join(f"{'good room ' * n},positive\n" for n in (1, 2, 100)))
    found = score(reviews, "onnx", data=data, columns="text=body,label=y")
    assert found.rows == 3
    assert found.notes == ("1 of 3 rows is longer than 128 tokens and was cut",)
    with pytest.raises(UsageError, match="squad does not fit text-classification: accuracy"):
        score(reviews, "onnx", "squad", data=data)
    with pytest.raises(UsageError, match="there is no step 'trt'"):
        score(reviews, "trt", data=data)


def test_a_gate_that_cannot_fail_is_refused(mine: Made, tmp_path: Path) -> None:
    made = derive(mine, "onnx-int8", broken)
    rows = made.data.read_text().splitlines(keepends=True)
    for count in (1, 3):
        few = tmp_path / f"{count}.jsonl"
        few.write_text("".join(rows[:count]))
        with pytest.raises(UsageError, match=rf"cannot fail on {count} rows?: .* it takes 5 rows at least"):
            score(made, "onnx-int8", data=few, fail_if=GATE)
        assert score(made, "onnx-int8", data=few, fail_if="accuracy drops by 1%").exit_code == 1
    told = "\n".join(report_scores.lines(score(made, "onnx", data=tmp_path / "1.jsonl")))
    assert "(1 row)" in told and "1 rows" not in told


def test_labels_that_are_another_models_are_noticed(mine: Made, tmp_path: Path) -> None:
    made = derive(mine, "onnx-optimized")
    rows = [json.loads(line) for line in made.data.read_text().splitlines()]
    names = sorted({row["label"] for row in rows})
    for row in rows:
        row["label"] = names[(names.index(row["label"]) + 1) % len(names)]
    data = tmp_path / "shifted.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for metric in ("accuracy", "f1"):
        found = score(made, "onnx-optimized", metric, data=data)
        (note,) = found.warnings
        assert note.startswith("the reference itself is right in ") and found.notes == ()
        assert note.endswith(
            "no better than always saying the most common label (34 %): are these labels this model's?"
        )
    assert score(made, "onnx", data=data).warnings[0].startswith("onnx itself is right in ")


def test_repeated_and_empty_rows_are_told(mine: Made, tmp_path: Path) -> None:
    made = derive(mine, "onnx-optimized")
    rows = [json.loads(line) for line in made.data.read_text().splitlines()]
    rows = [rows[n % 10] for n in range(170)] + [{**rows[n], "text": " " * (n % 2)} for n in range(30)]
    data = tmp_path / "repeated.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = score(made, "onnx-optimized", data=data, fail_if=GATE)
    assert found.warnings[1:] == (
        "30 rows are empty",
        "12 distinct texts among 200 rows: the intervals hold for 200 independent ones",
    )
    assert found.fail_if[0].status == "not shown"
    assert found.warnings[0].startswith(f"--fail-if {GATE}: not shown: 200 rows cannot show a drop")
    assert "onnx-optimized: 30 rows are empty" in list(report_scores.warnings(found))


def test_another_tokenizer_is_noticed(mine: Made) -> None:
    """Many wrong models are wrong ids: the probes' ids in golden/ are those of the checkpoint's own tokenizer."""
    path = mine.out / "onnx" / "tokenizer.json"
    said = json.loads(path.read_text())
    said["normalizer"]["lowercase"] = False
    path.write_text(json.dumps(said))
    artifact = dataclasses.replace(mine.record.artifact("onnx", mine.out), files=disk.hash_tree(mine.out / "onnx"))
    made = dataclasses.replace(mine, record=mine.record.with_step(Outcome("onnx", "agrees", artifact=artifact)))
    found = score(made, "onnx")
    assert "the tokenizer beside the artifact gives other ids than the checkpoint's own did in" in " ".join(found.notes)


def test_it_needs_neither_torch_nor_transformers(mine: Made, tmp_path: Path) -> None:
    """As CI runs it: a process in which these cannot be imported."""
    made = derive(mine, "onnx-optimized")
    made.record.write(made.out)
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    program = f"""
from pathlib import Path
from nlpconvert import manifest, scoring
out = Path({str(made.out)!r})
found = scoring.score(out, manifest.read(out), "onnx-optimized", data=Path({str(made.data)!r}), metric="accuracy")
print(found.status, found.reference, found.scores[0].candidate)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "scored onnx, float32 0.905\n"), done.stderr


def test_generation_ends_where_it_should() -> None:
    """A graph made up: it says 5, 6, then the end, and never ends its second row."""
    from nlpconvert.models import Facts

    facts = Facts(
        "t5", "text2text-generation", ("input_ids", "decoder_input_ids", "decoder_attention_mask"), (), 9, 0, 1, 0,
        None, "own", 0, (), False,
    )  # fmt: skip

    def run(batch: Any) -> dict[str, np.ndarray]:
        ids = batch["decoder_input_ids"]
        assert ids.shape == batch["decoder_attention_mask"].shape
        logits = np.zeros((*ids.shape, 9), np.float32)
        logits[0, -1, [5, 6, 1][min(ids.shape[1] - 1, 2)]] = 1
        logits[1, -1, 7] = 1
        return {"logits": logits}

    start = np.zeros((2, 1), np.int64)
    batch = {"input_ids": start, "decoder_input_ids": start, "decoder_attention_mask": start + 1}
    assert scoring.generate(run, batch, facts, most=5) == [(5, 6), (7,) * 5]


# -- for a person ------------------------------------------------------------------------------------------------------


def test_the_report_of_a_step_that_passes(mine: Made) -> None:
    made = derive(mine, "onnx-optimized")
    found = dataclasses.replace(score(made, "onnx-optimized", fail_if=f"{GATE}, accuracy below 0.8"), provider="CPU")
    assert list(report_scores.lines(found)) == [
        "onnx-optimized does not fail on eval.jsonl (200 rows): accuracy 0.9050",
        "",
        "  accuracy         0.9050   reference 0.9050",
        "    interval       0.8556 to 0.9418 at 95 % (exact binomial)",
        "    difference     +0.00 %, -1.88 % to +1.88 % at 95 % (Tango's score interval)",
        "    discordant     the reference alone is right in 0 rows, the step alone in 0",
        "    could show     a drop of 3.06 % or more (at 95 %, four times of five)",
        "    decisions      changed in 0 of 200 rows (0 %, 0 % to 1.8 % at 95 %)",
        "    unseen         200 rows cannot see a change below 1.5 %",
        "    reference      onnx, float32",
        "    ran on         CPU, float32",
        "",
        f"  not shown {GATE}: no drop",
        "            warning: 200 rows cannot show a drop below 3.1 % at 95 %, and 0.5 % was asked for: give about "
        "1,300 rows",
        "  passes    accuracy below 0.8: it is 0.9050",
    ]
    assert list(report_scores.warnings(found)) == [
        f"onnx-optimized: --fail-if {GATE}: not shown: 200 rows cannot show a drop below 3.1 % at 95 %, and 0.5 % "
        "was asked for: give about 1,300 rows"
    ]


@pytest.mark.slow
def test_a_real_int8_passes(fixtures_dir: Path, tmp_path: Path) -> None:
    directory, out = fixtures_dir / "bert-text-classifier", tmp_path / "out"
    made = pipeline.run(str(directory), out, to=["onnx-int8"], options=Options(int8_method="weight-only", threads=1))
    assert [each.status for each in made] == ["agrees", "agrees"]
    found = scoring.score(
        out, manifest.read(out), "onnx-int8", data=directory / "eval.jsonl", metric="accuracy", fail_if=GATE
    )
    assert found.exit_code == 0 and found.notes == ()
    assert found.scores[0].reference == 0.905 and found.scores[0].candidate >= 0.895
