"""Floor 2: an ONNX graph fused for ONNX Runtime, on the CPU or on CUDA.

What is fused stands in FUSIONS, one row a fusion and target; the attentions have a file of their own. ONNX Runtime
itself fuses when it opens a file (BiasGelu, FastGelu, SkipLayerNormalization), so only what goes beyond that is worth a
file. On the CPU that is the standard's own Attention and RMSNormalization (opset 23), and residual sums in a form that
ONNX Runtime leaves alone: its SkipLayerNormalization takes several times as long there as the sum and the normalization
do. Weights, their names and one MatMul a projection stay, so that the fused graph can be quantized.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir
import onnxruntime
import onnxscript
from onnxscript import version_converter

from nlpconvert.artifact import Artifact, Made
from nlpconvert.convert import attention, derived, onnx_graph
from nlpconvert.convert.editing import Editor, drop_idle_reshapes, only_user, scalar, shape_of, source
from nlpconvert.errors import ConversionError, UsageError

STANDARD_OPSET = 23
"""From here on the standard has Attention and RMSNormalization."""

IR_VERSION = 11
"""The file format that opset came with."""

LEVEL = "all"
"""ONNX Runtime's optimization level that the file is meant for: what a session has unless it is told otherwise."""

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim")

Found = tuple[int, int, tuple[str, ...]]
"""How many were fused, of how many, and why the others were not."""


@dataclass(frozen=True)
class Fusion:
    """`name` stands in the manifest, `words` in the report: "6 of 6 {words}"."""

    name: str
    words: str
    fuse: Callable[[Editor, Set[int]], Found]


