"""Floor 2: the files of a checkpoint: where they are, what they say they are, what is refused before any is loaded.

Nothing here imports torch or runs a line of the checkpoint: JSON, safetensors headers and hashes. So `describe` is
quick enough to tell an output directory of another source before any work. What is made of the files is `source`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from nlpconvert.errors import UsageError
from nlpconvert.models import TASK_ALIASES, TASKS, TOKENIZER_FILES, architecture, task_of

# The kinds of module a sentence-transformers directory may chain, by the last part of their type.
SENTENCE_MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")

# What is fetched of a hub repository: everything small, then safetensors or, failing that, the pickled weights.
_SMALL = ("*.json", "*.txt", "*.model", "*.spm", "*.codes", "*.py")
_SAFETENSORS = ("model*.safetensors", "*/model.safetensors")
_PICKLED = ("pytorch_model*.bin", "*/pytorch_model.bin")


@dataclass(frozen=True)
class SentenceModule:
    """One module of a sentence-transformers directory after the transformer: its kind, its settings, its folder."""

    kind: str
    settings: Mapping[str, Any]
    directory: Path


@dataclass(frozen=True)
class SourceInfo:
    """What can be told of a checkpoint without loading it.

    `directory` is the checkpoint's, `transformer` the folder with config.json (another one in some directories of
    sentence-transformers). `own_task` is the task config.architectures stands for (None when it says nothing), `task`
    the one to convert for. `weights` are the transformer's weight files. `files` gives the sha256 of config, tokenizer,
    module and weight files by path relative to `directory`; `sha256` is the hash over those that decide the answers:
    config, modules and weights.
    """

    model: str
    directory: Path
    transformer: Path
    revision: str | None
    config: Mapping[str, Any]
    task: str
    own_task: str | None
    weights: tuple[Path, ...]
    sentence: tuple[SentenceModule, ...]
    files: Mapping[str, str]
    sha256: str
    notes: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """The model type config.json names."""
        return str(self.config["model_type"])

    @property
    def architectures(self) -> tuple[str, ...]:
        """The class names config.json holds, none when it holds none."""
        return _architectures(self.config)


def describe(model: str, *, revision: str | None = None, task: str | None = None) -> SourceInfo:
    """What a local directory or a hub id holds, with its hash and its task; no weights are loaded.

    Raises UsageError (one line) for whatever is wrong with the name, the files or the task, and for architectures that
    cannot be converted right. A hub id is fetched first, as far as it is not in the hub's cache.
    """
    asked = task_name(task) if task else None
    directory, commit = _locate(model, revision)
    modules = _sentence_modules(directory)
    transformer = modules[0].directory if modules else directory
    config = _config(directory, transformer)
    _refuse(config, model)
    architectures = _architectures(config)
    own = task_of(architectures[0]) if architectures else None
    chosen = _choose_task(asked, own, bool(modules), model, architectures)
    sentence = modules[1:] if chosen == "sentence-embedding" else ()
    weights = _weights(transformer, config)
    deciding = [transformer / "config.json", *weights]
    if sentence:
        deciding += [
            directory / "modules.json",
            *(file for module in sentence for file in _own_files(module.directory)),
        ]
    others = [transformer / name for name in (*TOKENIZER_FILES, "generation_config.json", "sentence_bert_config.json")]
    others.append(directory / "config_sentence_transformers.json")
    deciding = [file for file in deciding if file.is_file()]
    files = {_relative(file, directory): _sha256(file) for file in (*deciding, *others) if file.is_file()}
    return SourceInfo(
        model=model,
        directory=directory,
        transformer=transformer,
        revision=commit,
        config=config,
        task=chosen,
        own_task=own,
        weights=weights,
        sentence=tuple(sentence),
        files=files,
        sha256=_combined({name: files[name] for name in (_relative(file, directory) for file in deciding)}),
        notes=_sentence_notes(directory, transformer) if sentence else (),
    )


def task_name(word: str) -> str:
    """A task's own name, from it or from one of the words people use for it; UsageError lists the tasks."""
    name = TASK_ALIASES.get(word, word)
    if name not in TASKS:
        raise UsageError(f"unknown task {word!r}: the tasks are {', '.join(TASKS)}")
    return name


