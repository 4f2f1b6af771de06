"""The table of floors: which room may import what, at the top of a file and inside a function.

ROOMS is the one table. A file of the package that is in no row fails, as does an import that its row does not allow;
the message says what to do instead. Imports under `if TYPE_CHECKING:` are for types and always allowed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("nlpconvert", "convert", "validators")
# convert/ and validators/ stand at the top of the repository and install inside the package.
INSIDE_THE_PACKAGE = {"convert": "nlpconvert.convert", "validators": "nlpconvert.validators"}


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """What the rooms of a floor may import: our own floors and other people's packages, at the top and in functions.

    What is allowed at the top is allowed inside a function too, save for frameworks (see Room).
    """

    top: frozenset[int]
    inside: frozenset[int]
    packages_top: frozenset[str]
    packages_inside: frozenset[str]
    advice: str


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


FLOORS: dict[int, Floor] = {
    0: Floor(
        top=frozenset({0}),
        inside=frozenset({0}),
        packages_top=_set(""),
        packages_inside=_set(""),
        advice="errors and artifact are the types everyone shares: the standard library and nothing else",
    ),
    1: Floor(
        top=frozenset({0, 1}),
        inside=frozenset({0, 1}),
        packages_top=_set("numpy"),
        packages_inside=_set("scipy tokenizers"),
        advice="arrays in, data out: take what a framework has to say as numpy arrays or as a callable",
    ),
    2: Floor(
        top=frozenset({0, 1}),
        inside=frozenset({0, 1}),
        packages_top=_set("numpy"),
        packages_inside=_set(""),
        advice="rooms of floor 2 do not know each other: the pipeline brings them together, with callables",
    ),
    3: Floor(
        top=frozenset({0, 1, 3}),
        inside=frozenset({0, 1, 2, 3}),
        packages_top=_set("numpy"),
        packages_inside=_set(""),
        advice="import floor 2 inside the function that needs it; a framework belongs at the top of a file of floor 2",
    ),
    4: Floor(
        top=frozenset({0, 1}),
        inside=frozenset({0, 1}),
        packages_top=_set(""),
        packages_inside=_set("jinja2 matplotlib"),
        advice="the report turns data into lines and documents: compute on a lower floor and pass the result in",
    ),
    5: Floor(
        top=frozenset({0}),
        inside=frozenset({0, 3, 4}),
        packages_top=_set("rich typer"),
        packages_inside=_set(""),
        advice="a command is a signature and a few lines: import pipeline, search, bench, report or doctor inside it",
    ),
}


@dataclass(frozen=True)
class Room:
    """One row: a file, or all the files of a folder ("folder/*.py"), and its floor.

    `frameworks`: packages of its own, imported at the top of the file (floor 2: at the top only; the file itself is
    imported late). `late`: packages it may import inside functions besides, with the reason in a comment.
    `rooms`: more of our own modules that it may import anywhere. `bars`: those it must not import all the same.
    """

    files: str
    floor: int
    frameworks: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    rooms: frozenset[str] = frozenset()
    bars: frozenset[str] = frozenset()


# The first row that fits a file holds.
_NO_JUDGE = _set("nlpconvert.validators nlpconvert.backends")
# The files of training know each other, and nobody else of their floor.
_TRAINING = frozenset(
    f"nlpconvert.training.{path.stem}".removesuffix(".__init__") for path in (ROOT / "nlpconvert/training").glob("*.py")
)
ROOMS: tuple[Room, ...] = (
    # The package itself: `import nlpconvert` loads nothing, its `__getattr__` brings floor 3 when asked.
    Room("nlpconvert/__init__.py", 0, rooms=_set("nlpconvert.pipeline")),
    Room("nlpconvert/__main__.py", 5, rooms=_set("nlpconvert.cli")),
    Room("nlpconvert/errors.py", 0),
    Room("nlpconvert/artifact.py", 0),
    Room("nlpconvert/manifest.py", 0),
    Room("nlpconvert/disk.py", 0),
    Room("nlpconvert/host.py", 0),
    Room("nlpconvert/progress.py", 0),
    Room("nlpconvert/memory.py", 0),
    Room("nlpconvert/models.py", 1),
    Room("nlpconvert/inputs.py", 1),
    Room("nlpconvert/probes.py", 1),
    Room("nlpconvert/dataset.py", 1),
    Room("nlpconvert/integers.py", 1),
    Room("nlpconvert/blocks.py", 1),
    Room("nlpconvert/giveback.py", 1),
    Room("nlpconvert/recipe.py", 1, _set("safetensors")),
    Room("nlpconvert/profiles.py", 1),
    Room("nlpconvert/bench/__init__.py", 0),
    Room("nlpconvert/triton/__init__.py", 0),
    Room("nlpconvert/triton/plan.py", 1),
    Room("nlpconvert/triton/endpoints.py", 1),
    Room("nlpconvert/cache_names.py", 1),
    Room("nlpconvert/breaks.py", 1, rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/proofs.py", 1),
    Room("nlpconvert/renaming.py", 1),
    Room("nlpconvert/settings.py", 1),
    Room("nlpconvert/tokens.py", 1),
    Room("nlpconvert/labelled.py", 1),
    Room("nlpconvert/marking.py", 1),
    # What writes token by token, and what it is asked.
    Room("nlpconvert/writer.py", 1),
    Room("nlpconvert/config_facts.py", 1),
    # A benchmark's parts that need no runtime: the clock's rules, texts in batches, the queue, what is asked.
    Room("nlpconvert/bench/timing.py", 1),
    Room("nlpconvert/bench/policies.py", 1),
    Room("nlpconvert/bench/queueing.py", 1),
    Room("nlpconvert/bench/asking.py", 1),
    Room("nlpconvert/bench/findings.py", 1),
    Room("nlpconvert/passages.py", 1),
    Room("nlpconvert/passages_files.py", 1, _set("safetensors")),
    # What builder and runner of engines share: which flavour, which GPU, what lies beside an engine.
    Room("nlpconvert/engines.py", 1),
    # safetensors with numpy only: goldens are read where there is no torch.
    Room("nlpconvert/golden.py", 1, _set("safetensors")),
    # BLEU is sacrebleu's: its counts are what others report.
    Room("validators/metrics_text.py", 1, late=_set("sacrebleu")),
    # A structure check opens the artifact's own file, inside its function.
    Room("validators/*.py", 1, late=_set("onnx onnx_ir")),
    # The source room: `source` loads, the five others are its parts.
    Room(
        "nlpconvert/source.py",
        2,
        _set("torch transformers"),
        rooms=_set("nlpconvert.checkpoint nlpconvert.facts nlpconvert.forward nlpconvert.tokenizer nlpconvert.weights"),
    ),
    Room("nlpconvert/checkpoint.py", 2, _set("safetensors"), late=_set("huggingface_hub")),
    Room("nlpconvert/facts.py", 2, rooms=_set("nlpconvert.checkpoint nlpconvert.tokenizer")),
    Room("nlpconvert/tokenizer.py", 2, _set("transformers"), rooms=_set("nlpconvert.checkpoint")),
    Room("nlpconvert/weights.py", 2, _set("torch transformers"), rooms=_set("nlpconvert.checkpoint")),
    Room("nlpconvert/exact.py", 2, _set("torch")),
    Room("nlpconvert/forward.py", 2, _set("torch"), rooms=_set("nlpconvert.checkpoint")),
    # Training: what needs no torch first; then the engines and the loop, which know each other and nobody else.
    Room("nlpconvert/training/__init__.py", 1),
    Room("nlpconvert/training/world.py", 1),
    Room("nlpconvert/training/batches.py", 1),
    Room("nlpconvert/training/graph.py", 2, _set("torch onnx onnxruntime"), rooms=_TRAINING),
    Room("nlpconvert/training/operators.py", 2, _set("onnx onnxruntime")),
    Room("nlpconvert/training/gathers.py", 2, _set("onnx"), rooms=_TRAINING),
    Room("nlpconvert/training/narrow.py", 2, _set("onnx"), rooms=_TRAINING),
    Room("nlpconvert/training/ort.py", 2, _set("torch onnx onnxruntime"), rooms=_TRAINING),
    Room("nlpconvert/training/*.py", 2, _set("torch safetensors"), rooms=_TRAINING),
    # Triton's own protobuf, in a file of its own; and models that are copied into a repository, where Triton runs them.
    Room("nlpconvert/triton/config.py", 2, _set("tritonclient google")),
    Room("nlpconvert/triton/models/*.py", 2, late=_set("onnxruntime tokenizers torch triton_python_backend_utils")),
    Room("convert/torchscript.py", 2, _set("torch"), bars=_NO_JUDGE),
    Room(
        "convert/onnx.py",
        2,
        _set("torch transformers onnx onnx_ir onnxscript"),
        rooms=_set("nlpconvert.convert.onnx_graph"),
        bars=_NO_JUDGE,
    ),
    Room("convert/onnx_graph.py", 2, _set("onnx_ir"), bars=_NO_JUDGE),
    # Models that write: one graph under a forward of its own, and on it the decoder's and the pair's.
    Room(
        "convert/cached_graph.py",
        2,
        _set("torch transformers onnx_ir"),
        rooms=_set("nlpconvert.convert.onnx_graph"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/cached.py",
        2,
        _set("torch transformers onnx onnx_ir onnxscript"),
        rooms=_set("nlpconvert.convert.onnx nlpconvert.convert.onnx_graph nlpconvert.convert.cached_graph"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/pair.py",
        2,
        _set("onnx_ir"),
        rooms=_set("nlpconvert.convert.derived nlpconvert.convert.onnx_graph"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/cached_pair.py",
        2,
        _set("torch transformers onnx_ir"),
        rooms=_set(
            "nlpconvert.convert.onnx nlpconvert.convert.onnx_graph nlpconvert.convert.cached_graph "
            "nlpconvert.convert.cached"
        ),
        bars=_NO_JUDGE,
    ),
    # Breaking artifacts on purpose: with plain protobuf, so that it runs where there is no onnx_ir.
    Room("convert/breaking.py", 2, _set("onnx"), rooms=_set("nlpconvert.convert.breaking_graph"), bars=_NO_JUDGE),
    Room("convert/breaking_graph.py", 2, _set("onnx"), bars=_NO_JUDGE),
    Room("convert/breaking_torchscript.py", 2, _set("torch"), bars=_NO_JUDGE),
    Room(
        "convert/half.py",
        2,
        _set("onnx onnx_ir"),
        rooms=_set("nlpconvert.convert.onnx_graph nlpconvert.convert.derived nlpconvert.convert.half_plan"),
        bars=_NO_JUDGE,
    ),
    Room("convert/half_plan.py", 2, _set("onnx onnx_ir"), bars=_NO_JUDGE),
    Room("convert/editing.py", 2, _set("onnx_ir"), rooms=_set("nlpconvert.convert.onnx_graph"), bars=_NO_JUDGE),
    Room(
        "convert/attention.py",
        2,
        _set("onnx_ir"),
        rooms=_set("nlpconvert.convert.onnx_graph nlpconvert.convert.editing"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/optimize.py",
        2,
        _set("onnx_ir onnxruntime onnxscript"),
        rooms=_set(
            "nlpconvert.convert.onnx_graph nlpconvert.convert.derived nlpconvert.convert.editing "
            "nlpconvert.convert.attention"
        ),
        bars=_NO_JUDGE,
    ),
    Room("convert/linear.py", 2, _set("onnx_ir"), rooms=_set("nlpconvert.convert.onnx_graph"), bars=_NO_JUDGE),
    Room(
        "convert/static_int8.py",
        2,
        _set("onnx_ir"),
        rooms=_set("nlpconvert.convert.linear nlpconvert.convert.onnx_graph nlpconvert.convert.rewriting"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/rewriting.py",
        2,
        _set("onnx_ir"),
        rooms=_set("nlpconvert.convert.linear nlpconvert.convert.onnx_graph"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/weight_only.py",
        2,
        _set("onnx_ir"),
        rooms=_set("nlpconvert.convert.linear nlpconvert.convert.onnx_graph nlpconvert.convert.rewriting"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/dynamic_int8.py",
        2,
        _set("onnx_ir"),
        rooms=_set("nlpconvert.convert.linear nlpconvert.convert.onnx_graph nlpconvert.convert.rewriting"),
        bars=_NO_JUDGE,
    ),
    Room(
        "convert/retrained.py",
        2,
        _set("onnx_ir"),
        rooms=_set("nlpconvert.convert.linear nlpconvert.convert.onnx_graph nlpconvert.convert.rewriting"),
        bars=_NO_JUDGE,
    ),
    Room("convert/tapping.py", 2, _set("onnx"), bars=_NO_JUDGE),
    Room("convert/matching.py", 2, _set("onnx"), rooms=_set("nlpconvert.convert.tapping"), bars=_NO_JUDGE),
    Room("convert/derived.py", 2, _set("onnx onnx_ir"), rooms=_set("nlpconvert.convert.onnx_graph"), bars=_NO_JUDGE),
    # The builder runs in a process of its own, which alone imports it.
    Room("convert/tensorrt.py", 2, bars=_NO_JUDGE),
    # How an artifact is run: the interface that the files beside it fill.
    Room("nlpconvert/backends/__init__.py", 1),
    # How a served model is asked: the standard library speaks HTTP, tritonclient gRPC.
    Room("nlpconvert/backends/served.py", 2, rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/backends/served_grpc.py", 2, _set("grpc tritonclient")),
    Room("nlpconvert/backends/torchscript_tuple.py", 2, _set("torch")),
    Room("nlpconvert/backends/renamed.py", 2, rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/backends/torchscript.py", 2, _set("torch"), rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/backends/torchscript_taps.py", 2, _set("torch"), rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/backends/pytorch_taps.py", 2, _set("torch"), rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/backends/onnxruntime.py", 2, _set("onnxruntime"), rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/backends/eager.py", 2, _set("torch"), rooms=_set("nlpconvert.backends")),
    Room("nlpconvert/backends/gemm.py", 2, _set("onnx onnxruntime")),
    Room("nlpconvert/backends/writing.py", 2, _set("onnxruntime"), rooms=_set("nlpconvert.backends.onnxruntime")),
    Room("nlpconvert/backends/pytorch_writing.py", 2, _set("torch")),
    Room("nlpconvert/backends/processors.py", 2, _set("torch transformers")),
    Room("nlpconvert/backends/beams.py", 2, _set("torch transformers")),
    Room("nlpconvert/backends/slow_tokens.py", 2, _set("transformers")),
    Room(
        "nlpconvert/backends/tensorrt.py",
        2,
        rooms=_set("nlpconvert.backends nlpconvert.backends.trt_engine"),
    ),
    Room("nlpconvert/backends/trt_engine.py", 2, _set("polygraphy tensorrt tensorrt_rtx")),
    Room("nlpconvert/backends/trt_child.py", 2, _set("polygraphy tensorrt tensorrt_rtx")),
    Room("nlpconvert/backends/trt_writing.py", 2, rooms=_set("nlpconvert.backends.tensorrt")),
    # What a Triton is given to serve, and what it answers.
    Room("nlpconvert/triton/repository.py", 3),
    Room("nlpconvert/triton/files.py", 3),
    Room("nlpconvert/triton/server.py", 3),
    Room("nlpconvert/triton/serving.py", 3),
    Room("nlpconvert/triton/together.py", 3),
    Room("nlpconvert/reference.py", 3),
    Room("nlpconvert/judging.py", 3),
    Room("nlpconvert/runtimes.py", 3),
    Room("nlpconvert/goldens.py", 3),
    Room("nlpconvert/generation.py", 3),
    # The command `generate`: what it is pointed at and asked, what it does, what comes back.
    Room("nlpconvert/subjects.py", 3),
    Room("nlpconvert/prompting.py", 3),
    Room("nlpconvert/generating.py", 3),
    Room("nlpconvert/generated.py", 3),
    Room("nlpconvert/first_difference.py", 3),
    Room("nlpconvert/writing.py", 3),
    Room("nlpconvert/writing_why.py", 3),
    Room("nlpconvert/proving.py", 3),
    Room("nlpconvert/noise.py", 3),
    Room("nlpconvert/foreign.py", 3),
    Room("nlpconvert/verifying.py", 3),
    Room("nlpconvert/locating.py", 3),
    Room("nlpconvert/against_model.py", 3),
    Room("nlpconvert/pieces.py", 3),
    Room("nlpconvert/plan.py", 3),
    Room("nlpconvert/line.py", 3),
    Room("nlpconvert/making.py", 3),
    Room("nlpconvert/calibration.py", 3),
    Room("nlpconvert/own_words.py", 3),
    Room("nlpconvert/sampling.py", 3),
    Room("nlpconvert/pairs.py", 3),
    Room("nlpconvert/quantizing.py", 3),
    Room("nlpconvert/cpu_int8.py", 3),
    Room("nlpconvert/pipeline.py", 3),
    Room("nlpconvert/search.py", 3),
    Room("nlpconvert/weight_search.py", 3),
    # `bench`: the run, the subjects each in a process of its own, texts in batches, the queue.
    Room("nlpconvert/bench/benching.py", 3),
    Room("nlpconvert/bench/subjects.py", 3),
    Room("nlpconvert/bench/worker.py", 3),
    Room("nlpconvert/bench/child.py", 3),
    Room("nlpconvert/bench/texts.py", 3),
    Room("nlpconvert/bench/arrivals.py", 3),
    Room("nlpconvert/doctor.py", 3),
    Room("nlpconvert/comparing.py", 3),
    Room("nlpconvert/rechecking.py", 3),
    Room("nlpconvert/scoring.py", 3),
    # `recover`: what is asked and found, the texts, the condition, and the training itself.
    Room("nlpconvert/recovered.py", 3),
    Room("nlpconvert/recover_texts.py", 3),
    Room("nlpconvert/recover_parity.py", 3),
    Room("nlpconvert/recovering.py", 3),
    # `train`: what is asked, the run, and what an epoch is worth.
    Room("nlpconvert/training_wishes.py", 3),
    Room("nlpconvert/training_prepared.py", 3),
    Room("nlpconvert/training_run.py", 3),
    Room("nlpconvert/training_epochs.py", 3),
    Room(
        "nlpconvert/report.py",
        4,
        rooms=_set(
            "nlpconvert.report_located nlpconvert.report_output nlpconvert.report_proof nlpconvert.report_scores "
            "nlpconvert.report_written nlpconvert.wording"
        ),
    ),
    Room("nlpconvert/wording.py", 4),
    Room("nlpconvert/report_output.py", 4, rooms=_set("nlpconvert.wording")),
    Room("nlpconvert/documents.py", 4, rooms=_set("nlpconvert.report nlpconvert.report_output nlpconvert.wording")),
    Room("nlpconvert/report_proof.py", 4),
    # How numbers are worded is the report's; a page is put together from its parts.
    Room("nlpconvert/github.py", 4, rooms=_set("nlpconvert.report nlpconvert.wording")),
    Room("nlpconvert/plots.py", 4),
    Room("nlpconvert/values.py", 4),
    Room(
        "nlpconvert/html_output.py",
        4,
        rooms=_set("nlpconvert.report nlpconvert.wording nlpconvert.plots nlpconvert.values"),
    ),
    Room(
        "nlpconvert/html_step.py",
        4,
        rooms=_set(
            "nlpconvert.report nlpconvert.wording nlpconvert.plots nlpconvert.values nlpconvert.html_output "
            "nlpconvert.html_asked nlpconvert.html_written"
        ),
    ),
    Room("nlpconvert/html_written.py", 4, rooms=_set("nlpconvert.plots nlpconvert.report_written nlpconvert.wording")),
    Room("nlpconvert/html_asked.py", 4, rooms=_set("nlpconvert.report_scores")),
    Room(
        "nlpconvert/html.py",
        4,
        late=_set("markupsafe"),  # jinja2's own half
        rooms=_set("nlpconvert.report nlpconvert.wording nlpconvert.plots nlpconvert.html_step"),
    ),
    Room("nlpconvert/report_located.py", 4),
    Room("nlpconvert/report_written.py", 4, rooms=_set("nlpconvert.wording")),
    Room("nlpconvert/report_generated.py", 4, rooms=_set("nlpconvert.wording")),
    # How a status and a size are worded is the report's.
    Room("nlpconvert/report_diff.py", 4, rooms=_set("nlpconvert.report nlpconvert.wording")),
    Room("nlpconvert/report_scores.py", 4),
    Room("nlpconvert/report_recover.py", 4, rooms=_set("nlpconvert.wording")),
    Room("nlpconvert/report_bench.py", 4, rooms=_set("nlpconvert.wording")),
    Room("nlpconvert/report_training.py", 4, rooms=_set("nlpconvert.wording")),
    Room(
        "nlpconvert/html_bench.py",
        4,
        late=_set("markupsafe"),  # jinja2's own half
        rooms=_set("nlpconvert.report_bench nlpconvert.wording nlpconvert.plots nlpconvert.plots_bench"),
    ),
    Room("nlpconvert/plots_bench.py", 4, rooms=_set("nlpconvert.plots")),
    Room(
        "nlpconvert/cli.py",
        5,
        rooms=_set(
            "nlpconvert.terminal nlpconvert.gate nlpconvert.generate_command nlpconvert.options "
            "nlpconvert.triton_command nlpconvert.bench_command nlpconvert.train_command "
            "nlpconvert.recover_command"
        ),
    ),
    # The commands of the gate, and the options' words that the commands share.
    Room("nlpconvert/gate.py", 5, rooms=_set("nlpconvert.terminal nlpconvert.options nlpconvert.triton_command")),
    Room("nlpconvert/generate_command.py", 5, rooms=_set("nlpconvert.options")),
    Room("nlpconvert/bench_command.py", 5, rooms=_set("nlpconvert.options nlpconvert.terminal")),
    Room("nlpconvert/train_command.py", 5, rooms=_set("nlpconvert.terminal nlpconvert.options")),
    Room("nlpconvert/recover_command.py", 5, rooms=_set("nlpconvert.terminal nlpconvert.options")),
    Room("nlpconvert/triton_command.py", 5, rooms=_set("nlpconvert.terminal nlpconvert.options")),
    Room("nlpconvert/options.py", 5, rooms=_set("nlpconvert.terminal")),
    Room("nlpconvert/terminal.py", 5),
)

TERMINAL_FLOOR = 5


def row_of(file: str) -> Room | None:
    """The row that holds for a file, given by its path in the repository."""
    for room in ROOMS:
        folder, _, name = room.files.rpartition("/")
        if file == room.files or (name == "*.py" and file.startswith(folder + "/") and file.endswith(".py")):
            return room
    return None


# -- reading imports ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported name: every module it may mean, the longest first, where it stands, and whether in a function."""

    candidates: tuple[str, ...]
    line: int
    in_function: bool
    guarded: bool  # inside a `try` whose handler goes on without it


