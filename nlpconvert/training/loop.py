"""Floor 2: the training itself: steps from micro-batches, what is logged, checkpoints, when to stop.

An engine makes gradients, `ranks` sums them, `optimizers` makes a step of them, `states` keeps it. What an epoch's
weights are worth is asked of a callable; nothing here knows how a model is exported or scored.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nlpconvert import disk
from nlpconvert.errors import DriftError
from nlpconvert.progress import Progress
from nlpconvert.training import Engine
from nlpconvert.training.batches import Data, Deal
from nlpconvert.training.optimizers import clip, factor, set_rate, warmup_steps
from nlpconvert.training.ranks import Gradients, Ranks
from nlpconvert.training.states import State, States

EPOCHS = 3
SEEDS = 2**31 - 1
"""Seeds of dropout lie below this."""


@dataclass(frozen=True)
class Plan:
    """How long: `epochs` (3 where nothing is said) or `steps`, whichever ends first; `lr` after `warmup` (steps, or a
    share of all).

    `clip`: the largest norm of gradients, 0 for no limit. `patience`: epochs without a better score after which to
    stop, None for never. `checkpoint_every`: steps between checkpoints, beside those at the ends of epochs.
    """

    epochs: int | None = None
    steps: int | None = None
    lr: float = 5e-5
    warmup: float = 0.0
    clip: float = 1.0
    patience: int | None = None
    checkpoint_every: int | None = None


@dataclass(frozen=True)
class Score:
    """What an epoch is worth: one number, and whether more of it is better. `sound`: it may be kept as the best.

    `record`: plain JSON for the person.
    """

    value: float
    higher_is_better: bool
    sound: bool = True
    record: Mapping[str, Any] | None = None


@dataclass
class Memory:
    """What the loop remembers from step to step; all of it is in a checkpoint.

    `loss`, `targets`: sums of the epoch so far. `best`: the best score, of which epoch, after which step; `since`:
    epochs without a better one. `epochs`: a record of each that is done.
    """

    loss: float = 0.0
    targets: int = 0
    best: float | None = None
    best_epoch: int | None = None
    best_step: int | None = None
    best_sound: bool = False
    since: int = 0
    done: bool = False
    why: str = ""
    epochs: list[dict[str, Any]] | None = None


Judge = Callable[[int, float], Score]
"""An epoch's number (from 1) and its mean loss, to what its weights are worth."""


def total_steps(plan: Plan, deal: Deal) -> int:
    """Steps of a whole run. Steps alone may go on for as many epochs as they take."""
    if plan.steps is not None and plan.epochs is None:
        return plan.steps
    whole = (plan.epochs or EPOCHS) * deal.steps_per_epoch
    return whole if plan.steps is None else min(plan.steps, whole)


