"""A gate that is proved: every break of a real artifact, judged as `verify` judges, and gates that see too little.

One small artifact of each format is broken once; each break is a test of its own. The long matrix is slow.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nlpconvert import breaks, disk, judging, manifest, pipeline, proving, report_proof, runtimes
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.proofs import Proof, Smallest, Trial
from tests import tiny

OPTIONS = Options(threads=1)


def prove(out: Path, step: str, options: Options = OPTIONS, **given: Any) -> Proof:
    return proving.prove(out, manifest.read(out), step, options, Silent(), **given)


def trials(proof: Proof) -> dict[str, Trial]:
    return {trial.name: trial for trial in proof.trials}


def make(model: Path, out: Path, steps: Sequence[str], **options: Any) -> Path:
    outcomes = pipeline.run(str(model), out, to=list(steps), options=replace(OPTIONS, **options))
    assert {each.status for each in outcomes} == {"agrees"}, [(each.step, each.reason) for each in outcomes]
    return out


@pytest.fixture(scope="module")
def bert(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT classifier as TorchScript, ONNX and fused ONNX."""
    out = tmp_path_factory.mktemp("proving") / "out"
    return make(classifier, out, ["torchscript", "onnx", "onnx-optimized"])


@pytest.fixture(scope="module")
def proofs(bert: Path) -> dict[str, Proof]:
    """The proof of each of its artifacts."""
    return {step: prove(bert, step) for step in ("torchscript", "onnx", "onnx-optimized")}


# What the gate says of each break of a float32 classifier: where, and in which words.
SEEN: dict[str, tuple[str, str]] = {
    "weight-nudged-0.1%": ("output.dense", "out of tolerance"),
    "weight-nudged-1%": ("output.dense", "out of tolerance"),
    "weight-nudged-10%": ("output.dense", "out of tolerance"),
    "heads-swapped": ("attention.self", "out of tolerance"),
    "bias-dropped": ("dense", "out of tolerance"),
    "mask-ignored": ("", "out of tolerance"),
    "positions-shifted": ("position_embeddings", "out of tolerance"),
    "epsilon-changed": ("LayerNorm", "out of tolerance"),
    "batch-frozen": ("", "the artifact failed where the reference answers"),
    "scale-doubled": ("", "out of tolerance"),
    "answer-float16": ("", "out of tolerance"),
    "row-zeroed": ("word_embeddings", "out of tolerance"),
    "truncated": ("", "cannot open"),
    "nan": ("", "not finite"),
    "output-missing": ("", "the artifact does not give it"),
    "output-renamed": ("", "it gives logits_0 instead"),
    "outputs-swapped": ("", "out of tolerance"),
    "types-ignored": ("", "out of tolerance"),
    "stale-answer": ("", "out of tolerance"),
}


@pytest.mark.parametrize("name", list(SEEN))
@pytest.mark.parametrize("step", ["torchscript", "onnx", "onnx-optimized"])
def test_each_break_trips_the_gate(proofs: dict[str, Proof], step: str, name: str) -> None:
    trial = trials(proofs[step])[name]
    module, words = SEEN[name]
    assert trial.status == "seen", trial
    assert words in trial.reason, trial
    assert trial.times > 1
    if step == "torchscript":  # a frozen trace records no modules: an operation is named
        assert not trial.module
    else:
        assert module in trial.module, trial
        assert bool(module) == bool(trial.module)
    if name != "truncated":
        assert (trial.output, bool(trial.case)) == ("logits", True)


@pytest.mark.parametrize("step", ["torchscript", "onnx", "onnx-optimized"])
def test_a_gate_that_holds_says_how_little_it_sees(proofs: dict[str, Proof], step: str) -> None:
    proof = proofs[step]
    assert proof.holds
    assert proof.exit_code == 0
    assert not proof.unseen
    assert len(proof.seen) >= 19
    smallest = proof.smallest
    assert smallest is not None
    assert smallest.share is not None
    assert smallest.unseen < smallest.share < 1e-3
    assert smallest.share / smallest.unseen <= proving.FACTOR
    assert smallest.judgings <= proving.MOST_JUDGINGS


def test_a_truncated_data_file_is_seen(proofs: dict[str, Proof]) -> None:
    assert "cannot open" in trials(proofs["onnx"])["data-truncated"].reason
    assert "data-truncated" not in trials(proofs["torchscript"])


