"""The TorchScript converter and its backend: names, exactness, what is refused, what does not lie in the file."""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nlpconvert import forward, pipeline
from nlpconvert.artifact import Artifact
from nlpconvert.backends import torchscript as backend
from nlpconvert.convert import torchscript as converter
from nlpconvert.errors import CannotRunHere, ConversionError, DriftError, UsageError
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import ask, batch, loaded, make

MODEL = tiny.Tiny("bert", "BertModel", "BertConfig", {**tiny.S, "max_position_embeddings": 64})


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loaded(MODEL, tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="module")
def artifact(bert: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Never written to."""
    return make("torchscript", bert, tmp_path_factory.mktemp("bert") / "torchscript")


def test_names_after_freeze_save_and_load(bert: Loaded, artifact: Artifact) -> None:
    module = torch.jit.load(str(artifact.path))
    rows = {name: torch.from_numpy(array) for name, array in batch(bert.facts, [9, 4]).items()}
    answers = module(**rows)
    assert list(answers) == ["last_hidden_state", "pooler_output"]
    assert [(spec.name, spec.dtype, spec.shape) for spec in artifact.outputs] == [
        ("last_hidden_state", "float32", ("batch", "sequence", 32)),
        ("pooler_output", "float32", ("batch", 32)),
    ]
    assert [(spec.name, spec.dtype, spec.shape) for spec in artifact.inputs] == [
        (name, "int64", ("batch", "sequence")) for name in ("input_ids", "token_type_ids", "attention_mask")
    ]
    assert dict(module.named_parameters()) == {}  # frozen: weights are constants of the graph


def test_inputs_are_bound_by_keyword(bert: Loaded, artifact: Artifact) -> None:
    """Tokenizers and `forward` have different orders; by position two inputs of one shape are swapped in silence."""
    module = torch.jit.load(str(artifact.path))
    rows = {name: torch.from_numpy(array) for name, array in batch(bert.facts, [9, 4]).items()}
    straight, turned = module(**rows), module(**dict(reversed(rows.items())))
    assert torch.equal(straight["pooler_output"], turned["pooler_output"])
    assert [each.name for each in module.forward.schema.arguments] == ["self", *rows]
    swapped = {**rows, "token_type_ids": rows["attention_mask"], "attention_mask": rows["token_type_ids"]}
    assert (module(**swapped)["pooler_output"] - straight["pooler_output"]).abs().max() > 0.05
    with pytest.raises(RuntimeError, match=r"[Uu]nknown keyword argument|missing value for argument"):
        module(**{("position_ids" if "type" in name else name): tensor for name, tensor in rows.items()})


@pytest.mark.parametrize(
    ("lengths", "left"), [([7, 5], False), ([1], False), ([3], False), ([64, 12, 1], False), ([9, 4, 2, 1], True)]
)
def test_answers_are_pytorchs_own(lengths: list[int], left: bool, bert: Loaded, artifact: Artifact) -> None:
    rows = batch(bert.facts, lengths, left=left)
    reference = forward.call(bert.module, rows)
    answers = ask(artifact, rows)
    assert list(answers) == list(reference)
    for name, answer in answers.items():
        np.testing.assert_allclose(answer, reference[name], atol=1e-6, rtol=0)


def test_no_path_of_the_machine(artifact: Artifact, tmp_path: Path) -> None:
    """Not in the file as it lies, nor in what its records hold once unpacked."""
    machine = ("site-packages", "/tmp", "/home/", "/root/", "/usr/", str(Path.cwd()), str(Path(torch.__file__).parent))
    words = [each.encode() for each in (*machine, str(artifact.directory))]
    contents = [artifact.path.read_bytes()]
    with zipfile.ZipFile(artifact.path) as archive:
        contents += [archive.read(name) for name in archive.namelist()]
        assert not [name for name in archive.namelist() if name.endswith("debug_pkl")]
    for content in contents:
        assert [word for word in words if word in content] == []
        # Some records are compressed within.
        for start in (at for at in range(len(content) - 1) if content[at : at + 2] in (b"x\x9c", b"x\xda")):
            try:
                unpacked = zlib.decompressobj().decompress(content[start:], 1 << 20)
            except zlib.error:
                continue
            assert [word for word in words if word in unpacked] == []


def test_the_models_forward_is_put_back(bert: Loaded, artifact: Artifact) -> None:
    assert bert.module.forward.__name__ == "forward"
    assert list(forward.call(bert.module, batch(bert.facts, [5]))) == ["last_hidden_state", "pooler_output"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_script_says_in_one_sentence_that_it_cannot(bert: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ConversionError) as caught:
        make("torchscript", bert, tmp_path, method="script")
    message = str(caught.value)
    assert message.startswith("torch.jit.script does not take BertModel (") and "use --method trace" in message
    assert "\n" not in message
    assert not any(tmp_path.iterdir())
    assert list(forward.call(bert.module, batch(bert.facts, [5]))) == ["last_hidden_state", "pooler_output"]


def test_script_through_the_line(bert: Loaded, tmp_path: Path) -> None:
    options = pipeline.Options(method="script")
    outcomes = pipeline.run(str(bert.directory), tmp_path / "out", to=["torchscript"], options=options)
    assert outcomes[0].status == "failed" and "use --method trace" in outcomes[0].reason
    assert pipeline.exit_code(outcomes) == 3 and not (tmp_path / "out" / "torchscript").exists()


def test_unknown_method(bert: Loaded, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--method compile is not one of trace, script"):
        make("torchscript", bert, tmp_path, method="compile")


def test_o16_training_mode_is_refused(bert: Loaded, tmp_path: Path) -> None:
    """A trace would hold the dropout, and `eval` on the loaded file would do nothing."""
    bert.module.train()
    try:
        with pytest.raises(ConversionError, match="training mode: dropout would be baked into the trace"):
            make("torchscript", bert, tmp_path)
    finally:
        bert.module.eval()
    assert not any(tmp_path.iterdir())


def test_a_model_that_cannot_be_traced(bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> Any:
        raise RuntimeError("\n  no such thing\nand a stack")

    monkeypatch.setattr(torch.jit, "trace", wrong)
    with pytest.raises(ConversionError, match=r"^torch\.jit\.trace could not trace BertModel: no such thing$"):
        make("torchscript", bert, tmp_path)


def test_a_model_that_no_file_can_hold(bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> Any:
        raise RuntimeError("\nCould not export Python function call 'GeLUFunction'. Remove calls")

    monkeypatch.setattr(torch.jit, "save", wrong)
    with pytest.raises(ConversionError, match="TorchScript cannot hold all of BertModel: Could not export Python"):
        make("torchscript", bert, tmp_path)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        ctx.save_for_backward(state)
        return state * by


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(state: torch.Tensor) -> torch.Tensor:
        return state / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


def test_custom_functions_are_traced_as_their_forward(bert: Loaded, tmp_path: Path) -> None:
    """BLOOM's GELU is one: kept as a call into Python, the trace cannot be saved."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(120, 8)

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"last_hidden_state": Halved.apply(Doubled.apply(self.embed(input_ids), 3.0))}

    module = Own().eval().requires_grad_(False)
    ids = np.arange(14).reshape(2, 7)
    facts = dataclasses.replace(bert.facts, inputs=("input_ids",), outputs=bert.facts.outputs[:1])
    converter.convert(module, {"input_ids": ids}, facts, tmp_path)
    answer = torch.jit.load(str(tmp_path / "model.pt"))(input_ids=torch.from_numpy(ids))
    torch.testing.assert_close(answer["last_hidden_state"], module.embed(torch.from_numpy(ids)) * 1.5)
    assert torch.autograd.Function.apply.__qualname__ == "Function.apply"


