"""Floor 3: `recover`: what int8 lost is won back by training against the reference, on texts without labels.

    nlpconvert recover out --step onnx-qdq --data texts.jsonl [--train weights|scales|all] [--all-int8]

The step's recipe is simulated in PyTorch (`training.fake_quant`), which has to compute what ONNX Runtime computes of
the artifact, layer by layer, before anything is trained. Trained on the calibrate part, kept where the select part says
so, judged on the rest: against the original reference, with the goldens and the tolerance of every other verdict. What
was trained is written by the ordinary converter, and takes the step's place when it is whole and no worse than what was
there; the record says what was trained, on what and for how long.

Trained scales are a recipe like any other. One that stands on trained weights is of the kind TRAINED: replaying it on
the checkpoint's own weights would make another file, and is refused.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import (
    calibration,
    cpu_int8,
    disk,
    inputs,
    judging,
    manifest,
    models,
    plan,
    quantizing,
    recipe,
    recover_parity,
    recover_texts,
    runtimes,
    search,
    verifying,
)
from nlpconvert.artifact import STEPS, Artifact, Made, Outcome
from nlpconvert.errors import DriftError, MissingPackage, UsageError
from nlpconvert.line import Line
from nlpconvert.making import Work
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, captured
from nlpconvert.recipe import Recipe
from nlpconvert.recovered import Recovered, Wishes, far, finite, told
from nlpconvert.settings import Settings

if TYPE_CHECKING:
    from nlpconvert.judging import Bounds, Probes
    from nlpconvert.recover_texts import Texts
    from nlpconvert.training.distil import Group, Trained
    from nlpconvert.training.fake_quant import FakeQuantized
    from nlpconvert.validators.tolerance import Tolerance

TRAINED = "static, trained weights"
"""The kind of a recipe whose numbers fit weights that are not the checkpoint's."""

WEIGHTS, SCALES = 2e-4, 2e-4
"""How far a step of the optimizer moves a matrix, as a share of its root mean square; and the logarithm of a scale."""
NORMS = 0.1
"""What weights of normalisation move beside matrices."""

SCORES = 8
"""How often the select part is asked on the way."""
CENTERED = 8
"""Batches that the mean of every layer's input is taken from."""
SCRATCH = ".scratch"


def recover(
    out: Path, step: str, wishes: Wishes, options: Options, progress: Progress, settings: Settings | None = None
) -> Recovered:
    """Trains a step's int8 against the reference and puts the better artifact in its place.

    UsageError for what cannot be trained (another step or method, a model that writes, too few texts) or is not the
    checkpoint that OUT was made from; DriftError where the artifact is not what it was, where the simulation does not
    compute what ONNX Runtime does, and for a loss that is no number. Whatever is raised, the step is as it was.
    """
    wishes.check()
    plan.check_words(options)
    record = manifest.read(out)
    made = _trainable(record, step, out)
    line = Line(_model(record, wishes.model), out, _options(record, options), progress, settings)
    with line.opened("int8") as (record, probes):
        # Other texts make other goldens: what lies beside the step is judged by them too.
        record = line.asked_anew(record, (), probes)
        return _Recovery(line, record, probes, step, made, wishes).run()


def _options(record: Manifest, options: Options) -> Options:
    hub = record.source.get("id")
    revision = record.source.get("revision") if isinstance(hub, str) else None
    revision = options.revision or (revision if isinstance(revision, str) else None)
    return replace(options, task=record.task, revision=revision, allow_missing_weights=True)


def _model(record: Manifest, given: str | None) -> str:
    """What the step was made from: given, else where it was. UsageError where that is gone."""
    for package in plan.NEEDS["torchscript"]:
        if runtimes.lacks(package):
            raise MissingPackage(f"recover trains in PyTorch: pip install 'nlpconvert[cpu]' ({package})")
    place, hub = record.source.get("path"), record.source.get("id")
    if given is not None:
        return given
    if isinstance(place, str) and Path(place).is_dir():
        return place
    if isinstance(hub, str):
        return hub
    raise UsageError(f"the model is not where it was ({place}): give --model DIR; its outputs are what is trained for")


