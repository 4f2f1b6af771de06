"""TensorRT: real engines are built (TensorRT-RTX needs no GPU), crashes are read, and what is loaded is compared first.

On a machine with a fitting GPU `test_open` runs the engine against ONNX Runtime; elsewhere it holds the refusal.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nlpconvert import disk, engines, profiles
from nlpconvert.artifact import Artifact, Made, TensorSpec
from nlpconvert.backends import tensorrt as backend
from nlpconvert.convert import tensorrt
from nlpconvert.engines import Gpu, Here, Sidecar
from nlpconvert.errors import (
    CannotRunHere,
    ConversionError,
    DriftError,
    MissingPackage,
    OutOfProfile,
    UsageError,
)
from nlpconvert.profiles import Profile

AXES = ("batch", "sequence")
LIMIT = 64
PROFILE = profiles.parse("1x1", "4x16", "8x64", AXES)
NO_GPU = "no NVIDIA GPU with a driver here"
RTX_HERE = Here({"tensorrt-rtx": "1.7.1"}, None, NO_GPU)
ADA, HOPPER = Gpu("NVIDIA L40S", "8.9"), Gpu("NVIDIA H200", "9.0")


# -- what the tests build from -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def onnx_model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tiny random BERT as an ONNX artifact with external data and our names for its axes."""
    import onnx
    import onnx_ir
    import torch
    from transformers import BertConfig, BertModel
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LIMIT,
    )
    ids = torch.arange(21).reshape(3, 7)
    example = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    with torch.no_grad():
        exported = OnnxExporter().export(BertModel(config).eval(), example, OnnxConfig(dynamic=True))
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    onnx_ir.save(exported.components["model"].program, path, external_data="model.onnx.data")
    model = onnx.load(path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dimension, axis in zip(value.type.tensor_type.shape.dim, AXES, strict=False):
            if dimension.dim_param:
                dimension.dim_param = axis
    path.write_bytes(model.SerializeToString())
    return Artifact(
        step="onnx",
        path=path,
        format="onnx",
        precision="float32",
        task="feature-extraction",
        inputs=tuple(TensorSpec(name, "int64", AXES) for name in example),
        outputs=(
            TensorSpec("last_hidden_state", "float32", (*AXES, 32)),
            TensorSpec("pooler_output", "float32", ("batch", 32)),
        ),
        files={name: disk.sha256_file(path.with_name(name)) for name in ("model.onnx", "model.onnx.data")},
        parent="source",
        parent_sha256="0" * 64,
    )


def build(parent: Artifact, directory: Path, **options: Any) -> Made:
    """`convert` with what these tests have in common; the log stands beside the engine's directory."""
    directory.mkdir(exist_ok=True)
    settings = {"profile": PROFILE, "max_length": LIMIT, "log": directory.with_suffix(".log"), **options}
    return tensorrt.convert(parent, directory, **settings)


def artifact_of(made: Made, directory: Path, parent: Artifact) -> Artifact:
    return Artifact(
        step="trt",
        path=directory / made.file,
        format="tensorrt",
        precision="float32",
        task=parent.task,
        inputs=made.inputs,
        outputs=made.outputs,
        files={path.name: disk.sha256_file(path) for path in directory.iterdir()},
        parent=parent.step,
        parent_sha256=parent.sha256,
        made_by=made.made_by,
    )


@pytest.fixture(scope="session")
def engine(onnx_model: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An engine that TensorRT-RTX has really built."""
    directory = tmp_path_factory.mktemp("engine") / "trt"
    return artifact_of(build(onnx_model, directory, runtime="tensorrt-rtx"), directory, onnx_model)


def copy_of(artifact: Artifact, directory: Path) -> Artifact:
    for path in artifact.directory.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return dataclasses.replace(artifact, path=directory / artifact.path.name)


# -- building ----------------------------------------------------------------------------------------------------------


def test_an_engine_and_its_sidecar_are_built(engine: Artifact, onnx_model: Artifact) -> None:
    assert {path.name for path in engine.directory.iterdir()} == {"model.engine", "model.engine.json"}
    assert engine.path.stat().st_size > 100_000
    assert engine.inputs == onnx_model.inputs
    assert engine.outputs == onnx_model.outputs
    sidecar = engines.read_sidecar(engine.path)
    version = engines.installed_flavours()["tensorrt-rtx"]
    assert (sidecar.flavour, sidecar.builder) == ("tensorrt-rtx", version)
    assert sidecar.compute_capabilities == ("8.0", "8.6", "8.9", "12.0", "12.1")
    assert sidecar.profiles == (PROFILE,)
    assert engine.made_by["profiles"] == [PROFILE.as_data()]
    assert sidecar.onnx == onnx_model.files
    assert sidecar.engine_sha256 == engine.sha256
    assert not sidecar.tf32
    assert engine.made_by["strongly_typed"] is True
    assert engine.made_by["versions"]["tensorrt-rtx"] == version
    assert "Building engine" in engine.directory.with_suffix(".log").read_text()


def test_options_reach_the_builder(onnx_model: Artifact, tmp_path: Path) -> None:
    made = build(onnx_model, tmp_path / "trt", tf32=True, workspace=256, compute_capabilities=["8.9"])
    sidecar = engines.read_sidecar(tmp_path / "trt" / made.file)
    assert sidecar.tf32
    assert sidecar.compute_capabilities == ("8.9",)
    log = (tmp_path / "trt.log").read_text()
    assert "[TF32, STRONGLY_TYPED]" in log
    assert "WORKSPACE: 256.00 MiB" in log


def test_neither_the_current_directory_nor_our_own_names_shadow_tensorrt(
    onnx_model: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_rtx.py").write_text("raise SystemExit('the wrong file')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert build(onnx_model, tmp_path / "trt").file == "model.engine"


def failure(parent: Artifact, directory: Path, **options: Any) -> ConversionError:
    """The ConversionError of a build, once it is sure that it is one line and has left nothing."""
    with pytest.raises(ConversionError) as caught:
        build(parent, directory, **options)
    assert "\n" not in str(caught.value)
    assert str(directory.with_suffix(".log")) in str(caught.value)
    assert list(directory.iterdir()) == []
    return caught.value


def test_a_corrupt_onnx_file_is_a_readable_failure(onnx_model: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_model.path.read_bytes()[:500])
    error = failure(dataclasses.replace(onnx_model, path=path), tmp_path / "trt")
    assert "could not build" in str(error)
    assert "Failed to parse the ONNX model" in str(error)
    assert "PolygraphyException" in error.detail


def test_missing_external_data_is_named(onnx_model: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_model.path.read_bytes())
    error = failure(dataclasses.replace(onnx_model, path=path), tmp_path / "trt")
    assert f"Failed to open file: {tmp_path / 'model.onnx.data'}" in str(error)


def test_a_gpu_without_the_arithmetic_is_a_readable_failure(onnx_model: Artifact, tmp_path: Path) -> None:
    error = failure(onnx_model, tmp_path / "trt", compute_capabilities=["7.5"])
    assert "for Turing (SM75): FP32 GEMM is not supported" in str(error)


def test_an_unknown_compute_capability_is_named(onnx_model: Artifact, tmp_path: Path) -> None:
    error = failure(onnx_model, tmp_path / "trt", compute_capabilities=["8.9", "9.0"])
    assert "cannot build for compute capability 9.0, it knows 7.5, 8.0" in str(error)


def test_an_artifact_that_is_not_its_network_is_refused(onnx_model: Artifact, tmp_path: Path) -> None:
    fewer = dataclasses.replace(onnx_model, inputs=onnx_model.inputs[:2])
    error = failure(fewer, tmp_path / "trt")
    assert "reads input_ids, attention_mask, token_type_ids, the profile is for input_ids, attention_mask" in str(error)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            (TensorSpec("logits", "float32", AXES),),
            "the engine's outputs are last_hidden_state, those of the ONNX file",
        ),
        ((TensorSpec("last_hidden_state", "float32", (*AXES, 16)),), "has shape (-1, -1, 32), that of the ONNX file"),
        ((TensorSpec("last_hidden_state", "float32", AXES),), "has shape (-1, -1, 32), that of the ONNX file"),
    ],
)
def test_outputs_that_are_not_the_onnx_files_are_refused(
    onnx_model: Artifact, tmp_path: Path, outputs: tuple[TensorSpec, ...], message: str
) -> None:
    """The builder is played here: what it says it has built is ours to doubt."""
    said = {
        "builder": "1.7.1",
        "polygraphy": "0",
        "compute_capabilities": ["8.9"],
        "inputs": [{"name": spec.name, "dtype": "int64", "shape": [-1, -1]} for spec in onnx_model.inputs],
        "outputs": [{"name": "last_hidden_state", "dtype": "float32", "shape": [-1, -1, 32]}],
        "seconds": 0.0,
    }
    code = "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    with pytest.raises(ConversionError) as caught:
        build(
            dataclasses.replace(onnx_model, outputs=outputs),
            tmp_path / "trt",
            here=RTX_HERE,
            command=lambda _request, result: [sys.executable, "-c", code, str(result), json.dumps(said)],
        )
    assert message in str(caught.value)
    assert list((tmp_path / "trt").iterdir()) == []


def dying(code: str) -> Callable[[Path, Path], list[str]]:
    """A builder that leaves half an engine, says something and then runs `code`."""
    start = (
        "import json, os, pathlib, signal, sys; request = json.load(open(sys.argv[1])); "
        "pathlib.Path(request['engine'] + '.part').write_text('half'); print('last words', flush=True); "
    )
    return lambda request, _result: [sys.executable, "-c", start + code, str(request)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed while building (SIGSEGV): a fault of the builder"),
        ("os.abort()", "crashed while building (SIGABRT)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed while building (SIGKILL), most likely for want of memory"),
        ("sys.exit(0)", "could not build: it left no result, its last words: last words ("),
        ("import nowhere", "could not build: it left no result, its last words: ModuleNotFoundError: No module named"),
        ("print('[E] first', '[E] second', sep='\\n'); sys.exit(1)", "could not build: first"),
    ],
)
def test_a_builder_that_dies_is_a_readable_failure(
    onnx_model: Artifact, tmp_path: Path, code: str, message: str
) -> None:
    error = failure(onnx_model, tmp_path / "trt", here=RTX_HERE, command=dying(code))
    assert str(error).startswith(f"tensorrt-rtx 1.7.1 {message}")
    assert "last words" in error.detail
    assert error.exit_code == 3


def test_a_profile_past_the_limit_starts_no_builder(onnx_model: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max has sequence 65, over this model's limit of 64 tokens"):
        build(onnx_model, tmp_path / "trt", profile=profiles.parse("1x1", "4x16", "8x65", AXES))
    assert not (tmp_path / "trt.log").exists()


@pytest.mark.parametrize(
    ("options", "here", "message"),
    [
        ({"timing_cache": Path("cache")}, RTX_HERE, "tensorrt-rtx ignores --timing-cache"),
        ({"hardware_compatibility": True}, RTX_HERE, "tensorrt-rtx ignores --hardware-compatibility"),
        ({"compute_capabilities": ["8.9"]}, Here({"tensorrt": "10.14"}, ADA), "tensorrt ignores --compute-capability"),
    ],
)
def test_an_option_that_the_flavour_ignores_is_refused(
    onnx_model: Artifact, tmp_path: Path, options: Mapping[str, Any], here: Here, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(onnx_model, tmp_path / "trt", here=here, **options)
    assert not (tmp_path / "trt.log").exists()


# -- which flavour, which GPU ------------------------------------------------------------------------------------------

BOTH = {"tensorrt": "10.14", "tensorrt-rtx": "1.7.1"}


@pytest.mark.parametrize(
    ("runtime", "here", "flavour", "note"),
    [
        (None, Here(BOTH, ADA), "tensorrt", ""),
        (None, Here(BOTH, HOPPER), "tensorrt", ""),
        (None, Here(BOTH, None, NO_GPU), "tensorrt-rtx", f"built without a GPU: {NO_GPU}"),
        (None, Here({"tensorrt-rtx": "1.7.1"}, ADA), "tensorrt-rtx", ""),
        ("tensorrt-rtx", Here(BOTH, ADA), "tensorrt-rtx", ""),
        ("tensorrt-rtx", Here(BOTH, HOPPER), "tensorrt-rtx", "NVIDIA H200 has 9.0: built for other machines"),
        (
            None,
            Here({"tensorrt-rtx": "1.7.1"}, HOPPER),
            "tensorrt-rtx",
            "NVIDIA H200 has 9.0: built for other machines",
        ),
    ],
)
def test_choose(runtime: str | None, here: Here, flavour: str, note: str) -> None:
    found, said = engines.choose(runtime, here)
    assert found.name == flavour
    assert note in said
    assert bool(note) == bool(said)


@pytest.mark.parametrize(
    ("runtime", "here", "error", "message"),
    [
        ("trt", Here(BOTH, ADA), UsageError, '--runtime "trt" is unknown: it is one of tensorrt, tensorrt-rtx'),
        ("tensorrt", RTX_HERE, MissingPackage, "tensorrt (with polygraphy) is not installed: pip install 'nlpcon"),
        (None, Here({}, ADA), MissingPackage, "pip install 'nlpconvert[gpu]' or pip install 'nlpconvert[trt-rtx]'"),
        ("tensorrt", Here(BOTH, None, NO_GPU), MissingPackage, f"a GPU of compute capability 7.5+; {NO_GPU}"),
        (None, Here({"tensorrt": "10.14"}, Gpu("V100", "7.0")), MissingPackage, "V100 has 7.0"),
    ],
)  # fmt: skip
def test_choose_refuses(runtime: str | None, here: Here, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        engines.choose(runtime, here)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("capabilities", "gpu", "expected"),
    [
        (("8.0", "8.9"), "8.9", True),
        (("8.0", "8.9"), "8.6", False),
        (("8.0+",), "12.0", True),
        (("8.0+",), "7.5", False),
        ((), "8.9", False),
    ],
)
def test_fits(capabilities: tuple[str, ...], gpu: str, expected: bool) -> None:
    assert engines.fits(capabilities, gpu) is expected


class FakeDriver:
    """The five calls of libcuda that are used, as C would answer them."""

    def __init__(self, init: int = 0, attribute: int = 0) -> None:
        self.init, self.attribute = init, attribute

    def cuInit(self, _flags: int) -> int:
        return self.init

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, _device: ctypes.c_int) -> int:
        name.value = b"NVIDIA L40S"[:length]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, _device: ctypes.c_int) -> int:
        value._obj.value = {75: 8, 76: 9}[attribute]
        return self.attribute


def test_find_gpu_asks_the_driver() -> None:
    assert engines.find_gpu(FakeDriver()) == (ADA, "")
    assert engines.find_gpu(FakeDriver(init=100)) == (
        None,
        "no usable NVIDIA GPU here: the driver answers with CUDA error 100",
    )
    assert engines.find_gpu(FakeDriver(attribute=101))[1].endswith("CUDA error 101")


def test_runtime_here_finds_what_is_installed() -> None:
    here = tensorrt.runtime_here()
    assert here.installed["tensorrt-rtx"].startswith("1.")
    assert (here.gpu is None) == bool(here.no_gpu)


# -- what is compared before loading -----------------------------------------------------------------------------------

SIDECAR = Sidecar(
    flavour="tensorrt-rtx",
    builder="1.7.1",
    compute_capabilities=("8.0", "8.6", "8.9"),
    hardware_compatibility=False,
    precision="float32",
    tf32=False,
    profiles=(PROFILE,),
    onnx={"model.onnx": "a" * 64},
    engine_sha256="b" * 64,
)


@pytest.mark.parametrize(
    ("sidecar", "here", "reason"),
    [
        (SIDECAR, Here({"tensorrt-rtx": "1.7.1"}, ADA), ""),
        (SIDECAR, RTX_HERE, NO_GPU),
        (SIDECAR, Here({"tensorrt-rtx": "1.8"}, ADA), "the engine was built by tensorrt-rtx 1.7.1, here is 1.8"),
        (
            SIDECAR,
            Here({"tensorrt-rtx": "1.7.1"}, HOPPER),
            "has compute capability 9.0, the engine is for 8.0, 8.6, 8.9",
        ),
        (SIDECAR, Here({"tensorrt": "10.14"}, ADA), "needs tensorrt-rtx, which is not installed here: pip install"),
        (SIDECAR, Here({}, ADA), "pip install 'nlpconvert[trt-rtx]'"),
    ],
)
def test_cannot_run(sidecar: Sidecar, here: Here, reason: str) -> None:
    found = engines.cannot_run(sidecar, here)
    assert reason in found
    assert bool(reason) == bool(found)
    assert "\n" not in found


def test_a_sidecar_comes_back(tmp_path: Path) -> None:
    engines.write_sidecar(tmp_path / "model.engine", SIDECAR)
    assert engines.read_sidecar(tmp_path / "model.engine") == SIDECAR


def test_a_sidecar_of_before_there_were_several_profiles_is_read(tmp_path: Path) -> None:
    data = SIDECAR.as_data()
    (only,) = data.pop("profiles")
    (tmp_path / "model.engine.json").write_text(json.dumps({**data, "profile": only}))
    assert engines.read_sidecar(tmp_path / "model.engine") == SIDECAR


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"flavour": "tensorrt"}', "\u0000"])
def test_a_broken_sidecar_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.engine.json").write_text(text)
    with pytest.raises(DriftError, match="is not a sidecar of an engine"):
        engines.read_sidecar(tmp_path / "model.engine")


def test_a_missing_sidecar_is_refused(engine: Artifact, tmp_path: Path) -> None:
    moved = copy_of(engine, tmp_path)
    (tmp_path / "model.engine.json").unlink()
    with pytest.raises(DriftError, match=r"model\.engine\.json is missing"):
        backend.open(moved)


def test_a_changed_engine_is_refused(engine: Artifact, tmp_path: Path) -> None:
    changed = copy_of(engine, tmp_path)
    content = bytearray(changed.path.read_bytes())
    content[-1] ^= 1
    changed.path.write_bytes(content)
    with pytest.raises(DriftError, match="is not the engine that was built: sha256"):
        backend.open(changed)


def test_a_changed_sidecar_is_refused(engine: Artifact, tmp_path: Path) -> None:
    changed = copy_of(engine, tmp_path)
    engines.write_sidecar(changed.path, dataclasses.replace(engines.read_sidecar(changed.path), builder="1.6"))
    with pytest.raises(CannotRunHere, match=r"was built by tensorrt-rtx 1\.6, here is 1\."):
        backend.open(changed)


def test_an_engine_of_another_onnx_file_is_refused(engine: Artifact) -> None:
    with pytest.raises(DriftError, match=r"was built from another ONNX file: model\.onnx "):
        backend.open(dataclasses.replace(engine, parent_sha256="f" * 64))


def test_open(engine: Artifact, onnx_model: Artifact) -> None:
    """Where a GPU fits, the engine answers as ONNX Runtime does; elsewhere the reason is said."""
    here = engines.runtime_here()
    if here.gpu is None or not engines.fits(engines.FLAVOURS["tensorrt-rtx"].capabilities, here.gpu.compute_capability):
        with pytest.raises(CannotRunHere) as caught:
            backend.open(engine)
        assert str(caught.value) == here.no_gpu or "the engine is for 8.0" in str(caught.value)
        assert caught.value.exit_code == 4
        return
    import onnxruntime

    ids = np.arange(27, dtype=np.int64).reshape(3, 9)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    session = backend.open(engine)
    answers = session.run(batch)
    session.close()
    expected = onnxruntime.InferenceSession(onnx_model.path, providers=["CPUExecutionProvider"]).run(None, batch)
    for spec, reference in zip(onnx_model.outputs, expected, strict=True):
        np.testing.assert_allclose(answers[spec.name], reference, atol=1e-3, rtol=1e-3)


def test_tensorrts_own_reason_is_quoted(engine: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past our own comparison, a machine without a driver is TensorRT's to refuse."""
    if engines.find_gpu()[0] is not None:
        pytest.skip("this machine has a driver")
    monkeypatch.setenv("POLYGRAPHY_USE_TENSORRT_RTX", "1")  # `_load` sets it: this puts it back afterwards
    for name in [name for name in sys.modules if name.split(".")[0] == "polygraphy" or name.endswith(".trt_engine")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(CannotRunHere, match=r"cannot load the engine here: .*CUDA driver version is insufficient"):
        backend._load(engine, engines.read_sidecar(engine.path))


def test_polygraphy_of_the_other_flavour_is_said(engine: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polygraphy.config", SimpleNamespace(USE_TENSORRT_RTX=False))
    with pytest.raises(CannotRunHere, match="already loaded for tensorrt in this process and cannot run an engine of"):
        backend._load(engine, engines.read_sidecar(engine.path))


# -- running -----------------------------------------------------------------------------------------------------------


class FakeRunner:
    """A loaded engine: keeps what it is fed and answers with it."""

    version = "1.7.1"
    profiles = 1

    def __init__(self, dtype: str = "int64", error: str = "") -> None:
        self.dtypes = {name: np.dtype(dtype) for name in ("input_ids", "attention_mask")}
        self.fed: dict[str, np.ndarray] = {}
        self.error = error
        self.closed = False

    def infer(self, feed: Mapping[str, Any], profile: int = 0, keep: Collection[str] = ()) -> dict[str, Any]:
        if self.error:
            raise RuntimeError(self.error)
        self.fed = dict(feed)
        return {"logits": feed["input_ids"].astype(np.float32)}

    def close(self) -> None:
        self.closed = True


def session_of(runner: FakeRunner, profile: Profile = PROFILE) -> backend.EngineSession:
    specs = tuple(TensorSpec(name, "int64", AXES) for name in runner.dtypes)
    return backend.EngineSession(runner, specs, (profile,), provider="tensorrt-rtx 1.7.1 on a GPU", precision="float32")


def batch_of(rows: int, length: int) -> dict[str, np.ndarray]:
    ids = np.arange(rows * length, dtype=np.int64).reshape(rows, length)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def test_a_batch_is_cast_to_the_engines_types() -> None:
    runner = FakeRunner("int32")
    session = session_of(runner)
    answers = session.run(batch_of(2, 5))
    assert answers["logits"].shape == (2, 5)
    assert {name: array.dtype.name for name, array in runner.fed.items()} == {
        "input_ids": "int32",
        "attention_mask": "int32",
    }
    session.close()
    assert runner.closed


def test_ids_that_do_not_fit_are_refused_not_wrapped() -> None:
    batch = batch_of(2, 5)
    batch["input_ids"][1, 2] = 3_000_000_000
    with pytest.raises(UsageError, match="input input_ids holds 3000000000, which the engine's int32 cannot hold"):
        session_of(FakeRunner("int32")).run(batch)
    assert session_of(FakeRunner("int64")).run(batch)["logits"].max() == np.float32(3e9)


def test_fractions_are_not_ids() -> None:
    with pytest.raises(UsageError, match="input x is float32, the engine takes int64: give whole numbers"):
        backend.cast("x", np.ones((1, 2), np.float32), np.dtype("int64"))


def test_cast_makes_arrays_contiguous() -> None:
    found = backend.cast("x", np.arange(6).reshape(2, 3).T, np.dtype("int64"))
    assert found.flags.c_contiguous
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_batch_outside_the_profile_is_told_apart() -> None:
    session = session_of(FakeRunner())
    with pytest.raises(OutOfProfile, match="length 65 is over the engine's profile 64") as caught:
        session.run(batch_of(2, 65))
    assert caught.value.exit_code == 4
    with pytest.raises(OutOfProfile, match="batch 9 is over the engine's profile 8"):
        session.run(batch_of(9, 5))


def test_an_engine_that_fails_is_not_run() -> None:
    with pytest.raises(CannotRunHere, match=r"the engine failed on tensorrt-rtx 1\.7\.1 on a GPU: out of memory"):
        session_of(FakeRunner(error="out of memory")).run(batch_of(1, 1))
