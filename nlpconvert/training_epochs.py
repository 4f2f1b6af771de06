"""Floor 3: what an epoch's weights are worth: written as a checkpoint, exported, judged, scored; the best one kept.

    OUT/model/       the best epoch's weights as a Hugging Face checkpoint, which every other command takes
    OUT/converted/   the line's own OUT of that checkpoint: nlpconvert verify OUT/converted

Both are built aside and put in place together when they are whole.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import disk, manifest, pipeline, scoring
from nlpconvert.artifact import Outcome
from nlpconvert.errors import NlpconvertError
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent, captured

if TYPE_CHECKING:
    from nlpconvert.source import Loaded
    from nlpconvert.training.loop import Score
    from nlpconvert.validators.scores import Scored

MODEL, CONVERTED = "model", "converted"

METRIC_OF: dict[str, str] = {
    "text-classification": "accuracy",
    "multiple-choice": "accuracy",
    "token-classification": "f1",
    "question-answering": "squad",
    "text-generation": "perplexity",
    "text2text-generation": "perplexity",
}
"""The metric of --eval where none is named."""


@dataclass
class Epochs:
    """Judges the weights in `loaded` after each epoch. `evaluation`: labelled rows, None for none.

    `options` are the line's, for a task that is already known; the lock of `out` is held.
    """

    out: Path
    loaded: Loaded
    options: Options
    progress: Progress
    evaluation: Path | None = None
    columns: str = ""
    metric: str = ""

    def judge(self, epoch: int, loss: float) -> Score:
        """The epoch's score: its metric on the evaluation's rows by PyTorch, else the mean loss of training.

        It is sound where the exported model agrees with PyTorch with the same weights.
        """
        from nlpconvert.training.loop import Score

        began = time.perf_counter()
        self.progress.start(f"epoch {epoch}: convert and judge")
        self.discard()
        outcome, found, problem = self._judged()
        record: dict[str, Any] = {
            "verdict": outcome.status,
            "reason": outcome.reason or problem,
            "worst": _worst(outcome),
            "scores": {each.name: {"pytorch": each.reference, "onnx": each.candidate} for each in found},
            "seconds": round(time.perf_counter() - began, 3),
        }
        sound = outcome.status == "agrees" and not problem
        if self.evaluation is None:
            score = Score(loss, False, sound, record)
        else:
            value, higher = math.nan, True
            if found:
                value = found[0].candidate if found[0].reference is None else found[0].reference
                higher = found[0].better_is == "higher"
            score = Score(value, higher, sound, record)
        self.progress.line(_line(epoch, loss, record))
        return score

    def better(self, epoch: int) -> None:
        """The judged epoch is the best so far: it takes its place."""
        for name in (CONVERTED, MODEL):
            new = self._aside(name)
            if new is not None:
                disk.replace_directory(new, self.out / name)

    def discard(self) -> None:
        """Removes what was judged and is not the best."""
        for name in (CONVERTED, MODEL):
            new = self._aside(name)
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)

    def _aside(self, name: str) -> Path | None:
        found = self._built.get(name)
        return found if found is not None and found.is_dir() else None

    def __post_init__(self) -> None:
        """Nothing has been judged yet."""
        self._built: dict[str, Path] = {}

    def _judged(self) -> tuple[Outcome, tuple[Scored, ...], str]:
        """The line's verdict on these weights, their scores, and why there are none where there should be."""
        from nlpconvert.training import states

        loaded = self.loaded
        with disk.building(self.out, MODEL) as model, disk.building(self.out, CONVERTED) as converted:
            self._built = {MODEL: model, CONVERTED: converted}
            was = loaded.module.training
            loaded.module.eval()
            with captured(Path(os.devnull)):
                states.write_model(loaded.module, loaded.tokenizer, loaded.directory, model)
            outcome = self._converted(model, converted)
            found: tuple[Scored, ...] = ()
            problem = ""
            if self.evaluation is not None and outcome.artifact is not None:
                scores = scoring.score_steps(
                    converted,
                    manifest.read(converted),
                    ["onnx"],
                    data=self.evaluation,
                    columns=self.columns,
                    metric=self.metric,
                    options=replace(self.options, data=None),
                    model=str(model),
                )[0]
                found, problem = scores.scores, scores.reason
            with suppress(NlpconvertError):  # a line that failed early has no manifest
                self._settle(converted)
            loaded.module.train(was)
        return outcome, found, problem

    def _converted(self, model: Path, converted: Path) -> Outcome:
        """The line's ONNX step; weights that PyTorch itself cannot answer with are a failure and not an end."""
        try:
            return pipeline.convert_step("onnx", str(model), converted, options=self.options, progress=Silent())[-1]
        except NlpconvertError as error:
            return Outcome("onnx", "failed", str(error))

    def _settle(self, converted: Path) -> None:
        """The line's source is where the model will lie, and not where it was built."""
        record = manifest.read(converted)
        home = str((self.out / MODEL).absolute())
        replace(record, source={**record.source, "model": home, "path": home}).write(converted)


def metric_of(task: str, asked: str | None) -> str:
    """The metric of an evaluation. UsageError for one that is none or does not fit the task."""
    from nlpconvert.validators import metrics, metrics_text

    name = asked or METRIC_OF.get(task, "")
    row = metrics.metric_for(name, task)
    if row.name == "bleu":
        metrics_text.check_bleu()
    return row.name


def _worst(outcome: Outcome) -> float | None:
    """The largest difference of the export from PyTorch, over its outputs."""
    outputs = ((outcome.verdict or {}).get("comparison") or {}).get("outputs") or ()
    found = [abs(float(each["worst"]["difference"])) for each in outputs if each.get("worst")]
    return max(found, default=None)


def _line(epoch: int, loss: float, record: Mapping[str, Any]) -> str:
    scores = "".join(
        f", {name} {each['pytorch' if each['pytorch'] is not None else 'onnx']:.4g}"
        for name, each in record["scores"].items()
    )
    reason = f" ({record['reason']})" if record["reason"] else ""
    return f"epoch {epoch}: loss {loss:.4g}{scores}, exported to ONNX: {record['verdict']}{reason}"