def _trainable(record: Manifest, step: str, out: Path) -> Recipe:
    """The step's recipe. UsageError where it is none that can be trained, DriftError where the step is not whole."""
    plan.check_step_names([step], tuple(record.steps), f"in {out} there is")
    artifact = record.artifact(step, out)
    if artifact.format != "onnx" or artifact.precision != "int8" or step not in STEPS:
        raise UsageError(f"{step} is {artifact.precision}, {artifact.format}: recover trains onnx-qdq and onnx-int8")
    if artifact.encoder is not None:
        raise UsageError(f"{step} is an encoder and a decoder in two graphs: recover trains what is one graph")
    if record.record(step).stale:
        raise DriftError(f"{step} is stale: {artifact.parent} was replaced since; make it again before it is trained")
    for name in (step, artifact.parent):
        changed = manifest.tampered(record, name, out)
        if changed:
            raise DriftError(f"{changed[0]} since it was recorded: nothing was trained")
    if recipe.FILE not in artifact.files:
        raise UsageError(f"{step} has no {recipe.FILE}: what was decided for its layers is not known")
    made = recipe.read(artifact.directory / recipe.FILE)
    if made.kind == TRAINED:
        raise UsageError(
            f"the weights of {step} were trained before and are not the checkpoint's: make it anew (--force), and then "
            "recover it with more --steps"
        )
    if made.kind != "static":
        raise UsageError(f"{step} is {made.kind}: recover trains static int8 (nlpconvert onnx --int8 --method static)")
    return made


@dataclass(frozen=True)
class _Trained:
    """What training ends with: the recipe, the weights as the checkpoint has them and as they are now (none where only
    scales were trained), and what the record says of it."""

    made: Recipe
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]
    facts: dict[str, Any] = field(default_factory=dict)