def test_class_names_that_torch_cannot_read_back(bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports a checkpoint's own code under a hash, and a part of a name must not start with a digit."""
    name = "transformers_modules.model.11710e2f.modeling_own"
    monkeypatch.setattr(type(bert.module), "__module__", name)
    artifact = make("torchscript", bert, tmp_path)
    assert type(bert.module).__module__ == name
    assert list(ask(artifact, batch(bert.facts, [5]))) == ["last_hidden_state", "pooler_output"]


# -- opening -----------------------------------------------------------------------------------------------------------


def test_another_device_is_refused(artifact: Artifact) -> None:
    with pytest.raises(CannotRunHere, match="traced on cpu and holds that device as constants; cuda was asked for"):
        backend.open(artifact, device="cuda")
    elsewhere = dataclasses.replace(artifact, made_by={"device": "cuda"})
    with pytest.raises(CannotRunHere, match=r"traced on cuda .*; cpu was asked for"):
        backend.open(elsewhere)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_traced_on_cuda_and_none_here(artifact: Artifact) -> None:
    with pytest.raises(CannotRunHere, match="there is no CUDA device here"):
        backend.open(dataclasses.replace(artifact, made_by={"device": "cuda"}), device="cuda")


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_damaged_file_is_a_drift(damage: str, artifact: Artifact, tmp_path: Path) -> None:
    content = artifact.path.read_bytes()
    spoiled = {"empty": b"", "cut": content[: len(content) // 2], "text": b"not an archive"}[damage]
    (tmp_path / "model.pt").write_bytes(spoiled)
    with pytest.raises(DriftError, match=r"^torch cannot open model\.pt: "):
        backend.open(dataclasses.replace(artifact, path=tmp_path / "model.pt"))


def test_provider_says_what_runs_it(artifact: Artifact) -> None:
    session = backend.open(artifact)
    assert session.provider == f"cpu (torch {torch.__version__})" and session.precision == "float32"
    session.close()
