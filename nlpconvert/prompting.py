"""Floor 3: what `generate` is asked: prompts as ids, and how to write; all that can be said against either.

Nothing is run here. A tokenizer is read by `tokens`, or by transformers where it has no tokenizer.json.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nlpconvert import dataset, generation, subjects, tokens
from nlpconvert.errors import MissingPackage, UsageError, first_line
from nlpconvert.first_difference import Show
from nlpconvert.generation import Settings
from nlpconvert.models import TOKENIZER_FILES
from nlpconvert.subjects import Subject

LARGEST_SEED = 2**63 - 1
_DRAWING = ("seed", "temperature", "top_k", "top_p")
_UNCUT = 2**31 - 1


class Words(Protocol):
    """A tokenizer: text to ids with special tokens, nothing cut; ids to text without them."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class _Fast:
    def __init__(self, reader: tokens.Reader) -> None:
        reader.limit = _UNCUT  # a prompt that is too long is refused, not cut
        self._reader = reader

    def encode(self, text: str) -> list[int]:
        return list(self._reader.read(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._reader.decode(ids)


def read_prompts(path: Path) -> list[str]:
    """Prompts from a file: a .txt with one a line, or the column text of a .jsonl or .csv; `-` is standard input, one a
    line. UsageError when it cannot be read or holds none."""
    if str(path) != "-":
        try:
            return [str(row["text"]) for row in dataset.read(path, "text-generation")]
        except UsageError as error:  # prompts are in the column "text", and no other can be named
            raise UsageError(str(error).partition("; if another one is meant")[0]) from error
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 (byte {error.start:,})") from error
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UsageError("standard input holds no prompt; write one a line")
    return prompts


def load_words(subject: Subject) -> Words | None:
    """The tokenizer beside the artifact; None where there is none."""
    directory = subject.directory
    if (directory / tokens.FILE).is_file():
        return _Fast(tokens.load([directory], subject.facts))
    if not any((directory / name).is_file() for name in TOKENIZER_FILES if not name.endswith(".json")):
        return None
    try:
        from nlpconvert.backends import slow_tokens
    except ImportError as error:
        raise MissingPackage(
            f"there is no {tokens.FILE} in {directory}, and other tokenizers are transformers' own, which is not "
            "installed: pip install 'nlpconvert[cpu]'"
        ) from error
    return slow_tokens.load(directory)


_NUMBERS = re.compile(r"\s*\d{1,9}(?:[\s,]+\d{1,9})*[\s,]*")


def read_ids(prompts: Sequence[str], words: Words | None, subject: Subject, ids: bool) -> list[list[int]]:
    """Every prompt's ids. UsageError for one without a token, or with one that the model does not know."""
    numbers = ids and all(_NUMBERS.fullmatch(prompt) for prompt in prompts)
    if not numbers and words is None:
        advice = "give prompts of token ids alone" if ids else "give token ids, with --ids"
        raise UsageError(f"there is no tokenizer in {subject.directory}: put the model's there, or {advice} (5 17 3)")
    found = []
    for number, prompt in enumerate(prompts, start=1):
        if numbers:
            row = [int(each) for each in re.findall(r"\d+", prompt)]
        else:
            assert words is not None
            _check_letters(prompt, number)
            row = words.encode(prompt)
        if not row:
            raise UsageError(f"prompt {number} ({prompt[:40]!r}) has no token, so there is nothing to go on from")
        beyond = next((each for each in row if each >= subject.facts.vocab_size), None)
        if beyond is not None:
            raise UsageError(
                f"prompt {number} has the id {beyond}, and the model knows {subject.facts.vocab_size:,} ids"
            )
        found.append(row)
    return found


def _check_letters(prompt: str, number: int) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"prompt {number} is not UTF-8 (character {error.start:,})") from error


def shown(words: Words | None, prompt: Sequence[int], pair: bool) -> Show:
    """How a row's new tokens read: as they stand after its prompt, where that can be told."""

    def show(before: Sequence[int], ids: Sequence[int]) -> str:
        if words is None:
            return " ".join(map(str, ids))
        if not ids:
            return ""
        # A tokenizer's first word has no space before it: only what stands before tells.
        start = [*(() if pair else prompt), *before]
        known, whole = words.decode(start), words.decode([*start, *ids])
        return whole[len(known) :] if known and whole.startswith(known) else words.decode(ids)

    return show


# -- settings ----------------------------------------------------------------------------------------------------------


def choose(subject: Subject, changes: dict[str, Any], longest: int) -> Settings:
    """Settings by the generation config beside the artifact and what is asked for. UsageError for what is wrong."""
    for name in ("stop", "eos"):
        if isinstance(changes.get(name), str | int):
            changes[name] = (changes[name],)
        elif changes.get(name) is not None:
            changes[name] = tuple(changes[name])
    if any(not text for text in changes.get("stop") or ()):
        raise UsageError("--stop is empty: every text holds that")
    given = [name for name in _DRAWING if changes.get(name) is not None]
    if given and not changes.get("sample"):
        raise UsageError(f"--{given[0].replace('_', '-')} is about drawing tokens, and nothing is drawn: add --sample")
    for name, value in changes.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} {value}: give a number")
    if not 0 <= (changes.get("seed") or 0) <= LARGEST_SEED:
        raise UsageError(f"--seed {changes['seed']}: from 0 to {LARGEST_SEED}")
    if changes.get("top_p") is not None and not 0 < changes["top_p"] <= 1:
        raise UsageError(f"--top-p {changes['top_p']}: a share, above 0 and up to 1")
    for name in ("chunk", "beams"):
        if changes.get(name) is not None and changes[name] < 1:
            raise UsageError(f"--{name} {changes[name]}: 1 or more")
    pair = subject.pair
    if changes.get("chunk") is not None and (pair or (changes.get("beams") or 1) > 1):
        why = "an encoder reads its source at once" if pair else "beam search reads prompts at once"
        raise UsageError(f"--chunk {changes['chunk']}: {why}; leave it out")
    try:
        how = generation.settings(subject.facts, subject.generation, **changes)
        if not all(type(each) is int for each in how.eos):
            raise ValueError(f"eos_token_id is {subject.generation.get('eos_token_id')!r}")
        if not 0 <= how.pad < subject.facts.vocab_size:
            raise ValueError(f"it pads with {how.pad}, and the model knows {subject.facts.vocab_size:,} ids")
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{subject.directory / subjects.GENERATION}: {first_line(error)}") from error
    if changes.get("max_new_tokens") is None:
        how = replace(how, max_new_tokens=_length(subject, how.max_new_tokens, 1 if pair else longest))
    return how