def convert(parent: Artifact, directory: Path, *, target: str) -> Made:
    """Writes `model.onnx` (+ data, companions) into `directory`: the parent's graph, fused for `target`.

    A graph in which nothing could be fused is written all the same, and says so. Raises UsageError for another target
    than "cpu" and "cuda", ConversionError where the parent cannot be read or is fused already.
    """
    if target not in FUSIONS:
        raise UsageError(f"there is no fusion for {target}: only for {' and '.join(FUSIONS)}")
    program = derived.load(parent)
    foreign = sorted({node.op_type for node in program.graph.all_nodes() if node.domain not in ("", "ai.onnx")})
    if foreign:
        raise ConversionError(f"{parent.path} is fused already: it holds {', '.join(foreign)}")
    if target == "cpu" and program.graph.opset_imports[""] < STANDARD_OPSET:
        version_converter.convert_version(program, STANDARD_OPSET)
        program.ir_version = max(program.ir_version, IR_VERSION)
    whole = sum(node.op_type == "Attention" for node in program.graph)

    config = _config(parent.directory)
    heads = _numbers(config, HEADS)
    editor = Editor(program)
    drop_idle_reshapes(editor)
    found: dict[str, Found] = {}
    for row in FUSIONS[target]:
        found[row.name] = row.fuse(editor, heads)
        editor.clean()
    if any(node.domain == attention.CONTRIB for node in program.graph):
        program.graph.opset_imports[attention.CONTRIB] = 1
    onnx_graph.clean_metadata(program)
    inputs, outputs = derived.write(program, parent, directory)

    reasons = [f"{row.name}: {reason}" for row in FUSIONS[target] for reason in found[row.name][2]]
    return Made(
        file=derived.ONNX_FILE,
        inputs=inputs,
        outputs=outputs,
        made_by={
            "optimizer": "nlpconvert",
            "target": target,
            "level": LEVEL,
            "fused": {name: [done, total] for name, (done, total, _) in found.items()},
            "not_fused": reasons,
            "num_heads": sorted(heads),
            "hidden_size": min(_numbers(config, WIDTHS), default=None),
            "opset": program.graph.opset_imports[""],
            "onnx_ir": onnx_ir.__version__,
            "onnxscript": onnxscript.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
        notes=(
            _told(target, found),
            *([f"{whole} attentions stand in the parent as one operator already"] if whole else []),
            *(f"not fused: {reason}" for reason in reasons),
        ),
    )


def _told(target: str, found: Mapping[str, Found]) -> str:
    if not any(done for done, _, _ in found.values()):
        return "nothing could be fused: the file computes as its parent does"
    counts = [(found[row.name], row.words) for row in FUSIONS[target]]
    return f"fused: {', '.join(f'{done} of {total} {words}' for (done, total, _), words in counts if total)}"


def gain(parent: Callable[[], object], fused: Callable[[], object], rounds: int = 7) -> float:
    """How long `fused` takes against `parent`, below 1 where it is faster: medians of turns taken alternately."""
    spent: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for call, times in zip((parent, fused), spent, strict=True):
            start = time.perf_counter()
            call()
            if turn:  # the first one allocates
                times.append(time.perf_counter() - start)
    before, after = map(statistics.median, spent)
    return after / before


# ---- what the config says -------------------------------------------------------------------------------------------


def _config(directory: Path) -> Mapping[str, Any]:
    """The checkpoint's config.json beside the parent, {} where there is none."""
    try:
        read = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _numbers(config: Mapping[str, Any], keys: Sequence[str]) -> set[int]:
    """What a config says under any of these keys, its text part included."""
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    return {place[key] for place in places for key in keys if isinstance(place.get(key), int)}


# ---- norms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Norm:
    """A normalization over the last axis, `shift` and mean taken off in LayerNormalization only."""

    output: onnx_ir.Value
    data: onnx_ir.Value
    weight: onnx_ir.Value
    shift: onnx_ir.Value | None
    epsilon: float
    rms: bool


def _layer_norms(editor: Editor) -> Iterator[_Norm]:
    for node in editor.graph:
        if node.op_type == "LayerNormalization" and all(not value.uses() for value in node.outputs[1:]):
            data, weight, shift = (*node.inputs, None)[:3]
            if data is not None and weight is not None and node.attributes.get_int("axis", -1) in (-1, _last(data)):
                yield _Norm(node.outputs[0], data, weight, shift, node.attributes.get_float("epsilon", 1e-5), False)


def _last(value: onnx_ir.Value) -> int:
    return len(value.shape) - 1 if value.shape is not None else -1


def _rms_norms(editor: Editor) -> Iterator[_Norm | str]:
    """weight * data * 1/sqrt(mean(data**2) + epsilon), or why what looks so is something else."""
    for node in [node for node in editor.graph if node.op_type == "Reciprocal"]:
        root = source(node.inputs[0], "Sqrt")
        total = source(root.inputs[0], "Add") if root else None
        mean = source(total.inputs[0], "ReduceMean") if total else None
        square = source(mean.inputs[0], "Pow") if mean else None
        if total is None or mean is None or square is None or square.inputs[0] is None:
            continue
        data, epsilon = square.inputs[0], scalar(total.inputs[1])
        scaled = only_user(node.outputs[0])
        weighted = only_user(scaled.outputs[0]) if scaled is not None else None
        if scaled is None or weighted is None or {scaled.op_type, weighted.op_type} != {"Mul"}:
            yield f"{onnx_graph.module_scope(node)}: no weight is multiplied with it"
            continue
        weight = next((each for each in weighted.inputs if each is not scaled.outputs[0]), None)
        fits = data in scaled.inputs and scalar(square.inputs[1]) == 2 and epsilon is not None
        over = scalar(mean.inputs[1]) if len(mean.inputs) > 1 else None
        if not fits or over not in (-1, _last(data)) or mean.attributes.get_int("keepdims", 1) != 1:
            yield f"{onnx_graph.module_scope(node)}: it is no RMS normalization over the last axis"
        elif weight is None or weight.shape is None or shape_of(weight) != shape_of(data)[-1:]:
            yield f"{onnx_graph.module_scope(node)}: its weight is not one number a channel"
        else:
            assert epsilon is not None
            yield _Norm(weighted.outputs[0], data, weight, None, epsilon, True)


def _fuse_rms(editor: Editor, heads: Set[int]) -> Found:
    """RMSNormalization for the seven operators that it was exported as."""
    reasons, done = [], 0
    for norm in list(_rms_norms(editor)):
        if isinstance(norm, str):
            reasons.append(norm)
            continue
        before = norm.output.producer()
        assert before is not None
        options = {"axis": -1, "epsilon": norm.epsilon, "stash_type": 1}
        name = f"{norm.output.name}.fused"
        made = editor.add("RMSNormalization", [norm.data, norm.weight], before, name, shape_of(norm.data), options)
        editor.replace(norm.output, made)
        done += 1
    return done, done + len(reasons), tuple(reasons)


@dataclass(frozen=True)
class _Residual:
    """The sum that a normalization reads: two tensors of one shape (batch, sequence, channels), and a bias of channels
    that was added to the first of them just before."""

    node: onnx_ir.Node
    terms: tuple[onnx_ir.Value, onnx_ir.Value]
    bias: onnx_ir.Value | None


def _residual(norm: _Norm) -> _Residual | None:
    node = source(norm.data, "Add")
    terms = [value for value in node.inputs if value is not None] if node is not None else []
    if (
        node is None
        or node.graph is None
        or len(terms) != 2
        or any(value.shape is None for value in (norm.data, *terms))
    ):
        return None
    if len(norm.data.shape or ()) != 3 or any(value.shape != norm.data.shape for value in terms):
        return None
    for first, second in (terms, terms[::-1]):
        added = source(first, "Add")
        if added is None or only_user(first) is None:
            continue
        for inner, bias in (added.inputs, added.inputs[::-1]):
            if inner is not None and bias is not None and bias.is_initializer() and len(bias.shape or ()) == 1:
                return _Residual(node, (inner, second), bias)
    return _Residual(node, (terms[0], terms[1]), None)


def _keep_sums(editor: Editor, heads: Set[int]) -> Found:
    """Residual sums as Sum, which ONNX Runtime does not fuse into SkipLayerNormalization. Terms keep their order."""
    done = 0
    for norm in list(_layer_norms(editor)):
        found = _residual(norm) if only_user(norm.data) is not None else None
        if found is None:
            continue
        first, second = found.terms
        terms = [first, second] if found.bias is None else [first, found.bias, second]
        made = editor.add("Sum", terms, found.node, f"{norm.data.name}.fused", shape_of(norm.data))
        editor.replace(norm.data, made)
        done += 1
    return done, done, ()


def _skip_norms(editor: Editor, heads: Set[int]) -> Found:
    """A sum, its bias and the normalization after it in one operator, which gives the sum too where it is read."""
    done, reasons = 0, []
    norms = [*_layer_norms(editor), *(norm for norm in list(_rms_norms(editor)) if isinstance(norm, _Norm))]
    for norm in norms:
        found = _residual(norm)
        if found is None:
            continue
        if not norm.weight.is_initializer() or (norm.shift is not None and not norm.shift.is_initializer()):
            reasons.append(f"{norm.output.name}: its weight is computed")
            continue
        op = "SkipSimplifiedLayerNormalization" if norm.rms else "SkipLayerNormalization"
        weights = [norm.weight] if norm.rms else [norm.weight, norm.shift]
        made = editor.add(
            op,
            [*found.terms, *weights, *([found.bias] if found.bias is not None else [])],
            found.node,
            f"{norm.output.name}.fused",
            shape_of(norm.data),
            {"epsilon": norm.epsilon},
            domain=attention.CONTRIB,
            outputs=4,
        )
        editor.replace(norm.output, made)
        editor.clean()
        if norm.data.uses() or norm.data.is_graph_output():
            producer = made.producer()
            assert producer is not None
            total = producer.outputs[3]
            total.type, total.shape = made.type, made.shape
            editor.replace(norm.data, total)
        done += 1
    return done, done + len(reasons), tuple(reasons)


FUSIONS: dict[str, tuple[Fusion, ...]] = {
    "cpu": (
        Fusion("attention", "attentions", partial(attention.fuse, standard=True)),
        Fusion("rms_norm", "RMS normalizations", _fuse_rms),
        Fusion("residual", "residual sums kept apart from their normalization", _keep_sums),
    ),
    "cuda": (
        Fusion("attention", "attentions", partial(attention.fuse, standard=False)),
        Fusion("skip_norm", "skip normalizations", _skip_norms),
    ),
}
"""What is fused, in this order. On the CPU every operator is the standard's; on CUDA they are ONNX Runtime's own."""
