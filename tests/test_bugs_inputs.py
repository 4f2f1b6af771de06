"""Public bug reports on inputs, outputs and heads (B): what we answer instead.

| report | what goes wrong | test |
|---|---|---|
| O-09 | inputs swapped by position | test_o09_*; test_torchscript.py::test_inputs_are_bound_by_keyword |
| O-10 a | token types lost | test_o10a_a_pair_is_not_two_halves_of_one_text |
| O-10 b | token types the tokenizer does not name | test_o10b_a_tokenizer_that_names_no_token_types |
| O-10 c | token types the model does not have | test_o10c_a_tokenizer_that_makes_too_many |
| O-10 d | one kind of token type | test_o10d_one_kind_is_no_input; test_source.py::test_heads |
| O-11 | left padding without positions | test_o11_left_padding |
| O-12 | the pad id decides positions | test_o12_masked_places_hold_the_pad_id |
| O-13 a | head missing | test_source.py::test_missing_head, test_head_that_was_never_trained |
| O-13 b | names with a prefix | test_source.py::test_prefixed_names |
| O-13 c | head that fits by name only | test_source.py::test_head_that_fits_by_name_only |
| O-13 d, e | own classes that initialise again | test_o13*; test_source.py::test_weights_changed_while_loading |
| O-14 | parity measured on padding | test_o14_*; test_parity.py::test_a_difference_in_padding_is_reported_apart |
| O-15 | remote code | test_o15_*; test_source.py::test_remote_code; test_checkpoint.py::test_remote_code_is_named |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from nlpconvert import forward, pipeline, probes, source
from nlpconvert.artifact import Artifact
from nlpconvert.convert import torchscript
from nlpconvert.errors import UsageError
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import CLOSE, ask, batch, loaded, make
from tests.test_bugs_shapes import MISTRAL

BERT = tiny.ROWS["bert"]


@pytest.fixture(scope="module", params=["torchscript", "onnx"])
def gpt2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Artifact]:
    folder = tmp_path_factory.mktemp("gpt2")
    model = loaded(tiny.ROWS["gpt2"], folder / "model")
    return model, make(request.param, model, folder / request.param)


def edit(file: Path, **values: Any) -> None:
    data = {**json.loads(file.read_text()), **values} if file.exists() else values
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def with_tokenizer(directory: Path, names: list[str]) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(115))]
    tokenizer = transformers.BertTokenizer(
        vocab={word: index for index, word in enumerate(words)}, model_input_names=names
    )
    tokenizer.save_pretrained(directory)
    return directory


# -- O-09 --------------------------------------------------------------------------------------------------------------


def test_o09_swapped_inputs_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that takes the token types for the mask makes a file that opens, runs and answers finite numbers."""
    own = torchscript._trace

    def swapping(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
        right = module.forward

        def wrong(**tensors: torch.Tensor) -> Any:
            mask, types = tensors["attention_mask"], tensors["token_type_ids"]
            return right(**{**tensors, "attention_mask": types, "token_type_ids": mask})

        module.forward = wrong
        try:
            return own(module, inputs)
        finally:
            module.forward = right

    monkeypatch.setattr(torchscript, "_trace", swapping)
    model = tiny.save(BERT, tmp_path / "model")
    (outcome,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"])
    assert outcome.status == "drift" and outcome.exit_code == 1
    assert outcome.verdict is not None
    (output,) = outcome.verdict["comparison"]["outputs"]
    assert output["worst"]["difference"] > 0.05 and output["problems"] == []


# -- O-10 --------------------------------------------------------------------------------------------------------------


def test_o10a_a_pair_is_not_two_halves_of_one_text(tmp_path: Path) -> None:
    model = loaded(BERT, tmp_path / "model")
    artifact = make("torchscript", model, tmp_path / "torchscript")
    assert [spec.name for spec in artifact.inputs] == ["input_ids", "token_type_ids", "attention_mask"]
    pair = batch(model.facts, [12])
    assert set(pair["token_type_ids"][0]) == {0, 1}
    one = {**pair, "token_type_ids": np.zeros_like(pair["token_type_ids"])}
    answers = ask(artifact, pair)["logits"], ask(artifact, one)["logits"]
    assert np.abs(answers[0] - answers[1]).max() > 0.01
    for asked, answer in zip((pair, one), answers, strict=True):
        np.testing.assert_allclose(answer, forward.call(model.module, asked)["logits"], **CLOSE)


def test_o10b_a_tokenizer_that_names_no_token_types(tmp_path: Path) -> None:
    """The model has two kinds of token, so they stay an input, and the probes' pairs use both."""
    with_tokenizer(tiny.save(BERT, tmp_path), ["input_ids", "attention_mask"])
    model = source.load(str(tmp_path))
    assert model.encode is not None and "token_type_ids" in model.facts.inputs
    pairs = {case.name: case for case in probes.probe_cases(model.facts, model.encode)}["pairs"]
    types, mask = pairs.inputs["token_type_ids"], pairs.inputs["attention_mask"]
    assert set(types[mask == 1]) == {0, 1} and not types[mask == 0].any()


def test_o10c_a_tokenizer_that_makes_too_many(tmp_path: Path) -> None:
    """DeBERTa-v2 with type_vocab_size 0: what the tokenizer makes is not an input, and nobody asks for it."""
    names = ["input_ids", "token_type_ids", "attention_mask"]
    model = source.load(str(with_tokenizer(tiny.save(tiny.ROWS["deberta-v2"], tmp_path / "model"), names)))
    artifact = make("torchscript", model, tmp_path / "torchscript")
    assert [spec.name for spec in artifact.inputs] == ["input_ids", "attention_mask"]
    asked = probes.probe_cases(model.facts, model.encode)[0].inputs
    assert list(asked) == ["input_ids", "attention_mask"]
    np.testing.assert_allclose(ask(artifact, asked)["logits"], forward.call(model.module, asked)["logits"], **CLOSE)


def test_o10d_one_kind_is_no_input(tmp_path: Path) -> None:
    model = loaded(tiny.ROWS["roberta"], tmp_path, type_vocab_size=1)
    assert model.facts.inputs == ("input_ids", "attention_mask") and model.facts.type_vocab_size == 0


# -- O-11, O-12 --------------------------------------------------------------------------------------------------------


def test_o11_left_padding(gpt2: tuple[Loaded, Artifact]) -> None:
    """Without positions the last token's logits of a left-padded row are off by 2, in PyTorch and artifact alike."""
    model, artifact = gpt2
    alone, padded = batch(model.facts, [6]), batch(model.facts, [6, 10], left=True)
    assert padded["attention_mask"][0].tolist() == [0] * 4 + [1] * 6
    expected = forward.call(model.module, alone)["logits"][0]
    np.testing.assert_allclose(ask(artifact, padded)["logits"][0, 4:], expected, **CLOSE)
    # And the positions are what does it.
    padded["position_ids"][0] = np.arange(10)
    assert np.abs(ask(artifact, padded)["logits"][0, -1] - expected[-1]).max() > 0.1


def test_o11_left_padding_is_among_the_probes(gpt2: tuple[Loaded, Artifact]) -> None:
    cases = {case.name: case for case in probes.probe_cases(gpt2[0].facts, None)}
    (twin,) = cases["extra-padding-left"].twins
    assert twin.case == "alone" and cases["extra-padding-left"].inputs["attention_mask"][0, 0] == 0


def test_o12_masked_places_hold_the_pad_id(tmp_path: Path) -> None:
    """RoBERTa counts positions by the pad id: any other id at a masked place moves the tokens after it."""
    row = tiny.Tiny("", "RobertaModel", "RobertaConfig", {**tiny.S, **tiny.ROBERTA})
    model = loaded(row, tmp_path / "model")
    assert model.facts.pad_id == 1
    cases = [case.inputs for case in probes.probe_cases(model.facts, None)]
    for inputs in (*cases, probes.export_example(model.facts, None)):
        assert (inputs["input_ids"][inputs["attention_mask"] == 0] == 1).all()
    artifact = make("torchscript", model, tmp_path / "torchscript")
    left = batch(model.facts, [6, 10], left=True)
    expected = forward.call(model.module, batch(model.facts, [6]))["last_hidden_state"][0]
    np.testing.assert_allclose(ask(artifact, left)["last_hidden_state"][0, 4:], expected, **CLOSE)
    left["input_ids"][0, :4] = 0
    assert np.abs(ask(artifact, left)["last_hidden_state"][0, 4:] - expected).max() > 0.05


# -- O-13: classes of the checkpoint's own -----------------------------------------------------------------------------

OWN = """
import torch
from transformers import BertConfig, BertModel, BertPreTrainedModel

class OwnClassifier(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config)
        self.head = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 3))
        {post_init}

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_()

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, return_dict=None):
        state = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).pooler_output
        return {{"logits": self.head(state)}}
"""


def own_model(directory: Path, monkeypatch: pytest.MonkeyPatch, post_init: str) -> Path:
    """A checkpoint with a two-layer head of its own code, every weight stored."""
    from safetensors.torch import save_file

    base = tiny.build(tiny.Tiny("", "BertModel", "BertConfig", {**tiny.S, "max_position_embeddings": 64}))
    base.save_pretrained(directory)  # type: ignore[operator]
    head = tiny.scale(torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 3)))
    stored = {f"bert.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    stored |= {f"head.{name}": tensor.detach().clone() for name, tensor in head.state_dict().items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "modeling_own.py").write_text(OWN.format(post_init=post_init))
    auto_map = {"AutoModelForSequenceClassification": "modeling_own.OwnClassifier"}
    edit(directory / "config.json", architectures=["BertForSequenceClassification"], auto_map=auto_map, num_labels=3)
    modules = directory.parent / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    return directory


def test_o13d_init_weights_through_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `_init_weights` that writes through `.data` gets past transformers' guard; the stored values must survive."""
    model = own_model(tmp_path / "model", monkeypatch, "self.post_init()")
    reference = source.load(str(model), trust_remote_code=True)
    assert type(reference.module).__name__ == "OwnClassifier"
    stored = load_file(model / "model.safetensors")
    assert reference.description["compared"] == len(stored)
    for name, tensor in reference.module.state_dict().items():
        assert name not in stored or torch.equal(tensor, stored[name]), name
    options = pipeline.Options(trust_remote_code=True)
    (outcome,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"], options=options)
    assert outcome.status == "agrees", (
        outcome.reason
    )  # also where the code's hash, a part of its name, starts with a digit


def test_o13e_a_class_without_post_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers crashes on a missing inner attribute: that is one line about the checkpoint, and no traceback."""
    model = own_model(tmp_path / "model", monkeypatch, "pass")
    with pytest.raises(UsageError) as caught:
        source.load(str(model), trust_remote_code=True)
    message = str(caught.value)
    assert "cannot be loaded as text-classification" in message and "\n" not in message, message


# -- O-14, O-15 --------------------------------------------------------------------------------------------------------


def test_o14_padding_of_a_sliding_window_is_reported_apart(tmp_path: Path) -> None:
    """Mistral with a window of 4: real tokens decide, padded ones have a line of their own, both are finite."""
    model = tiny.save(MISTRAL, tmp_path / "model")
    (outcome,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"])
    assert outcome.status == "agrees" and outcome.verdict is not None
    (output,) = outcome.verdict["comparison"]["outputs"]
    assert output["padded"] is not None and output["padded_nonfinite"] == 0
    asked = batch(loaded(MISTRAL, tmp_path / "again").facts, [12, 8, 4], left=True)
    assert np.isfinite(ask(outcome.artifact, asked)["logits"]).all()  # type: ignore[arg-type]


def test_o14_a_difference_in_padding_alone_is_no_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were padding scored, this would fail; were real tokens not, an artifact that is wrong there would pass."""
    from nlpconvert.backends.torchscript import TorchScriptSession

    own = TorchScriptSession.run
    place = 0

    def moved(self: Any, asked: Any) -> Any:
        answers = own(self, asked)
        answers["logits"] = answers["logits"] + 3.0 * (asked["attention_mask"] == place)[..., None]
        return {name: array.astype(np.float32) for name, array in answers.items()}

    monkeypatch.setattr(TorchScriptSession, "run", moved)
    model = tiny.save(MISTRAL, tmp_path / "model")
    (outcome,) = pipeline.run(str(model), tmp_path / "padded", to=["torchscript"])
    assert outcome.status == "agrees" and outcome.verdict is not None
    assert outcome.verdict["comparison"]["outputs"][0]["padded"]["difference"] == pytest.approx(3.0, abs=1e-4)
    place = 1
    (outcome,) = pipeline.run(str(model), tmp_path / "real", to=["torchscript"])
    assert outcome.status == "drift"


def test_o15_remote_code_is_refused_before_anything_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = own_model(tmp_path / "model", monkeypatch, "self.post_init()")
    with pytest.raises(UsageError, match=r"wants to run its own code \(modeling_own\.py\)"):
        pipeline.run(str(model), tmp_path / "out")
    assert not (tmp_path / "out" / "nlpconvert.json").exists()
    assert not (tmp_path / "modules").exists()
