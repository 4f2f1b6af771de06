"""`nlpconvert generate`: what an artifact writes, beside PyTorch and alone, and one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from nlpconvert import cli, config_facts, disk, generating, manifest, report_generated, source, subjects
from nlpconvert.artifact import Artifact, Outcome
from nlpconvert.convert import cached, cached_pair
from nlpconvert.errors import DriftError, NlpconvertError, UsageError
from nlpconvert.first_difference import Judge, Watch, greedy
from nlpconvert.generation import Written
from nlpconvert.source import Loaded
from nlpconvert.writer import encodes
from tests import tiny
from tests.asking import loaded
from tests.test_verify_alone import ABSENT, BLOCKER

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((ROOT / "nlpconvert" / "data" / "generate.schema.json").read_text("utf-8"))
PROMPTS = ("The import statement", "A class")


def make_out(model: Loaded, out: Path) -> Path:
    """An OUT with the step onnx, as the line would make it, without goldens."""
    step = out / "onnx"
    step.mkdir(parents=True)
    convert = cached_pair.convert if encodes(model.facts) else cached.convert
    made = convert(model.module, model.facts, step, companions=model.directory)
    artifact = Artifact(
        step="onnx",
        path=step / made.file,
        format="onnx",
        precision="float32",
        task=model.facts.task,
        inputs=made.inputs,
        outputs=made.outputs,
        files=disk.hash_tree(step),
        parent="source",
        parent_sha256=model.description["sha256"],
        made_by=made.made_by,
    )
    record = manifest.Manifest(model.description, asdict(model.facts), manifest.Golden({}))
    record.with_step(Outcome("onnx", "agrees", artifact=artifact)).write(out)
    return out


@pytest.fixture(scope="module")
def model(fixtures_dir: Path) -> Loaded:
    """The trained GPT-2."""
    return source.load(str(fixtures_dir / "gpt2-lm"))


@pytest.fixture(scope="module")
def out(model: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its OUT."""
    return make_out(model, tmp_path_factory.mktemp("gpt2") / "out")


