"""Floor 1: the tokenizer that lies beside an artifact, read without transformers: what CI has.

`tokenizer.json` says all that a fast tokenizer does; the `tokenizers` package runs it. The checkpoint's own, through
transformers, is `tokenizer`; how texts become rows of a batch is `inputs`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nlpconvert.errors import UsageError, first_line
from nlpconvert.inputs import ROW_CAP
from nlpconvert.models import Facts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
SENTENCE_FILE = "sentence_bert_config.json"


@dataclass(frozen=True)
class Reading:
    """A text, or a pair, as ids with special tokens, cut at the model's limit.

    `offsets` are characters (start, end) of the token's own text, `sides` which text it is of: 0, 1, or None for a
    special token. All of equal length. `cut`: something was left out.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    sides: tuple[int | None, ...]
    cut: bool


class Reader:
    """A tokenizer that keeps to the model's facts. `encode` is an `inputs.Encode`."""

    def __init__(self, tokenizer: Tokenizer, facts: Facts, *, lower: bool = False) -> None:
        self._tokenizer = tokenizer
        self._lower = lower
        self._types = "token_type_ids" in facts.inputs
        self.limit = min(facts.max_length or ROW_CAP, ROW_CAP)
        # A file may hold the padding and the limit of its training.
        tokenizer.no_padding()

    def read(self, text: str, pair: str | None = None, *, keep_first: bool = False) -> Reading:
        """The text's tokens, special ones included; what is too long is cut and its closing tokens kept.

        An empty second text is none, as in transformers. `keep_first`: of a pair only the second text is cut (a
        question is not), as far as that can be.
        """
        pair = pair or None
        if self._lower:
            text, pair = text.lower(), None if pair is None else pair.lower()
        strategy = "only_second" if keep_first and pair is not None else "longest_first"
        self._tokenizer.enable_truncation(self.limit, strategy=strategy)
        try:
            encoding = self._tokenizer.encode(text, pair)
        except Exception:
            if strategy != "only_second":
                raise
            self._tokenizer.enable_truncation(self.limit)  # the first text alone is past the limit
            encoding = self._tokenizer.encode(text, pair)
        return Reading(
            tuple(encoding.ids),
            tuple(encoding.type_ids),
            tuple(encoding.offsets),
            tuple(encoding.sequence_ids),
            bool(encoding.overflowing),
        )

    def encode(self, text: str, pair: str | None = None) -> dict[str, list[int]]:
        """Text and optional pair to ids: an `inputs.Encode`."""
        reading = self.read(text, pair)
        found = {"input_ids": list(reading.ids), "token_type_ids": list(reading.types)}
        return found if self._types else {"input_ids": found["input_ids"]}

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load(directories: Iterable[Path], facts: Facts) -> Reader:
    """The tokenizer in the first of these directories that holds one.

    UsageError where none does, where it cannot be read, or where it gives ids that the model has no embedding for.
    """
    places = list(dict.fromkeys(directories))
    path = next((place / FILE for place in places if (place / FILE).is_file()), None)
    if path is None:
        where = ", ".join(str(place) for place in places) or "the artifact"
        raise UsageError(
            f"--data needs {FILE}, and there is none in {where}: save the checkpoint's tokenizer as a fast one "
            "(AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)) and convert again"
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for whatever is wrong with the file
        raise UsageError(f"{path} cannot be read as a tokenizer: {first_line(error)}") from error
    beyond = sorted(
        (index, token)
        for token, index in tokenizer.get_vocab(with_added_tokens=True).items()
        if index >= facts.vocab_size
    )
    if beyond:
        raise UsageError(
            f"{path} gives id {beyond[0][0]} for {beyond[0][1]!r}, but the model knows {facts.vocab_size} ids: it is "
            "not this model's; put the right one beside the artifact"
        )
    return Reader(tokenizer, facts, lower=facts.task == "sentence-embedding" and _lowers(path.parent))


def _lowers(directory: Path) -> bool:
    """Whether sentence-transformers lowers every text before this tokenizer sees it."""
    path = directory / SENTENCE_FILE
    if not path.is_file():
        return False
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not JSON: {first_line(error)}") from error
    return isinstance(settings, dict) and bool(settings.get("do_lower_case"))


def raw(path: Path) -> Callable[[str], list[int]]:
    """A tokenizer.json exactly as it stands, its own normalizer and truncation included: text to ids.

    UsageError when it cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # as above
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text).ids)
