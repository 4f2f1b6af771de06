"""Floor 2: a checkpoint becomes the reference: one float32 model in eval mode, its weights proven to be the file's.

`load` refuses what would start from random weights or contradicts the checkpoint. What can be told without torch is
`checkpoint`, the proof `weights`, the calling convention `forward`, text `tokenizer`, what others have to know `facts`.
Nothing of the checkpoint's own code runs unless it is trusted by flag.
"""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from nlpconvert import forward, tokenizer, weights
from nlpconvert.checkpoint import SourceInfo, describe, few, first_line, remote_code
from nlpconvert.errors import MissingPackage, UsageError
from nlpconvert.facts import gather, short_example
from nlpconvert.forward import call
from nlpconvert.inputs import Encode
from nlpconvert.models import ENCODER_DECODER_FEATURES, TASKS, Facts, OutputRow

__all__ = ["Loaded", "SourceInfo", "call", "describe", "load"]


@dataclass(frozen=True)
class Loaded:
    """The reference and what is known of it.

    `module` is the Hugging Face model itself in float32 and eval mode; its `forward` takes `facts.inputs` by keyword
    and returns a dict of `facts.outputs` in order. `encode` and `tokenizer` are None when the checkpoint has no
    tokenizer. `description` is plain JSON for the manifest. `parameter_bytes` counts unique parameters and persistent
    buffers in float32, ties once, never-trained ones that no output reads left out.
    """

    module: torch.nn.Module
    facts: Facts
    encode: Encode | None
    description: dict[str, Any]
    directory: Path
    notes: tuple[str, ...]
    tokenizer: Any
    parameter_bytes: int


def load(
    model: str,
    *,
    revision: str | None = None,
    task: str | None = None,
    allow_missing_weights: bool = False,
    trust_remote_code: bool = False,
    device: str = "cpu",
) -> Loaded:
    """Loads a local directory or hub id as the float32 reference.

    Raises UsageError (exit 2) in one line for a wrong file, name, task or a head without trained weights, and
    MissingPackage (exit 5) when the device or a package that the tokenizer needs is not there.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MissingPackage(
            f"device {device} is not there: torch {torch.__version__} sees no CUDA device, use --device cpu"
        )
    info = describe(model, revision=revision, task=task)
    code = remote_code(info)
    if code and not trust_remote_code:
        raise UsageError(
            f"{model} wants to run its own code ({', '.join(code)}): read it, then say --trust-remote-code, or take "
            "auto_map out of its config.json and tokenizer_config.json to use transformers' own classes"
        )
    notes = list(info.notes)
    with _quiet():
        config = _config(info, trust_remote_code, notes)
        module = _from_pretrained(info, _auto_class(info, config, trust_remote_code), config, trust_remote_code)
        words = tokenizer.load(info, trust_remote_code, notes)
    found = weights.compare(module, info.weights)
    facts = gather(info, module, words, forward.accepts(module), notes)
    steps = forward.sentence_steps(module, info.sentence, weights.read_folder)
    rows, untrained = _outputs(info, module, facts, found, steps, allow_missing_weights, notes)
    facts = replace(facts, outputs=rows)
    forward.attach(module, facts.inputs, [row.name for row in rows], steps)
    parameters, size = _size(module, untrained)
    notes += found.notes()
    if device != "cpu":
        torch.set_float32_matmul_precision("highest")  # no TF32 in a reference
        torch.backends.cudnn.allow_tf32 = False
        module.to(device)
    description = {
        "model": model,
        "id" if info.revision else "path": model if info.revision else str(info.directory),
        "revision": info.revision,
        "sha256": info.sha256,
        "files": dict(info.files),
        "dtype": ", ".join(found.dtypes),
        "class": type(module).__name__,
        "model_type": info.model_type,
        "architectures": list(info.architectures),
        "task": info.task,
        "parameters": parameters,
        "parameter_bytes": size,
        "tied": [list(group) for group in found.tied],
        "compared": found.compared,
        "not_compared": list(found.not_compared),
        "not_loaded": list(found.not_loaded),
        "not_in_file": list(found.not_in_file),
        "max_length": facts.max_length,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    encode = None if words is None else tokenizer.encoder(info, words, facts)
    return Loaded(module, facts, encode, description, info.directory, tuple(notes), words, size)


# -- from the files to a module ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its progress bar and loading report: what they would say is in `notes` and errors."""
    log: Any = transformers_logging
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()