@pytest.fixture
def copied(out: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    shutil.copytree(out, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def bare(out: Path, tmp_path: Path) -> Path:
    """The step's files without a manifest, as another tool leaves them."""
    shutil.copytree(out / "onnx", tmp_path / "bare")
    return tmp_path / "bare"


def run(*arguments: object) -> int:
    return cli._main(["generate", *map(str, arguments)])


def record_again(out: Path, **changes: Any) -> None:
    """The files as they lie there now become those of the record."""
    record = manifest.read(out)
    made = record.artifact("onnx", out)
    artifact = replace(made, files=disk.hash_tree(made.directory), **changes)
    replace(record, steps={}).with_step(replace(record.outcome("onnx", out), artifact=artifact)).write(out)


def theirs(model: Loaded, prompt: str, **settings: Any) -> list[int]:
    """The new tokens of transformers' own `generate`."""
    module: Any = model.module
    attached = vars(module).pop("forward")
    try:
        ids = torch.tensor([model.tokenizer(prompt)["input_ids"]])
        made = module.generate(ids, attention_mask=torch.ones_like(ids), **{"do_sample": False, **settings})
        return [int(each) for each in made[0, ids.shape[1] :]]
    finally:
        module.forward = attached


# -- what is written ---------------------------------------------------------------------------------------------------


def test_it_writes_as_generate_does(out: Path, model: Loaded) -> None:
    made = generating.generate(out / "onnx", PROMPTS, max_new_tokens=30)
    for row, prompt in zip(made.rows, PROMPTS, strict=True):
        assert list(row.ids) == theirs(model, prompt, max_new_tokens=30)
        whole = model.tokenizer.decode([*row.prompt_ids, *row.ids])
        assert row.prompt + row.text == whole
        assert row.ended == "length"
    assert (made.step, made.precision, made.provider, made.exit_code) == ("onnx", "float32", "CPUExecutionProvider", 0)
    assert made.speed.tokens == 60 and made.speed.tokens_per_second > 0
    alone = [generating.generate(out, prompt, max_new_tokens=30).rows[0] for prompt in PROMPTS]
    assert tuple(alone) == made.rows
    split = generating.generate(out, PROMPTS, max_new_tokens=30, batch=1, chunk=2)
    assert split.rows == made.rows


def test_the_length_is_the_generation_config_s_and_what_fits(out: Path, model: Loaded) -> None:
    assert len(generating.generate(out, "A class").rows[0].ids) == 40
    long = "A class " * 120
    row = generating.generate(out, long).rows[0]
    assert len(row.prompt_ids) + len(row.ids) == 256 + 1  # the last is written and never read


def test_a_draw_is_that_of_generate_and_a_seed_s(out: Path, model: Loaded) -> None:
    asked = {"max_new_tokens": 12, "temperature": 0.9, "top_k": 30}
    made = generating.generate(out, "A class", sample=True, seed=5, **asked)
    torch.manual_seed(5)
    assert list(made.rows[0].ids) == theirs(model, "A class", do_sample=True, **asked)
    assert made.settings["seed"] == 5 and made.settings["top_k"] == 30
    two = generating.generate(out, ["A class", "A class"], sample=True, seed=5, batch=1, **asked)
    assert two.rows[0] == made.rows[0] != two.rows[1]


def test_a_stop_text_and_ids(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = generating.generate(out, "A class", stop="and").rows[0]
    assert row.ended == "stop" and row.text.endswith("and")
    ids = " ".join(map(str, row.prompt_ids))
    assert run(out, ids, "--ids", "--max-new-tokens", 2, "-q") == 0
    assert capfd.readouterr().out.split() == [*ids.split(), *map(str, row.ids[:2])]


def test_python_has_it_too(out: Path) -> None:
    told: list[str] = []
    made = generating.generate(out, "The import statement", max_new_tokens=9, on_text=told.append)
    assert "".join(told) == made.rows[0].text and len(told) > 3


def test_json_is_by_its_schema(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert run(out / "onnx", *PROMPTS, "--max-new-tokens", 5, "--json", "--compare") == 0
    said = json.loads(capfd.readouterr().out)
    jsonschema.validate(said, SCHEMA)
    assert [row["prompt"] for row in said["rows"]] == list(PROMPTS)
    assert said["comparison"]["identical"] == 2 and said["artifact"] == str(out / "onnx")


def test_texts_stand_on_standard_output_and_the_speed_beside(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(out, "A class", "--max-new-tokens", 5) == 0
    said = capfd.readouterr()
    made = generating.generate(out, "A class", max_new_tokens=5).rows[0]
    assert said.out == f"A class{made.text}\n"
    assert said.err.startswith("5 tokens, ") and said.err.endswith("onnx, float32, CPUExecutionProvider\n")


def test_prompts_from_a_file_and_standard_input(
    out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("A class\r\n\nThe for\n")
    assert run(out, "--data", tmp_path / "prompts.txt", "--max-new-tokens", 2, "--json") == 0
    assert [row["prompt"] for row in json.loads(capfd.readouterr().out)["rows"]] == ["A class", "The for"]
    with (tmp_path / "prompts.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(out, "one", "-", "--max-new-tokens", 2, "--json") == 0
    assert [row["prompt"] for row in json.loads(capfd.readouterr().out)["rows"]] == ["one", "A class", "The for"]


@pytest.mark.slow
def test_an_encoder_decoder_writes_by_its_two_graphs(tmp_path: Path) -> None:
    model = loaded(tiny.ROWS["t5"], tmp_path / "model")
    out = make_out(model, tmp_path / "out")
    prompts = ["5 6 7 8", "9 10"]
    made = generating.generate(out, prompts, ids=True, compare=True, max_new_tokens=12)
    assert made.compared is not None and made.compared.differences == (None, None)
    shutil.copytree(out / "onnx", tmp_path / "bare")
    bare = generating.generate(tmp_path / "bare", prompts, ids=True, max_new_tokens=12)
    assert [row.ids for row in bare.rows] == [row.ids for row in made.rows]
    assert made.rows[0].text == " ".join(map(str, made.rows[0].ids))


# -- beside PyTorch ----------------------------------------------------------------------------------------------------


def test_the_same_is_told_as_the_same(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(out, *PROMPTS, "--compare") == 0
    said = capfd.readouterr().out
    assert "2 of 2 texts as PyTorch writes it\n  1: identical, 40 tokens\n  2: identical, 40 tokens\n" in said


@pytest.mark.parametrize("asked", [{"sample": True, "seed": 2, "top_k": 20}, {"beams": 3}, {"repetition_penalty": 1.4}])
def test_what_is_not_greedy_is_compared_too(out: Path, asked: dict[str, Any]) -> None:
    made = generating.generate(out, PROMPTS, compare=True, max_new_tokens=15, **asked)
    assert made.compared is not None and made.compared.differences == (None, None)


@pytest.fixture
def shifted(copied: Path) -> Path:
    """An artifact that was recorded with other weights than the model's."""
    data = copied / "onnx" / "model.onnx.data"
    weights = np.frombuffer(data.read_bytes(), np.float32).copy()
    weights *= np.float32(1.2)
    data.write_bytes(weights.tobytes())
    record_again(copied)
    return copied


@pytest.mark.parametrize("more", [[], ["--sample"], ["--beams", "2"]])
def test_a_difference_is_marked_and_ends_in_1(
    shifted: Path, more: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(shifted, *PROMPTS, "--compare", *more) == 1
    said = capfd.readouterr().out
    assert "differs at new token" in said
    assert ("no near tie" if not more else "more than is allowed") in said
    record_again(shifted, precision="int8")
    assert run(shifted, *PROMPTS, "--compare", *more) == 0, "below float32 it is told, and judged by verify"
    assert "below float32 (int8) that may be" in capfd.readouterr().out


def test_the_first_difference_is_the_first(shifted: Path) -> None:
    compared = generating.generate(shifted, PROMPTS, compare=True).compared
    assert compared is not None and compared.real
    made = generating.generate(shifted, PROMPTS)
    for ours, row, each in zip(made.rows, compared.rows, compared.differences, strict=True):
        if each is None:
            assert ours.ids == row.ids
            continue
        assert ours.ids[: each.position] == row.ids[: each.position]
        assert (each.candidate, each.reference) == (ours.ids[each.position], row.ids[each.position])
        assert ours.text.endswith(each.candidate_text) and row.text.endswith(each.reference_text)
        assert each.margin is not None and each.margin > 0 and each.moved is None


def _passes(margin: float) -> tuple[tuple[Written, Watch], tuple[Written, Watch]]:
    """Two rows of two tokens; the second's last differs, where the reference's best two are `margin` apart."""
    given = []
    for row in ([4.0, 4.0 - margin, 0.0], [4.0, 4.0 + margin, 0.0]):
        watch = Watch()
        for scores in ([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], [[0.0, 3.0, 0.0], row]):
            watch.see(np.array(scores, np.float32), np.array([0, 0]))
        last = int(np.argmax(row))
        given.append((Written(np.array([[1, 1], [1, last]]), (2, 2), ("length",) * 2, 0.0, 0.0), watch))
    return given[0], given[1]


def _show(before: Any, ids: Any) -> str:
    return " ".join(map(str, ids))


def test_a_near_tie_is_one_by_the_reference_s_noise() -> None:
    judge = Judge("float32", noise=1e-4, scale=1.0)
    for margin, near in ((5e-4, True), (5e-3, False)):
        same, differs = greedy(judge, *_passes(margin), [_show, _show])
        assert same is None and differs is not None
        assert (differs.position, differs.reference, differs.candidate) == (1, 0, 1)
        assert differs.near_tie is near and differs.before == "1"
        assert differs.margin == pytest.approx(margin, rel=1e-2)


def test_noise_is_the_goldens_where_they_are_what_was_recorded(copied: Path) -> None:
    golden = copied / "golden"
    golden.mkdir()
    (golden / "written.json").write_text(json.dumps({"noise": {"floor": 3e-6}, "scale": 2.5}))
    record = manifest.read(copied)
    replace(record, golden=manifest.Golden(disk.hash_tree(golden))).write(copied)
    made = generating.generate(copied, "A class", compare=True, max_new_tokens=3)
    assert made.compared is not None and made.compared.noise == 3e-6
    (golden / "written.json").write_text(json.dumps({"noise": {"floor": 1.0}, "scale": 2.5}))
    with pytest.raises(DriftError, match=r"written.json has changed"):
        generating.generate(copied, "A class", compare=True)


def test_a_difference_is_told_in_lines() -> None:
    row = {"prompt": "p", "prompt_ids": [1], "text": "x", "ids": [2], "ended": "eos"}
    each = {
        "position": 4, "reference": 7, "candidate": None, "before": "so far", "reference_text": " and on",
        "candidate_text": "", "margin": 0.25, "candidate_margin": 0.5, "moved": None, "near_tie": False,
    }  # fmt: skip
    speed = {"tokens": 2, "tokens_per_second": 10.0, "prefill_seconds": 0.0, "step_seconds": 0.2}
    data = {
        "precision": "float32",
        "comparison": {
            "noise": None, "identical": 0, "near_ties": 0, "rows": [{**row, "difference": each}], "speed": speed,
        },
    }  # fmt: skip
    assert list(report_generated.comparison(data)) == [
        "0 of 1 text as PyTorch writes it",
        "  1: differs at new token 5, no near tie",
        '       both wrote   "so far"',
        "       artifact     has ended",
        '       PyTorch      " and on"   token 7, margin 0.25',
        "  the reference's noise was not measured; a usual one stands in for it where near ties are told",
        "  PyTorch: 2 tokens, 10.0 tokens/s",
    ]


# -- without torch -----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the program where torch, transformers and what only converting needs cannot be found."""
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "blocker"), str(ROOT)])}

    def start(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nlpconvert", "generate", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return start


def test_greedy_needs_neither_torch_nor_transformers(
    out: Path, bare: Path, program: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert {"torch", "transformers"} <= set(ABSENT)
    made = generating.generate(out, "A class", max_new_tokens=8).rows[0]
    for place in (out / "onnx", bare):
        done = program(place, "A class", "--max-new-tokens", 8, "-q")
        assert (done.returncode, done.stdout) == (0, f"A class{made.text}\n"), done.stderr
    for more in (["--sample"], ["--beams", 2], ["--repetition-penalty", 1.2], ["--compare"]):
        done = program(out, "A class", *more)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1), done.stderr
        assert "pip install 'nlpconvert[cpu]'" in done.stderr


# -- what is wrong -----------------------------------------------------------------------------------------------------


def one_line(capfd: pytest.CaptureFixture[str]) -> str:
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("nlpconvert: ") and said.err.count("\n") == 1, said
    return said.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "there is no prompt"),
        (["x", "--max-new-tokens", "257"], "can write 256 and not 257: give --max-new-tokens 256 or less"),
        (["a class of " * 300], "prompt 1 is 901 tokens long, and the model takes 256 at most"),
        (
            ["ok", "a class of " * 80],
            "after prompt 2, of 241 tokens, the model, which takes 256, can write 16 and",
        ),
        (["x", "--step", "trt"], "holds no step 'trt'; there is onnx"),
        (["x", "--seed", "1"], "--seed is about drawing tokens"),
        (["x", "--top-k", "1"], "--top-k is about drawing tokens"),
        (["x", "--sample", "--temperature", "nan"], "--temperature nan: give a number"),
        (["x", "--sample", "--temperature", "0"], "transformers refuses the generation settings"),
        (["x", "--sample", "--top-p", "2"], "--top-p 2.0: a share"),
        (["x", "--sample", "--beams", "2"], "beam search neither samples nor stops at texts"),
        (["x", "--chunk", "2", "--beams", "2"], "beam search reads prompts at once"),
        (["x", "--threads", "5000"], "--threads 5000"),
        (["x", "--provider", "tensorrt"], '--provider "tensorrt" is unknown: it is one of cpu, cuda'),
        (["x", "--model", "there"], "--model is what --compare runs"),
        (["x", "--compare", "--model", "fixtures/llama-lm"], "fixtures/llama-lm is checkpoint"),
        (["1500", "--ids"], "prompt 1 has the id 1500, and the model knows 1,500 ids"),
        (["\udcff"], "prompt 1 is not UTF-8"),
        (["-", "-"], "standard input can be read once"),
        (["-"], "standard input holds no prompt"),
        (["--data", "there.txt"], "there.txt: no such file"),
    ],
)
def test_a_wrong_word_is_one_line(
    out: Path, more: list[str], words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if "16" in words:
        more = [*more, "--max-new-tokens", "40"]
    assert run(out, *more) == 2
    assert words in one_line(capfd)


def test_places_that_hold_nothing_to_write_with(
    out: Path, fixtures_dir: Path, tmp_path: Path, features_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for place, words in (
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path, "holds no artifact that writes"),
        (fixtures_dir / "gpt2-lm", "it is a checkpoint; convert it first"),
        (features_out / "onnx", "is of the task feature-extraction: it answers and does not write"),
    ):
        assert run(place, "x") == 2
        assert words in one_line(capfd)
    assert run(out / "onnx", "x", "--step", "trt") == 2
    assert "is the step onnx, and --step says trt" in one_line(capfd)


def test_an_artifact_without_a_cache_is_told(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = manifest.read(copied)
    made = record.artifact("onnx", copied)
    inputs = tuple(spec for spec in made.inputs if not spec.name.startswith("past"))
    for changes, words in (
        ({"inputs": inputs}, "is an ONNX graph without a cache"),
        ({"inputs": inputs, "format": "tensorrt"}, "is a TensorRT engine without a cache"),
        ({"inputs": inputs, "format": "torchscript"}, "is TorchScript and keeps no cache"),
    ):
        record_again(copied, **changes)
        assert run(copied, "x") == 2
        assert words in one_line(capfd)


def test_a_foreign_step_is_written_with_where_its_graph_keeps_a_cache(copied: Path, out: Path) -> None:
    made = manifest.read(copied).artifact("onnx", copied)
    inputs = tuple(spec for spec in made.inputs if not spec.name.startswith("past"))
    record_again(copied, inputs=inputs, made_by={"foreign": True})
    found = generating.generate(copied, "A class", max_new_tokens=5)
    assert found.rows == generating.generate(out, "A class", max_new_tokens=5).rows


def test_changed_files_are_not_opened(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = copied / "onnx" / "generation_config.json"
    config.write_text(config.read_text().replace("40", "41"))
    assert run(copied / "onnx", "x") == 1
    assert "onnx/generation_config.json has changed since it was verified; it was not opened" in one_line(capfd)
    record_again(copied)
    assert run(copied, "x", "--json") == 0
    assert len(json.loads(capfd.readouterr().out)["rows"][0]["ids"]) == 41
    (copied / "onnx" / "tokenizer.json").unlink()
    assert run(copied, "x") == 1
    assert "onnx/tokenizer.json is missing" in one_line(capfd)
    record_again(copied)
    assert run(copied, "x") == 2
    assert "give token ids, with --ids (5 17 3)" in one_line(capfd)
    assert run(copied, "5 17", "--ids", "-q", "--max-new-tokens", 3) == 0
    assert capfd.readouterr().out.startswith("5 17 ")


def test_a_step_that_drifted_says_so(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = manifest.read(copied)
    record.with_step(replace(record.outcome("onnx", copied), status="drift")).write(copied)
    assert run(copied, "A class", "--max-new-tokens", 2) == 0
    assert "the verdict on onnx is drift: nlpconvert verify" in capfd.readouterr().err
    stale = manifest.read(copied).with_step(record.outcome("onnx", copied), stale=True)
    stale.write(copied)
    assert run(copied, "A class") == 1
    assert "onnx is stale" in one_line(capfd)


def test_numbers_that_are_none_are_a_drift(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = copied / "onnx" / "model.onnx.data"
    weights = np.frombuffer(data.read_bytes(), np.float32).copy()
    weights[:] = np.nan
    data.write_bytes(weights.tobytes())
    record_again(copied)
    assert run(copied, "A class") == 1
    assert "gives scores that are no numbers (NaN)" in one_line(capfd)


# -- what another tool made --------------------------------------------------------------------------------------------


def test_a_bare_directory_writes_by_its_config(bare: Path, out: Path, fixtures_dir: Path) -> None:
    made = generating.generate(bare, "A class", compare=True, model=str(fixtures_dir / "gpt2-lm"), max_new_tokens=9)
    assert made.rows == generating.generate(out, "A class", max_new_tokens=9).rows
    assert made.compared is not None and made.compared.differences == (None,)
    assert "holds no nlpconvert.json" in made.notes[0] and made.step == ""
    assert subjects.find(bare / "model.onnx").facts == subjects.find(bare).facts


def test_facts_by_config_are_the_model_s_own(bare: Path, model: Loaded) -> None:
    found, own = subjects.find(bare).facts, model.facts
    for name in ("inputs", "vocab_size", "pad_id", "eos_id", "decoder_start_id", "max_length", "positions", "task"):
        assert getattr(found, name) == getattr(own, name), name


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "names no model_type"),
        ({"model_type": "gpt2"}, "says no vocab_size"),
        ({"model_type": "t5", "vocab_size": 9}, "says no decoder_start_token_id"),
    ],
)
def test_a_config_that_says_too_little(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config_facts.of_writer(config, {}, (), (), encodes=True)


def test_a_tokenizer_without_its_one_file_is_transformers(bare: Path, out: Path) -> None:
    words = json.loads((bare / "tokenizer.json").read_text("utf-8"))["model"]
    (bare / "tokenizer.json").unlink()
    (bare / "vocab.json").write_text(json.dumps(words["vocab"]))
    merges = [each if isinstance(each, str) else " ".join(each) for each in words["merges"]]
    (bare / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    made = generating.generate(bare, PROMPTS, max_new_tokens=9)
    assert made.rows == generating.generate(out, PROMPTS, max_new_tokens=9).rows
    (bare / "vocab.json").write_text("{")
    with pytest.raises(UsageError, match=r"the tokenizer in .* cannot be loaded"):
        generating.generate(bare, "x")


def _without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / name).write_text(text)

    return write


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("config.json"), "holds no nlpconvert.json and no config.json"),
        (_write("config.json", "{"), "config.json cannot be read"),
        (_write("config.json", "[]"), "config.json holds no JSON object"),
        (_write("model.onnx", "no model"), "is no ONNX model"),
        (_write("generation_config.json", '{"eos_token_id": ["x"]}'), r"eos_token_id is \['x'\]"),
        (_write("generation_config.json", '{"max_new_tokens": "many"}'), "generation_config.json: invalid literal"),
        (_write("generation_config.json", '{"max_new_tokens": 1e999}'), "generation_config.json: cannot convert"),
        (_write("generation_config.json", '{"pad_token_id": 1500}'), "pads with 1500"),
        (_write("tokenizer.json", "{}"), "cannot be read as a tokenizer"),
        (lambda directory: (directory / "model.onnx").rename(directory / "decoder_model_merged.onnx"), "two graphs in"),
    ],
)
def test_a_bare_directory_that_is_not_whole(bare: Path, change: Callable[[Path], None], words: str) -> None:
    change(bare)
    with pytest.raises(NlpconvertError, match=words) as raised:
        generating.generate(bare, "A class")
    assert raised.value.exit_code == 2


@pytest.fixture(autouse=True)
def _quiet_stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing waits for a person."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield
