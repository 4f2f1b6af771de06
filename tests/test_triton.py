"""A Triton model repository: what is written, that Triton's own protobuf reads it, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import disk, golden, manifest, models
from nlpconvert.artifact import Artifact, TensorSpec
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.profiles import Profile
from nlpconvert.triton import config as triton_config
from nlpconvert.triton import files as triton_files
from nlpconvert.triton import plan, repository
from nlpconvert.triton.plan import Batching, Tensor
from nlpconvert.triton.repository import Wanted

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("attention_mask", "int64", ("batch", "sequence"))
LOGITS = TensorSpec("logits", "float32", ("batch", 4))


def engine(**made_by: Any) -> Artifact:
    """An engine as a manifest has it."""
    profile = {"min": {"batch": 1, "sequence": 1}, "opt": {"batch": 4, "sequence": 8}}
    profile["max"] = {"batch": 8, "sequence": 16}
    made = {"builder": "tensorrt", "profiles": [profile], **made_by}
    return Artifact(
        "trt", Path("model.engine"), "tensorrt", "float32", "text-classification", (IDS, MASK), (LOGITS,),
        {"model.engine": "0" * 64}, "onnx", "", made,
    )  # fmt: skip


@pytest.fixture
def out(classifier_out: Path, tmp_path: Path) -> Path:
    """An OUT that a test may change."""
    return Path(shutil.copytree(classifier_out, tmp_path / "out"))


# -- batching ---------------------------------------------------------------------------------------------------------

PROFILE = Profile({"batch": 1}, {"batch": 4}, {"batch": 8})


def chosen(**given: Any) -> Batching:
    """`choose_batching` with what is not given left out."""
    asked: dict[str, Any] = dict.fromkeys(("file", "max_batch", "max_delay", "instances", "profile"))
    return plan.choose_batching(**{**asked, **given})


def test_an_engine_batches_as_far_as_its_profile_goes() -> None:
    assert chosen(profile=PROFILE).max_batch == 8
    assert chosen(profile=PROFILE, max_batch=4, max_delay="2.5ms") == Batching(4, (), 2500, 1, "given")


def test_a_profile_that_batching_contradicts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"max_batch_size 9 is over the engine's profile, which ends at batch 8"):
        chosen(profile=PROFILE, max_batch=9)
    with pytest.raises(UsageError, match="begins at batch 2, and a request of one row would be refused"):
        chosen(profile=replace(PROFILE, min={"batch": 2}))


@pytest.mark.parametrize(("text", "microseconds"), [("5ms", 5000), ("500us", 500), ("0.01s", 10000), ("0ms", 0)])
def test_delays(text: str, microseconds: int) -> None:
    assert plan.delay(text) == microseconds


@pytest.mark.parametrize("text", ["5", "ms", "-1ms", "5 minutes", "", "90s"])
def test_what_is_no_delay_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--max-delay"):
        plan.delay(text)


def test_batching_is_read_from_what_bench_recommends(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    found = {"max_batch_size": 16, "preferred_batch_size": [8, 16], "max_queue_delay_microseconds": 3000}
    file.write_text(json.dumps({"queue": {**found, "instance_count": 2, "frontier": [{"max_batch_size": 1}]}}))
    assert chosen(file=file) == Batching(16, (8, 16), 3000, 2, str(file))
    assert chosen(file=file, instances=1).instances == 1
    with pytest.raises(UsageError, match="give one or the other"):
        chosen(file=file, max_batch=2)
    with pytest.raises(UsageError, match="over the engine's profile"):
        chosen(file=file, profile=PROFILE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("{}", "recommends no max_batch_size"),
        ('{"max_batch_size": 0}', "a number from 1 up"),
        ('{"max_batch_size": "4"}', "a number from 1 up"),
        ('{"max_batch_size": 4, "preferred_batch_size": [8]}', "preferred_batch_size 8 is over max_batch_size 4"),
        ('[{"max_batch_size": 4}, {"max_batch_size": 5}]', "holds 2 recommendations"),
    ],
)
def test_what_recommends_nothing_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        chosen(file=file)


# -- which backend ----------------------------------------------------------------------------------------------------


def test_engines_that_triton_cannot_load_are_refused() -> None:
    assert plan.choose_backend(engine(), None) == "tensorrt"
    with pytest.raises(UsageError, match="an engine of tensorrt-rtx, and Triton's tensorrt backend loads those of"):
        plan.choose_backend(engine(builder="tensorrt-rtx"), None)
    with pytest.raises(UsageError, match="--backend onnxruntime does not run tensorrt: give tensorrt or python"):
        plan.choose_backend(engine(), "onnxruntime")
    with pytest.raises(UsageError, match="not by the Python one"):
        plan.choose_backend(engine(), "python")


def test_a_cache_stays_inside_the_python_backend() -> None:
    past = TensorSpec("past_key_values.0.key", "float32", ("batch", 2, "past_sequence", 4))
    cached = replace(engine(), format="onnx", inputs=(IDS, MASK, past))
    assert plan.choose_backend(cached, None) == "python"
    with pytest.raises(UsageError, match="its clients would have to send along: --backend python keeps it inside"):
        plan.choose_backend(cached, "onnxruntime")


# -- config.pbtxt -----------------------------------------------------------------------------------------------------


def test_a_configuration_reads_back_as_it_was_written(tmp_path: Path) -> None:
    inputs = [Tensor("input_ids", "int64", (-1,), ragged=True), Tensor("TEXT", "text", (1,), optional=True)]
    outputs = [Tensor("logits", "float32", (-1, 11), labels="labels.txt")]
    text = triton_config.model(
        "m", "python", inputs, outputs, Batching(8, (4, 8), 2000, 3), file="model.py", parameters={"a": "b"}
    )
    file = tmp_path / "config.pbtxt"
    file.write_text(text)
    read = triton_config.read(file)
    assert (read.name, read.backend, read.max_batch, read.file) == ("m", "python", 8, "model.py")
    assert (list(read.inputs), list(read.outputs)) == (inputs, outputs)
    assert read.batches and not read.decoupled
    for line in ("count: 3", "kind: KIND_CPU", "max_queue_delay_microseconds: 2000", "num_versions: 1"):
        assert line in text


def test_one_row_at_a_time_has_no_batcher(tmp_path: Path) -> None:
    text = triton_config.model("m", "onnxruntime", [Tensor("x", "int64", (-1,))], [], Batching(1))
    assert "dynamic_batching" not in text and "max_batch_size: 1" in text


def test_a_configuration_that_does_not_parse_is_told(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text('name: "m"\nmax_batch: 3\n')
    with pytest.raises(DriftError, match=r"does not parse: .*max_batch"):
        triton_config.read(file)


def test_an_unknown_element_type_is_refused() -> None:
    with pytest.raises(UsageError, match="no element type for x, which is complex64"):
        triton_config.model("m", "python", [Tensor("x", "complex64", (-1,))], [], None)


# -- the repository ---------------------------------------------------------------------------------------------------


def test_an_onnx_repository_holds_what_the_manifest_says(out: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    made = repository.write(out, "onnx", repo, Wanted(name="classifier", max_batch=8, max_delay="5ms"))
    record = manifest.read(out)
    artifact = record.artifact("onnx", out)
    there = disk.hash_tree(repo)
    assert {there[f"classifier/1/{name}"] for name in ("model.onnx", "model.onnx.data")} == {
        artifact.files["model.onnx"],
        artifact.files["model.onnx.data"],
    }
    config = triton_config.read(repo / "classifier" / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch, config.file) == (
        "classifier", "onnxruntime", 8, "model.onnx",
    )  # fmt: skip
    assert [(t.name, t.dtype, t.dims) for t in config.inputs] == [
        (spec.name, spec.dtype, (-1,)) for spec in artifact.inputs
    ]
    assert [(t.name, t.dtype, t.dims) for t in config.outputs] == [
        ("logits", "float32", (artifact.outputs[0].shape[-1],))
    ]
    side = triton_files.read(repo)
    assert (side["sha256"], side["step"], side["out"]) == (artifact.sha256, "onnx", "out")
    assert triton_files.examine(repo, record, out) == []
    assert any("batches requests of one length only" in note for note in made.notes)
    assert not [entry for entry in tmp_path.iterdir() if "nlpconvert.new" in entry.name]


def test_warmups_are_rows_of_the_goldens(out: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repository.write(out, "onnx", repo, Wanted(name="m"))
    cases = {case.name: case for case in golden.read(out / manifest.GOLDEN)[0]}
    files = sorted((repo / "m" / "warmup").iterdir())
    assert len(files) == 2 * len(manifest.read(out).artifact("onnx", out).inputs)
    for file in files:
        case, _, name = file.name.partition(".")
        assert np.frombuffer(file.read_bytes(), np.int64).tolist() == cases[case].inputs[name][0].tolist()


def test_text_goes_in_where_it_is_asked_for(out: Path, tmp_path: Path) -> None:
    made = repository.write(out, "onnx", tmp_path / "repo", Wanted(name="m", backend="python", tokenizer=True))
    assert made.models == ("m", "m_tokenizer", "m_text")
    chain = triton_config.read(tmp_path / "repo" / "m_text" / "config.pbtxt")
    assert chain.platform == "ensemble" and chain.models == ("m_tokenizer", "m")
    assert [tensor.name for tensor in chain.inputs] == ["TEXT", "TEXT_PAIR"]
    # Mixed lengths form one batch: the model pads them itself.
    own = triton_config.read(tmp_path / "repo" / "m" / "config.pbtxt")
    assert all(tensor.ragged for tensor in own.inputs)


def test_a_classifier_has_its_labels(out: Path, tmp_path: Path) -> None:
    record = manifest.read(out)
    artifact, facts = record.artifact("onnx", out), models.facts_from_data(record.facts)
    size = artifact.outputs[0].shape[-1]
    assert isinstance(size, int)
    beside = replace(artifact, path=tmp_path / "model.onnx")
    assert triton_files.labels(beside, facts) == []
    words = {str(n): f"label {n}" for n in range(size)}
    (tmp_path / "config.json").write_text(json.dumps({"id2label": words}))
    assert triton_files.labels(beside, facts) == list(words.values())
    assert triton_files.served_tensors(beside, facts, ragged=False)[1][0].labels == "labels.txt"
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {**words, "99": "one more"}}))
    assert triton_files.labels(beside, facts) == []


def test_torchscript_gives_a_tuple_and_the_same_answers(out: Path, tmp_path: Path) -> None:
    import torch

    repository.write(out, "torchscript", tmp_path / "repo", Wanted(name="m"))
    record = manifest.read(out)
    artifact = record.artifact("torchscript", out)
    case = next(case for case in golden.read(out / manifest.GOLDEN)[0] if case.name == "right-padded")
    given = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    own = torch.jit.load(str(artifact.path))(**given)  # type: ignore[no-untyped-call]
    wrapped = torch.jit.load(str(tmp_path / "repo/m/1/model.pt"))(**given)  # type: ignore[no-untyped-call]
    assert isinstance(wrapped, tuple)
    for spec, tensor in zip(artifact.outputs, wrapped, strict=True):
        assert torch.equal(own[spec.name], tensor)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_changed_files_are_not_served(name: str, out: Path, tmp_path: Path) -> None:
    with (out / "onnx" / name).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DriftError, match=f"onnx/{name} has changed since it was verified"):
        repository.write(out, "onnx", tmp_path / "repo", Wanted(name="m"))
    assert not (tmp_path / "repo").exists()


def test_a_place_that_is_taken_is_left_alone(out: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repository.write(out, "onnx", repo, Wanted(name="m"))
    with pytest.raises(UsageError, match="is there already; --force replaces it"):
        repository.write(out, "onnx", repo, Wanted(name="other"))
    repository.write(out, "onnx", repo, Wanted(name="other"), force=True)
    assert (repo / "other").is_dir() and not (repo / "m").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("keep me")
    with pytest.raises(UsageError, match="holds files that are not of a repository made here"):
        repository.write(out, "onnx", mine, Wanted(name="m"), force=True)
    with pytest.raises(UsageError, match="a directory of its own, beside"):
        repository.write(out, "onnx", out / "repo", Wanted(name="m"))


def test_names_that_would_lead_elsewhere_are_refused(out: Path, tmp_path: Path) -> None:
    for name in ("../m", "", "a b", ".m"):
        with pytest.raises(UsageError, match="a model's name is letters"):
            repository.write(out, "onnx", tmp_path / "repo", Wanted(name=name or " "))


def test_an_engine_of_rtx_is_not_written(out: Path, tmp_path: Path) -> None:
    if manifest.read(out).steps["trt"].outcome.artifact is None:
        pytest.fail("the line made no engine")
    with pytest.raises(UsageError, match="is an engine of tensorrt-rtx"):
        repository.write(out, "trt", tmp_path / "repo", Wanted(name="m"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name: "input_ids"', 'name: "ids"', "input input_ids is missing"),
        ("TYPE_INT64", "TYPE_INT32", "is int32, the artifact's int64"),
        ("dims: -1", "dims: 128", "has dims [128] where the artifact takes any size: [-1]"),
    ],
)
def test_a_wrong_configuration_is_seen_before_a_server_is(
    old: str, new: str, said: str, out: Path, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    repository.write(out, "onnx", repo, Wanted(name="m"))
    config = repo / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace(old, new))
    problems = triton_files.examine(repo, manifest.read(out), out)
    assert any(said in problem for problem in problems), problems
    assert "m/config.pbtxt has changed since it was written" in problems


def test_missing_weights_are_seen_before_a_server_is(out: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repository.write(out, "onnx", repo, Wanted(name="m"))
    (repo / "m/1/model.onnx.data").unlink()
    problems = triton_files.examine(repo, manifest.read(out), out)
    assert problems[0] == "m/1/model.onnx.data is missing, and the model is opened with it"


def test_what_triton_leaves_behind_is_no_change(out: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repository.write(out, "onnx", repo, Wanted(name="m", backend="python"))
    (repo / "m/1/__pycache__").mkdir()
    (repo / "m/1/__pycache__/model.cpython-311.pyc").write_bytes(b"x")
    assert triton_files.examine(repo, manifest.read(out), out) == []


def test_a_folder_without_a_sidecar_is_none_of_ours(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no nlpconvert-triton\.json"):
        triton_files.read(tmp_path)


# -- warnings ---------------------------------------------------------------------------------------------------------


def test_rows_that_depend_on_their_companions_are_told_before_writing(out: Path) -> None:
    record = manifest.read(out)
    artifact, facts = record.artifact("onnx", out), models.facts_from_data(record.facts)
    row = {"name": "logits", "flagged": 3, "worst_abs": 0.02, "cosine": 0.97, "kind": "company", "own": False}
    (line,) = plan.warnings(artifact, facts, {"outputs": [row]}, Batching(8))
    assert line.startswith("onnx: a row's answer depends on the rows that share its batch: logits by 2.0e-02")
    assert plan.warnings(artifact, facts, {"outputs": [row]}, Batching(1)) == []
    assert plan.warnings(artifact, facts, {"outputs": [{**row, "flagged": 0}]}, Batching(8)) == []
    assert "is not known" in plan.warnings(artifact, facts, None, Batching(8))[0]