def remote_code(info: SourceInfo) -> tuple[str, ...]:
    """The Python files that loading with trust would execute: what auto_map of the config and the tokenizer name."""
    maps = [info.config.get("auto_map")]
    tokenizer_config = info.transformer / "tokenizer_config.json"
    if tokenizer_config.is_file():
        maps.append(read_json(tokenizer_config).get("auto_map"))
    files: list[str] = []
    for reference in _strings(maps):
        repository, _, dotted = reference.rpartition("--")
        file = dotted.rpartition(".")[0].replace(".", "/") + ".py"
        files.append(f"{repository}:{file}" if repository else file)
    return tuple(dict.fromkeys(files))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; UsageError names the file that is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file} holds no JSON object but a {type(value).__name__}")
    return value


def few(names: Sequence[str], most: int = 4) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# -- where it is -------------------------------------------------------------------------------------------------------


def _locate(model: str, revision: str | None) -> tuple[Path, str | None]:
    path = Path(model).expanduser()
    if model and path.is_dir():
        if revision is not None:
            raise UsageError(f"--revision belongs to a hub id, and {model} is a local directory: leave it out")
        return path.resolve(), None
    if model and path.exists():
        raise UsageError(f"{model} is a file: give the directory that holds config.json and the weights")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", model):
        raise UsageError(f"there is no directory {model!r}, and that is no hub id (owner/name) either")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(patterns: tuple[str, ...]) -> Path:
        ignored = ("onnx/*", "openvino/*", "original/*")
        return Path(snapshot_download(model, revision=revision, allow_patterns=[*patterns], ignore_patterns=[*ignored]))

    try:
        directory = fetch(_SMALL)
        for patterns in (_SAFETENSORS, _PICKLED):
            fetch(patterns)
            if any(file for pattern in patterns for file in directory.glob(pattern)):
                break
    except GatedRepoError as error:
        raise UsageError(f"{model} is gated on the hub: accept its terms there and log in (hf auth login)") from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"no directory {model} here and no such model on the hub (or it is private: log in)"
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{model} has no revision {revision!r} on the hub") from error
    except HFValidationError as error:
        raise UsageError(f"there is no directory {model!r}, and that is no hub id: {first_line(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        raise UsageError(
            f"no directory {model} here, and the hub cannot be reached for it: give a local directory, or go online",
            detail=str(error),
        ) from error
    return directory, directory.name


# -- what it says it is ------------------------------------------------------------------------------------------------


