"""What is told of, and refused about, a checkpoint's files before anything of them is loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nlpconvert.checkpoint import describe, remote_code, task_name
from nlpconvert.errors import UsageError
from tests import tiny


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.ROWS["bert"], tmp_path_factory.mktemp("checkpoint") / "bert")


@pytest.fixture
def directory(bert: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(bert, tmp_path / "model")


def edit(file: Path, **values: Any) -> None:
    """Sets values of a JSON file; None takes one out."""
    data = {**json.loads(file.read_text()), **values} if file.exists() else values
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def refused(model: str | Path, *words: str, **options: Any) -> None:
    """`describe` refuses in one line that holds all the words."""
    with pytest.raises(UsageError) as caught:
        describe(str(model), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def test_describes_without_torch(bert: Path) -> None:
    script = (
        "import sys; from nlpconvert.checkpoint import describe; info = describe(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules); print(info.task, info.sha256)"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(bert)], capture_output=True, text=True, check=True)
    info = describe(str(bert))
    assert ran.stdout.split() == ["text-classification", info.sha256]
    assert (info.own_task, info.model_type) == ("text-classification", "bert")
    assert info.architectures == ("BertForSequenceClassification",)
    assert set(info.files) == {"config.json", "model.safetensors"}


def test_hash_follows_what_decides_the_answers(bert: Path, directory: Path) -> None:
    before = describe(str(bert)).sha256
    assert describe(str(directory)).sha256 == before  # where it lies does not matter
    (directory / "README.md").write_text("about")
    (directory / "vocab.txt").write_text("[PAD]")
    assert describe(str(directory)).sha256 == before
    assert "vocab.txt" in describe(str(directory)).files
    edit(directory / "config.json", layer_norm_eps=1e-3)
    assert describe(str(directory)).sha256 != before
    shutil.copytree(bert, directory, dirs_exist_ok=True)
    assert describe(str(directory)).sha256 == before
    content = bytearray((directory / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (directory / "model.safetensors").write_bytes(content)
    assert describe(str(directory)).sha256 != before


def test_names_that_are_no_model(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path / "absent", "no directory", "absent")
    refused("a/b/c", "no directory", "a/b/c", "owner/name")
    refused("", "no directory")
    refused(bert / "config.json", "is a file", "directory")
    refused(bert, "--revision", "local directory", revision="main")


def test_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused("someone/some-model", "someone/some-model", "hub cannot be reached", "local directory")


def test_hub_id_from_the_cache(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, what was fetched once is found again, and the commit is recorded."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, repository = "a" * 40, tmp_path / "models--someone--some-model"
    shutil.copytree(bert, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for revision in (None, commit):
        info = describe("someone/some-model", revision=revision)
        assert (info.revision, info.sha256) == (commit, describe(str(bert)).sha256)


def test_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    refused(directory, "no config.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not JSON"), ("[1]", "no JSON object but a list"), ("{}", "no model_type"), ("\xff", "is not JSON")],
)
def test_config_that_is_none(directory: Path, content: str, words: str) -> None:
    (directory / "config.json").write_bytes(content.encode("latin-1"))
    refused(directory, "config.json", words)


def test_adapter_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    edit(directory / "adapter_config.json", peft_type="LORA", base_model_name_or_path="bert")
    refused(directory, "LoRA adapter", "merge")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    edit(adapter / "adapter_config.json", peft_type="LORA")
    refused(adapter, "LoRA adapter", "merge")


@pytest.mark.parametrize(
    ("model_type", "values", "word"),
    [
        ("longformer", {}, "window count"),
        ("led", {}, "window count"),
        ("funnel", {}, "pooling positions"),
        ("big_bird", {"attention_type": "block_sparse"}, "original_full"),
        ("big_bird", {}, "original_full"),  # the class's default is the refused value
        ("encoder-decoder", {"encoder": {"model_type": "longformer"}}, "longformer"),
    ],
)
def test_refused_architectures(directory: Path, model_type: str, values: dict[str, Any], word: str) -> None:
    edit(directory / "config.json", model_type=model_type, **values)
    refused(directory, "cannot be converted right", word)


def test_big_bird_with_full_attention_is_taken(directory: Path) -> None:
    edit(directory / "config.json", model_type="big_bird", attention_type="original_full")
    assert describe(str(directory)).model_type == "big_bird"


def test_quantized_weights_are_refused(directory: Path) -> None:
    edit(directory / "config.json", quantization_config={"quant_method": "gptq"})
    refused(directory, "gptq", "full-precision")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no whole safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-lfs pointer"),
        (b"nothing of the kind" * 100, "no whole safetensors file"),
    ],
)
def test_weights_that_are_none(directory: Path, content: bytes, words: str) -> None:
    (directory / "model.safetensors").write_bytes(content)
    refused(directory, "model.safetensors", words)


def test_truncated_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(directory, str(file), "no whole safetensors file")


def test_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "tf_model.h5")
    refused(directory, "no weights", "tf_model.h5", "other frameworks")
    (directory / "pytorch_model.bin").touch()
    refused(directory, "pytorch_model.bin", "empty")


def test_distributed_checkpoint(directory: Path) -> None:
    (directory / "shard-00001-model-00001-of-00001.safetensors").touch()
    refused(directory, "distributed", "save_pretrained")


def test_index(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    edit(index, weight_map={"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    refused(directory, index.name, "model-00002-of-00002.safetensors", "missing")
    for outside in ("../model.safetensors", "/etc/model.safetensors", "..\\model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        refused(directory, index.name, repr(outside), "outside")
    index.write_text("{}")
    refused(directory, index.name, "weight_map")


def test_weights_file_outside_is_refused(directory: Path) -> None:
    edit(directory / "config.json", transformers_weights="../other.safetensors")
    refused(directory, "outside")


def test_task(directory: Path) -> None:
    assert describe(str(directory), task="question-answering").task == "question-answering"  # judged when loaded
    assert task_name("ner") == "token-classification"
    refused(directory, "unknown task 'translate-me'", "fill-mask", task="translate-me")
    refused(directory, "modules.json", "feature-extraction", task="sentence-embedding")
    edit(directory / "config.json", architectures=None)
    refused(directory, "no architectures", "--task")
    assert describe(str(directory), task="fill-mask").own_task is None
    edit(directory / "config.json", architectures=["SomethingElse"])
    refused(directory, "SomethingElse", "--task")


def test_remote_code_is_named(directory: Path) -> None:
    assert remote_code(describe(str(directory))) == ()
    edit(directory / "config.json", auto_map={"AutoModel": "modeling_own.OwnModel", "AutoConfig": "sub.conf.OwnConfig"})
    edit(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "someone/code--tokenization.Own"]})
    assert remote_code(describe(str(directory))) == ("modeling_own.py", "sub/conf.py", "someone/code:tokenization.py")


def test_sentence_transformers(minilm: Path, tmp_path: Path) -> None:
    info = describe(str(minilm))
    assert info.task == "sentence-embedding"
    assert [module.kind for module in info.sentence] == ["Pooling", "Normalize"]
    assert {"modules.json", "1_Pooling/config.json", "tokenizer.json"} <= set(info.files)
    assert "256" in " ".join(info.notes)
    plain = describe(str(minilm), task="feature-extraction")
    assert plain.sentence == () and plain.sha256 != info.sha256  # pooling decides only where it is asked for


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ([{"type": "sentence_transformers.models.LSTM", "path": "1"}], "sentence_transformers.models.LSTM"),
        ([{"type": "own.Pooling", "path": "1_Pooling"}], "own.Pooling"),
        ([{"type": "sentence_transformers.models.Transformer", "path": "../x"}], "outside"),
        ([{"type": "sentence_transformers.models.Transformer", "path": ""}], "Transformer, Pooling"),
        ({"a": 1}, "module list"),
    ],
)
def test_sentence_modules_that_are_not_known(directory: Path, modules: Any, words: str) -> None:
    (directory / "modules.json").write_text(json.dumps(modules))
    refused(directory, "modules.json", words)


def test_errors_are_one_line(directory: Path) -> None:
    """A library's many lines stay in the detail."""
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{\n\n\n\n\n\n")
    refused(directory, "model.safetensors")
    assert re.fullmatch(r"[0-9a-f]{64}", describe(str(tiny.save(tiny.ROWS["gpt2"], directory.parent / "gpt2"))).sha256)
