"""Floor 3: a Triton model repository of one artifact: which models, which files, and what the sidecar says of them.

How a configuration is written is `config`, what stands in it `plan`; that the served model answers as the
artifact does is `serving`'s business.

    repo/nlpconvert-triton.json       which artifact, by hash, and every file that was written
    repo/NAME/config.pbtxt            and labels.txt, warmup/ beside it
    repo/NAME/1/model.onnx            model.onnx.data, or model.pt, model.plan, or model.py with serving.json
    repo/NAME_tokenizer, NAME_text    texts to ids, and the chain of both
    repo/NAME_generate                token by token, of a model that keeps a cache
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nlpconvert
from nlpconvert import cache_names, disk, golden, manifest, models, tokens
from nlpconvert.artifact import Artifact
from nlpconvert.errors import ConversionError, DriftError, MissingPackage, UsageError
from nlpconvert.inputs import case_axes, case_tokens
from nlpconvert.manifest import Manifest
from nlpconvert.models import Facts
from nlpconvert.runtimes import lacks
from nlpconvert.triton import plan
from nlpconvert.triton.files import (
    LABELS,
    SIDECAR,
    artifact_files,
    check_place,
    json_beside,
    labels,
    served_tensors,
)
from nlpconvert.triton.plan import PYTHON, Batching, Tensor, Warmup

TEMPLATES = Path(__file__).resolve().parent / "models"
EXTRA = "tritonclient is not installed: pip install 'nlpconvert[serve]'"
MAX_NEW_TOKENS = 256
_BIGGEST_WARMUP = 4096
"""Tokens of a warm-up request at most: it is answered before the server is ready."""


@dataclass(frozen=True)
class Wanted:
    """What a repository is asked to be.

    `backend`: "onnxruntime", "pytorch", "tensorrt" or "python"; None for the format's own (Python where a cache is
    kept). `tokenizer`: texts in as well. `gpu`: instances on GPUs.
    """

    name: str | None = None
    backend: str | None = None
    tokenizer: bool = False
    batching: Path | None = None
    max_batch: int | None = None
    max_delay: str | None = None
    instances: int | None = None
    threads: int | None = None
    gpu: bool = False


@dataclass(frozen=True)
class Repository:
    """A repository that was written. `models`: their names, the artifact's own first. `notes`: lines for a person."""

    path: Path
    name: str
    backend: str
    step: str
    sha256: str
    models: tuple[str, ...]
    batching: Batching
    notes: tuple[str, ...] = ()


# ---- writing --------------------------------------------------------------------------------------------------------


def write(out: Path, step: str, repo: Path, wanted: Wanted | None = None, *, force: bool = False) -> Repository:
    """Writes the repository `repo` of a step of `out`: into a sibling, then by rename.

    UsageError: no such step, options that do not go together, a place that is taken. DriftError: the artifact's files
    are not those that were verified. MissingPackage: tritonclient, whose protobuf writes the configuration.
    """
    wanted = wanted or Wanted()
    record = manifest.read(out)
    artifact = record.artifact(step, out)
    facts = models.facts_from_data(record.facts)
    backend = plan.choose_backend(artifact, wanted.backend)
    check_place(repo, out, force)
    if lacks("tritonclient") or lacks("grpc"):
        raise MissingPackage(EXTRA)
    changed = manifest.tampered(record, step, out)
    if changed:
        raise DriftError(f"{changed[0]} since it was verified; restore it or make it again, nothing was written")
    if record.record(step).stale:
        raise DriftError(f"{step} is stale: {artifact.parent}, from which it was made, was replaced since")
    batching = plan.choose_batching(
        file=wanted.batching,
        max_batch=wanted.max_batch,
        max_delay=wanted.max_delay,
        instances=wanted.instances,
        profile=plan.profile(artifact),
        step=step,
    )
    name = plan.check_name(wanted.name or out.resolve().name)
    work = _Writing(out, record, artifact, facts, replace(wanted, name=name), backend, batching)
    where = repo.absolute()
    with disk.building(where.parent, where.name) as new:
        written = work.write(new)
        disk.replace_directory(new, where)
    return replace(written, path=repo)