class Loop:
    """One run over the data. `run` goes from a checkpoint, or the beginning, to the end."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        data: Data,
        deal: Deal,
        plan: Plan,
        ranks: Ranks,
        progress: Progress,
        *,
        states: States | None = None,
        log: Log | None = None,
    ) -> None:
        self.engine, self.optimizer, self.data, self.deal, self.plan = engine, optimizer, data, deal, plan
        self.ranks, self.progress, self.states, self.log = ranks, progress, states, log
        self.memory = Memory(epochs=[])
        self.steps = total_steps(plan, deal)
        self.warmup = warmup_steps(plan.warmup, self.steps)
        self._parameters = list(engine.parameters.values())
        self._gradients = Gradients(self._parameters, ranks)
        self._saved: set[int] = set()

    # -- going on -------------------------------------------------------------------------------------------------

    def resume(self, state: State) -> int:
        """Puts everything back as it was after a checkpoint's step; that step."""
        assert self.states is not None
        self.states.load(state, self.engine.parameters, self.optimizer)
        self.memory = Memory(**state.memory)
        self._saved = {state.step}
        return state.step

    def run(self, judge: Judge, first: int = 0, better: Callable[[int], None] = lambda epoch: None) -> Memory:
        """All steps from number `first` on. `better` is called by the first rank for an epoch that is the best so far.

        Raises DriftError where the loss or the gradients are no numbers: the weights are then those of the step before.
        """
        per_epoch = self.deal.steps_per_epoch
        for step in range(first, self.steps):
            if self.memory.done:
                break
            epoch, place = divmod(step, per_epoch)
            if place == 0 or step == first:
                left = min(per_epoch, self.steps - epoch * per_epoch)
                self.progress.start(f"epoch {epoch + 1} of {-(-self.steps // per_epoch)}", left)
                self.progress.advance(place)
            line = self.step(step)
            if self.log is not None:
                self.log.write(line)
            self.progress.advance()
            if place == per_epoch - 1 or step == self.steps - 1:
                self._end_epoch(epoch, step, judge, better)
            elif self.plan.checkpoint_every and (step + 1) % self.plan.checkpoint_every == 0:
                self._save(step + 1)
        return self.memory

    def step(self, step: int) -> dict[str, Any]:
        """One step, and what is logged of it."""
        began = time.perf_counter()
        parts = self.deal.step(step, self.ranks.world.rank)
        for number, rows in enumerate(parts):
            batch = self.data.batch(rows)
            if batch.targets:
                loss = self.engine.step(batch, self._seed(step, number))
                self._gradients.add(loss, batch.targets, alone=len(parts) == 1)
        loss, targets = self._gradients.finish()
        rate = self.plan.lr * factor(step, self.steps, self.warmup)
        norm = clip(self._parameters, self.plan.clip)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DriftError(self._broken(step + 1, loss, norm, rate))
        if targets:
            set_rate(self.optimizer, rate)
            self.optimizer.step()
        self.memory.loss += loss * targets
        self.memory.targets += targets
        return {
            "step": step + 1,
            "epoch": step // self.deal.steps_per_epoch + 1,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "targets": targets,
            "seconds": round(time.perf_counter() - began, 6),
        }

    def _seed(self, step: int, number: int) -> int:
        """Dropout's seed: another for each micro-batch of each rank, and the same in a run that was resumed."""
        deal = self.deal
        return (deal.seed + (step * deal.accumulate + number) * deal.size + self.ranks.world.rank) % SEEDS

    def _broken(self, step: int, loss: float, norm: float, rate: float) -> str:
        """What is said of a step that cannot be made. A checkpoint of the very weights that led here is removed."""
        if self.states is not None and step - 1 in self._saved:
            self._saved.remove(step - 1)
            if self.ranks.world.first:
                self.states.drop(step - 1)
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        kept = "there is no good checkpoint yet"
        if self.states is not None and self._saved:
            kept = f"the last good checkpoint is {self.states.path(max(self._saved))}"
        return f"{what} at step {step} (learning rate {rate:.3g}): training is stopped; {kept}; try a smaller --lr"

    def _end_epoch(self, epoch: int, step: int, judge: Judge, better: Callable[[int], None]) -> None:
        memory = self.memory
        mean = memory.loss / max(memory.targets, 1)
        score = self._judged(epoch + 1, mean, judge)
        sign = 1 if score.higher_is_better else -1
        # What may not be kept never takes the place of what may.
        found = (score.sound, sign * score.value)
        before = None if memory.best is None else (memory.best_sound, sign * memory.best)
        if math.isfinite(score.value) and (before is None or found > before):
            memory.best, memory.best_epoch, memory.best_step = score.value, epoch + 1, step + 1
            memory.best_sound, memory.since = score.sound, 0
            if self.ranks.world.first:
                better(epoch + 1)
        else:
            memory.since += 1
        assert memory.epochs is not None
        memory.epochs.append(
            {"epoch": epoch + 1, "step": step + 1, "loss": mean, "score": score.value, **(score.record or {})}
        )
        if self.log is not None:
            self.log.tell({"step": step + 1, "score": score.value, "scores": (score.record or {}).get("scores", {})})
        memory.loss, memory.targets = 0.0, 0
        if self.plan.patience is not None and memory.since >= self.plan.patience and step + 1 < self.steps:
            memory.done = True
            memory.why = f"no better for {memory.since} epochs"
        elif step + 1 == self.steps:
            memory.done = True
        self._save(step + 1)

    def _judged(self, epoch: int, mean: float, judge: Judge) -> Score:
        """The first rank's judgement, on all ranks."""
        if not self.ranks.world.first:
            return Score(**self.ranks.told_by_first(None))
        score = judge(epoch, mean)
        self.ranks.told_by_first(asdict(score))
        return score

    def _save(self, step: int) -> None:
        if self.states is not None and self.ranks.world.first:
            self.states.save(step, self.engine.parameters, self.optimizer, asdict(self.memory), self.memory.best_step)
        self._saved = {*sorted(self._saved)[-1:], step}


class Log:
    """JSON lines, one a step; on going on, what was logged past the checkpoint is taken away."""

    def __init__(self, path: Path, more: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self.path, self._more = path, more
        self._file: Any = None

    @contextlib.contextmanager
    def opened(self, after: int) -> Iterator[Log]:
        """The file, holding the lines of steps up to `after`."""
        kept = []
        if after and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] <= after:
                        kept.append(line + "\n")
        disk.write_text_atomic(self.path, "".join(kept))
        with self.path.open("a", encoding="utf-8") as self._file:
            yield self

    def write(self, line: Mapping[str, Any]) -> None:
        """One step."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.tell(line)

    def tell(self, line: Mapping[str, Any]) -> None:
        """What is not for the file, but for whoever else listens."""
        if self._more is not None:
            self._more(line)
