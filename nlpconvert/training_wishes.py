"""Floor 3: what a run of training is asked to do, and all that can be said against it before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from nlpconvert import plan
from nlpconvert.errors import MissingPackage, UsageError
from nlpconvert.plan import Options


@dataclass(frozen=True)
class Wishes:
    """What is asked of a run; the defaults are the command line's. What concerns the model is `plan.Options`.

    `evaluation`: labelled rows that epochs are scored on, by `metric`. `engine`, `lr`, `metric`: None for what fits.
    `batch`: rows of a micro-batch and rank; a step takes batch * accumulate * ranks rows. `warmup`: steps, or a share
    of all steps where it is below 1. `verify`: only hold the engine against PyTorch over `steps` steps.
    """

    data: Path
    evaluation: Path | None = None
    columns: str = ""
    metric: str | None = None
    engine: str | None = None
    epochs: int | None = None
    steps: int | None = None
    batch: int = 16
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float | None = None
    warmup: float = 0.0
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    dropout: bool = True
    checkpoint_every: int | None = None
    patience: int | None = None
    resume: bool = False
    verify: bool = False


def check(wishes: Wishes, options: Options) -> str:
    """The engine that will be used. UsageError for a number or a word that cannot be meant, MissingPackage (exit 5) for
    an engine that was named and is not installed."""
    least: tuple[tuple[str, float | None, float], ...] = (
        ("--epochs", wishes.epochs, 1),
        ("--steps", wishes.steps, 1),
        ("--batch", wishes.batch, 1),
        ("--accumulate", wishes.accumulate, 1),
        ("--warmup", wishes.warmup, 0),
        ("--weight-decay", wishes.weight_decay, 0),
        ("--clip", wishes.clip, 0),
        ("--seed", wishes.seed, 0),
        ("--checkpoint-every", wishes.checkpoint_every, 1),
        ("--patience", wishes.patience, 1),
    )
    for option, value, smallest in least:
        if value is not None and not (math.isfinite(value) and value >= smallest):
            raise UsageError(f"{option} {value:g}: it is {smallest:g} or more")
    if wishes.lr is not None and not (math.isfinite(wishes.lr) and wishes.lr > 0):
        raise UsageError(f"--lr {wishes.lr:g}: it is more than 0")
    plan.check_words(options)
    if not wishes.verify:
        plan.not_here(plan.steps(["onnx"]), options, named=True)  # every epoch is exported
    for option, path in (("--data", wishes.data), ("--eval", wishes.evaluation)):
        if path is not None and not path.exists():
            raise UsageError(f"{option} {path}: no such file")
    if wishes.metric is not None and wishes.evaluation is None:
        raise UsageError(f"--metric {wishes.metric} is of --eval, and no --eval is given")
    if wishes.verify and wishes.resume:
        raise UsageError("--verify trains nothing that could be gone on with: leave --resume out")
    return _engine(wishes)


def _engine(wishes: Wishes) -> str:
    from nlpconvert.training import engines, optimizers

    optimizers.named(wishes.optimizer)
    if wishes.engine not in (None, *engines.ENGINES):
        raise UsageError(f"--engine {wishes.engine}: it is one of {', '.join(engines.ENGINES)}")
    if wishes.engine == "torch":
        if wishes.verify:
            raise UsageError("--verify holds an engine against PyTorch, and --engine torch is PyTorch itself")
        return "torch"
    try:
        engines.require_ort()
    except MissingPackage:
        if wishes.engine == "ort" or wishes.verify:
            raise
        return "torch"
    return "ort"
