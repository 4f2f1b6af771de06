"""Floor 3: which runtime opens which format, how an artifact is opened, and how it is asked one case ahead."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from nlpconvert.artifact import Artifact
from nlpconvert.backends import Batch, Session
from nlpconvert.errors import CannotRunHere, MissingPackage, first_line
from nlpconvert.models import Facts
from nlpconvert.plan import Options
from nlpconvert.validators import structure
from nlpconvert.writer import Writer


@dataclass(frozen=True)
class Runtime:
    """One row: how a format is run. `package` must be importable, `extra` is what brings it."""

    format: str
    module: str
    package: str
    extra: str


RUNTIMES: dict[str, Runtime] = {
    row.format: row
    for row in (
        Runtime("torchscript", "nlpconvert.backends.torchscript", "torch", "cpu"),
        Runtime("onnx", "nlpconvert.backends.onnxruntime", "onnxruntime", "verify"),
        Runtime("tensorrt", "nlpconvert.backends.tensorrt", "polygraphy", "trt-rtx"),
    )
}

_AHEAD = 64 << 20
"""Bytes of answers up to which those of two batches are held at once."""
WRITERS: dict[str, str] = {"onnx": "nlpconvert.backends.writing", "tensorrt": "nlpconvert.backends.trt_writing"}
"""By format, what writes with a cache."""


def open_artifact(artifact: Artifact, options: Options) -> Session:
    """A session on the artifact. CannotRunHere when the runtime is not installed or the machine cannot run it."""
    runtime = RUNTIMES[artifact.format]
    if lacks(runtime.package):
        raise CannotRunHere(f"{runtime.package} is not installed: pip install 'nlpconvert[{runtime.extra}]'")
    where = {"onnx": options.provider, "torchscript": options.device, "tensorrt": "cuda"}[artifact.format]
    try:
        backend = importlib.import_module(runtime.module)
        session: Session = backend.open(_itself(artifact), device=where, threads=options.threads)
    except MissingPackage as error:
        raise CannotRunHere(str(error)) from error
    except ImportError as error:
        raise CannotRunHere(f"{runtime.package} cannot be imported here: {first_line(error)}") from error
    if not artifact.made_by.get("foreign"):
        return session
    from nlpconvert.backends.renamed import RenamedSession

    made = artifact.made_by
    if not made.get("outputs"):
        session.close()
        raise CannotRunHere("what it reads and gives is not known yet: verify the file itself here, with --reference")
    return RenamedSession(session, made["inputs"], made["outputs"], made["types"])


def _itself(artifact: Artifact) -> Artifact:
    """A foreign artifact with the names of its own inputs, which its backend asks for."""
    if not artifact.made_by.get("foreign"):
        return artifact
    theirs = {ours: name for name, ours in artifact.made_by.get("inputs", {}).items()}
    return replace(
        artifact, inputs=tuple(replace(spec, name=theirs.get(spec.name, spec.name)) for spec in artifact.inputs)
    )


def writer(session: Session, artifact: Artifact, facts: Facts) -> Writer | None:
    """A writer on an open session; None where it keeps no cache. DriftError for a cache that goes in and not out."""
    backend = WRITERS.get(artifact.format)
    if backend is None:
        return None
    if artifact.made_by.get("foreign"):
        if not getattr(session, "plain", False):
            return None  # a cache under other names is not known
        session = session.wrapped  # type: ignore[attr-defined]
    module = importlib.import_module(backend)
    found: Writer | None = module.writer(session, facts) if module.keeps(session) else None
    return found


def load_runtime(artifact: Artifact) -> None:
    """Imports what `open_artifact` and `judge` need for it, where it is installed; what is missing they report."""
    with contextlib.suppress(Exception):
        importlib.import_module(RUNTIMES[artifact.format].module)
        if artifact.format == "onnx":
            structure.load_onnx()


def lacks(package: str) -> bool:
    """Whether a package cannot be imported here, by its name alone."""
    return importlib.util.find_spec(package) is None


def ahead(session: Session, batches: Sequence[Batch], most: int) -> Iterator[Callable[[], dict[str, np.ndarray]]]:
    """For each batch what gives its answers, or raises what the runtime raised. `most`: bytes of the largest answers.

    A session that may be asked from another thread (`concurrent`) runs a batch while the one before is judged, unless
    two batches' answers at once would be much.
    """
    if not getattr(session, "concurrent", False) or most > _AHEAD:
        for batch in batches:
            yield functools.partial(session.run, batch)
        return
    with ThreadPoolExecutor(1) as beside:
        running: Future[dict[str, np.ndarray]] | None = None
        for batch in batches:
            before, running = running, beside.submit(session.run, batch)
            if before is not None:
                yield before.result
        if running is not None:
            yield running.result