def _config(info: SourceInfo, trust: bool, notes: list[str]) -> Any:
    own_code = trust and "AutoConfig" in (info.config.get("auto_map") or {})
    if info.model_type not in transformers.CONFIG_MAPPING and not own_code:
        near = difflib.get_close_matches(info.model_type, transformers.CONFIG_MAPPING.keys(), n=1)
        raise UsageError(
            f"transformers {transformers.__version__} does not know the model type {info.model_type!r} of {info.model}"
            f"{f' (is {near[0]!r} meant?)' if near else ''}: upgrade transformers, or convert another checkpoint"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            info.transformer, trust_remote_code=trust, local_files_only=True
        )
    except Exception as error:  # the file is the user's: whatever is raised over it is about the file
        raise UsageError(
            f"{info.transformer / 'config.json'} is no valid {info.model_type} config: {first_line(error)}",
            detail=str(error),
        ) from error
    # config.json may ask for an attention kernel, which transformers would fetch from the hub and run.
    if config._attn_implementation not in (None, "eager", "sdpa"):
        notes.append(
            f"the config's attention implementation {config._attn_implementation!r} is not used: PyTorch's own is"
        )
        config._attn_implementation = None
    return config


def _auto_class(info: SourceInfo, config: Any, trust: bool) -> Any:
    """The Auto class of the task; UsageError when the model type has no such head."""
    name = TASKS[info.task].auto_class
    encoder_only = bool(info.sentence) or any(each.endswith("EncoderModel") for each in info.architectures)
    own_code = trust and name in (info.config.get("auto_map") or {})
    text_encoders = transformers.AutoModelForTextEncoding
    if name == "AutoModel" and encoder_only and not own_code and type(config) in text_encoders._model_mapping:
        return text_encoders
    auto = getattr(transformers, name)
    if own_code or type(config) in auto._model_mapping:
        return auto
    has = [row.name for row in TASKS.values() if type(config) in getattr(transformers, row.auto_class)._model_mapping]
    raise UsageError(
        f"{info.model_type} has no model for {info.task} in transformers {transformers.__version__}: {_list(has)}"
    )


def _from_pretrained(info: SourceInfo, auto: Any, config: Any, trust: bool) -> torch.nn.Module:
    pickled = info.weights[0].suffix != ".safetensors"
    try:
        # What the file lacks is drawn at random: the same every time, and without moving the caller's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module: torch.nn.Module = auto.from_pretrained(
                info.transformer,
                config=config,
                dtype=torch.float32,
                trust_remote_code=trust,
                local_files_only=True,
                use_safetensors=not pickled,
                weights_only=True,
                ignore_mismatched_sizes=True,  # `weights.compare` names both shapes
            )
    except ImportError as error:
        raise MissingPackage(f"{info.model} needs a package that is not installed: {first_line(error)}") from error
    except Exception as error:  # as above: the files are the user's
        if pickled:
            for file in info.weights:
                weights.read_pickled(file)  # says what is wrong with it, if that is what it was
        raise UsageError(
            f"{info.model} cannot be loaded as {info.task}: {first_line(error)}",
            detail="".join(traceback.format_exception(error)),
        ) from error
    return module.float().eval().requires_grad_(False)


# -- outputs -----------------------------------------------------------------------------------------------------------


def _outputs(
    info: SourceInfo,
    module: torch.nn.Module,
    facts: Facts,
    found: weights.Weights,
    steps: list[forward.SentenceStep],
    allow_missing: bool,
    notes: list[str],
) -> tuple[tuple[OutputRow, ...], frozenset[str]]:
    """The outputs that stand on trained weights, and the names of untrained weights that none of them reads.

    An optional output (the pooler's) over missing weights is dropped with a line; a required one is an error unless
    `allow_missing`, as is a head that config.architectures contradicts.
    """
    contradiction = _contradiction(info, found)
    _accept(contradiction, allow_missing, notes)
    features = info.task == "feature-extraction" and "decoder_input_ids" in facts.inputs
    candidates = ENCODER_DECODER_FEATURES if features else TASKS[info.task].outputs
    if info.task == "text-classification" and _is_score(module):
        candidates = tuple(replace(row, measure="score") for row in candidates)
    example = {name: torch.tensor(value) for name, value in short_example(facts).items()}
    try:
        names = forward.given(module, example)
    except UsageError:
        raise
    except Exception as error:  # whatever a model raises over a plain short input
        raise UsageError(
            f"{info.model} does not run on {list(next(iter(example.values())).shape)} plain ids: {first_line(error)}",
            detail="".join(traceback.format_exception(error)),
        ) from error
    names |= {"sentence_embedding"} if steps else set()
    rows = tuple(row for row in candidates if row.name in names)
    absent = [row.name for row in candidates if row.name not in names and not row.optional]
    if absent:
        raise UsageError(
            f"{info.model}: {type(module).__name__} gives no {', '.join(absent)}, only {', '.join(sorted(names))}"
        )
    forward.attach(module, facts.inputs, [row.name for row in rows], steps)
    reads = _reads(module, example, found.missing) if found.missing else {}
    for row in [row for row in rows if row.optional and reads.get(row.name)]:
        notes.append(f"{row.name} is dropped: {few(sorted(reads[row.name]))} are not in the checkpoint")
    kept = tuple(row for row in rows if not (row.optional and reads.get(row.name)))
    read = frozenset(name for row in kept for name in reads.get(row.name, ()))
    if read and not contradiction:
        _accept(_untrained(info, module, [name for name in found.missing if name in read], found), allow_missing, notes)
    return kept, frozenset(found.missing) - read


