"""Floor 3: a served model is asked the goldens: one request at a time, then all at once, and judged as an artifact is.

What a server must be told to serve it is `triton`; who asks is `backends.served`. Here a Triton is started, waited for
and stopped, and what came back is held against PyTorch's answers by `judging`'s own rules.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import judging, manifest, models, plan, probes, runtimes, tokens, verifying
from nlpconvert.artifact import Artifact, Outcome
from nlpconvert.errors import CannotRunHere, DriftError, MissingPackage, NlpconvertError, first_line
from nlpconvert.judging import Bounds, Probes
from nlpconvert.manifest import Manifest
from nlpconvert.models import Facts
from nlpconvert.plan import Options
from nlpconvert.progress import Progress
from nlpconvert.settings import Settings
from nlpconvert.triton import endpoints, files, repository, server
from nlpconvert.triton import plan as triton_plan
from nlpconvert.triton.repository import Wanted
from nlpconvert.triton.together import Together, batches, moved, unproven

if TYPE_CHECKING:
    from nlpconvert.backends.served import ServedSession
    from nlpconvert.triton.endpoints import Client, Place

# ---- any endpoint ---------------------------------------------------------------------------------------------------


def endpoint(
    out: Path,
    step: str | None,
    url: str,
    *,
    options: Options,
    progress: Progress,
    settings: Settings,
    cases: Sequence[str] | None = None,
    timeout: float | None = None,
) -> list[Outcome]:
    """What a server answers at `url`, held against the goldens of `out`. `step`: whose tolerances and names hold.

    A server that is not there is "not run". UsageError: another form of URL, a model that it does not serve, a step
    that has to be named.
    """

    where = endpoints.place(url)
    tolerances = plan.check_words(options)
    record = manifest.read(out)
    chosen = files.one_step(out, step)
    asked = _Asking.of(out, record, chosen, tolerances, settings, cases, progress)
    client = open_client(where, timeout)
    try:
        return [asked.judge(client)]
    finally:
        client.close()


def open_client(where: Place, timeout: float | None = None) -> Client:
    """HTTP by the standard library, gRPC by tritonclient (MissingPackage without it)."""
    from nlpconvert.backends import served

    seconds = endpoints.TIMEOUT if timeout is None else timeout
    if where.scheme != "grpc":
        return served.HttpClient(where, seconds)
    if runtimes.lacks("tritonclient") or runtimes.lacks("grpc"):
        raise MissingPackage(f"gRPC: {repository.EXTRA}")
    from nlpconvert.backends import served_grpc

    return served_grpc.connect(where, seconds)


# ---- asking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asking:
    out: Path
    record: Manifest
    artifact: Artifact
    facts: Facts
    probes: Probes
    bounds: Bounds
    progress: Progress

    @classmethod
    def of(
        cls,
        out: Path,
        record: Manifest,
        step: str,
        tolerances: Any,
        settings: Settings,
        cases: Sequence[str] | None,
        progress: Progress,
    ) -> _Asking:
        changed = manifest.tampered(record, manifest.GOLDEN, out) or manifest.tampered(record, step, out)
        if changed:
            raise DriftError(f"{out}: {changed[0]} since it was recorded, so nothing can be judged by it; restore it")
        artifact = record.artifact(step, out)
        facts = models.facts_from_data(record.facts)
        bounds = verifying.bounds_of(record, step, tolerances, settings)
        return cls(out, record, artifact, facts, judging.stored_probes(record, out, cases), bounds, progress)

    def judge(self, client: Client) -> Outcome:
        """The outcome of a served model; "not run" where no server answers, or it is lost on the way."""
        from nlpconvert.backends import served

        started = time.perf_counter()
        outcome = Outcome(
            self.artifact.step,
            "not run",
            artifact=self.artifact,
            bytes=self.record.record(self.artifact.step).outcome.bytes,
        )
        inputs, outputs = triton_plan.asked(self.artifact, self.facts)
        try:
            session = served.ServedSession(
                client, [s.name for s in inputs], [s.name for s in outputs], self.artifact.precision
            )
            wrong = self._wrong(session)
            if wrong:
                return replace(outcome, status="drift", reason=f"the served model is another: {'; '.join(wrong[:3])}")
            found = self._asked(session, outcome)
        except endpoints.Unreachable as error:
            return replace(outcome, reason=str(error))
        if session.lost is not None:
            found = replace(outcome, reason=f"the server was lost while it was asked: {session.lost}")
        return replace(found, seconds=time.perf_counter() - started)

    def _wrong(self, session: ServedSession) -> list[str]:
        """How what the server says of its model differs from the artifact."""
        inputs, outputs = files.served_tensors(self.artifact, self.facts, ragged=False)
        lines: list[str] = []
        for kind, want, have in (
            ("input", inputs, session.described.inputs),
            ("output", outputs, session.described.outputs),
        ):
            batched = [replace(each, dims=(-1, *each.dims)) for each in want]
            lines += files.differences(kind, batched, have)
        return lines

    def _asked(self, session: ServedSession, outcome: Outcome) -> Outcome:
        """Alone, then all at once."""
        agrees, alone, _ = judging.judge(
            session, self.artifact, self.facts.outputs, self.probes, self.bounds, self.progress
        )
        served: dict[str, Any] = {
            "server": session.described.server,
            "backend": session.described.backend,
            "protocol": session.client.place.scheme,
            "alone": {"agrees": agrees, "cases": alone["cases"]},
        }
        verdict, notes = {**alone, "served": served}, [f"served by {session.provider}"]
        if session.lost is not None or not agrees:
            return replace(outcome, status="drift", verdict=verdict, notes=tuple(notes))
        together = Together(self.probes, session)
        counts = together.ask(self.progress)
        if session.lost is not None:
            return outcome
        agrees, company, _ = judging.judge(
            together, self.artifact, self.facts.outputs, self.probes, self.bounds, self.progress
        )
        served["together"] = {
            "agrees": agrees,
            "requests": together.requests,
            "in_flight": together.in_flight,
            "copies": together.copies,
            "moved": together.moved,
            "rows": None if counts is None else counts.rows,
            "executions": None if counts is None else counts.executions,
            "sizes": None if counts is None else {str(size): count for size, count in counts.sizes.items()},
        }
        notes.append(batches(together, counts))
        problems = unproven(session, counts)
        if not agrees:
            verdict = {**company, "served": served}
            notes.append("each request alone agrees; in a batch with others it does not")
        if problems:
            verdict = {**verdict, "structure": [*verdict["structure"], *problems]}
        return replace(
            outcome, status="agrees" if agrees and not problems else "drift", verdict=verdict, notes=tuple(notes)
        )


# ---- a Triton of our own --------------------------------------------------------------------------------------------


def check(
    out: Path,
    repo: Path,
    *,
    tritonserver: Path | None,
    options: Options,
    progress: Progress,
    settings: Settings,
    force: bool = False,
    grpc: bool = False,
    timeout: float | None = None,
) -> list[Outcome]:
    """Starts a Triton on a repository of `out`, asks it the goldens, stops it.

    What is wrong with the repository is told before any server starts (DriftError), unless `force`. Where the server
    lacks the backend that was written, that one is "not run", and the same file is asked through the Python backend.
    MissingPackage: no tritonserver.
    """
    binary = server.find(tritonserver)
    side = files.read(repo)
    tolerances = plan.check_words(options)
    record = manifest.read(out)
    record.record(side["step"])
    problems = files.examine(repo, record, out)
    if problems and not force:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise DriftError(f"{repo}: {problems[0]}{more}; nothing was started (--force asks it all the same)",
                         detail="\n".join(problems))  # fmt: skip
    asking = _Asking.of(out, record, side["step"], tolerances, settings, None, progress)
    try:
        found = _served(binary, repo, side, asking, grpc, timeout)
        return [replace(found, notes=(*found.notes, *problems))]
    except server.BackendMissing as error:
        written = Outcome(
            side["step"], "not run", f"this Triton has no {side['backend']} backend", artifact=asking.artifact
        )
        if problems:
            return [replace(written, status="drift", reason=f"{'; '.join(problems[:3])}; and {written.reason}")]
        if side["backend"] == triton_plan.PYTHON or asking.artifact.format == "tensorrt":
            return [replace(written, reason=f"{written.reason}: {error}")]
        progress.line(f"{written.reason}: the same file is asked through the Python backend")
        with tempfile.TemporaryDirectory(prefix="nlpconvert-triton-") as folder:
            again = Path(folder) / "repository"
            repository.write(out, side["step"], again, _wanted(side))
            found = _served(binary, again, files.read(again), asking, grpc, timeout)
        return [written, replace(found, step=f"{side['step']} (python backend)")]


def _wanted(side: Mapping[str, Any]) -> Wanted:
    """The same repository for the Python backend."""
    batching = side["batching"]
    return Wanted(
        name=side["name"],
        backend=triton_plan.PYTHON,
        tokenizer=bool(side.get("tokenizer")),
        max_batch=batching.get("max_batch_size"),
        max_delay=f"{batching.get('max_queue_delay_microseconds', 0)}us",
        instances=batching.get("instances"),
        threads=side.get("threads"),
        gpu=bool(side.get("gpu")),
    )


def _served(
    binary: Path, repo: Path, side: Mapping[str, Any], asking: _Asking, grpc: bool, timeout: float | None
) -> Outcome:

    try:
        with server.running(binary, repo, asking.progress) as (http, grpc_port):
            where = endpoints.Place("grpc" if grpc else "http", "127.0.0.1", grpc_port if grpc else http, side["name"])
            client = open_client(where, timeout)
            try:
                outcome = asking.judge(client)
            finally:
                client.close()
            return _more(outcome, replace(where, scheme="http", port=http), side, asking, timeout)
    except server.DidNotStart as error:
        # It may be the repository's fault or the machine's: what the server said is told, and nothing was verified.
        return Outcome(side["step"], "drift" if error.refused else "not run", str(error), artifact=asking.artifact)


def _more(outcome: Outcome, where: Place, side: Mapping[str, Any], asking: _Asking, timeout: float | None) -> Outcome:
    """With what the chain of texts and the model that writes were found to do."""
    problems: list[str] = []
    notes: list[str] = []
    for name in side["models"]:
        try:
            if name == f"{side['name']}_text":
                problems += _texts(replace(where, model=name), side, asking, timeout, notes)
            elif name == f"{side['name']}_generate":
                problems += _writes(replace(where, model=name), asking, timeout, notes)
        except (NlpconvertError, RuntimeError) as error:
            problems.append(f"{name}: {first_line(error)}")
    outcome = replace(outcome, notes=(*outcome.notes, *notes))
    if not problems or outcome.verdict is None:
        return outcome
    verdict = {**outcome.verdict, "structure": [*outcome.verdict["structure"], *problems]}
    return replace(outcome, status="drift", verdict=verdict)


def _texts(
    where: Place, side: Mapping[str, Any], asking: _Asking, timeout: float | None, notes: list[str]
) -> list[str]:
    """Texts in: the ids are those that the artifact's own tokenizer gives, and the answers those to these ids."""
    from nlpconvert.backends import served

    reader = tokens.load([asking.artifact.directory], asking.facts)
    texts = [row["text"] for row in probes.texts()][:32]
    chain, ids = (
        served.HttpClient(replace(where, model=name), endpoints.TIMEOUT if timeout is None else timeout)
        for name in (where.model, f"{side['name']}_tokenizer")
    )
    core = served.HttpClient(replace(where, model=side["name"]), chain.timeout)
    for client in (chain, ids, core):
        client.describe()
    inputs, outputs = triton_plan.asked(asking.artifact, asking.facts)
    names, given = [spec.name for spec in inputs], [spec.name for spec in outputs]
    problems: list[str] = []
    for text in texts:
        array = np.array([[text.encode()]], object)
        found = ids.infer({"TEXT": array}, names)
        expected = reader.encode(text)["input_ids"]
        if found["input_ids"].tolist() != [list(expected)]:
            problems.append(f"{side['name']}_tokenizer gives other ids than tokenizer.json for {text[:40]!r}")
        direct, through = core.infer(found, given), chain.infer({"TEXT": array}, given)
        for name in given:
            scale = float(np.sqrt(np.mean(np.square(direct[name], dtype=np.float64)))) if direct[name].size else 0.0
            if direct[name].shape != through[name].shape or moved(direct[name], through[name]) > 1e-5 * scale:
                problems.append(f"{where.model}: {name} is another than for the ids themselves, for {text[:40]!r}")
    for client in (chain, ids, core):
        client.close()
    notes.append(f"{where.model}: {len(texts)} texts gave the ids of tokenizer.json and the answers to them")
    if problems:
        notes.pop()
    return problems[:3]


