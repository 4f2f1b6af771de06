"""The proof that what was loaded is what the file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nlpconvert import weights
from nlpconvert.errors import UsageError
from tests import tiny


def saved(row: tiny.Tiny, directory: Path) -> tuple[Any, Path]:
    model = tiny.build(row)
    model.save_pretrained(directory)  # type: ignore[operator]
    return model, directory / "model.safetensors"


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Any, Path]:
    return saved(tiny.ROWS["bert"], tmp_path)


def rewrite(file: Path, change: Any) -> None:
    tensors = load_file(file)
    save_file(change(tensors), file, metadata={"format": "pt"})


def test_every_tensor_is_compared(bert: tuple[Any, Path]) -> None:
    model, file = bert
    found = weights.compare(model, [file])
    assert found.compared == len(model.state_dict()) == len(load_file(file))
    assert found.missing == found.not_in_file == found.not_loaded == found.not_compared == ()
    assert found.dtypes == ("float32",) and found.notes() == []


@pytest.mark.parametrize("name", ["classifier.weight", "bert.encoder.layer.1.attention.output.LayerNorm.bias"])
def test_one_changed_element_is_found(bert: tuple[Any, Path], name: str) -> None:
    model, file = bert
    tensor = model.state_dict()[name]
    tensor.view(-1)[-1] += 1e-6 * tensor.abs().max()
    with pytest.raises(UsageError, match=f"{name} was loaded with other values"):
        weights.compare(model, [file])


def test_other_shape_is_named(bert: tuple[Any, Path]) -> None:
    model, file = bert
    rewrite(file, lambda tensors: {**tensors, "classifier.weight": torch.zeros(3, 32)})
    with pytest.raises(UsageError, match=r"classifier.weight is \(3, 32\) in the checkpoint.*\(2, 32\)"):
        weights.compare(model, [file])


def test_nan_equals_nan(bert: tuple[Any, Path]) -> None:
    model, file = bert
    model.state_dict()["classifier.bias"][0] = torch.nan
    rewrite(file, lambda tensors: {**tensors, "classifier.bias": model.state_dict()["classifier.bias"]})
    assert weights.compare(model, [file]).missing == ()


def test_missing_and_not_loaded(bert: tuple[Any, Path]) -> None:
    model, file = bert
    rewrite(file, lambda tensors: {("x." + key if "classifier" in key else key): tensors[key] for key in tensors})
    found = weights.compare(model, [file])
    assert found.missing == found.not_in_file == ("classifier.weight", "classifier.bias")
    assert found.not_loaded == ("x.classifier.bias", "x.classifier.weight")
    assert "2 tensors of the checkpoint are not part of this model: x.classifier" in found.notes()[0]


def test_old_names_and_old_buffers(bert: tuple[Any, Path]) -> None:
    """gamma and beta are LayerNorm's old names; position_ids were once stored and say nothing new."""
    model, file = bert

    def old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {key.replace("LayerNorm.weight", "LayerNorm.gamma"): tensors[key] for key in tensors}
        tensors = {key.replace("LayerNorm.bias", "LayerNorm.beta"): tensors[key] for key in tensors}
        return {**tensors, "bert.embeddings.position_ids": torch.arange(64)[None]}

    rewrite(file, old)
    found = weights.compare(model, [file])
    assert found.missing == found.not_loaded == ()
    rewrite(file, lambda tensors: {**tensors, "bert.embeddings.position_ids": torch.arange(64).flip(0)[None]})
    assert weights.compare(model, [file]).not_loaded == ("bert.embeddings.position_ids",)


def test_ties_are_not_missing(tmp_path: Path) -> None:
    model, file = saved(tiny.ROWS["gpt2"], tmp_path)
    assert "lm_head.weight" not in load_file(file)
    found = weights.compare(model, [file])
    assert found.missing == found.not_in_file == ()
    assert found.tied == (("transformer.wte.weight", "lm_head.weight"),)


def test_declared_optional_is_listed_and_not_missing(tmp_path: Path) -> None:
    model, file = saved(tiny.ROWS["marian"], tmp_path)
    found = weights.compare(model, [file])
    assert "model.encoder.embed_positions.weight" in found.not_in_file and found.missing == ()


def test_merged_tensors_are_compared_through_the_conversion(tmp_path: Path) -> None:
    """A mixture of experts is stored expert by expert and held as one tensor."""
    values = {**tiny.S, "num_key_value_heads": 2, "num_local_experts": 2, "max_position_embeddings": 64}
    model, file = saved(tiny.Tiny("mixtral", "MixtralForCausalLM", "MixtralConfig", values), tmp_path)
    stored = load_file(file)
    assert len(stored) > len(model.state_dict())
    found = weights.compare(model, [file])
    assert found.compared == len(stored) and found.not_compared == found.missing == found.not_loaded == ()
    name = next(each for each in model.state_dict() if "experts" in each)
    model.state_dict()[name].view(-1)[-1] += 1
    with pytest.raises(UsageError, match=r"experts.* was loaded with other values"):
        weights.compare(model, [file])


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights(bert: tuple[Any, Path], tmp_path: Path, zipped: bool) -> None:
    model, file = bert
    pickled = tmp_path / "pytorch_model.bin"
    half = {key: value.half() for key, value in load_file(file).items()}
    torch.save(half, pickled, _use_new_zipfile_serialization=zipped)
    model.load_state_dict(half)
    found = weights.compare(model, [pickled])
    assert found.compared == len(half) and found.dtypes == ("float16",)
    assert found.notes() == ["the checkpoint is float16; the reference computes in float32"]


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def test_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    pickled, trace = tmp_path / "pytorch_model.bin", tmp_path / "trace"
    torch.save({"weight": torch.zeros(1), "evil": Evil(trace)}, pickled)
    with pytest.raises(UsageError, match="more than tensors and is refused"):
        weights.read_pickled(pickled)
    assert not trace.exists()
    torch.load(pickled, weights_only=False)  # it would have
    assert trace.exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle at all", b"PK\x03\x04broken"])
def test_pickle_that_is_none(tmp_path: Path, content: bytes) -> None:
    pickled = tmp_path / "pytorch_model.bin"
    pickled.write_bytes(content)
    with pytest.raises(UsageError, match=r"pytorch_model\.bin"):
        weights.read_pickled(pickled)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no weights"):
        weights.read_folder(tmp_path)
    save_file({"linear.weight": torch.ones(1, 1).half()}, tmp_path / "model.safetensors")
    assert weights.read_folder(tmp_path)["linear.weight"].dtype == torch.float32