def test_the_smallest_nudge_is_where_the_whole_gate_turns(bert: Path, proofs: dict[str, Proof]) -> None:
    smallest = proofs["onnx"].smallest
    assert smallest is not None
    assert smallest.share is not None
    record = manifest.read(bert)
    probes = judging.stored_probes(record, bert)
    artifact = record.artifact("onnx", bert)
    session = runtimes.open_artifact(artifact, OPTIONS)
    bench = proving.Bench(artifact, record, probes, (), OPTIONS, judging.judge, bert.parent)
    bench.begin(session)
    row = breaks.BREAKS[0]
    found = [bench.trial([replace(row, factor=1 + share)]).status for share in (smallest.share, smallest.unseen)]
    session.close()
    assert found == ["seen", "not seen"]


def test_nothing_in_out_is_touched(bert: Path) -> None:
    before = disk.hash_tree(bert)
    prove(bert, "onnx")
    assert disk.hash_tree(bert) == before


def test_a_proof_is_plain_data(proofs: dict[str, Proof]) -> None:
    for proof in proofs.values():
        data = json.loads(json.dumps(proof.to_dict(), allow_nan=False))
        assert Proof.from_dict(data).to_dict() == data
        assert data["holds"] is True


# -- gates that do not hold --------------------------------------------------------------------------------------------


def test_a_tolerance_too_wide_to_see_them_does_not_hold(bert: Path) -> None:
    proof = prove(bert, "onnx", Options(threads=1, tolerance="rel<=0.9"))
    assert not proof.holds
    assert proof.exit_code == 1
    missed = {trial.name for trial in proof.unseen}
    assert {"weight-nudged-0.1%", "weight-nudged-10%", "answer-float16"} <= missed
    assert trials(proof)["nan"].status == "seen"
    told = list(report_proof.lines(proof))
    assert any(line.startswith("This gate does not hold: it has to see a weight 10 % larger") for line in told)
    assert any("a weight 10 % larger" in line and "NOT SEEN and gross" in line for line in told)


def test_a_judge_that_never_fails_is_found_out(bert: Path) -> None:
    def blind(*given: Any) -> Any:
        _, verdict, used = judging.judge(*given)
        return True, verdict, used

    proof = prove(bert, "onnx", judge=blind)
    assert not proof.holds
    # What cannot be opened is seen without a judge.
    assert {trial.name for trial in proof.seen} == {"truncated", "data-truncated"}
    assert proof.smallest is not None
    assert proof.smallest.share is None
    assert "none, not even 100 %" in list(report_proof.lines(proof))[-1]


def test_what_disagrees_unbroken_proves_nothing(bert: Path) -> None:
    with pytest.raises(DriftError, match="onnx does not agree as it is"):
        prove(bert, "onnx", Options(threads=1, tolerance="abs<=1e-12"))


def test_what_is_not_what_its_hash_says_is_refused(bert: Path, tmp_path: Path) -> None:
    out = shutil.copytree(bert, tmp_path / "out")
    with (out / "onnx" / "model.onnx.data").open("ab") as file:
        file.write(b"0")
    with pytest.raises(DriftError, match=r"onnx/model.onnx.data has changed since it was recorded"):
        prove(out, "onnx")
    with pytest.raises(UsageError, match="there is no step 'trt'"):
        prove(out, "trt")


# -- artifacts that cannot be edited -----------------------------------------------------------------------------------


def test_an_engine_is_broken_by_what_goes_in_and_comes_out(bert: Path, tmp_path: Path) -> None:
    """ONNX Runtime stands in for an engine: the session breaks need no more than a session."""
    record = manifest.read(bert)
    artifact = record.artifact("onnx", bert)
    session = runtimes.open_artifact(artifact, OPTIONS)
    engine = replace(artifact, format="tensorrt")
    probes = judging.stored_probes(record, bert)
    bench = proving.Bench(engine, record, probes, (), OPTIONS, judging.judge, tmp_path)
    bench.begin(session)
    rows = {name: ways for name, ways in breaks.ways("tensorrt").items() if ways[0].kind == "session"}
    found = {name: bench.trial(ways) for name, ways in rows.items()}
    session.close()
    status = {name: trial.status for name, trial in found.items()}
    assert status.pop("positions-shifted") == "does not apply"  # BERT counts its own
    assert "takes no positions" in found["positions-shifted"].reason
    assert set(status.values()) == {"seen"}, found
    assert len(status) >= 10


