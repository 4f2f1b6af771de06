"""Floor 3: what `generate` gives back: rows, speed, and where PyTorch was asked too, the first differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nlpconvert import __version__
from nlpconvert.first_difference import Difference

SCHEMA = 1
"""Of the JSON document: data/generate.schema.json."""


@dataclass(frozen=True)
class Row:
    """What was written to one prompt. `ids`: the new tokens, the one that ended it included; `ended`: "eos", "stop" or
    "length"."""

    prompt: str
    prompt_ids: tuple[int, ...]
    text: str
    ids: tuple[int, ...]
    ended: str


@dataclass(frozen=True)
class Speed:
    """Tokens of all rows together, and seconds; those of the prompts are 0 where beams are searched."""

    tokens: int
    prefill_seconds: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Prompts included in the time."""
        return self.tokens / max(self.prefill_seconds + self.step_seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "tokens": self.tokens,
            "prefill_seconds": self.prefill_seconds,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class Compared:
    """PyTorch's texts to the same prompts, and by row the first difference (None: the same).

    `noise`: the reference's floor by which near ties are told; None where it is not known and a usual one stands in.
    """

    model: str
    noise: float | None
    rows: tuple[Row, ...]
    differences: tuple[Difference | None, ...]
    speed: Speed

    @property
    def real(self) -> tuple[Difference, ...]:
        """The differences that are no near ties."""
        return tuple(each for each in self.differences if each is not None and not each.near_tie)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "model": self.model,
            "noise": self.noise,
            "identical": sum(each is None for each in self.differences),
            "near_ties": sum(each is not None and each.near_tie for each in self.differences),
            "rows": [
                {**row_data(row), "difference": None if each is None else each.to_dict()}
                for row, each in zip(self.rows, self.differences, strict=True)
            ],
            "speed": self.speed.to_dict(),
        }


@dataclass(frozen=True)
class Generated:
    """What an artifact wrote. `provider` is what really ran it; `notes` are lines for the person."""

    artifact: str
    step: str
    precision: str
    provider: str
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    speed: Speed
    compared: Compared | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 where a float32 artifact wrote something else than PyTorch and it was no near tie. Below float32 that is
        told: how often it may happen is what `verify` judges."""
        return int(self.compared is not None and self.precision == "float32" and bool(self.compared.real))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: data/generate.schema.json."""
        return {
            "nlpconvert": __version__,
            "schema": SCHEMA,
            "artifact": self.artifact,
            "step": self.step or None,
            "precision": self.precision,
            "provider": self.provider,
            "settings": dict(self.settings),
            "rows": [row_data(row) for row in self.rows],
            "speed": self.speed.to_dict(),
            "comparison": None if self.compared is None else self.compared.to_dict(),
            "notes": list(self.notes),
        }


def row_data(row: Row) -> dict[str, Any]:
    return {
        "prompt": row.prompt,
        "prompt_ids": list(row.prompt_ids),
        "text": row.text,
        "ids": list(row.ids),
        "ended": row.ended,
    }