def _is_score(module: Any) -> bool:
    """Whether the labels are numbers each for itself (a regression, several labels at once), not one decision."""
    kind = getattr(module.config, "problem_type", None)
    return module.config.num_labels == 1 or kind in ("regression", "multi_label_classification")


def _reads(module: torch.nn.Module, example: dict[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, set[str]]:
    """Which of the named weights each output depends on, from the autograd graph of one short pass."""
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    chosen = [state[name].requires_grad_(True) for name in names]
    try:
        with torch.enable_grad():
            answers = module(**example)
        reads: dict[str, set[str]] = {}
        for output, value in answers.items():
            reads[output] = set()
            if value.requires_grad:
                gradients = torch.autograd.grad(value.sum(), chosen, retain_graph=True, allow_unused=True)
                reads[output] = {name for name, each in zip(names, gradients, strict=True) if each is not None}
        return reads
    finally:
        for tensor in chosen:
            tensor.requires_grad_(False)


def _accept(problem: str, allowed: bool, notes: list[str]) -> None:
    """An error where there is a problem, a note where --allow-missing-weights takes it."""
    if problem and not allowed:
        raise UsageError(f"{problem}; --allow-missing-weights takes it all the same")
    if problem:
        notes.append(f"taken by --allow-missing-weights: {problem}")


def _contradiction(info: SourceInfo, found: weights.Weights) -> str:
    """A task with another head than the one config.architectures says was trained, "" when there is none.

    The base model of any head is no contradiction, nor is a head over a bare model when nothing of it is missing.
    """
    features = info.task in ("feature-extraction", "sentence-embedding")
    if features or info.own_task in (None, info.task, "feature-extraction"):
        return ""
    said = f"{info.model} is a {info.own_task} model ({info.architectures[0]})"
    if found.missing:
        return f"{said}: for {info.task} these weights would start from random values: {few(found.missing)}"
    return (
        f"{said}, and its weights fit {info.task} by name only: their head was trained for something else; "
        f"use --task {info.own_task}"
    )


def _untrained(info: SourceInfo, module: torch.nn.Module, names: list[str], found: weights.Weights) -> str:
    total = found.compared + len(found.missing)
    prefix = _common_prefix(found, names)
    hint = f" (every name in the file starts with {prefix!r}: save it without)" if prefix else ""
    return (
        f"{info.model} has no trained {type(module).__name__}: {len(names)} of {total} weights would start from random "
        f"values: {few(names)}{hint}"
    )


def _common_prefix(found: weights.Weights, untrained: list[str]) -> str:
    """A prefix such as "module." that keeps the file's names from meeting the model's."""
    for name in untrained:
        for stored in found.not_loaded:
            prefix = stored.removesuffix(name)
            if prefix and prefix != stored and all(each.startswith(prefix) for each in found.not_loaded):
                return prefix
    return ""


def _size(module: torch.nn.Module, leave_out: frozenset[str]) -> tuple[int, int]:
    """Count of unique parameters, and bytes of unique parameters and persistent buffers as they are loaded."""
    parameters = {id(each) for name, each in module.named_parameters() if name not in leave_out}
    count = size = 0
    seen = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in leave_out or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        count += tensor.numel() if id(tensor) in parameters else 0
        size += tensor.numel() * tensor.element_size()
    return count, size


def _list(names: list[str]) -> str:
    return f"it has {', '.join(names)}" if names else "it has none of the tasks"
