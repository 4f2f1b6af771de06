"""Floor 2: tokenizers that have no tokenizer.json (SentencePiece in two files, such as Marian's), by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from nlpconvert.errors import MissingPackage, UsageError, first_line


class SlowWords:
    """Text to ids with special tokens, nothing cut; and ids to text without them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """A text's ids."""
        return list(self._tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load(directory: Path) -> SlowWords:
    """The tokenizer whose files lie in a directory. UsageError when it cannot be loaded, MissingPackage when a package
    of its own is not here."""
    try:
        return SlowWords(transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True))
    except ImportError as error:
        raise MissingPackage(
            f"the tokenizer in {directory} needs a package that is not installed ({first_line(error)}): "
            "pip install 'nlpconvert[cpu]'"
        ) from error
    except Exception as error:  # the files are someone else's
        raise UsageError(f"the tokenizer in {directory} cannot be loaded: {first_line(error)}") from error
