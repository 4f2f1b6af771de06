"""Floor 3: an artifact is broken on purpose, in every way of the table in `breaks`, and judged as `verify` judges it.

What is proved is the gate, not the artifact: that it trips where it should, and how small a change it can see. OUT is
never written to: a broken file lies in a temporary directory and reads all that was not changed from the original.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import breaks, judging, manifest, models, pairs, plan, runtimes
from nlpconvert.artifact import Artifact
from nlpconvert.backends import Batch, Session
from nlpconvert.breaks import Asked, Break, Broken, NotApplicable
from nlpconvert.errors import CannotRunHere, DriftError, first_line
from nlpconvert.judging import Probes
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent
from nlpconvert.proofs import Proof, Smallest, Trial
from nlpconvert.validators.findings import Comparison

if TYPE_CHECKING:
    from nlpconvert.judging import Bounds
    from nlpconvert.validators.tolerance import Tolerance

Judge = Callable[..., tuple[bool, dict[str, Any], Sequence[Any]]]
"""As `judging.judge`."""

ROUNDING = 1e-6
"""A break that moves the answers by less than this part of their size (relative L2 of every output) changed nothing but
the last bits of float32 (which is good for 6e-8 in each of many sums)."""

KEPT_BYTES = 256 << 20
"""Answers of the unbroken artifact that are kept, so that what only changes answers need not run it again."""

SMALLEST, LARGEST = 1e-7, 1.0
FACTOR = 1.5
MOST_JUDGINGS = 8
SHOWN = 3
"""How many of the cases that showed a nudge best are run again in the search for the smallest."""

_BY_ELEMENT = ("abs", "rel", "noise", "cosine")  # the worst case decides, whatever the others say


def prove(
    out: Path,
    record: Manifest,
    step: str,
    options: Options,
    progress: Progress,
    *,
    given: Sequence[Tolerance] | Bounds = (),
    judge: Judge | None = None,
) -> Proof:
    """Breaks the artifact of `step` in every way that applies and judges each as `verify` would, with `given`
    tolerances (else those of the options, else the table's).

    Raises DriftError where the unbroken artifact does not agree (there is nothing to prove then) or is not what its
    hash says, CannotRunHere where it cannot run here, UsageError where there is no such artifact.
    """
    artifact = record.artifact(step, out)
    for name in (manifest.GOLDEN, step):
        changed = manifest.tampered(record, name, out)
        if changed:
            raise DriftError(f"{changed[0]} since it was recorded: nothing can be proved by breaking it further")
    probes = judging.stored_probes(record, out)
    with contextlib.ExitStack() as stack:
        artifact = stack.enter_context(pairs.as_one(artifact))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nlpconvert-proof-")))
        session = runtimes.open_artifact(artifact, options)
        stack.callback(session.close)
        bench = Bench(
            artifact, record, probes, given or plan.check_words(options), options, judge or judging.judge, scratch
        )
        bench.begin(session)
        return bench.proof(progress)


class Remembered:
    """A session that remembers its answers, up to KEPT_BYTES, and once `replaying` gives those of batches it knows."""

    def __init__(self, base: Session) -> None:
        self.base = base
        self.provider, self.precision = base.provider, base.precision
        self.replaying = False
        self._kept: dict[int, tuple[Batch, dict[str, np.ndarray]]] = {}  # the batch itself, so that no id comes again
        self._bytes = 0

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """The base's answers."""
        if self.replaying and id(batch) in self._kept:
            return dict(self._kept[id(batch)][1])
        answers = self.base.run(batch)
        size = sum(array.nbytes for array in answers.values())
        if not self.replaying and id(batch) not in self._kept and self._bytes + size <= KEPT_BYTES:
            self._kept[id(batch)] = (batch, dict(answers))
            self._bytes += size
        return answers

    def close(self) -> None:
        """The base is closed by whoever opened it."""


class Partly:
    """A broken session for some batches; the others have the unbroken one's answers, which are known."""

    def __init__(self, broken: Session, whole: Session, batches: Sequence[Batch]) -> None:
        self._broken, self._whole = broken, whole
        self._batches = {id(batch) for batch in batches}
        self.provider, self.precision = broken.provider, broken.precision

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """The answers of whoever answers this batch."""
        return (self._broken if id(batch) in self._batches else self._whole).run(batch)

    def close(self) -> None:
        """Both are closed by whoever opened them."""


class Bench:
    """One artifact on the bench: broken, opened and judged, again and again."""

    def __init__(
        self,
        artifact: Artifact,
        record: Manifest,
        probes: Probes,
        given: Sequence[Tolerance] | Bounds,
        options: Options,
        judge: Judge,
        scratch: Path,
    ) -> None:
        self.artifact, self.probes, self.given, self.options = artifact, probes, given, options
        self.facts = models.facts_from_data(record.facts)
        self.cases = [case for case in probes.cases if case.name not in probes.not_applicable]
        self.scratch = scratch
        self._judge = judge
        self._whole: Remembered | None = None
        self._tolerances: tuple[str, ...] = ()

    @property
    def whole(self) -> Remembered:
        """The unbroken artifact."""
        assert self._whole is not None
        return self._whole

    def begin(self, session: Session) -> None:
        """Judges the unbroken artifact. DriftError where it does not agree as it is."""
        self._whole = Remembered(session)
        agrees, verdict, used = self.judged(self._whole, self.artifact)
        self._whole.replaying = True
        self._tolerances = tuple(dict.fromkeys(str(getattr(each, "text", each)) for each in used))
        if not agrees:
            said = _sighting(verdict)["reason"]
            raise DriftError(
                f"{self.artifact.step} does not agree as it is ({said}), so nothing is proved by breaking it; "
                f"look at `nlpconvert verify --step {self.artifact.step}` first"
            )

    def judged(self, session: Session, artifact: Artifact, parent: Session | None = None) -> Any:
        """What `verify` makes of a session."""
        probes = self.probes
        if artifact.path != self.artifact.path and artifact.format == "onnx":
            from nlpconvert.convert import breaking

            if not breaking.holds_tables(artifact.path):  # they are unchanged, in the original's data file
                probes = replace(probes, vocabulary=None)
        return self._judge(session, artifact, self.facts.outputs, probes, self.given, Silent(), parent)

    def proof(self, progress: Progress) -> Proof:
        """All breaks, one after the other."""
        rows = breaks.ways(self.artifact.format)
        progress.start("prove", len(rows) + 1)
        trials: list[Trial] = []
        shown: dict[float, list[str]] = {}
        for ways in rows.values():
            trials.append(self.trial(ways, shown))
            progress.advance()
        smallest = self.smallest([trial for trial in trials if trial.name.startswith(breaks.NUDGE)], shown)
        progress.advance()
        return Proof(
            self.artifact.step,
            self.artifact.format,
            self.artifact.precision,
            self._tolerances,
            tuple(trials),
            smallest,
        )

    # -- one break

    def trial(self, ways: Sequence[Break], shown: dict[float, list[str]] | None = None) -> Trial:
        """A break, in the first of its ways that applies. `shown` is told the cases by which a nudge was seen best."""
        reasons: list[str] = []
        for row in ways:
            try:
                return self._trial(row, shown)
            except NotApplicable as reason:
                reasons.append(str(reason))
        return self._result(ways[0], "does not apply", Broken(""), reason=reasons[-1])

    def _trial(self, row: Break, shown: dict[float, list[str]] | None) -> Trial:
        with self.broken(row) as (session, artifact, broken, refused):
            if session is None:
                return self._result(row, "seen", broken, times=math.inf, reason=refused)
            agrees, verdict, _ = self.judged(session, artifact)
            if not agrees:
                if shown is not None and row.factor != 1.0:
                    shown[row.factor - 1] = _cases(verdict)
                return self._result(row, "seen", broken, **_sighting(verdict))
            moved = self._moved(session, artifact)
            if moved <= ROUNDING:
                size = f"moves the answers by {moved:.1e} of their size, which is rounding"
                raise NotApplicable(f"{broken.what}: {'changes no answer of this model' if moved == 0 else size}")
            used = max(
                (output.used for output in Comparison.from_dict(verdict["comparison"]).outputs), default=math.nan
            )
            reason = f"moves the answers by {moved:.1e} of their size"
            return self._result(row, "not seen", broken, times=used, reason=reason)

    def _result(self, row: Break, status: str, broken: Broken, **found: Any) -> Trial:
        gross = row.is_gross(self.artifact.precision)
        return Trial(row.name, row.words, gross, status, broken.what, broken.module, **found)

    def _moved(self, session: Session, artifact: Artifact) -> float:
        """How far the broken artifact's scored answers are from the unbroken one's, as a part of their size."""
        _, verdict, _ = self.judged(session, artifact, self.whole)
        outputs = verdict["parent_comparison"]["outputs"]
        return max((float(output["relative_l2"]) for output in outputs), default=0.0)

    @contextlib.contextmanager
    def broken(self, row: Break) -> Iterator[tuple[Session | None, Artifact, Broken, str]]:
        """The artifact broken as a row says, opened: (session, artifact, what was done, ""), or (None, ..., why it
        cannot be opened). NotApplicable where the break cannot be done."""
        if row.kind == "session":
            session, broken = breaks.bend(row.way, self.whole, self.cases, self.artifact.precision)
            yield session, self.artifact, broken, ""
            return
        directory = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            opened, artifact, broken, refused = self._opened(row, directory)
            try:
                yield opened, artifact, broken, refused
            finally:
                if opened is not None:
                    opened.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _opened(self, row: Break, directory: Path) -> tuple[Session | None, Artifact, Broken, str]:
        artifact = self.artifact
        if row.kind == "graph" and artifact.format == "torchscript":
            from nlpconvert.backends.torchscript import TorchScriptSession
            from nlpconvert.convert import breaking_torchscript

            module, broken = breaking_torchscript.break_module(artifact.path, row.way, self._asked(row))
            return TorchScriptSession(module, artifact, self.options.device), artifact, broken, ""
        if row.kind == "graph":
            from nlpconvert.convert import breaking

            broken = breaking.break_file(artifact.path, row.way, directory, self._asked(row))
            data = artifact.directory
        else:
            broken, data = self._cut_off(row, directory)
        assert broken.path is not None
        artifact = replace(artifact, path=broken.path)
        try:
            return self._open(artifact, data), artifact, broken, ""
        except DriftError as error:
            return None, artifact, broken, first_line(error)
        except CannotRunHere as error:
            raise NotApplicable(f"{broken.what} cannot run here: {first_line(error)}") from error

    def _open(self, artifact: Artifact, data: Path) -> Session:
        if artifact.format != "onnx":
            return runtimes.open_artifact(artifact, self.options)
        from nlpconvert.backends import onnxruntime

        precision, device, threads = artifact.precision, self.options.provider, self.options.threads
        return onnxruntime.open_file(artifact.path, precision=precision, device=device, threads=threads, data=data)

    def _asked(self, row: Break) -> Asked:
        token = breaks.token_to_zero(self.cases, self.facts.special_ids) if row.way == "row-zeroed" else 0
        batch = breaks.frozen_at(self.cases) if row.way == "batch-frozen" else 1
        return Asked(row.factor, token, batch)

    def _cut_off(self, row: Break, directory: Path) -> tuple[Broken, Path]:
        """The main file, or its data file, without its second half; and where the data is."""
        whole = self.artifact.path
        if row.name == "data-truncated":
            data = whole.with_name(f"{whole.name}.data")
            if data.name not in self.artifact.files:
                raise NotApplicable("it has no data file")
            shutil.copyfile(whole, directory / whole.name)
            _copy_half(data, directory / data.name)
            return Broken(f"{data.name} cut off in the middle", path=directory / whole.name), directory
        _copy_half(whole, directory / whole.name)
        for beside in self.artifact.directory.iterdir():  # an engine is opened by what lies beside it
            if self.artifact.format == "tensorrt" and beside.is_file() and beside.name != whole.name:
                shutil.copyfile(beside, directory / beside.name)
        return Broken(f"{whole.name} cut off in the middle", path=directory / whole.name), self.artifact.directory

    # -- the smallest nudge

    def smallest(self, nudges: Sequence[Trial], shown: Mapping[float, Sequence[str]]) -> Smallest | None:
        """The smallest nudge of the weight that was nudged which the gate sees, to a factor of FACTOR.

        By bisection on a logarithmic scale, from what `nudges` have shown. Where the worst element decides, only the
        cases that showed it best are run again: the others keep the unbroken artifact's answers, so what is seen in
        that way is seen by the whole gate too. None where there is no weight to nudge.
        """
        done = [trial for trial in nudges if trial.status != "does not apply"]
        if not done:
            return None
        row = next(row for row in breaks.BREAKS if row.name == done[0].name)
        seen = [share for share in shown if shown[share]]
        high = min(seen, default=None)
        low = max((s for s in map(_share, done) if s is not None and (high is None or s < high)), default=SMALLEST)
        judgings = 0
        if high is None:
            judgings += 1
            cases = self._sees(row, LARGEST, None)
            if not cases:
                return Smallest(done[0].module, done[0].what, None, LARGEST, judgings)
            high, again = LARGEST, cases
        else:
            again = list(shown[high])
        while high / low > FACTOR and judgings < MOST_JUDGINGS:
            between = math.sqrt(high * low)
            judgings += 1
            found = self._sees(row, between, again)
            if found:
                high = between
            else:
                low = between
        return Smallest(done[0].module, done[0].what.rpartition(" times ")[0], high, low, judgings)

    def _sees(self, row: Break, share: float, names: Sequence[str] | None) -> list[str]:
        """The cases by which a nudge of this size is seen, none where it is not. `names`: those run, None for all."""
        try:
            with self.broken(replace(row, factor=1 + share)) as (session, artifact, _, _):
                if session is None:
                    return []
                if names is not None and self._by_element():
                    batches = [case.inputs for case in self.cases if case.name in names]
                    session = Partly(session, self.whole, batches)
                agrees, verdict, _ = self.judged(session, artifact)
                return [] if agrees else _cases(verdict) or [self.cases[0].name]
        except NotApplicable:
            return []

    def _by_element(self) -> bool:
        return all(text.startswith(_BY_ELEMENT) for text in self._tolerances)


def _share(trial: Trial) -> float | None:
    """A nudge's size, by its row; None where it was seen."""
    row = next(row for row in breaks.BREAKS if row.name == trial.name)
    return row.factor - 1 if trial.status == "not seen" else None


def _copy_half(source: Path, target: Path) -> None:
    size = source.stat().st_size // 2
    with source.open("rb") as reader, target.open("wb") as writer:
        while size and (part := reader.read(min(size, 1 << 20))):
            writer.write(part)
            size -= len(part)


def _cases(verdict: Mapping[str, Any]) -> list[str]:
    """The cases that used up most of the tolerance, worst first."""
    used: dict[str, float] = {}
    for output in Comparison.from_dict(verdict["comparison"]).outputs:
        for name, drift in output.cases.items():
            used[name] = max(used.get(name, 0.0), drift.used)
    ranked = sorted(used, key=lambda name: -used[name])
    return ranked[:SHOWN]


def _sighting(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Where a verdict that disagrees saw it: output, case, times the tolerance, and the gate's words."""
    comparison = Comparison.from_dict(verdict["comparison"])
    worst = next((output for output in comparison.ranked if not output.agrees), None)
    structure = [str(each) for each in verdict.get("structure", ())]
    if worst is None:
        reason = next(iter((*comparison.problems, *structure)), "")
        return {"times": math.inf, "reason": reason}
    reason = worst.problems[0] if worst.problems else f"out of tolerance, {worst.tolerance.text} allowed"
    if worst.nonfinite:
        reason = f"{worst.nonfinite} of its elements not finite"
    return {"output": worst.name, "case": worst.worst_case, "times": worst.used, "reason": reason}
