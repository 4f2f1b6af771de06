"""Floor 3: a run of training from its wishes to its record: source, data, engine, ranks and epochs brought together.

    OUT/model/          the best epoch's weights, a Hugging Face checkpoint
    OUT/converted/      the line's OUT of it: golden/, onnx/ and nlpconvert.json with the verdict
    OUT/checkpoints/    to go on from: the last one and the best one
    OUT/train.jsonl     a line a step
    OUT/training.json   the record: what was asked, with what it was done, the gradients' verdict, epochs and curve

What is refused is refused before the first step. Of several ranks the first one alone speaks and writes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nlpconvert
from nlpconvert import disk, host, manifest, training_epochs, training_wishes
from nlpconvert import training_prepared as prepared
from nlpconvert.artifact import Outcome
from nlpconvert.errors import ConversionError, NlpconvertError, UsageError, first_line, worst
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent, captured
from nlpconvert.training import world as worlds
from nlpconvert.training.batches import Data, Deal
from nlpconvert.training.world import World
from nlpconvert.training_epochs import Epochs
from nlpconvert.training_wishes import Wishes

if TYPE_CHECKING:
    import torch

    from nlpconvert.source import Loaded
    from nlpconvert.training import Engine
    from nlpconvert.training.gradients import Verdict
    from nlpconvert.training.loop import Log, Loop, Plan
    from nlpconvert.training.losses import Objective
    from nlpconvert.training.ranks import Ranks
    from nlpconvert.training.states import State, States

RECORD, LOG, BOARD = "training.json", "train.jsonl", "tensorboard"
CURVE = 1000
"""Points of a curve that the record keeps at most; the log has all."""
VERIFIED_STEPS = 10


@dataclass(frozen=True)
class Trained:
    """What a run came to: its record, which OUT keeps, and the exit code."""

    record: Mapping[str, Any]
    exit_code: int


class SaidByFirst(NlpconvertError):
    """This rank ends with an error that the first rank tells the person."""

    def __init__(self, error: NlpconvertError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_code


def train(
    model: str,
    out: Path,
    wishes: Wishes,
    options: Options | None = None,
    progress: Progress | None = None,
    world: World | None = None,
) -> Trained:
    """Trains `model` on the rows of `wishes.data` into `out`, or goes on with the run that lies there.

    `options` are the line's: task, threads, tolerance and what else concerns the model and its exports. Raises
    UsageError and MissingPackage before any step, DriftError for wrong gradients and for a loss that is no number,
    SaidByFirst on a rank other than the first.
    """
    options, progress = options or Options(), progress or Silent()
    world = worlds.find(os.environ, os.getppid()) if world is None else world
    try:
        engine = training_wishes.check(wishes, options)
        if wishes.verify and world.size > 1:
            raise UsageError("--verify compares engines within one process: start one")
    except NlpconvertError as error:
        if world.first:
            raise
        raise SaidByFirst(error) from error
    from nlpconvert.training import ranks

    try:
        with ranks.meet(world) as together:
            run = Run(model, out, wishes, options, progress if world.first else Silent(), together, engine)
            return run.verified() if wishes.verify else run.trained()
    except ranks.RankFailed as error:
        if world.first or not error.heard:
            raise
        raise SaidByFirst(error) from error


class Run:
    """One run on one rank. `engine`: its name."""

    def __init__(
        self, model: str, out: Path, wishes: Wishes, options: Options, progress: Progress, ranks: Ranks, engine: str
    ) -> None:
        from nlpconvert.training import ranks as all_ranks

        self.model, self.out, self.wishes, self.options = model, out, wishes, options
        self.progress, self.ranks, self.engine_name = progress, ranks, engine
        self.threads = all_ranks.use_threads(options.threads, ranks.world)
        self.began = time.perf_counter()
        self.notes: list[str] = []

    # -- the two things it does -----------------------------------------------------------------------------------

    def trained(self) -> Trained:
        """All of it, to the end."""
        from nlpconvert.training import gradients, loop, states

        with self._home():
            loaded, data, deal = self._prepared()
            prepared.check_epochs(loaded, self.wishes, self.options)
            objective, engine = self._engine(loaded)
            optimizer = self._optimizer(loaded, engine)
            kept = states.States(self.out, self._asked(loaded, data))
            found = self._resumed(kept)
            after = 0 if found is None else found.step
            with self._log(after) as log:
                work = loop.Loop(
                    engine, optimizer, data, deal, self._plan(), self.ranks, self.progress, states=kept, log=log
                )
                if found is not None:
                    work.resume(found)
                record = self._record(loaded, data, deal, engine, work, kept.run)
                verdict = self._gradients(objective, engine, data, deal, after)
                gradients.require(verdict)
                record["gradients"] = verdict.to_dict()
                epochs = self._epochs(loaded)
                self._write(record, work, "running")
                try:
                    work.run(epochs.judge, after, epochs.better)
                except NlpconvertError as error:
                    self._write(record, work, "stopped", str(error))
                    raise
                finally:
                    epochs.discard()
                return self._write(record, work, "finished", work.memory.why)

    def verified(self) -> Trained:
        """The engine against PyTorch: gradients, losses and weights over some steps; nothing is written."""
        from nlpconvert.training import comparing, eager, loop, losses

        loaded, data, deal = self._prepared()
        objective, engine = self._engine(loaded)
        plan = replace(self._plan(), epochs=None, steps=self.wishes.steps or VERIFIED_STEPS)

        def loop_of(loaded: Loaded, engine: Engine, progress: Progress) -> Loop:
            return loop.Loop(engine, self._optimizer(loaded, engine), data, deal, plan, self.ranks, progress)

        ours = loop_of(loaded, engine, self.progress)
        others = [prepared.load_model(self.model, self.options) for _ in range(2)]
        others[1].module.double()
        theirs, exact = (
            loop_of(each, eager.EagerEngine(losses.with_loss(each.module, each.facts.task, each.facts)), Silent())
            for each in others
        )
        record = self._record(loaded, data, deal, engine, ours, self._asked(loaded, data))
        verdict = self._gradients(objective, engine, data, deal, 0)
        record["gradients"] = verdict.to_dict()
        if verdict.agrees:
            self.progress.start(f"{engine.name} against PyTorch", ours.steps)
            record["verified"] = comparing.compare(ours, theirs, exact, ours.steps).to_dict()
        agrees = verdict.agrees and record["verified"]["agrees"]
        record |= {"status": "verified" if agrees else "drift", "exit_code": int(not agrees), "notes": self.notes}
        record["seconds"] = round(time.perf_counter() - self.began, 3)
        return Trained(record, record["exit_code"])

    # -- what it begins with --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _home(self) -> Iterator[None]:
        """OUT, locked and repaired, by the first rank. UsageError where it is no place for this run."""
        if not self.ranks.world.first:
            yield
            return
        with disk.lock(self.out, "nlpconvert train"):
            for directory in (self.out, self.out / "checkpoints"):
                for line in disk.repair(directory):
                    self.progress.line(line)
            there = [path.name for path in self.out.iterdir() if not disk.is_bookkeeping(path.name)]
            if there and RECORD not in there:
                made = "artifacts" if manifest.FILE in there else "something else"
                raise UsageError(f"{self.out} is not empty and holds {made}, no {RECORD}; give a new directory")
            if there and not self.wishes.resume:
                raise UsageError(f"{self.out} holds a run of training: --resume goes on with it, or give another -o")
            yield

    def _prepared(self) -> tuple[Loaded, Data, Deal]:
        """Model and data. UsageError for what is wrong with them."""
        self.progress.start("load")
        loaded, data = prepared.load(self.model, self.wishes, self.options)
        self._say(*loaded.notes, *data.notes)
        size, wishes = self.ranks.world.size, self.wishes
        return loaded, data, Deal(len(data.examples), wishes.batch, wishes.accumulate, size, wishes.seed)

    def _engine(self, loaded: Loaded) -> tuple[Objective, Engine]:
        """The engine over model and loss. Where none was named and ONNX Runtime cannot train it, PyTorch."""
        from nlpconvert.training import engines, losses

        objective = losses.with_loss(loaded.module, loaded.facts.task, loaded.facts)
        self._say(*objective.notes)
        self.progress.start(f"engine {self.engine_name}")
        try:
            with captured(Path(os.devnull)):
                engine = engines.make(self.engine_name, objective, threads=self.threads)
        except ConversionError as error:
            if self.wishes.engine is not None or self.wishes.verify:
                raise
            self._say(f"{error}: PyTorch trains it instead")
            self.engine_name = "torch"
            engine = engines.make("torch", objective)
        if self.wishes.engine is None and self.engine_name == "torch":
            self._say("engine: torch (PyTorch itself; pip install 'nlpconvert[training]' brings ONNX Runtime's)")
        engine.dropout = self.wishes.dropout
        return objective, engine

    def _optimizer(self, loaded: Loaded, engine: Engine) -> torch.optim.Optimizer:
        from nlpconvert.training import optimizers

        wishes = self.wishes
        return optimizers.make(wishes.optimizer, loaded.module, engine.parameters, self._plan().lr, wishes.weight_decay)

    def _plan(self) -> Plan:
        from nlpconvert.training import loop, optimizers

        wishes = self.wishes
        rate = optimizers.OPTIMIZERS[wishes.optimizer].rate if wishes.lr is None else wishes.lr
        return loop.Plan(
            epochs=wishes.epochs,
            steps=wishes.steps,
            lr=rate,
            warmup=wishes.warmup,
            clip=wishes.clip,
            patience=wishes.patience,
            checkpoint_every=wishes.checkpoint_every,
        )

    def _resumed(self, kept: States) -> State | None:
        """The checkpoint to go on from, the same on all ranks; None to begin."""
        found = kept.newest() if self.wishes.resume else None
        step = self.ranks.told_by_first(None if found is None else found.step)
        if (None if found is None else found.step) != step:
            raise UsageError(
                f"rank {self.ranks.world.rank} does not see the checkpoint of step {step} in {kept.directory}: all "
                "ranks need the same files there"
            )
        if self.wishes.resume:
            self._say(
                f"going on after step {step}" if step else f"{kept.directory} holds no checkpoint: from the start"
            )
        return found

    # -- gradients ------------------------------------------------------------------------------------------------

    def _gradients(self, objective: Objective, engine: Engine, data: Data, deal: Deal, after: int) -> Verdict:
        """The engine's gradients of the first batch with a target, against autograd's."""
        from nlpconvert.training import eager, gradients

        self.progress.start("gradients against PyTorch")
        parts = (
            rows for step in range(deal.steps_per_epoch) for rows in deal.step(after + step, self.ranks.world.rank)
        )
        batch = next((each for each in map(data.batch, parts) if each.targets), data.batch([0]))
        verdict = gradients.verify(engine, eager.EagerEngine(objective), batch)
        for line in verdict.lines():
            self.progress.line(line)
        return verdict

    # -- what it leaves -------------------------------------------------------------------------------------------

    def _say(self, *lines: str) -> None:
        for line in lines:
            if line not in self.notes:
                self.notes.append(line)
                self.progress.line(line)

    def _asked(self, loaded: Loaded, data: Data) -> dict[str, Any]:
        """What decides every bit of the run, by the names a person gave it."""
        wishes, plan = self.wishes, self._plan()
        evaluation = wishes.evaluation
        return {
            "model": loaded.description["sha256"],
            "task": loaded.facts.task,
            "--data": data.sha256,
            "--eval": "" if evaluation is None else disk.sha256_file(evaluation),
            "--columns": wishes.columns,
            "--metric": "" if evaluation is None else training_epochs.metric_of(loaded.facts.task, wishes.metric),
            "--engine": self.engine_name,
            "--epochs": plan.epochs,
            "--steps": plan.steps,
            "--batch": wishes.batch,
            "--accumulate": wishes.accumulate,
            "--optimizer": wishes.optimizer,
            "--lr": plan.lr,
            "--warmup": wishes.warmup,
            "--weight-decay": wishes.weight_decay,
            "--clip": wishes.clip,
            "--seed": wishes.seed,
            "--dropout": wishes.dropout,
            "number of ranks": self.ranks.world.size,
        }

    @contextlib.contextmanager
    def _log(self, after: int) -> Iterator[Log | None]:
        """The log of the first rank, and TensorBoard's where it is installed."""
        from nlpconvert.training import loop

        if not self.ranks.world.first:
            yield None
            return
        with contextlib.ExitStack() as stack:
            more = None
            if importlib.util.find_spec("tensorboard") is not None:
                try:
                    from nlpconvert.training.board import Board
                except ImportError as error:
                    self._say(f"TensorBoard cannot be imported: {first_line(error)}")
                else:
                    more = stack.enter_context(contextlib.closing(Board(self.out / BOARD))).write
            yield stack.enter_context(loop.Log(self.out / LOG, more).opened(after))

    def _epochs(self, loaded: Loaded) -> Epochs:
        wishes = self.wishes
        # The weights are all there now, whatever the checkpoint lacked.
        options = replace(self.options, task=loaded.facts.task, revision=None, allow_missing_weights=False)
        metric = "" if wishes.evaluation is None else training_epochs.metric_of(loaded.facts.task, wishes.metric)
        return Epochs(self.out, loaded, options, self.progress, wishes.evaluation, wishes.columns, metric)

    def _record(
        self, loaded: Loaded, data: Data, deal: Deal, engine: Engine, work: Loop, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        graph = getattr(engine, "graph", None)
        return {
            "nlpconvert": nlpconvert.__version__,
            "model": dict(loaded.description),
            "data": {"path": str(self.wishes.data), "rows": len(data.examples), "sha256": data.sha256},
            "evaluation": None if self.wishes.evaluation is None else str(self.wishes.evaluation),
            "asked": dict(asked),
            "engine": {"name": engine.name, "opset": None if graph is None else graph.opset, "threads": self.threads},
            "world": asdict(self.ranks.world),
            "host": host.host_facts(),
            "versions": host.versions(),
            "steps": work.steps,
            "steps_per_epoch": deal.steps_per_epoch,
            "rows_per_step": deal.rows_per_step,
            "parameters": sum(each.numel() for each in engine.parameters.values()),
        }

    def _write(self, record: Mapping[str, Any], work: Loop, status: str, why: str = "") -> Trained:
        """The record as it stands, written by the first rank; its exit code is the worst of the epochs' verdicts."""
        memory = work.memory
        epochs = memory.epochs or []
        codes = [Outcome("onnx", each.get("verdict", "agrees")).exit_code for each in epochs]
        code = worst([*codes, 1] if status == "stopped" else codes)
        whole = {
            **record,
            "status": status,
            "why": why,
            "exit_code": code,
            "best": None if memory.best is None else {"epoch": memory.best_epoch, "score": memory.best},
            "epochs": epochs,
            "curve": self._curve(),
            "seconds": round(time.perf_counter() - self.began, 3),
            "notes": self.notes,
        }
        if self.ranks.world.first:
            disk.write_json_atomic(self.out / RECORD, whole)
        return Trained(whole, code)

    def _curve(self) -> dict[str, list[float]]:
        """Steps, losses and learning rates of the log, evenly thinned to at most CURVE points."""
        path = self.out / LOG
        if not self.ranks.world.first or not path.is_file():
            return {}
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        kept = lines[:: -(-len(lines) // CURVE)] if lines else []
        return {name: [line[name] for line in kept] for name in ("step", "loss", "learning_rate")}
