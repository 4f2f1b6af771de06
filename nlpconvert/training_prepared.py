"""Floor 3: what a run of training begins with: the model, its tokenizer and labels, the rows as examples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import labelled, plan, tokens, training_epochs
from nlpconvert.judging import Bounds
from nlpconvert.labelled import Labels
from nlpconvert.plan import Options
from nlpconvert.progress import captured
from nlpconvert.settings import Settings
from nlpconvert.tokens import Reader
from nlpconvert.training.batches import Data, read
from nlpconvert.training_wishes import Wishes
from nlpconvert.validators import metrics

if TYPE_CHECKING:
    from nlpconvert.source import Loaded

NUMBERED = ("text-classification", "token-classification")
"""Tasks whose labels have names in the model's config."""


def load(model: str, wishes: Wishes, options: Options) -> tuple[Loaded, Data]:
    """The model and the rows to learn from. UsageError for what is wrong with either, file and line named."""
    loaded = load_model(model, options)
    return loaded, read(wishes.data, wishes.columns, loaded.facts, _reader(loaded), _labels(loaded))


def load_model(model: str, options: Options) -> Loaded:
    """The model alone."""
    from nlpconvert import source

    with captured(Path(os.devnull)):
        return source.load(model, **options.loading())


def check_epochs(loaded: Loaded, wishes: Wishes, options: Options) -> None:
    """UsageError where an epoch could not be judged by these options, or not scored by --eval: told now, and not when
    the first one has ended."""
    rows = plan.steps(["onnx"])
    bounds = {row.name: Bounds.of(row.name, plan.check_words(options), Settings()) for row in rows}
    plan.check_rows(rows, options, loaded.facts, bounds)
    if wishes.evaluation is None:
        return
    facts = loaded.facts
    row = metrics.METRICS[training_epochs.metric_of(facts.task, wishes.metric)]
    read_rows = labelled.read(wishes.evaluation, wishes.columns, row, facts.task)
    labelled.prepare(read_rows, row, facts, _reader(loaded), _labels(loaded), wishes.evaluation)


def _reader(loaded: Loaded) -> Reader:
    """The checkpoint's tokenizer, from its file or, where it has another kind of file, as transformers reads that."""
    fast = getattr(loaded.tokenizer, "backend_tokenizer", None)
    if fast is None or (loaded.directory / tokens.FILE).is_file():
        return tokens.load([loaded.directory], loaded.facts)  # says what to do where there is none
    return Reader(type(fast).from_str(fast.to_str()), loaded.facts)


def _labels(loaded: Loaded) -> Labels:
    """The names of the model's labels; none where its task has no such names."""
    config: Any = loaded.module.config
    if loaded.facts.task not in NUMBERED:
        return Labels()
    names = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    return Labels([names.get(index, str(index)) for index in range(config.num_labels)], "config.json")