class _Recovery:
    """One recovery in an OUT that is locked, with its model loaded and its goldens asked."""

    def __init__(self, line: Line, record: Manifest, probes: Probes, step: str, made: Recipe, wishes: Wishes) -> None:
        self.line, self.record, self.probes, self.step, self.made = line, record, probes, step, made
        self.wishes, self.options, self.progress, self.out = wishes, line.options, line.progress, line.out
        self.row = STEPS[step]
        self.bounds: Bounds = verifying.bounds_of(record, step, line.tolerances, line.settings)

    def run(self) -> Recovered:
        started = time.perf_counter()
        log = self.out / "logs" / f"{self.step}.recover.log"
        log.unlink(missing_ok=True)
        there = verifying.again(self.record, self.step, self.out, self.probes, self.bounds, self.options, self.progress)
        if there.verdict is None or there.artifact is None:
            raise DriftError(f"{self.step} cannot be judged as it is, so nothing was trained: {there.reason}")
        with disk.building(self.out, self.step) as new:
            work = self._work(new, log)
            try:
                with captured(log):
                    before, artifact = self._start(work, there)
                    trained = self._trained(work, artifact)
                    trained.facts["before"] = told(before)
                    trained.facts["seconds"] = round(time.perf_counter() - started, 1)
                    made = self._written(work, trained) if trained.facts["best_step"] else None
            finally:
                shutil.rmtree(new / SCRATCH, ignore_errors=True)
            outcome, tolerances = (before, ()) if made is None else self._judge(self._outcome(new, made))
            # All in integers may drift more than what stayed in float32: there the tolerance is the bound.
            enough = far(outcome) <= far(there) or (self.wishes.all_int8 and outcome.status == "agrees")
            take = made is not None and enough
            if take:
                disk.replace_directory(new, self.out / self.step)
            else:
                shutil.rmtree(new, ignore_errors=True)
        if take:
            outcome = self._recorded(replace(outcome, seconds=time.perf_counter() - started), tolerances)
        return Recovered(self.step, before, outcome, take, {**trained.facts, "after": told(outcome)})

    def _recorded(self, outcome: Outcome, tolerances: Sequence[Tolerance]) -> Outcome:
        """The outcome at its place in OUT, in the manifest."""
        assert outcome.artifact is not None
        place = self.out / self.step / outcome.artifact.path.name
        outcome = replace(outcome, artifact=replace(outcome.artifact, path=place))
        record = self.record.with_step(
            outcome, tolerances=[each.to_dict() for each in tolerances], options=self.options.recorded()
        )
        record.write(self.out)
        return outcome

    # -- before -------------------------------------------------------------------------------------------------------

    def _work(self, new: Path, log: Path) -> Work:
        assert self.line.loaded is not None
        return Work(
            row=self.row,
            options=replace(self.options, recipe=None),
            record=self.record,
            loaded=self.line.loaded,
            parent=self.record.artifact(self.row.parent, self.out),
            new=new,
            log=log,
            probes=self.probes,
            tolerances=self.bounds.given,
            progress=self.progress,
            facts=models.facts_from_data(self.record.facts),
            encode=self.line.encode,
        )

    def _start(self, work: Work, there: Outcome) -> tuple[Outcome, Artifact]:
        """What is trained and how it is judged: the step as it is, or with all of its layers in integers."""
        assert there.artifact is not None
        self.bench = recover_parity.Held(work, work.above, work.new / SCRATCH, math.inf)
        back = any(layer.precision == "float32" and layer.share for layer in self.made.layers)
        if not self.wishes.all_int8 or not (back or any(site.outliers for site in self.made.sites.values())):
            return there, there.artifact
        self.progress.start(f"{self.step}: all layers in integers")
        looked = search.Static(self.bench, activation=self.made.activation, largest=self.made.largest)
        found = looked.recipe(dict.fromkeys(looked.sites, 0))
        self.made = replace(found, base=self.made.base, search=self.made.search)
        whole = work.new / SCRATCH / "whole"
        whole.mkdir(parents=True)
        base = self._base(work.above, work.new / SCRATCH)
        outcome = self._outcome(whole, quantizing.write_made(replace(work, new=whole), self.made, base, ()))
        outcome, _ = self._judge(outcome)
        assert outcome.artifact is not None
        return outcome, outcome.artifact

    def _base(self, plain: Artifact, scratch: Path) -> Artifact:
        """The graph that a recipe is applied to: the exported one, or that one fused."""
        if self.made.base == cpu_int8.PLAIN:
            return plain
        from nlpconvert.convert import optimize

        directory = scratch / f"fused-{plain.directory.name}"
        directory.mkdir(parents=True, exist_ok=True)
        fused = optimize.convert(plain, directory, target="cpu")
        return replace(plain, step=self.made.base, path=directory / fused.file, files=disk.hash_tree(directory))

    # -- training -----------------------------------------------------------------------------------------------------

    def _trained(self, work: Work, artifact: Artifact) -> _Trained:
        from nlpconvert.convert import derived, retrained
        from nlpconvert.training import distil, fake_quant

        assert work.loaded is not None
        texts, counts = self._texts(work)
        student = fake_quant.FakeQuantized(work.loaded.module, self.made)
        try:
            every = student.trained()
            there = retrained.present(derived.load(work.above).graph, every)
            lacking = [layer.name for layer in fake_quant.quantized_layers(self.made) if layer.name not in there]
            if lacking:
                raise UsageError(f"the weight of {lacking[0]} is not in {work.above.step} as the checkpoint has it")
            student.leave(set(every) - there)
            before = student.trained()
            self.bench.student = student
            base = self._base(work.above, work.new / SCRATCH)
            parity = recover_parity.check(student, self.bench, self.made, base, artifact)
            student.center(itertools.islice(texts.batches(), CENTERED))
            started = time.perf_counter()
            self.progress.start(f"{self.step}: train {self.wishes.train}", self.wishes.steps)
            result = distil.train(
                student,
                self._groups(student),
                texts.batches(),
                work.facts.outputs,
                distil.Plan(self.wishes.steps, max(self.wishes.steps // SCORES, 1), self.wishes.hidden),
                score=self._score,
                watched=distil.blocks(work.loaded.module),
                on_step=lambda step, loss: self.progress.advance(),
                threads=self.options.threads,
            )
            after = student.trained() if self.wishes.train != "scales" else {}
            facts = self._settings(result, counts, time.perf_counter() - started)
            return _Trained(student.recipe(), before, after, {**facts, "parity": parity})
        finally:
            student.close()

    def _settings(self, result: Trained, counts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        wishes, data = self.wishes, self.options.data
        return {
            "trained": wishes.train,
            "steps": wishes.steps,
            "best_step": result.best,
            "batch": wishes.batch,
            "rate": wishes.rate,
            "hidden": wishes.hidden,
            "seed": wishes.seed,
            "all_int8": wishes.all_int8,
            "data": None if data is None else {"name": data.name, "sha256": disk.sha256_file(data)},
            **counts,
            "training_seconds": round(seconds, 1),
            "scores": [
                {"step": each.step, "score": round(each.score, 6), "loss": finite(each.loss)} for each in result.scores
            ],
        }

    def _texts(self, work: Work) -> tuple[Texts, dict[str, Any]]:
        """The texts to train on, without those that are judged; and how many there are."""
        cases = calibration.asked(work, "calibrate")
        items = inputs.items_of(cases, work.facts)
        judged = {item.rows for item in inputs.items_of(self.probes.cases, work.facts)}
        kept = [item for item in items if item.rows not in judged]
        own = sum(len(case.inputs["input_ids"]) for case in cases if case.from_data)
        texts = recover_texts.Texts(work.facts, kept, self.wishes.batch, self.wishes.seed)
        counts = {"texts": len(kept), "texts_of_data": own, "left_out_as_judged": len(items) - len(kept)}
        return texts, {**counts, "select_texts": len(inputs.items_of(self.bench.cases, work.facts))}

    def _groups(self, student: FakeQuantized) -> list[Group]:
        """Each tensor with a learning rate that fits its size."""
        from nlpconvert.training.distil import Group

        groups, rate = [], self.wishes.rate
        if self.wishes.train in ("weights", "all"):
            for weight in student.weights():
                share = WEIGHTS if weight.ndim > 1 else WEIGHTS * NORMS
                groups.append(Group([weight], rate * share * float(weight.detach().square().mean().sqrt())))
        if self.wishes.train in ("scales", "all"):
            groups += [Group([each], rate * SCALES * size) for each, size in student.scales()]
        return groups

    def _score(self) -> float:
        score = self.bench.score(recover_parity.STUDENT)
        self.progress.line(f"{self.step}: {score.text}, {score.used:.3g} of what is allowed on the select part")
        return score.used + score.energy  # of two that use as much, the one that moves less

    # -- after --------------------------------------------------------------------------------------------------------

    def _written(self, work: Work, trained: _Trained) -> Made:
        """The artifact in its new directory, by the converter that made the old one."""
        from nlpconvert.convert import derived, onnx_graph, retrained

        plain, scratch = work.above, work.new / SCRATCH
        if trained.after:
            program = derived.load(plain)
            before = {name: trained.before[name] for name in trained.after}
            retrained.put(program.graph, before, trained.after)
            directory = scratch / "weights"
            directory.mkdir(parents=True)
            onnx_graph.save(program, directory / derived.ONNX_FILE)
            derived.copy_companions(plain, directory)
            plain = replace(plain, path=directory / derived.ONNX_FILE, files=disk.hash_tree(directory))
        facts = dict(trained.facts)
        recipe_now = replace(trained.made, candidates=(), search={**self.made.search, "recovered": facts})
        made = quantizing.write_made(work, recipe_now, self._base(plain, scratch), ())
        if trained.after:
            recipe.write(replace(recipe_now, kind=TRAINED), work.new)
        return replace(made, made_by={**made.made_by, "recovered": facts})

    def _outcome(self, new: Path, made: Made) -> Outcome:
        artifact = Artifact(
            step=self.step,
            path=new / made.file,
            format=self.row.format,
            precision=self.row.precision,
            task=self.record.task,
            inputs=made.inputs,
            outputs=made.outputs,
            files=disk.hash_tree(new),
            parent=self.row.parent,
            parent_sha256=self.record.artifact(self.row.parent, self.out).sha256,
            made_by=made.made_by,
        )
        size = sum((new / name).stat().st_size for name in artifact.files)
        return Outcome(self.step, "not run", artifact=artifact, bytes=size, notes=made.notes)

    def _judge(self, outcome: Outcome) -> tuple[Outcome, Sequence[Tolerance]]:
        parent = self.record.artifact(self.row.parent, self.out)
        return judging.judged(outcome, self.record, self.probes, self.bounds, self.options, self.progress, parent)