def _writes(where: Place, asking: _Asking, timeout: float | None, notes: list[str]) -> list[str]:
    """Written token by token: the same ids as the artifact writes greedily here, prompt by prompt."""
    from nlpconvert import generation
    from nlpconvert.backends import served

    written = asking.probes.written
    if written is None:
        return []
    try:
        session = runtimes.open_artifact(asking.artifact, Options())
    except CannotRunHere as error:
        notes.append(f"{where.model} was not asked: {error}")
        return []
    try:
        writer = runtimes.writer(session, asking.artifact, asking.facts)
        assert writer is not None
        problems, count = [], 0
        for prompt in _prompts(written.passages):
            how = generation.settings(asking.facts, eos=written.eos, max_new_tokens=16)
            ids = np.array([prompt], np.int64)
            ours = generation.generate(writer, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, how)
            expected = ours.tokens[0, : ours.lengths[0]].tolist()
            client = served.HttpClient(where, endpoints.TIMEOUT if timeout is None else timeout)
            given = {"input_ids": prompt, "max_new_tokens": 16}
            found = [int(each["token"]) for each in client.stream(given)]
            count += len(found)
            if found != expected:
                problems.append(f"{where.model} writes {found[:8]}... where the artifact writes {expected[:8]}...")
    finally:
        session.close()
    if not problems:
        notes.append(f"{where.model}: {count} tokens, one by one, are those that the artifact writes here")
    return problems[:3]


def _prompts(passages: Sequence[Any]) -> list[list[int]]:
    """The first real row of some passages that are written freely, or of any."""
    chosen = [each for each in passages if each.new] or list(passages)
    found = []
    for passage in chosen[:4]:
        ids, mask = passage.inputs["input_ids"][0], passage.inputs["attention_mask"][0]
        if mask.any():
            found.append([int(token) for token in ids[mask != 0]])
    return found
