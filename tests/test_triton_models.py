"""The models that are copied into a repository, run as Triton would run them, without a Triton."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import generation, golden, inputs, judging, manifest, models, runtimes, tokens
from nlpconvert.plan import Options
from nlpconvert.triton import repository
from nlpconvert.triton.repository import Wanted


def opened(version: Path) -> Any:
    """The model of a version's folder, initialised as Triton does it."""
    spec = importlib.util.spec_from_file_location("served_model", version / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_repository": str(version.parent), "model_version": version.name})
    return model


@pytest.fixture(scope="module")
def repo(classifier_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the classifier for the Python backend, with its tokenizer."""
    place = tmp_path_factory.mktemp("served") / "repo"
    repository.write(classifier_out, "onnx", place, Wanted(name="m", backend="python", tokenizer=True, threads=1))
    return place


@pytest.mark.parametrize("step", ["onnx", "torchscript"])
def test_mixed_lengths_are_one_batch_and_each_gets_its_own(step: str, classifier_out: Path, tmp_path: Path) -> None:
    repository.write(classifier_out, step, tmp_path / "repo", Wanted(name="m", backend="python", threads=1))
    model = opened(tmp_path / "repo" / "m" / "1")
    ran: list[int] = []
    run = model.model.run
    model.model.run = lambda batch: ran.append(len(batch["input_ids"])) or run(batch)
    cases, answers = golden.read(classifier_out / manifest.GOLDEN)
    group = [(number, dict(case.inputs)) for number, case in enumerate(cases)]
    found = dict(model.answers(group))
    assert ran == [sum(len(case.inputs["input_ids"]) for case in cases)]
    for number, case in enumerate(cases):
        reference = answers[case.name]["logits"]
        np.testing.assert_allclose(found[number]["logits"], reference.values, rtol=1e-4, atol=1e-4)


def test_answers_by_token_are_cut_to_their_own_length(features_out: Path, tmp_path: Path) -> None:
    repository.write(features_out, "onnx", tmp_path / "repo", Wanted(name="m", backend="python", threads=1))
    model = opened(tmp_path / "repo" / "m" / "1")
    cases = [case for case in golden.read(features_out / manifest.GOLDEN)[0] if case.name.startswith("length-")]
    assert len({case.inputs["input_ids"].shape for case in cases}) > 1
    for number, answer in model.answers([(n, dict(case.inputs)) for n, case in enumerate(cases)]):
        assert answer["last_hidden_state"].shape[:2] == cases[number].inputs["input_ids"].shape


def test_a_request_that_fails_takes_no_other_with_it(repo: Path, classifier_out: Path) -> None:
    model = opened(repo / "m" / "1")
    case = golden.read(classifier_out / manifest.GOLDEN)[0][0]
    wrong = {**case.inputs, "input_ids": np.full_like(case.inputs["input_ids"], 10**6)}
    found = dict(model.answers([(0, dict(case.inputs)), (1, wrong), (2, dict(case.inputs))]))
    assert isinstance(found[1], Exception)
    np.testing.assert_array_equal(found[0]["logits"], found[2]["logits"])


def test_texts_become_the_ids_that_were_judged(repo: Path, classifier_out: Path) -> None:
    record = manifest.read(classifier_out)
    facts = models.facts_from_data(record.facts)
    reader = tokens.load([classifier_out / "onnx"], facts)
    texts = ["abc", "", "a longer text " * 40, "x y z"]
    found = opened(repo / "m_tokenizer" / "1").encode(texts, None)
    kit = inputs.tokenize_with(facts, reader.encode)
    expected = inputs.collate(facts, [inputs.Item((kit.row(text),)) for text in texts])
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_pairs_of_texts(repo: Path, classifier_out: Path) -> None:
    facts = models.facts_from_data(manifest.read(classifier_out).facts)
    reader = tokens.load([classifier_out / "onnx"], facts)
    model = opened(repo / "m_tokenizer" / "1")
    found = model.encode(["abc"], ["de"])
    expected = reader.encode("abc", "de")
    assert found["input_ids"].tolist() == [expected["input_ids"]]
    assert found["token_type_ids"].tolist() == [expected["token_type_ids"]]
    with pytest.raises(ValueError, match="2 texts and 1 second texts"):
        model.encode(["a", "b"], ["c"])


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["gpt2-lm", "t5-seq2seq"])
def test_what_is_written_is_what_the_artifact_writes(fixture: str, fixtures_dir: Path, tmp_path: Path) -> None:
    """Prompts of the goldens, greedily: token by token the same."""
    from nlpconvert import pipeline

    out, repo = tmp_path / "out", tmp_path / "repo"
    assert [o.status for o in pipeline.convert_step("onnx", str(fixtures_dir / fixture), out)] == ["agrees"]
    made = repository.write(out, "onnx", repo, Wanted(name="m", threads=1))
    assert (made.backend, made.models) == ("python", ("m", "m_generate"))
    serving = json.loads((repo / "m_generate" / "1" / "serving.json").read_text())
    record = manifest.read(out)
    artifact, facts = record.artifact("onnx", out), models.facts_from_data(record.facts)
    model = opened(repo / "m_generate" / "1")
    session = runtimes.open_artifact(artifact, Options(threads=1))
    writer = runtimes.writer(session, artifact, facts)
    assert writer is not None
    written = judging.stored_probes(record, out).written
    assert written is not None
    how = generation.settings(facts, eos=tuple(serving["eos"]), max_new_tokens=12)
    for passage in written.passages[:3]:
        mask = passage.inputs["attention_mask"][:1] != 0
        ids = passage.inputs["input_ids"][:1][mask][None]
        ours = generation.generate(writer, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, how)
        pieces = list(model.texts(ids[0].tolist(), 12))
        assert [token for token, _ in pieces] == ours.tokens[0, : ours.lengths[0]].tolist()
        whole = model.decoded([token for token, _ in pieces])
        assert "".join(text for _, text in pieces).strip() == whole.rstrip("�").strip()
    session.close()
