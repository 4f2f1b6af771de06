"""Floor 2: the checkpoint's tokenizer, as far as the probes need it: does it fit the model, text in, ids out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from nlpconvert.checkpoint import SourceInfo, few, first_line, read_json
from nlpconvert.errors import MissingPackage, UsageError
from nlpconvert.inputs import Encode
from nlpconvert.models import TOKENIZER_FILES, Facts


def load(info: SourceInfo, trust: bool, notes: list[str]) -> Any:
    """The checkpoint's tokenizer; None, with a note, when it has none."""
    if not any((info.transformer / name).is_file() for name in TOKENIZER_FILES):
        notes.append(f"{info.model} has no tokenizer: probes are random ids, not text")
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            info.transformer, trust_remote_code=trust, local_files_only=True
        )
    except ImportError as error:
        raise MissingPackage(
            f"the tokenizer of {info.model} needs a package that is not installed ({first_line(error)}): "
            "pip install 'nlpconvert[cpu]'"
        ) from error
    except Exception as error:  # the files are the user's
        raise UsageError(
            f"the tokenizer of {info.model} cannot be loaded: {first_line(error)}", detail=str(error)
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        notes.append(f"the tokenizer of {info.model} has no vocabulary: probes are random ids, not text")
        return None
    return tokenizer


def check_vocabulary(info: SourceInfo, tokenizer: Any, rows: int, notes: list[str]) -> None:
    """Every id the tokenizer may give has an embedding row; fewer ids than rows are only worth a line."""
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    beyond = sorted((index, token) for token, index in vocabulary.items() if index >= rows)
    if beyond:
        shown = few([f"{token!r} ({index})" for index, token in beyond])
        raise UsageError(
            f"{info.model}: the tokenizer has {len(vocabulary)} entries and the model {rows} embedding rows: {shown} "
            "would read past the table; resize the model's embeddings or take these tokens out"
        )
    if len(vocabulary) < rows:
        notes.append(f"the tokenizer has {len(vocabulary)} entries, the model {rows} embedding rows")


def encoder(info: SourceInfo, tokenizer: Any, facts: Facts) -> Encode:
    """Text and optional pair to ids with special tokens, truncated at the true limit, not padded."""
    settings_file = info.transformer / "sentence_bert_config.json"
    lower = bool(info.sentence) and settings_file.is_file() and bool(read_json(settings_file).get("do_lower_case"))
    types = "token_type_ids" in facts.inputs

    return _encode(tokenizer, facts.max_length, types, lower)


def beside(directory: Path, facts: Facts) -> Encode:
    """The tokenizer whose files lie in a directory, cut where the model's is. UsageError when it cannot be loaded."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the files are someone else's
        raise UsageError(first_line(error), detail=str(error)) from error
    return _encode(tokenizer, facts.max_length, "token_type_ids" in facts.inputs, lower=False)


def _encode(tokenizer: Any, max_length: int | None, types: bool, lower: bool) -> Encode:
    def encode(text: str, pair: str | None = None) -> dict[str, list[int]]:
        if lower:
            text, pair = text.lower(), pair.lower() if pair is not None else None
        encoded = tokenizer(
            text,
            pair,
            truncation=max_length is not None,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=types,
            verbose=False,  # a probe past the tokenizer's own idea of a limit is meant, where the model has none
        )
        return {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}

    return encode
