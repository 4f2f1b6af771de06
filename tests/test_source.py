"""Loading a checkpoint: what is taken, what is refused in one line, and what the rest of the house is told of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nlpconvert.errors import MissingPackage, NlpconvertError, UsageError
from nlpconvert.source import Loaded, call, load
from tests import tiny

BERT = {**tiny.S, "max_position_embeddings": 64}
LABELS = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}


def save(directory: Path, model: str, config: str = "BertConfig", **values: Any) -> Path:
    row = tiny.Tiny("", model, config, values or BERT)
    return tiny.save(row, directory)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A three-label sequence classifier; never written to (`directory` is a copy)."""
    return save(tmp_path_factory.mktemp("classifier") / "m", "BertForSequenceClassification", **BERT, **LABELS)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("masked") / "m", "BertForMaskedLM")


@pytest.fixture
def directory(classifier: Path, tmp_path: Path) -> Path:
    return shutil.copytree(classifier, tmp_path / "model")


def edit(file: Path, **values: Any) -> None:
    data = {**json.loads(file.read_text()), **values} if file.exists() else values
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def rewrite(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def refused(model: Path, *words: str, kind: type[NlpconvertError] = UsageError, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        load(str(model), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def batch(loaded: Loaded, rows: int = 3, length: int = 7) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(6, 120, (rows, length))
    if loaded.facts.required_token is not None:
        ids[:, -1] = loaded.facts.required_token
    made = {name: np.ones_like(ids) if "mask" in name else ids for name in loaded.facts.inputs}
    made |= {name: ids % 2 for name in made if name == "token_type_ids"}
    return made | {name: np.tile(np.arange(length), (rows, 1)) for name in made if name == "position_ids"}


# -- what is taken -----------------------------------------------------------------------------------------------------


def test_loads_the_reference(classifier: Path) -> None:
    loaded = load(str(classifier))
    with torch.no_grad():
        tensors = {name: torch.tensor(array) for name, array in batch(loaded).items()}
        own = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()(**tensors)
    np.testing.assert_array_equal(call(loaded.module, batch(loaded))["logits"], own.logits.numpy())
    assert type(loaded.module) is transformers.BertForSequenceClassification
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    said = loaded.description
    assert json.loads(json.dumps(said)) == said
    assert said["path"] == str(classifier) and said["revision"] is None
    assert (said["class"], said["model_type"], said["task"]) == (
        "BertForSequenceClassification",
        "bert",
        loaded.facts.task,
    )
    assert said["compared"] == len(load_file(classifier / "model.safetensors"))
    count = sum(parameter.numel() for parameter in loaded.module.parameters())
    assert (said["parameters"], loaded.parameter_bytes, said["parameter_bytes"]) == (count, 4 * count, 4 * count)
    assert loaded.encode is None and any("no tokenizer" in note for note in loaded.notes)


# Name of a row in tests/tiny.py, or (model class, config class, values): task, inputs and outputs that it must get.
TOKENS = ("input_ids", "attention_mask")
TYPED = ("input_ids", "token_type_ids", "attention_mask")
PLACED = ("input_ids", "attention_mask", "position_ids")
BOTH = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
ROBERTA = {**tiny.S, **tiny.ROBERTA, "type_vocab_size": 1}
T5 = tiny.ROWS["t5"].values
TAKEN: list[tuple[str | tuple[str, str, dict[str, Any]], str, tuple[str, ...], tuple[str, ...]]] = [
    (("BertModel", "BertConfig", BERT), "feature-extraction", TYPED, ("last_hidden_state", "pooler_output")),
    (("BertForMaskedLM", "BertConfig", BERT), "fill-mask", TYPED, ("logits",)),
    (("BertForMultipleChoice", "BertConfig", BERT), "multiple-choice", TYPED, ("logits",)),
    (("BertForQuestionAnswering", "BertConfig", BERT), "question-answering", TYPED, ("start_logits", "end_logits")),
    (("RobertaForSequenceClassification", "RobertaConfig", ROBERTA), "text-classification", TOKENS, ("logits",)),
    ("deberta-v2", "text-classification", TOKENS, ("logits",)),
    ("distilbert", "text-classification", TOKENS, ("logits",)),
    ("electra", "token-classification", TYPED, ("logits",)),
    ("mpnet", "feature-extraction", TOKENS, ("last_hidden_state", "pooler_output")),
    ("gpt2", "text-generation", PLACED, ("logits",)),
    ("llama", "text-generation", PLACED, ("logits",)),
    ("bloom", "text-generation", TOKENS, ("logits",)),
    (("GPT2Model", "GPT2Config", {**tiny.GPT, **tiny.PADS}), "feature-extraction", PLACED, ("last_hidden_state",)),
    ("t5", "text2text-generation", BOTH, ("logits", "encoder_last_hidden_state")),
    ("bart", "text2text-generation", BOTH, ("logits", "encoder_last_hidden_state")),
    (
        ("BartModel", "BartConfig", tiny.BART),
        "feature-extraction",
        BOTH,
        ("last_hidden_state", "encoder_last_hidden_state"),
    ),
    (("BartForSequenceClassification", "BartConfig", tiny.BART), "text-classification", TOKENS, ("logits",)),
    (("T5EncoderModel", "T5Config", T5), "feature-extraction", TOKENS, ("last_hidden_state",)),
]


@pytest.mark.parametrize(("row", "task", "inputs", "outputs"), TAKEN, ids=lambda each: str(each[0]))
def test_heads(row: Any, task: str, inputs: tuple[str, ...], outputs: tuple[str, ...], tmp_path: Path) -> None:
    tiny.save(tiny.ROWS[row] if isinstance(row, str) else tiny.Tiny("", *row), tmp_path)
    loaded = load(str(tmp_path))
    assert (loaded.facts.task, loaded.facts.inputs) == (task, inputs)
    assert tuple(each.name for each in loaded.facts.outputs) == outputs
    made = batch(loaded)
    if task == "multiple-choice":
        made = {name: np.stack([array, array], 1) for name, array in made.items()}
    assert tuple(call(loaded.module, made)) == outputs


def test_sharded(tmp_path: Path, classifier: Path) -> None:
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(classifier)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded, whole = load(str(tmp_path)), load(str(classifier))
    np.testing.assert_array_equal(*(call(each.module, batch(each))["logits"] for each in (loaded, whole)))
    assert loaded.description["compared"] == whole.description["compared"]


def test_pickled(directory: Path, classifier: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    loaded, whole = load(str(directory)), load(str(classifier))
    np.testing.assert_array_equal(*(call(each.module, batch(each))["logits"] for each in (loaded, whole)))
    assert "pytorch_model.bin" in loaded.description["files"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_is_float32(directory: Path, dtype: torch.dtype) -> None:
    rewrite(directory, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    edit(directory / "config.json", dtype=str(dtype).removeprefix("torch."))
    loaded = load(str(directory))
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.float32}
    assert loaded.description["dtype"] == str(dtype).removeprefix("torch.")
    assert any("computes in float32" in note for note in loaded.notes)
    assert call(loaded.module, batch(loaded))["logits"].dtype == np.float32


def test_sentence_transformers(minilm: Path) -> None:
    loaded = load(str(minilm))
    assert [row.name for row in loaded.facts.outputs] == ["sentence_embedding", "last_hidden_state"]
    assert loaded.encode is not None
    short, long = loaded.encode("A cat.", None), loaded.encode("A much longer sentence about a dog.", None)
    assert short["input_ids"][0] == 101 and short["input_ids"][-1] == 102
    width = len(long["input_ids"])
    made = {
        name: np.array(
            [
                list(each.get(name, [1] * len(each["input_ids"]))) + [0] * (width - len(each["input_ids"]))
                for each in (short, long)
            ]
        )
        for name in loaded.facts.inputs
    }
    answers = call(loaded.module, made)
    states, mask = answers["last_hidden_state"], made["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    np.testing.assert_allclose(
        answers["sentence_embedding"], mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=1e-6
    )
    assert loaded.facts.max_length == 512
    assert len(loaded.encode("word " * 900, None)["input_ids"]) == 512
    assert loaded.encode("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]


# -- weights that are missing, contradicted or changed -----------------------------------------------------------------


def test_pooler_of_a_masked_model_is_dropped(masked: Path) -> None:
    loaded = load(str(masked), task="feature-extraction")
    assert [row.name for row in loaded.facts.outputs] == ["last_hidden_state"]
    assert list(call(loaded.module, batch(loaded))) == ["last_hidden_state"]
    assert any(
        note.startswith("pooler_output is dropped: pooler.dense.bias, pooler.dense.weight") for note in loaded.notes
    )
    assert loaded.description["not_in_file"] == ["pooler.dense.weight", "pooler.dense.bias"]
    assert any(name.startswith("cls.") for name in loaded.description["not_loaded"])
    pooler = 4 * (32 * 32 + 32)
    assert loaded.parameter_bytes == 4 * sum(p.numel() for p in loaded.module.parameters()) - pooler


def test_missing_head(directory: Path) -> None:
    words = (
        "text-classification model (BertForSequenceClassification)",
        "question-answering",
        "random values",
        "qa_outputs",
    )
    refused(directory, *words, "--allow-missing-weights", task="question-answering")
    edit(directory / "config.json", id2label=None, label2id=None)  # a head for three answers does not even run
    rewrite(directory, lambda tensors: {name: tensor for name, tensor in tensors.items() if "classifier" not in name})
    loaded = load(str(directory), task="question-answering", allow_missing_weights=True)
    assert any(note.startswith("taken by --allow-missing-weights") and "qa_outputs" in note for note in loaded.notes)
    again = load(str(directory), task="question-answering", allow_missing_weights=True)
    np.testing.assert_array_equal(*(call(each.module, batch(each))["start_logits"] for each in (loaded, again)))


def test_head_that_was_never_trained(tmp_path: Path) -> None:
    save(tmp_path, "BertModel")
    refused(tmp_path, "no trained BertForMaskedLM", "cls.predictions", task="fill-mask")


def test_prefixed_names(directory: Path) -> None:
    rewrite(directory, lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()})
    refused(directory, "41 of 41 weights", "starts with 'module.'")


def test_head_that_fits_by_name_only(directory: Path) -> None:
    """A sequence head has a token head's names and shapes: only config.architectures tells."""
    refused(directory, "text-classification", "token-classification", "by name only", task="token-classification")
    loaded = load(str(directory), task="token-classification", allow_missing_weights=True)
    assert any("by name only" in note for note in loaded.notes)


def test_base_model_with_a_tied_head_is_whole(tmp_path: Path) -> None:
    save(tmp_path, "GPT2Model", "GPT2Config", **tiny.GPT, **tiny.PADS)
    loaded = load(str(tmp_path), task="text-generation")
    assert loaded.description["not_in_file"] == [] and loaded.description["not_loaded"] == []
    assert loaded.description["tied"] == [["transformer.wte.weight", "lm_head.weight"]]
    assert loaded.parameter_bytes == 4 * sum(parameter.numel() for parameter in loaded.module.parameters())


def test_number_of_labels_that_contradicts_the_weights(directory: Path) -> None:
    edit(directory / "config.json", id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    refused(directory, "classifier.", "(3,", "(2,", allow_missing_weights=True)


def test_weights_changed_while_loading(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What O-13 is about: loading ends with a clean report, and a tensor is not the file's."""
    own = transformers.BertForSequenceClassification.eval

    def tampering(self: Any) -> Any:
        with torch.no_grad():
            self.bert.encoder.layer[0].output.dense.bias[3] += 1e-5
        return own(self)

    monkeypatch.setattr(transformers.BertForSequenceClassification, "eval", tampering)
    refused(directory, "bert.encoder.layer.0.output.dense.bias", "other values")


def test_ties_that_the_file_contradicts(directory: Path, tmp_path: Path) -> None:
    gpt2 = tiny.save(tiny.ROWS["gpt2"], tmp_path / "gpt2")
    rewrite(gpt2, lambda tensors: {**tensors, "lm_head.weight": torch.ones(120, 32)})
    try:
        loaded = load(str(gpt2))
    except UsageError as error:
        assert "lm_head.weight" in str(error)
    else:  # then it must be the file's
        assert torch.equal(loaded.module.state_dict()["lm_head.weight"], torch.ones(120, 32))


# -- other bad input ---------------------------------------------------------------------------------------------------


def test_unknown_model_type(directory: Path) -> None:
    edit(directory / "config.json", model_type="bertt")
    refused(directory, "'bertt'", transformers.__version__, "'bert'", "upgrade")


def test_config_that_is_not_valid(directory: Path) -> None:
    edit(directory / "config.json", hidden_size="wide")
    refused(directory, "config.json", "no valid bert config")


def test_task_that_the_model_type_has_not(tmp_path: Path) -> None:
    refused(
        tiny.save(tiny.ROWS["gpt2"], tmp_path), "gpt2 has no model for fill-mask", "text-generation", task="fill-mask"
    )


def test_model_that_is_not_of_text(tmp_path: Path) -> None:
    values = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 8,
    }
    save(tmp_path, "ViTModel", "ViTConfig", **values, patch_size=4)
    refused(tmp_path, "ViTModel takes no input_ids")


def test_device_that_is_not_there(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(classifier, "cuda", "--device cpu", kind=MissingPackage, device="cuda")


CODE = """
from pathlib import Path
import transformers
Path({trace!r}).touch()
class OwnModel(transformers.BertModel):
    pass
"""


def test_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, trace = save(tmp_path / "model", "BertModel"), tmp_path / "trace"
    (model / "modeling_own.py").write_text(CODE.format(trace=str(trace)))
    edit(model / "config.json", auto_map={"AutoModel": "modeling_own.OwnModel"})
    refused(model, "modeling_own.py", "--trust-remote-code")
    assert not trace.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    loaded = load(str(model), trust_remote_code=True)
    assert trace.exists() and type(loaded.module).__name__ == "OwnModel"


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def test_pickle_that_runs_code(directory: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    tensors: dict[str, Any] = dict(load_file(directory / "model.safetensors"))
    torch.save({**tensors, "evil": Evil(trace)}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    refused(directory, "pytorch_model.bin", "refused")
    assert not trace.exists()


def test_attention_kernels_are_not_fetched(directory: Path) -> None:
    edit(directory / "config.json", attn_implementation="someone/kernel")
    loaded = load(str(directory))
    assert any("someone/kernel" in note for note in loaded.notes)
    assert loaded.module.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


# -- facts -------------------------------------------------------------------------------------------------------------


def test_true_limit_of_roberta(tmp_path: Path) -> None:
    save(tmp_path, "RobertaForMaskedLM", "RobertaConfig", **{**ROBERTA, "max_position_embeddings": 40})
    loaded = load(str(tmp_path))
    assert (loaded.facts.max_length, loaded.facts.pad_id, loaded.facts.positions) == (38, 1, "pad")
    call(loaded.module, batch(loaded, length=38))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        call(loaded.module, batch(loaded, length=39))


def test_facts_of_decoders_and_pairs(tmp_path: Path) -> None:
    facts = load(str(tiny.save(tiny.ROWS["t5"], tmp_path / "t5"))).facts
    assert (facts.decoder_start_id, facts.pad_id, facts.eos_id, facts.max_length) == (0, 0, 1, None)
    assert facts.constants == (8, 16)
    facts = load(str(save(tmp_path / "bart", "BartForSequenceClassification", "BartConfig", **tiny.BART))).facts
    assert (facts.required_token, facts.decoder_start_id) == (2, None)
    facts = load(str(tiny.save(tiny.ROWS["gemma3"], tmp_path / "gemma3"))).facts
    assert (facts.constants, facts.positions, facts.pairs) == ((8,), "mask", False)
    facts = load(str(tiny.save(tiny.ROWS["bert"], tmp_path / "bert"))).facts
    assert (facts.pairs, facts.type_vocab_size, facts.vocab_size) == (True, 2, 120)


def test_pad_falls_back_to_eos(tmp_path: Path) -> None:
    values = {**tiny.GPT, "bos_token_id": 1, "eos_token_id": 2}
    save(tmp_path, "GPT2ForSequenceClassification", "GPT2Config", **values, pad_token_id=0)
    edit(tmp_path / "config.json", pad_token_id=None)
    loaded = load(str(tmp_path))
    assert (loaded.facts.pad_id, loaded.facts.eos_id) == (2, 2)
    assert call(loaded.module, batch(loaded))["logits"].shape == (3, 2)  # without a pad id it raises for three rows


@pytest.mark.parametrize(
    ("values", "measure"),
    [({"num_labels": 1}, "score"), ({"problem_type": "multi_label_classification"}, "score"), ({}, "decisions")],
)
def test_labels_that_are_no_decision(tmp_path: Path, values: dict[str, Any], measure: str) -> None:
    loaded = load(str(save(tmp_path, "BertForSequenceClassification", **BERT, **values)))
    assert loaded.facts.outputs[0].measure == measure


# -- tokenizers --------------------------------------------------------------------------------------------------------


def with_tokenizer(directory: Path, entries: int) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(entries - 5))]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    tokenizer.save_pretrained(directory)
    return directory


def test_encodes(directory: Path) -> None:
    loaded = load(str(with_tokenizer(directory, 120)))
    assert loaded.encode is not None and loaded.facts.special_ids == (0, 1, 2, 3, 4)
    assert loaded.encode("w0 w1", "w2") == {"input_ids": [2, 5, 6, 3, 7, 3], "token_type_ids": [0, 0, 0, 0, 1, 1]}
    assert loaded.encode("", None)["input_ids"] == [2, 3]
    assert len(loaded.encode("w0 " * 100, "w1 " * 100)["input_ids"]) == 64 == loaded.facts.max_length
    assert not [note for note in loaded.notes if "tokenizer" in note]


def test_empty_text_without_special_tokens(tmp_path: Path) -> None:
    """A GPT-like tokenizer makes nothing of nothing; no token is invented."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny.save(tiny.ROWS["gpt2"], tmp_path)
    raw = Tokenizer(models.WordLevel({f"w{index}": index for index in range(120)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert loaded.encode is not None
    assert loaded.encode("", None) == {"input_ids": []}
    assert loaded.encode("w7 w9", None) == {"input_ids": [7, 9]}


def test_tokenizer_with_more_entries_than_rows(directory: Path) -> None:
    refused(with_tokenizer(directory, 122), "122 entries", "120 embedding rows", "'w115' (120), 'w116' (121)")


def test_tokenizer_with_fewer_entries_than_rows(directory: Path) -> None:
    loaded = load(str(with_tokenizer(directory, 117)))
    assert "the tokenizer has 117 entries, the model 120 embedding rows" in loaded.notes


def test_tokenizer_that_is_broken(directory: Path) -> None:
    (with_tokenizer(directory, 120) / "tokenizer.json").write_text("{")
    refused(directory, "tokenizer", "cannot be loaded")


def test_tokenizer_without_vocabulary(directory: Path) -> None:
    (with_tokenizer(directory, 120) / "tokenizer.json").unlink()
    loaded = load(str(directory))
    assert loaded.encode is None and any("no vocabulary" in note for note in loaded.notes)