def _config(directory: Path, transformer: Path) -> dict[str, Any]:
    if (directory / "adapter_config.json").is_file():
        raise UsageError(
            f"{directory} is a LoRA adapter (adapter_config.json), not a model: merge it into its base model "
            "(peft's merge_and_unload, then save_pretrained) and convert that"
        )
    file = transformer / "config.json"
    if not file.is_file():
        raise UsageError(f"{transformer} holds no config.json: give the directory of a Hugging Face checkpoint")
    config = read_json(file)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise UsageError(f"{file} names no model_type: it is not the config of a transformers model")
    return config


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _refuse(config: Mapping[str, Any], model: str) -> None:
    """Architectures whose export is known to answer wrongly (also as a part of another), and quantized weights."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        row = architecture(str(part.get("model_type", "")))
        # An attribute that config.json leaves out has the class's default: the value that the rows refuse.
        if row.refused and all(part.get(key, value) == value for key, value in (row.refused_when or {}).items()):
            raise UsageError(f"{model}: {row.model_type} cannot be converted right: {row.refused}")
    quantized = config.get("quantization_config") or config.get("compression_config")
    if isinstance(quantized, dict):
        method = quantized.get("quant_method", "quantized")
        raise UsageError(f"{model} holds {method} weights: convert the full-precision checkpoint it was made from")


def _choose_task(
    asked: str | None, own: str | None, is_sentence: bool, model: str, architectures: tuple[str, ...]
) -> str:
    """--task, else what the files say. Whether the two contradict is told when the weights are known."""
    if asked == "sentence-embedding" and not is_sentence:
        raise UsageError(
            f"{model} has no modules.json, so how its tokens are pooled is not known: use --task feature-extraction"
        )
    chosen = asked or ("sentence-embedding" if is_sentence else own)
    if chosen is None:
        said = f"names {architectures[0]}, whose task is not known" if architectures else "names no architectures"
        raise UsageError(f"config.json of {model} {said}: give --task ({', '.join(TASKS)})")
    return chosen


def _sentence_modules(directory: Path) -> tuple[SentenceModule, ...]:
    """The chain of a sentence-transformers directory, the transformer first; empty when it is none."""
    file = directory / "modules.json"
    if not file.is_file():
        return ()
    try:
        rows = [(str(row["type"]), str(row["path"])) for row in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} is not the module list of a sentence-transformers directory: {error!r}") from error
    modules = []
    for kind, path in rows:
        name = kind.rpartition(".")[2]
        if not kind.startswith("sentence_transformers.") or name not in SENTENCE_MODULES:
            raise UsageError(
                f"{file} lists the module {kind}, which is not supported: {', '.join(SENTENCE_MODULES)} are"
            )
        folder = directory / _inside(path, file)
        settings = read_json(folder / "config.json") if name in ("Pooling", "Dense", "LayerNorm") else {}
        modules.append(SentenceModule(name, settings, folder))
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or "Transformer" in kinds[1:] or "Pooling" in kinds[2:]:
        raise UsageError(
            f"{file} chains {', '.join(kinds) or 'nothing'}: it has to be Transformer, Pooling, then the rest"
        )
    return tuple(modules)


def _sentence_notes(directory: Path, transformer: Path) -> tuple[str, ...]:
    """What sentence-transformers does to a text before the model sees it, and the graph does not."""
    files = (directory / "config_sentence_transformers.json", transformer / "sentence_bert_config.json")
    general, own = (read_json(file) if file.is_file() else {} for file in files)
    notes = []
    prompt = (general.get("prompts") or {}).get(general.get("default_prompt_name") or "")
    if prompt:
        notes.append(f"the default prompt {prompt!r} is not in the graph: put it before the text")
    if own.get("max_seq_length"):
        notes.append(f"sentence-transformers cuts texts at {own['max_seq_length']} tokens, which the graph does not")
    return tuple(notes)


# -- weight files ------------------------------------------------------------------------------------------------------


def _weights(directory: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    """The weight files in transformers' own order of preference, each found whole as far as its header tells."""
    if any(re.match(r"shard-\d{5}-model-", file.name) for file in directory.glob("*.safetensors")):
        raise UsageError(f"{directory} is a distributed training checkpoint: save it with save_pretrained first")
    named = config.get("transformers_weights")
    names = (
        (str(_inside(str(named), directory / "config.json")),)
        if named
        else (
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
        )
    )
    file = next((directory / name for name in names if (directory / name).exists()), None)
    if file is None:
        others = sorted(
            each.name for pattern in ("*.h5", "*.msgpack", "*.gguf", "*.onnx") for each in directory.glob(pattern)
        )
        found = f" (found {', '.join(others)}, which are for other frameworks)" if others else ""
        raise UsageError(f"{directory} holds no weights: neither {' nor '.join(names)}{found}")
    files = _shards(file) if file.name.endswith(".json") else (file,)
    for each in files:
        if each.suffix == ".safetensors":
            with open_safetensors(each):
                continue
        if not each.is_file() or each.stat().st_size == 0:
            raise UsageError(f"{each} is empty or no file: fetch the checkpoint again")
    return files


def _shards(index: Path) -> tuple[Path, ...]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UsageError(f"{index} has no weight_map that names the shards")
    files = tuple(index.parent / _inside(name, index) for name in sorted(set(shards.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UsageError(f"{index} names {', '.join(missing)}, which is missing: fetch the checkpoint again")
    return files


def open_safetensors(file: Path, framework: str = "numpy", **options: Any) -> Any:
    """safetensors' `safe_open`; UsageError names a file that is truncated, empty or something else."""
    try:
        return safe_open(str(file), framework, **options)
    except (SafetensorError, OSError, ValueError) as error:
        pointer = (
            file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs")
        )
        reason = "it is a git-lfs pointer, not the file (git lfs pull)" if pointer else first_line(error)
        raise UsageError(f"{file} is no whole safetensors file: {reason}; fetch it again") from error


def _inside(name: str, said_by: Path) -> PurePosixPath:
    """A file name that a file of the checkpoint gives; it may not lead out of the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise UsageError(f"{said_by} names {name!r}, which is outside its directory: it is refused")
    return path


# -- hashes ------------------------------------------------------------------------------------------------------------


def _own_files(directory: Path) -> Iterator[Path]:
    return (directory / name for name in ("config.json", "model.safetensors", "pytorch_model.bin"))


def _sha256(file: Path) -> str:
    status = file.stat()
    return _hash(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _hash(file: Path, size: int, modified: int) -> str:
    # Size and time are only the cache's key: describe and load of one process read a large file once.
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _combined(files: Mapping[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _relative(file: Path, directory: Path) -> str:
    return file.relative_to(directory).as_posix()


def _strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and dicts (auto_map's values are names or lists of names)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (each for inner in value.values() for each in _strings(inner))
    elif isinstance(value, list | tuple):
        yield from (each for inner in value for each in _strings(inner))