def module_of(file: str) -> str:
    """`convert/onnx.py` -> `nlpconvert.convert.onnx`; a package's `__init__.py` -> the package."""
    parts = list(Path(file).with_suffix("").parts)
    if parts[0] in INSIDE_THE_PACKAGE:
        parts[:1] = INSIDE_THE_PACKAGE[parts[0]].split(".")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(module: str) -> str:
    """`nlpconvert.convert.onnx` -> `convert/onnx.py`: where a module of ours would stand if it were no package."""
    for folder, package in INSIDE_THE_PACKAGE.items():
        if module == package or module.startswith(package + "."):
            module = folder + module.removeprefix(package)
    return module.replace(".", "/") + ".py"


def imports(file: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, those under `if TYPE_CHECKING:` left out."""
    package = module_of(file) if file.endswith("/__init__.py") else module_of(file).rpartition(".")[0]

    def found(node: ast.AST, in_function: bool, guarded: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import((alias.name,), node.lineno, in_function, guarded)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0]
                base = f"{above}.{base}" if base else above
            for alias in node.names:
                yield Import((f"{base}.{alias.name}", base), node.lineno, in_function, guarded)
        elif isinstance(node, ast.Call) and _name(node.func) in {
            "importlib.import_module",
            "import_module",
            "__import__",
        }:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import((first.value,), node.lineno, in_function, guarded)

    def walk(node: ast.AST, in_function: bool, guarded: bool) -> Iterator[Import]:
        yield from found(node, in_function, guarded)
        if isinstance(node, ast.If) and _name(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            children: list[tuple[ast.AST, bool]] = [(child, guarded) for child in node.orelse]
        elif isinstance(node, ast.Try):
            goes_on = any(not _raises(handler) for handler in node.handlers)
            children = [(child, guarded or goes_on) for child in node.body]
            children += [(child, guarded) for child in (*node.handlers, *node.orelse, *node.finalbody)]
        else:
            children = [(child, guarded) for child in ast.iter_child_nodes(node)]
        function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child, child_guarded in children:
            yield from walk(child, function, child_guarded)

    yield from walk(tree, False, False)


def _name(node: ast.AST) -> str:
    """A dotted name as written, "" for any other expression."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


# -- the check ---------------------------------------------------------------------------------------------------------


def violations(file: str, source: str, files: frozenset[str]) -> list[str]:
    """What a file does against the table, one line each: place, what, and a sentence of advice.

    `file` is the path in the repository, `files` all files of the package, to tell a module from a name in it.
    """
    room = row_of(file)
    if room is None:
        return [
            f"{file}: is in no row of ROOMS in tests/test_floors.py. Add a row that says its floor and its frameworks."
        ]
    tree = ast.parse(source, filename=file)
    modules = {module_of(path): path for path in files}
    found = []
    for each in imports(file, tree):
        problem = _problem(file, room, each, modules)
        if problem:
            found.append(f"{file}:{each.line}: floor {room.floor} {problem}")
    if room.floor < TERMINAL_FLOOR:
        found += [
            f"{file}:{node.lineno}: floor {room.floor} prints. The terminal is cli's: return data and let it speak."
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and _name(node.func) == "print"
        ]
    return found


def _problem(file: str, room: Room, each: Import, modules: dict[str, str]) -> str:
    """What is wrong with one import, "" when nothing is."""
    root = each.candidates[0].partition(".")[0]
    where = "inside a function" if each.in_function else "at the top"
    if root in sys.stdlib_module_names:
        return ""
    if root in FOLDERS or root in {"tests", "fixtures", "benchmarks"}:
        return _our_problem(file, room, each, modules, where)
    return _package_problem(room, each, root, where)


def _our_problem(file: str, room: Room, each: Import, modules: dict[str, str], where: str) -> str:
    base = each.candidates[-1]
    if not (base == "nlpconvert" or base.startswith("nlpconvert.")):
        return (
            f"imports {base} from the top of the repository. Installed, it is not there: "
            "convert and validators are nlpconvert.convert and nlpconvert.validators, the tests are not shipped."
        )
    target = next((name for name in each.candidates if name in modules), None)
    if target is None:
        # A folder without __init__.py, or a file that is not there (yet): go by its name.
        target = next((name for name in each.candidates if row_of(file_of(name))), base)
    if any(target == barred or target.startswith(barred + ".") for barred in room.bars):
        return f"imports {target}. convert never runs or scores what it makes: take a callable from the pipeline."
    target_file = modules.get(target, file_of(target))
    if target in room.rooms or target_file == file:
        return ""
    if target == "nlpconvert":  # a name that `nlpconvert/__init__.py` itself holds, such as __version__
        return ""
    target_room = row_of(target_file)
    if target_room is None:
        return f"imports {target}, which is in no row of ROOMS in tests/test_floors.py. Import the file that is meant."
    floor = FLOORS[room.floor]
    if target_room.floor in (floor.inside if each.in_function else floor.top):
        return ""
    return f"imports {target} (floor {target_room.floor}) {where}. Rule: {floor.advice}."


def _package_problem(room: Room, each: Import, root: str, where: str) -> str:
    floor = FLOORS[room.floor]
    if each.guarded and not each.in_function:
        return (
            f"goes on when {root} is missing. The file is the dependency boundary: import it plainly; "
            "who imports this file late says which extra is missing."
        )
    if room.floor == 2 and root in room.frameworks and each.in_function and root not in room.late:
        return (
            f"imports {root} inside a function. A framework stands at the top of its file; the file is imported late."
        )
    allowed = floor.packages_top | room.frameworks
    if each.in_function:
        allowed |= floor.packages_inside | room.late
    if root in allowed:
        return ""
    if not each.in_function and root in floor.packages_inside | room.late:
        return f"imports {root} at the top. Import it inside the function that needs it."
    if room.floor == 2:
        return f"imports {root} {where}, which its row in ROOMS does not list. Add it there, or let another file do it."
    if root in {"typer", "rich", "click"}:
        return f"imports {root} {where}. The terminal is cli's: return data and let it speak."
    return f"imports {root} {where}. Rule: {floor.advice}."


# -- the tests ---------------------------------------------------------------------------------------------------------


def package_files() -> list[str]:
    """Every Python file of the three folders by its path in the repository (rglob does not follow the links)."""
    return sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", package_files())
def test_file_holds_its_floor(file: str) -> None:
    found = violations(file, (ROOT / file).read_text(encoding="utf-8"), frozenset(package_files()))
    assert not found, "\n" + "\n".join(found)


def test_the_walk_sees_every_folder() -> None:
    """An empty walk must not pass."""
    folders = {Path(file).parent.as_posix() for file in package_files()}
    assert folders >= {*FOLDERS, "nlpconvert/backends"}


# The files that the synthetic sources below may import.
HOUSE = frozenset(
    {
        "nlpconvert/__init__.py",
        "nlpconvert/errors.py",
        "nlpconvert/artifact.py",
        "nlpconvert/models.py",
        "nlpconvert/source.py",
        "nlpconvert/backends/__init__.py",
        "nlpconvert/backends/torchscript.py",
        "nlpconvert/pipeline.py",
        "nlpconvert/report.py",
        "nlpconvert/cli.py",
        "convert/onnx.py",
        "convert/torchscript.py",
        "validators/elementwise.py",
    }
)


def _in_function(line: str) -> str:
    return f"def verb():\n    {line}\n"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("nlpconvert/artifact.py", "import json\nfrom pathlib import Path\nfrom .errors import DriftError\n"),
        ("nlpconvert/artifact.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"),
        ("nlpconvert/artifact.py", "import typing\nif typing.TYPE_CHECKING:\n    from nlpconvert.cli import main\n"),
        ("nlpconvert/__init__.py", _in_function("from nlpconvert import pipeline")),
        ("nlpconvert/__main__.py", "from nlpconvert.cli import main\n"),
        ("nlpconvert/inputs.py", "import numpy as np\nfrom nlpconvert.models import Task\n"),
        ("nlpconvert/inputs.py", _in_function("import tokenizers")),
        ("validators/elementwise.py", "import numpy\nfrom nlpconvert.artifact import Artifact\n"),
        ("validators/elementwise.py", _in_function("import onnx")),
        ("convert/onnx.py", "import torch\nimport numpy\nfrom nlpconvert.errors import ConversionError\n"),
        ("nlpconvert/backends/torchscript.py", "import torch\nfrom nlpconvert.backends import Session\n"),
        ("nlpconvert/backends/torchscript.py", "import torch\nfrom . import Session\n"),
        ("nlpconvert/pipeline.py", "import numpy\nfrom nlpconvert.artifact import STEPS\n"),
        ("nlpconvert/pipeline.py", _in_function("from nlpconvert.convert import onnx")),
        ("nlpconvert/report.py", _in_function("import jinja2")),
        ("nlpconvert/cli.py", "import typer\nfrom rich.console import Console\nfrom nlpconvert import __version__\n"),
        ("nlpconvert/cli.py", _in_function("from nlpconvert import pipeline, report")),
        ("nlpconvert/cli.py", _in_function("print('said')")),
    ],
)
def test_checker_allows(file: str, source: str) -> None:
    assert violations(file, source, HOUSE) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        # No row.
        ("nlpconvert/attic.py", "", "is in no row"),
        # Floor 0: the standard library only.
        ("nlpconvert/errors.py", "import numpy\n", "imports numpy at the top"),
        ("nlpconvert/errors.py", _in_function("import numpy"), "imports numpy inside a function"),
        ("nlpconvert/errors.py", "import rich\n", "The terminal is cli's"),
        ("nlpconvert/errors.py", "from nlpconvert.models import Task\n", "imports nlpconvert.models (floor 1)"),
        ("nlpconvert/errors.py", "from .models import Task\n", "imports nlpconvert.models (floor 1)"),
        ("nlpconvert/errors.py", "print('drift')\n", "prints"),
        ("nlpconvert/__init__.py", "from nlpconvert.models import TASKS\n", "imports nlpconvert.models (floor 1)"),
        ("nlpconvert/__init__.py", "import torch\n", "imports torch at the top"),
        # TYPE_CHECKING spares its own branch only.
        (
            "nlpconvert/errors.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import numpy\n",
            "imports numpy at the top",
        ),
        # A class body and an `if` run at import, so they are the top.
        ("nlpconvert/cli.py", "class Console:\n    from nlpconvert import pipeline\n", "(floor 3) at the top"),
        ("nlpconvert/cli.py", "import os\nif os.name:\n    import nlpconvert.pipeline\n", "(floor 3) at the top"),
        # Floor 1: numpy, no framework, heavy helpers inside functions.
        ("nlpconvert/models.py", "import torch\n", "imports torch at the top"),
        ("nlpconvert/models.py", _in_function("import torch"), "imports torch inside a function"),
        ("nlpconvert/inputs.py", "import tokenizers\n", "inside the function that needs it"),
        ("nlpconvert/inputs.py", "from nlpconvert import source\n", "imports nlpconvert.source (floor 2)"),
        ("validators/elementwise.py", "import scipy.stats\n", "inside the function that needs it"),
        ("validators/elementwise.py", "import onnx\n", "inside the function that needs it"),
        ("validators/elementwise.py", "import onnxruntime\n", "imports onnxruntime at the top"),
        ("validators/elementwise.py", "from ..convert import onnx\n", "imports nlpconvert.convert.onnx (floor 2)"),
        # Floor 2: its own frameworks, at the top; not each other; convert never judges.
        ("convert/torchscript.py", "import onnx\n", "its row in ROOMS does not list"),
        ("convert/torchscript.py", _in_function("import torch"), "A framework stands at the top"),
        ("convert/torchscript.py", "from nlpconvert.convert import onnx\n", "do not know each other"),
        ("convert/torchscript.py", "from . import onnx\n", "do not know each other"),
        ("convert/torchscript.py", _in_function("import nlpconvert.source"), "do not know each other"),
        ("convert/onnx.py", "from nlpconvert.validators import elementwise\n", "never runs or scores"),
        (
            "convert/onnx.py",
            _in_function("from nlpconvert.validators.elementwise import score"),
            "never runs or scores",
        ),
        ("convert/onnx.py", "from nlpconvert.backends import Session\n", "never runs or scores"),
        ("convert/onnx.py", "from ..backends import torchscript\n", "never runs or scores"),
        ("convert/onnx.py", "from nlpconvert import backends\n", "never runs or scores"),
        ("convert/onnx.py", _in_function("print('exporting')"), "prints"),
        ("nlpconvert/source.py", "import typer\n", "does not list"),
        # The dependency boundary is the file.
        (
            "convert/torchscript.py",
            "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
            "goes on when torch",
        ),
        # Floor 3: floor 2 inside functions, no framework anywhere, no terminal.
        ("nlpconvert/pipeline.py", "from nlpconvert.convert import onnx\n", "import floor 2 inside the function"),
        ("nlpconvert/pipeline.py", "from nlpconvert import source\n", "import floor 2 inside the function"),
        ("nlpconvert/pipeline.py", _in_function("import torch"), "imports torch inside a function"),
        ("nlpconvert/pipeline.py", _in_function("__import__('torch')"), "imports torch inside a function"),
        (
            "nlpconvert/pipeline.py",
            "import importlib\n" + _in_function("importlib.import_module('onnx')"),
            "imports onnx inside a function",
        ),
        ("nlpconvert/pipeline.py", "import typer\n", "The terminal is cli's"),
        ("nlpconvert/pipeline.py", _in_function("print('done')"), "prints"),
        ("nlpconvert/pipeline.py", "from nlpconvert import cli\n", "imports nlpconvert.cli (floor 5)"),
        # Floor 4: types in, lines and documents out.
        ("nlpconvert/report.py", "import matplotlib\n", "inside the function that needs it"),
        ("nlpconvert/report.py", _in_function("import torch"), "imports torch inside a function"),
        ("nlpconvert/report.py", "from nlpconvert.pipeline import run\n", "imports nlpconvert.pipeline (floor 3)"),
        # Floor 5: nothing heavy, and the rest of the house late.
        ("nlpconvert/cli.py", "import numpy\n", "imports numpy at the top"),
        ("nlpconvert/cli.py", _in_function("import numpy"), "imports numpy inside a function"),
        ("nlpconvert/cli.py", _in_function("import torch"), "imports torch inside a function"),
        ("nlpconvert/cli.py", "from nlpconvert import pipeline\n", "imports nlpconvert.pipeline (floor 3) at the top"),
        ("nlpconvert/cli.py", "from .report import lines\n", "imports nlpconvert.report (floor 4) at the top"),
        ("nlpconvert/cli.py", _in_function("from nlpconvert import source"), "imports nlpconvert.source (floor 2)"),
        # The repository's top is not the package.
        (
            "nlpconvert/pipeline.py",
            _in_function("from validators import elementwise"),
            "from the top of the repository",
        ),
        ("nlpconvert/pipeline.py", _in_function("import convert.onnx"), "from the top of the repository"),
        ("nlpconvert/pipeline.py", "from tests.conftest import ROOT\n", "from the top of the repository"),
    ],
)
def test_checker_complains(file: str, source: str, expected: str) -> None:
    found = violations(file, source, HOUSE)
    assert len(found) == 1, found
    assert expected in found[0]
    assert found[0].startswith(file)