def _length(subject: Subject, usual: int, read: int) -> int:
    """How many tokens are written where nobody says: as generation_config.json has it, and as many as fit.

    `read`: tokens that the decoder reads before, at most. A `max_length` counts them too.
    """
    whole = subject.generation.get("max_length")
    if type(whole) is int and subject.generation.get("max_new_tokens") is None:
        usual = whole - read
    if subject.facts.max_length is not None:
        usual = min(usual, subject.facts.max_length - read + 1)
    return max(usual, 1)


def check_lengths(subject: Subject, rows: Sequence[Sequence[int]], how: Settings) -> None:
    """UsageError for a prompt that is past the model's limit, alone or with what is to be written."""
    limit = subject.facts.max_length
    if limit is None:
        return
    for number, row in enumerate(rows, start=1):
        if len(row) > limit:
            raise UsageError(f"prompt {number} is {len(row):,} tokens long, and the model takes {limit:,} at most")
        # A decoder reads the prompt first, or a start token; the last token is written and never read.
        room = limit - (1 if subject.pair else len(row)) + 1
        if how.max_new_tokens > room:
            after = "" if subject.pair else f"after prompt {number}, of {len(row):,} tokens, "
            raise UsageError(
                f"{after}the model, which takes {limit:,}, can write {room:,} and not {how.max_new_tokens:,}: "
                f"give --max-new-tokens {room} or less"
            )


def plain(how: Settings) -> dict[str, Any]:
    """The settings as JSON values, those that are in force."""
    drawn = {"seed": how.seed} if how.sample else {}
    kept = {name: value for name, value in how.wanted.items() if how.sample or name not in generation._SAMPLING}
    return {
        "max_new_tokens": how.max_new_tokens,
        "eos": list(how.eos),
        "sample": how.sample,
        **drawn,
        "beams": how.beams,
        "stop": list(how.stop),
        "chunk": how.chunk,
        **kept,
    }


def passed_over(subject: Subject, how: Settings) -> Iterator[str]:
    """What the model's own generation config asks for and was not done, for it has to be asked for here."""
    said = subject.generation
    beams = said.get("num_beams")
    if type(beams) is int and beams > 1 and how.beams == 1 and not how.sample:
        yield f"written greedily; the model's own {subjects.GENERATION} searches with {beams} beams: --beams {beams}"
    elif said.get("do_sample") is True and not how.sample and how.beams == 1:
        yield f"written greedily; the model's own {subjects.GENERATION} draws tokens: --sample"
