"""Floor 4: what an artifact wrote, as lines and as JSON: the speed, and beside PyTorch the first differences.

Takes the plain data of `generated.Generated.to_dict`. The texts themselves are the terminal's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nlpconvert import wording

ROWS = 20
"""Rows that are told one by one; of more, those that differ."""
SHOWN = 60
"""Characters of a text that a line shows."""


def to_json(data: Mapping[str, Any]) -> str:
    """One JSON object (data/generate.schema.json)."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def speed(data: Mapping[str, Any]) -> str:
    """Tokens, tokens a second, the prompts' time, and what ran it: one line."""
    found = data["speed"]
    name = data["step"] or "graph"
    return f"{_speed(found)}   {name}, {data['precision']}, {data['provider']}"


def comparison(data: Mapping[str, Any]) -> Iterator[str]:
    """How the texts differ from PyTorch's: a line for each row, more for one that differs."""
    found = data["comparison"]
    rows = found["rows"]
    near = f", {wording.count(found['near_ties'], 'near tie')}" if found["near_ties"] else ""
    yield f"{found['identical']:,} of {wording.count(len(rows), 'text')} as PyTorch writes it{near}"
    told = 0
    for number, row in enumerate(rows, start=1):
        each = row["difference"]
        if each is None and len(rows) <= ROWS:
            yield f"  {number}: identical, {wording.count(len(row['ids']), 'token')}"
        elif each is not None and told < ROWS:
            told += 1
            yield from _difference(number, each)
    more = sum(row["difference"] is not None for row in rows) - told
    if more:
        yield f"  and {more:,} more that differ: --json tells all"
    if found["noise"] is None and any(row["difference"] for row in rows):
        yield "  the reference's noise was not measured; a usual one stands in for it where near ties are told"
    real = sum(1 for row in rows if row["difference"] and not row["difference"]["near_tie"])
    if real and data["precision"] != "float32":
        yield f"  below float32 ({data['precision']}) that may be: how often is judged by nlpconvert verify"
    yield f"  PyTorch: {_speed(found['speed'])}"


def _difference(number: int, each: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {number}: differs at new token {each['position'] + 1}, {_kind(each)}"
    if each["before"]:
        yield f"       both wrote   {_cut(each['before'], tail=True)}"
    for name, text, token, margin in (
        ("artifact", each["candidate_text"], each["candidate"], each["candidate_margin"]),
        ("PyTorch", each["reference_text"], each["reference"], each["margin"]),
    ):
        words = "has ended" if token is None else f"{_cut(text)}   token {token}"
        told = "" if margin is None or token is None else f", margin {margin:.2g}"
        yield f"       {name:<12} {words}{told}"


def _kind(each: Mapping[str, Any]) -> str:
    if each["margin"] is not None or each["moved"] is None:
        return "a near tie: what follows is not judged" if each["near_tie"] else "no near tie"
    moved = f"the scores before it moved by {wording.drift(each['moved'])}"
    return f"{moved}, which is allowed" if each["near_tie"] else f"{moved}, more than is allowed"


def _speed(found: Mapping[str, Any]) -> str:
    prefill = f", prompts read in {found['prefill_seconds']:.3f} s" if found["prefill_seconds"] else ""
    return f"{wording.count(found['tokens'], 'token')}, {found['tokens_per_second']:,.1f} tokens/s{prefill}"


def _cut(text: str, *, tail: bool = False) -> str:
    """On one line, in quotes, and not too long."""
    if len(text) > SHOWN:
        text = f"...{text[-SHOWN:]}" if tail else f"{text[:SHOWN]}..."
    return json.dumps(text, ensure_ascii=False)