# -- other models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama: rotary positions, no biases, a normalization that is written out."""
    directory = tmp_path_factory.mktemp("decoder")
    model = tiny.save(tiny.ROWS["llama"], directory / "model")
    return make(model, directory / "out", ["onnx"])


def test_what_a_model_does_not_have_does_not_apply(decoder: Path) -> None:
    proof = prove(decoder, "onnx")
    assert proof.holds
    found = trials(proof)
    absent = {name: trial.reason for name, trial in found.items() if trial.status == "does not apply"}
    assert "no layer has a bias" in absent["bias-dropped"]
    assert "token types" in absent["types-ignored"]
    # Rotary positions are relative: all of them one further on is no break.
    assert "rounding" in absent["positions-shifted"] or "changes no answer" in absent["positions-shifted"]
    assert found["epsilon-changed"].status == "seen"
    assert not proof.unseen


# -- wording -----------------------------------------------------------------------------------------------------------


def trial(name: str, status: str, **given: Any) -> Trial:
    return Trial(name, f"{name} words", given.pop("gross", False), status, **given)


def test_the_lines_of_a_proof() -> None:
    seen = trial("one", "seen", module="layer.0.dense", output="logits", case="padded", times=12.345, reason="out")
    cannot = trial("two", "seen", what="model.onnx cut off", times=math.inf, reason="it cannot be opened", gross=True)
    unseen = trial("three", "not seen", what="epsilon 0.1", times=0.5, reason="moves the answers by 1.0e-05")
    absent = trial("four", "does not apply", reason="it takes no mask")
    smallest = Smallest("layer.0.dense", "weight", 0.0003, 0.0002, 5)
    proof = Proof("onnx", "onnx", "float32", ("rel<=5e-05",), (seen, cannot, unseen, absent), smallest)
    assert list(report_proof.lines(proof)) == [
        "onnx (onnx, float32), judged by rel<=5e-05: 2 of 3 breaks seen",
        "",
        "  break        where               seen by",
        "  one words    layer.0.dense       logits in case padded: 12.3 times the tolerance",
        "  two words    model.onnx cut off  it cannot be opened",
        "  three words  epsilon 0.1         NOT SEEN: moves the answers by 1.0e-05, 0.5 times the tolerance",
        "",
        "  does not apply  four words  it takes no mask",
        "",
        "the smallest nudge of layer.0.dense that is seen: 0.03 %",
    ]
    assert proof.holds


def test_long_words_of_a_runtime_are_cut_in_the_table_alone() -> None:
    long = trial("one", "seen", what="x", times=math.inf, reason="cannot open: " + "why " * 100, gross=True)
    told = list(report_proof.lines(Proof("onnx", "onnx", "float32", (), (long,))))
    assert max(map(len, told)) < 130
    assert long.reason in json.dumps(Proof("onnx", "onnx", "float32", (), (long,)).to_dict())


def test_a_proof_without_a_gross_break_does_not_hold() -> None:
    proof = Proof("onnx", "onnx", "float32", (), (trial("one", "seen", what="x", times=2.0),))
    assert not proof.holds
    assert "This gate does not hold: no gross break could be tried." in list(report_proof.lines(proof))


# -- the long matrix ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "mpnet", "roberta", "albert", "bart", "deberta-v2"])
def test_float32_artifacts_of_many_models(tmp_path: Path, name: str) -> None:
    out = make(tiny.save(tiny.ROWS[name], tmp_path / "model"), tmp_path / "out", ["torchscript", "onnx"])
    for step in ("torchscript", "onnx"):
        proof = prove(out, step)
        assert proof.holds, list(report_proof.lines(proof))
        assert not proof.unseen, proof.unseen
        assert len(proof.seen) >= 14, proof.trials


@pytest.mark.slow
@pytest.mark.parametrize("step", ["onnx-fp16", "onnx-int8", "onnx-qdq"])
def test_lower_precisions_of_a_trained_classifier(fixtures_dir: Path, tmp_path: Path, step: str) -> None:
    out = make(fixtures_dir / "bert-text-classifier", tmp_path / "out", [step])
    proof = prove(out, step)
    assert proof.holds, list(report_proof.lines(proof))
    assert trials(proof)["answer-float16"].status == "does not apply"
    assert trials(proof)["scale-doubled"].status == "seen"
    assert ("scale" in trials(proof)["scale-doubled"].what) == (step != "onnx-fp16"), "its weights have no scale"
    assert proof.smallest is not None
    assert proof.smallest.share is not None