@dataclass(frozen=True)
class _Writing:
    out: Path
    record: Manifest
    artifact: Artifact
    facts: Facts
    wanted: Wanted
    backend: str
    batching: Batching

    @property
    def name(self) -> str:
        assert self.wanted.name is not None
        return self.wanted.name

    @property
    def cached(self) -> bool:
        return cache_names.keeps(self.artifact.inputs)

    @property
    def labels(self) -> list[str]:
        return labels(self.artifact, self.facts)

    def write(self, root: Path) -> Repository:
        from nlpconvert.triton import config as triton_config

        notes = self._warnings()
        names = [self.name]
        own = root / self.name
        version = own / "1"
        version.mkdir(parents=True)
        file = self._files(version)
        if self.labels:
            (own / LABELS).write_text("\n".join(self.labels) + "\n", encoding="utf-8")
        inputs, outputs = self.tensors()
        text = triton_config.model(
            self.name,
            self.backend,
            inputs,
            outputs,
            self.batching,
            file=file,
            gpu=self.wanted.gpu or self.artifact.format == "tensorrt",
            warmup=self._warmup(own / "warmup", inputs),
            parameters=self._parameters(),
        )
        (own / triton_config.FILE).write_text(text, encoding="utf-8")
        if self.wanted.tokenizer:
            names += self._tokenizer(root, outputs)
        if self.cached:
            names += self._generate(root)
        repository = Repository(
            root, self.name, self.backend, self.artifact.step, self.artifact.sha256, tuple(names), self.batching, notes
        )
        disk.write_json_atomic(root / SIDECAR, self._sidecar(root, repository))
        return repository

    def tensors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs and outputs as a client sees them."""
        return served_tensors(self.artifact, self.facts, ragged=self.backend == PYTHON)

    def _warnings(self) -> tuple[str, ...]:
        verdict = self.record.record(self.artifact.step).outcome.verdict
        outcome = self.record.record(self.artifact.step).outcome
        notes = plan.warnings(
            self.artifact, self.facts, None if verdict is None else verdict.get("rows"), self.batching
        )
        if outcome.status != "agrees":
            notes.insert(0, f"{self.artifact.step} is not an artifact that agrees: {outcome.status} {outcome.reason}")
        if self.batching.instances > 1 and self.wanted.threads is None and not self.wanted.gpu:
            notes.append(
                f"{self.batching.instances} instances share the processor's cores: --threads says how many each takes"
            )
        if self.batching.source == "default":
            notes.append(
                f"max_batch_size {self.batching.max_batch} is a guess: `nlpconvert bench --arrivals` derives it"
            )
        if self.backend not in (PYTHON, "tensorrt") and plan.padded_axes(self.artifact.inputs):
            notes.append(
                f"the {self.backend} backend batches requests of one length only; --backend {PYTHON} pads mixed ones"
            )
        return tuple(notes)

    def _parameters(self) -> dict[str, str]:
        threads = self.wanted.threads
        if self.backend == "onnxruntime" and threads is not None:
            return {"intra_op_thread_count": str(threads)}
        if self.backend == "pytorch":
            # The graph as written is what was judged; the profiling executor would recompile it for every shape.
            found = {"DISABLE_OPTIMIZED_EXECUTION": "true"}
            return found if threads is None else {**found, "INTRA_OP_THREAD_COUNT": str(threads)}
        return {}

    # -- files --------------------------------------------------------------------------------------------------------

    def _files(self, version: Path) -> str:
        """The artifact's files below a version; the name of the one that the backend opens."""
        if self.backend == "pytorch":
            self._tuple(version / "model.pt")
            return "model.pt"
        copied = self._copy(version)
        if self.backend == "tensorrt":
            (version / copied[0]).rename(version / "model.plan")
            return "model.plan"
        if self.backend != PYTHON:
            return copied[0]
        shutil.copy(TEMPLATES / "runtime_model.py", version / "model.py")
        disk.write_json_atomic(version / "serving.json", self._serving())
        return "model.py"

    def _copy(self, version: Path) -> list[str]:
        """Graphs and what lies beside them, main file first; each is what the manifest says."""
        files = artifact_files(self.artifact)
        for name in files:
            place = version / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.artifact.directory / name, place)
            if disk.sha256_file(place) != self.artifact.files[name]:
                raise DriftError(f"{self.artifact.step}/{name} changed while it was copied; nothing was written")
        return files

    def _tuple(self, path: Path) -> None:
        """A TorchScript file that gives a tuple: Triton's backend takes no dict of outputs."""
        if lacks("torch"):
            raise MissingPackage("Triton's pytorch backend takes a tuple of outputs, and torch has to write it: "
                                 "pip install 'nlpconvert[cpu]', or --backend python")  # fmt: skip
        from nlpconvert.backends import torchscript_tuple

        outputs = tuple(spec.name for spec in self.artifact.outputs)
        try:
            torchscript_tuple.write(self.artifact.path, path, tuple(s.name for s in self.artifact.inputs), outputs)
        except (RuntimeError, ValueError) as error:
            raise ConversionError(f"{self.artifact.path} cannot be wrapped: {str(error).splitlines()[0]}") from error

    def _serving(self) -> dict[str, Any]:
        """serving.json: what the model of the Python backend reads."""
        inputs, outputs = plan.asked(self.artifact, self.facts)
        pair = self.artifact.encoder
        kind = "torchscript" if self.artifact.format == "torchscript" else "onnx" if pair is None else "onnx-pair"
        return {
            "kind": kind,
            "file": self.artifact.path.name,
            "encoder": None if pair is None else pair.name,
            "inputs": [plan.plain(spec) for spec in inputs],
            "outputs": [plan.plain(spec) for spec in outputs],
            "padded_axes": plan.padded_axes(inputs, pair is not None),
            "fills": plan.fills(self.facts),
            "threads": self.wanted.threads,
            "gpu": self.wanted.gpu,
        }

    def _warmup(self, place: Path, inputs: Sequence[Tensor]) -> list[Warmup]:
        """The shortest and the longest golden case, one row of each, as requests before the first one."""
        cases = [
            case
            for case in golden.read(self.out / manifest.GOLDEN)[0]
            if case.name not in self.record.golden.not_applicable
            and case_tokens(case) <= _BIGGEST_WARMUP
            and all(tensor.name in case.inputs for tensor in inputs)
            and all(size > 0 for size in case_axes(case).values())
        ]
        if not cases:
            return []
        profile = plan.profile(self.artifact)
        fitting = [case for case in cases if profile is None or plan.fits(profile, case_axes(case))]
        by_size = sorted(fitting, key=lambda case: (case_axes(case).get("sequence", 0), case.name))
        found = []
        for case in dict((each.name, each) for each in (by_size[:1] + by_size[-1:])).values():
            place.mkdir(exist_ok=True)
            files, tensors = {}, []
            for tensor in inputs:
                row = case.inputs[tensor.name][:1]
                files[tensor.name] = f"{case.name}.{tensor.name}"
                tensors.append(replace(tensor, dims=tuple(int(size) for size in row.shape[1:])))
                (place / files[tensor.name]).write_bytes(row.astype(tensor.dtype).tobytes())
            found.append(Warmup(case.name, 1, tuple(tensors), files))
        return found

    # -- texts --------------------------------------------------------------------------------------------------------

    def _reader(self) -> tokens.Reader:
        if not (self.artifact.directory / tokens.FILE).is_file():
            raise UsageError(f"--tokenizer needs {tokens.FILE} beside the artifact, and {self.artifact.step} has none")
        return tokens.load([self.artifact.directory], self.facts)

    def _tokenizer(self, root: Path, outputs: Sequence[Tensor]) -> list[str]:
        """The model that turns texts into ids, and the chain of it and the artifact's."""
        from nlpconvert.triton import config as triton_config

        if "decoder_input_ids" in self.facts.inputs or models.TASKS[self.facts.task].choices:
            raise UsageError(
                f"--tokenizer: {self.facts.task} takes more than a text; send ids, or text to NAME_generate"
            )
        reader = self._reader()
        name, chain = f"{self.name}_tokenizer", f"{self.name}_text"
        inputs, _ = self.tensors()
        version = root / name / "1"
        version.mkdir(parents=True)
        shutil.copy(TEMPLATES / "tokenizer_model.py", version / "model.py")
        shutil.copy(self.artifact.directory / tokens.FILE, version / tokens.FILE)
        serving = {
            "limit": reader.limit,
            "lower": self.facts.task == "sentence-embedding"
            and bool(json_beside(self.artifact.directory / tokens.SENTENCE_FILE).get("do_lower_case")),
            "pad": self.facts.pad_id,
            "last_type": max(self.facts.type_vocab_size - 1, 0),
            "inputs": [tensor.name for tensor in inputs],
        }
        disk.write_json_atomic(version / "serving.json", serving)
        texts = [Tensor("TEXT", "text", (1,))]
        if self.facts.pairs:
            texts.append(Tensor("TEXT_PAIR", "text", (1,), optional=True))
        ids = [replace(tensor, ragged=False) for tensor in inputs]
        # Each request is padded by itself; the model behind forms the batches.
        alone = Batching(self.batching.max_batch, instances=self.batching.instances)
        config = triton_config.model(name, PYTHON, texts, ids, alone)
        (root / name / triton_config.FILE).write_text(config, encoding="utf-8")
        steps = [
            (name, {tensor.name: tensor.name for tensor in texts}, {tensor.name: tensor.name for tensor in ids}),
            (self.name, {t.name: t.name for t in ids}, {t.name: t.name for t in outputs}),
        ]
        given = [replace(tensor, labels="") for tensor in outputs]
        (root / chain / "1").mkdir(parents=True)
        (root / chain / "1" / ".keep").touch()  # an empty folder is lost in git, and Triton wants a version
        text = triton_config.ensemble(chain, self.batching.max_batch, texts, given, steps)
        (root / chain / triton_config.FILE).write_text(text, encoding="utf-8")
        return [name, chain]

    def _generate(self, root: Path) -> list[str]:
        """The model that writes token by token."""
        from nlpconvert.triton import config as triton_config

        name = f"{self.name}_generate"
        version = root / name / "1"
        version.mkdir(parents=True)
        self._copy(version)
        shutil.copy(TEMPLATES / "generate_model.py", version / "model.py")
        inputs = [Tensor("input_ids", "int64", (-1,), optional=True), Tensor("TEXT", "text", (1,), optional=True)]
        inputs.append(Tensor("max_new_tokens", "int32", (1,), optional=True))
        if (self.artifact.directory / tokens.FILE).is_file():
            shutil.copy(self.artifact.directory / tokens.FILE, version / tokens.FILE)
        said = json_beside(self.artifact.directory / "generation_config.json")
        eos = said.get("eos_token_id", self.facts.eos_id)
        start = self.facts.pad_id if self.facts.decoder_start_id is None else self.facts.decoder_start_id
        serving = {
            "file": self.artifact.path.name,
            "encoder": None if self.artifact.encoder is None else self.artifact.encoder.name,
            "limit": self.facts.max_length,
            "eos": [] if eos is None else eos if isinstance(eos, list) else [eos],
            "start": start,
            "max_new_tokens": int(said.get("max_new_tokens") or MAX_NEW_TOKENS),
            "threads": self.wanted.threads,
            "gpu": self.wanted.gpu,
        }
        disk.write_json_atomic(version / "serving.json", serving)
        outputs = [Tensor("token", "int64", (1,)), Tensor("text", "text", (1,))]
        text = triton_config.model(
            name, PYTHON, inputs, outputs, None, gpu=self.wanted.gpu, decoupled=True, instances=self.batching.instances
        )
        (root / name / triton_config.FILE).write_text(text, encoding="utf-8")
        return [name]

    def _sidecar(self, root: Path, repository: Repository) -> dict[str, Any]:
        return {
            "nlpconvert": nlpconvert.__version__,
            "out": self.out.resolve().name,
            "step": repository.step,
            "sha256": repository.sha256,
            "source_sha256": self.record.source_sha256,
            "probe_sha256": self.record.golden.probe_sha256,
            "name": repository.name,
            "backend": repository.backend,
            "models": list(repository.models),
            "tokenizer": self.wanted.tokenizer,
            "threads": self.wanted.threads,
            "gpu": self.wanted.gpu,
            "batching": {
                "max_batch_size": self.batching.max_batch,
                "preferred_batch_size": list(self.batching.preferred),
                "max_queue_delay_microseconds": self.batching.max_delay,
                "instances": self.batching.instances,
                "source": self.batching.source,
            },
            "files": disk.hash_tree(root),
        }
