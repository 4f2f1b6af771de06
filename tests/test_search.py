"""The search for a mix, and what comes out of it on trained models: measured on texts that no part of it has seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import (
    calibration,
    cli,
    cpu_int8,
    dataset,
    forward,
    golden,
    host,
    inputs,
    manifest,
    pipeline,
    plan,
    recipe,
    runtimes,
    sampling,
    search,
    source,
)
from nlpconvert.artifact import Artifact, Outcome
from nlpconvert.errors import ConversionError
from nlpconvert.inputs import Case
from nlpconvert.search import Score
from tests import test_qdq
from tests.conftest import FIXTURES
from tests.test_fixtures import HOME
from tests.test_qdq import Model

STEPS = ("onnx-qdq", "onnx-int8")
QUICK = ("bert-text-classifier", "gpt2-lm")
model_of = test_qdq.model_of
_MADE: dict[str, tuple[Path, dict[str, Outcome]]] = {}


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Outcome]]]:
    """OUT of a fixture with both static steps, and their outcomes; made once for all test files, never changed."""

    def get(name: str) -> tuple[Path, dict[str, Outcome]]:
        if name not in _MADE:
            out = tmp_path_factory.mktemp(name) / "out"
            options = plan.Options(int8_method="static", keep_going=True, threads=1)
            outcomes = pipeline.run(str(HOME / name), out, to=list(STEPS), options=options)
            _MADE[name] = out, {outcome.step: outcome for outcome in outcomes}
        return _MADE[name]

    return get


def parents(made: Callable[[str], tuple[Path, dict[str, Outcome]]], name: str, to: Path) -> Path:
    """OUT of a fixture with its `onnx` alone."""
    shutil.copytree(made(name)[0], to, ignore=lambda _, names: [name for name in names if name in STEPS])
    return to


def artifact_of(outcome: Outcome) -> Artifact:
    assert outcome.artifact is not None, outcome.reason
    return outcome.artifact


# -- on the fixtures' own labelled texts -------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def decisions(task: str, case: Case, answers: Mapping[str, np.ndarray]) -> np.ndarray:
    """The label of each text or real token, the start and the end of each answer, the next token at each place."""
    mask = case.inputs["attention_mask"] != 0
    if task == "question-answering":
        places = [np.where(mask, answers[name], -np.inf).argmax(-1) for name in ("start_logits", "end_logits")]
        return np.concatenate(places)
    best = answers["logits"].argmax(-1)
    if task == "text-classification":
        return np.asarray(best)
    return np.asarray(
        best[case.inputs["decoder_attention_mask"] != 0 if "decoder_attention_mask" in case.inputs else mask]
    )


def nats(case: Case, answers: Mapping[str, np.ndarray]) -> tuple[float, int]:
    """Of the text (of an encoder-decoder's target), each token given those before it; and the number of tokens."""
    ids = case.inputs.get("decoder_input_ids", case.inputs["input_ids"])
    mask = case.inputs.get("decoder_attention_mask", case.inputs["attention_mask"]) != 0
    counted = mask[:, 1:] & mask[:, :-1]
    taken = np.take_along_axis(log_softmax(answers["logits"][:, :-1]), ids[:, 1:, None], -1)[..., 0]
    return -float(taken[counted].sum()), int(counted.sum())


def measured(name: str, artifact: Artifact) -> dict[str, float]:
    """Share of changed decisions and, for language models, perplexity over PyTorch's, on eval.jsonl."""
    loaded = source.load(str(HOME / name))
    facts = loaded.facts
    cases = inputs.data_cases(facts, loaded.encode, dataset.read(HOME / name / "eval.jsonl", facts.task))
    session = runtimes.open_artifact(artifact, plan.Options(threads=1))
    before, after = [], []
    lost, tokens = 0.0, 0
    for case in cases:
        reference = {key: np.asarray(value) for key, value in forward.call(loaded.module, case.inputs).items()}
        candidate = session.run(case.inputs)
        before.append(decisions(facts.task, case, reference))
        after.append(decisions(facts.task, case, candidate))
        if facts.task.endswith("generation"):
            (spent, counted), (now, _) = nats(case, reference), nats(case, candidate)
            lost, tokens = lost + now - spent, tokens + counted
    found = {"changed": float((np.concatenate(before) != np.concatenate(after)).mean())}
    return found | ({"perplexity": float(np.exp(lost / tokens))} if tokens else {})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FIXTURES]
)
def test_a_trained_model_answers_alike(name: str, quantized: Callable[[str], tuple[Path, dict[str, Outcome]]]) -> None:
    _, outcomes = quantized(name)
    for step in STEPS:
        artifact = artifact_of(outcomes[step])
        found = measured(name, artifact)
        print(name, step, outcomes[step].status, found, artifact.made_by["share_of_linear_flops"])
        if "perplexity" not in found:
            assert found["changed"] <= 0.005
        else:
            assert found["perplexity"] <= 1.01
        assert artifact.made_by["size_over_parent"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_an_encoder_decoder_scaled_on_its_users_texts_keeps_their_perplexity(step: str, tmp_path: Path) -> None:
    name = "t5-seq2seq"
    data = HOME / name / "eval.jsonl"
    options = plan.Options(int8_method="static" if step == "onnx-int8" else None, threads=1, data=data)
    outcome = pipeline.run(str(HOME / name), tmp_path / "out", to=[step], options=options)[-1]
    assert outcome.status == "agrees", outcome
    session = runtimes.open_artifact(artifact_of(outcome), plan.Options(threads=1))
    facts, encode = facts_of(name)
    own = calibration.data_cases(options, facts, encode, "judge")
    lost = tokens = 0.0
    loaded = source.load(str(HOME / name))
    for case in own:
        reference = {key: np.asarray(value) for key, value in forward.call(loaded.module, case.inputs).items()}
        (spent, counted), (now, _) = nats(case, reference), nats(case, session.run(case.inputs))
        lost, tokens = lost + now - spent, tokens + counted
    print(step, "perplexity over PyTorch's, on the part that is judged", np.exp(lost / tokens))
    assert np.exp(lost / tokens) <= 1.01


@pytest.mark.slow
def test_minilm_agrees_and_is_faster(minilm: Path, tmp_path: Path) -> None:
    options = plan.Options(int8_method="static", keep_going=True)
    outcomes = {o.step: o for o in pipeline.run(str(minilm), tmp_path / "out", to=list(STEPS), options=options)}
    for step in STEPS:
        outcome = outcomes[step]
        assert outcome.status == "agrees", outcome.reason
        assert outcome.verdict is not None
        for output in outcome.verdict["comparison"]["outputs"]:
            print(step, output["name"], output["cosine"])
        made_by = artifact_of(outcome).made_by
        print(step, made_by["share_of_linear_flops"], made_by["size_over_parent"], outcome.notes)
        assert made_by["share_of_linear_flops"] > 0.5 and made_by["size_over_parent"] < 0.8
    made = recipe.read(artifact_of(outcomes["onnx-int8"]).directory / "recipe.json")
    (chosen,) = [each for each in made.candidates if each.chosen]
    assert chosen.latency < 1


# -- the tolerance decides ---------------------------------------------------------------------------------------------


def test_a_tolerance_that_cannot_be_reached_is_drift_with_what_would_pass(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the best that was found, with how far it is."""
    out = tmp_path / "out"
    words = ["run", HOME / "bert-text-classifier", "-o", out, "--to", "onnx-qdq", "--task", "feature-extraction"]
    words += ["--tolerance", "cosine>=0.9999999", "--search-budget", "0.01", "--threads", "1"]
    assert cli._main([str(word) for word in words]) == 1
    told = capfd.readouterr().out
    assert "onnx-qdq disagrees with pytorch" in told and "allowed" in told
    assert "would pass at    cosine>=" in told
    outcome = manifest.read(out).outcome("onnx-qdq", out)
    assert any(
        "no mix stays in the tolerance with room to spare; the best found has cosine" in n for n in outcome.notes
    )
    # The time to search was over at once; what came out is whole, and was judged.
    made = recipe.read(out / "onnx-qdq" / "recipe.json")
    assert made.search["late"] and made.search["budget_seconds"] == 0.01
    assert outcome.verdict is not None and outcome.verdict["comparison"]["cases"] > 20
    (chosen,) = [each for each in made.candidates if each.chosen]
    assert chosen.used == min(each.used for each in made.candidates)


def made_up(model: Model, harm: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> search.Static:
    """A search whose files move the answers by `harm` for every site in integers, a tenth with channels apart."""
    static = model.searching()

    def score(levels: Mapping[str, int]) -> Score:
        part = {0: 1.0, 1: 0.1, 2: 0.05, search.FLOAT: 0.0}
        energy = sum(harm.get(name, 1e-6) * part[level] for name, level in levels.items())
        return Score(energy, energy, f"kl {energy:.3g}")

    monkeypatch.setattr(static, "score", score)
    return static


def test_the_search_gives_back_what_harms(model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("bert")
    names = list(model.static.sites)
    made, score = made_up(model, {names[3]: 50.0}, monkeypatch).search()
    assert score.used <= search.ROOM
    changed = {layer.site for layer in made.layers if layer.precision == "float32" and layer.share}
    changed |= {name for name, site in made.sites.items() if site.outliers}
    assert changed == {names[3]}
    assert made.layer(names[3]).drift == pytest.approx(50.0)
    assert [each.chosen for each in made.candidates].count(True) == 1
    assert made.candidates[0].share == max(each.share for each in made.candidates)


def test_what_harms_nothing_is_all_in_integers(
    model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, score = made_up(model_of("bert"), {}, monkeypatch).search()
    assert score.used < search.ROOM and len(made.candidates) == 1
    assert all(layer.precision == "int8" for layer in made.layers if layer.name != "classifier")


def test_where_nothing_fits_the_least_drift_is_taken(
    model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("bert")
    made, score = made_up(model, dict.fromkeys(model.static.sites, 1e3), monkeypatch).search()
    assert score.used > search.ROOM
    assert score.used == min(each.used for each in made.candidates)
    assert any(layer.precision == "int8" for layer in made.layers)  # never a file in which nothing is quantized


def test_a_rewrite_that_is_not_exact_is_refused(
    model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation that moves the answers by itself: here a shift that is taken off and never put back."""
    static = model_of("bert").searching()
    whole = static.recipe(dict.fromkeys(static.sites, 1))
    site = next(iter(whole.sites))
    wrong = replace(whole.sites[site], multiplier=whole.sites[site].multiplier * 0)
    monkeypatch.setattr(static, "recipe", lambda levels: replace(whole, sites={**whole.sites, site: wrong}))
    with pytest.raises(ConversionError, match="the rewrite of the layers' inputs is not exact here: it moves"):
        static.prove_exact()


def entry(name: str, used: float, energy: float) -> cpu_int8.Entry:
    nothing: Any = None
    return cpu_int8.Entry(name, nothing, nothing, Path(name), Score(used, energy, ""))


@pytest.mark.parametrize(
    ("entries", "latencies", "chosen"),
    [
        ([("a", 0.5, 0.1), ("b", 0.5, 0.2)], [0.9, 0.5], "b"),  # the fastest
        ([("a", 0.5, 0.1), ("b", 0.5, 0.2)], [0.545, 0.5], "a"),  # within a tenth: the one that moves less
        ([("a", 0.5, 0.1), ("b", 0.5, 0.2)], [0.56, 0.5], "b"),
        ([("a", 0.5, 0.2), ("b", 0.5, 0.1)], [0.5, 0.5], "b"),
        ([("a", 1.01, 0.1), ("b", 1.0, 0.2)], [0.1, 0.9], "b"),  # out of tolerance, however fast
        ([("a", 3.0, 0.1), ("b", 2.0, 0.9)], [0.1, 0.9], "b"),  # none fits: the nearest
    ],
)
def test_ties_within_a_tenth_of_the_latency_go_to_less_drift(
    entries: Sequence[tuple[str, float, float]], latencies: Sequence[float], chosen: str
) -> None:
    made = [entry(*each) for each in entries]
    times = {each.name: time for each, time in zip(made, latencies, strict=True)}
    assert cpu_int8._choose(made, times).name == chosen


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ({"sse4_2", "avx2"}, False),
        ({"sse4_2", "avx2", "avx512f", "avx512bw"}, False),
        ({"avx2", "avx_vnni"}, True),
        ({"avx2", "avx512f", "avx512_vnni"}, True),
        ({"avx2", "amx_int8"}, True),
    ],
)
def test_o29_weights_are_as_large_as_the_processor_can_take(
    flags: set[str], exact: bool, model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI pairs of products are added up in 16 bits: 7-bit weights there, and it is recorded."""
    monkeypatch.setattr(host, "host_facts", lambda: {"cpu_flags": sorted(flags), "machine": "x86_64"})
    assert host.exact_int8() == host.exact_int8(flags) == exact
    (made,) = cpu_int8._recipes(model_of("bert").bench, "static").values()
    assert (made.largest, made.activation) == (127 if exact else 63, "uint8")


# -- texts: calibrate, select, judge -----------------------------------------------------------------------------------


def facts_of(name: str) -> tuple[Any, Any]:
    loaded = source.load(str(HOME / name))
    return loaded.facts, loaded.encode


UNKNOWN = 1
"""[UNK] of the fixtures' tokenizers: texts in letters that they do not know look all alike."""


def token_rows(cases: Sequence[Case]) -> set[tuple[int, ...]]:
    """The real tokens of every row that tells its text from others."""
    found = set()
    for case in cases:
        for ids, mask in zip(case.inputs["input_ids"], case.inputs["attention_mask"], strict=True):
            row = tuple(int(each) for each in ids[mask != 0])
            if len(row) > 4 and UNKNOWN not in row:
                found.add(row)
    return found


def test_what_is_judged_was_neither_fitted_on_nor_chosen_by(
    quantized: Callable[[str], tuple[Path, dict[str, Outcome]]], tmp_path: Path
) -> None:
    """Token rows of all three parts of the user's texts, and of those that lie in the goldens afterwards."""
    name = "bert-text-classifier"
    facts, encode = facts_of(name)
    options = plan.Options(data=HOME / name / "eval.jsonl", threads=1)
    parts = {
        part: token_rows(calibration.data_cases(options, facts, encode, part))
        for part in ("calibrate", "select", "judge")
    }
    assert len(parts["calibrate"]) > 60 and len(parts["select"]) > 20 and len(parts["judge"]) > 60
    every = token_rows(calibration.data_cases(options, facts, encode, None))
    assert parts["calibrate"] | parts["select"] | parts["judge"] == every
    used = {part: token_rows(calibration.cases(options, facts, encode, part)) for part in ("calibrate", "select")}
    out = parents(quantized, name, tmp_path / "out")
    outcome = pipeline.run(str(HOME / name), out, to=["onnx-qdq"], options=options)[-1]
    assert outcome.status == "agrees"
    judged = [case for case in golden.read(out / manifest.GOLDEN)[0] if case.from_data]
    assert token_rows(judged) == parts["judge"]
    assert not parts["judge"] & (used["calibrate"] | used["select"])
    assert not used["calibrate"] & used["select"]


def test_shipped_parts_share_no_text_with_each_other_or_the_probes() -> None:
    """Texts, not tokens: pieces that a tokenizer does not know look all alike."""
    parts = {part: {dataset.row_key(row) for row in rows} for part, rows in calibration._shipped().items()}
    assert min(map(len, parts.values())) > 100
    from nlpconvert import probes

    probed = {dataset.row_key({"text": row.text}) for row in probes.probe_rows()}
    groups = [*parts.values(), probed]
    assert len(set().union(*groups)) == sum(map(len, groups))


def test_calibration_is_padded_as_in_production_and_padding_is_not_counted() -> None:
    facts, encode = facts_of("bert-text-classifier")
    cases = calibration.cases(plan.Options(), facts, encode, "calibrate")
    assert any((case.inputs["attention_mask"] == 0).any() for case in cases)
    case = next(case for case in cases if (case.inputs["attention_mask"] == 0).any())
    mask = case.inputs["attention_mask"]
    values = np.where(mask[..., None] != 0, np.float32(1), np.float32(1e9)) * np.ones((*mask.shape, 3), np.float32)
    rows, lengths = sampling._real_tokens(case, values)
    assert rows.max() == 1 and len(rows) == mask.sum() == len(lengths)
    assert set(lengths) == set(mask.sum(1))


def test_calibration_runs_in_bounded_memory(model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few inner tensors at a time where they are large; the ranges are the same."""
    model = model_of("bert")
    whole = sampling.sample_inputs(model.bench, model.static.found.sites)
    monkeypatch.setattr(sampling, "PASS_BYTES", 1)
    assert len(sampling._groups(model.static.found.sites, 100)) == len(model.static.found.sites)
    one_by_one = sampling.sample_inputs(model.bench, model.static.found.sites)
    for name, sample in whole.items():
        np.testing.assert_array_equal(sample.low, one_by_one[name].low)
        np.testing.assert_array_equal(sample.high, one_by_one[name].high)
        assert len(sample.rows) <= sampling.SAMPLE_TOKENS * 5 // 4
        np.testing.assert_array_equal(sample.rows, one_by_one[name].rows)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["word"] * 500, "500 rows with 1 different texts leave nothing to"),
        (["word", "WORD ", " ｗｏｒｄ"] * 40, "120 rows with 1 different texts leave nothing to"),
        (["one text", "another text"], "2 rows with 2 different texts leave nothing to"),
    ],
    ids=["one word", "one word, spelled in three ways", "two rows"],
)
def test_data_that_cannot_be_split_is_refused_before_any_work(
    lines: Sequence[str], expected: str, classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(lines))
    out = tmp_path / "out"
    assert cli._main(["run", str(classifier), "-o", str(out), "--to", "onnx-qdq", "--data", str(data)]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert (
        error.startswith("nlpconvert: ")
        and expected in error
        and "give more and more varied data" in error
        and str(data) in error
    )
    assert not (out / "onnx").exists() and not (out / "onnx-qdq").exists()
