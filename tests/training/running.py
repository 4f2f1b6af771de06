"""A run of training put together by hand from a fixture, as `training_run` does it: what these tests share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlpconvert import plan, source, training_prepared, training_wishes
from nlpconvert.progress import Silent
from nlpconvert.source import Loaded
from nlpconvert.training import engines, losses, optimizers
from nlpconvert.training.batches import Data, Deal
from nlpconvert.training.loop import Log, Loop, Plan
from nlpconvert.training.losses import Objective
from nlpconvert.training.ranks import Ranks
from nlpconvert.training.states import States
from nlpconvert.training.world import World

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
CLASSIFIER = "bert-text-classifier"


def rows(fixture: str, into: Path, first: int = 0, count: int = 24) -> Path:
    """Some of a fixture's own rows as a file."""
    lines = (FIXTURES / fixture / "eval.jsonl").read_text(encoding="utf-8").splitlines()[first : first + count]
    path = into / f"{fixture}-{first}-{count}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write(path: Path, made: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as a .jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def data_of(fixture: str, path: Path, **changed: Any) -> tuple[Loaded, Data]:
    """A fixture's model and a file's rows."""
    wishes = training_wishes.Wishes(path, **changed)
    return training_prepared.load(str(FIXTURES / fixture), wishes, plan.Options())


@dataclass
class Parts:
    """A loop and what it is made of."""

    loop: Loop
    loaded: Loaded
    objective: Objective


def build(
    fixture: str,
    path: Path,
    *,
    engine: str = "torch",
    batch: int = 8,
    accumulate: int = 1,
    size: int = 1,
    seed: int = 3,
    dropout: bool = False,
    optimizer: str = "adamw",
    ranks: Ranks | None = None,
    out: Path | None = None,
    log: Log | None = None,
    checkpoint: Path | None = None,
    **planned: Any,
) -> Parts:
    """A loop over a fixture, with states in `out` where that is given."""
    loaded = source.load(str(checkpoint or FIXTURES / fixture))
    wishes = training_wishes.Wishes(path)
    _, data = training_prepared.load(str(checkpoint or FIXTURES / fixture), wishes, plan.Options())
    objective = losses.with_loss(loaded.module, loaded.facts.task, loaded.facts)
    made = engines.make(engine, objective, threads=1)
    made.dropout = dropout
    wanted = Plan(**{"lr": 1e-4, **planned})
    loop = Loop(
        made,
        optimizers.make(optimizer, loaded.module, made.parameters, wanted.lr, 0.01),
        data,
        Deal(len(data.examples), batch, accumulate, size, seed),
        wanted,
        ranks or Ranks(World()),
        Silent(),
        states=None if out is None else States(out, {"--seed": seed}),
        log=log,
    )
    return Parts(loop, loaded, objective)
