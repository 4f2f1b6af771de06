"""Floor 2: the float32 ONNX graph to float16 or bfloat16, by measured range.

Ranges are measured on the calibration texts, `half_plan` says which nodes stay in float32 and why, and the graph is
rewritten so: casts stand in the graph itself, and a strongly typed runtime computes what it says and no other thing.
Nothing is clamped unless that was accepted.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir

from nlpconvert.artifact import Artifact, Made
from nlpconvert.convert import derived, half_plan, onnx_graph
from nlpconvert.convert.half_plan import FORMATS, HEADROOM, Format, Plan, is_float, number
from nlpconvert.errors import ConversionError, first_line

__all__ = ["FORMATS", "Runner", "convert"]

Runner = Callable[[Path, Sequence[str]], Iterator[tuple[object, Mapping[str, np.ndarray]]]]
"""Runs an ONNX file over the calibration cases and yields the named outputs of each."""

LISTED = 50
"""Nodes that the record names; the others are counted."""

COMPARED = 12
"""Calibration cases, the shortest texts, on which the rounded graph is held against the parent."""

FLUSHED_TOLD = 1e-3
"""Share of the weights that become zero from which on a person is told; the record always has the number."""

WORDS = {
    "range": "past what was measured to fit",
    "weights": "for their weights",
    "constant": "at a constant that does not fit",
    "operator": "without a 16-bit form",
    "head": "that give the answers",
    "sum": "summing over many elements",
    "normalisation": "of normalisations",
    "join": "between those",
    "index": "of mask and position arithmetic",
}
"""Kinds of reasons, the most telling first."""


def convert(parent: Artifact, directory: Path, *, precision: str, run: Runner, accept_clamped: bool) -> Made:
    """Writes `model.onnx` (+ data) and the parent's companions into `directory`.

    `precision` is "float16" or "bfloat16". Inputs and outputs are the parent's, float32 outputs included. With
    `accept_clamped` a constant past the format's range that would leave no product in 16 bits is clamped, and told.

    Raises ConversionError where no product can be 16 bits wide, where answers are no longer finite when every tensor is
    rounded, and where the file is larger than its source.
    """
    form = FORMATS[precision]
    program = derived.load(parent)
    scratch = directory / "measuring"
    clamped: list[dict[str, Any]] = []
    try:
        plan = Plan(program.graph, form, measure(parent.path, program.graph, scratch / "ranges", run))
        if not plan.half_products and accept_clamped and _clampable(plan):
            clamped = _clamp(plan)
            path = derived.trial(program, scratch / "clamped")
            plan = Plan(program.graph, form, measure(path, program.graph, scratch / "again", run))
        if not plan.half_products:
            raise ConversionError(_nothing(plan))
        facts, notes = _facts(plan), _notes(plan, clamped)
        weights = {name: value.const_value for name, value in program.graph.initializers.items()}
        rewrite(plan)
        inputs, outputs = derived.write(program, parent, directory)
        _lint(directory / derived.ONNX_FILE, scratch)
        names = [spec.name for spec in outputs]
        rounded = simulate(directory / derived.ONNX_FILE, weights, form, scratch / "rounded")
        moved = _moved(run(parent.path, names), run(rounded, names), form)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size, before = derived.size(directory), derived.size(parent.directory)
    if size > before:
        raise ConversionError(f"the {form.name} file has {size:,} bytes, more than the {before:,} it was made from")
    made_by = {
        "onnx_ir": onnx_ir.__version__,
        "format": form.name,
        "headroom": HEADROOM,
        "accumulation": "inputs and results of a product are measured, what it sums up inside is the runtime's",
        "size_over_parent": round(size / before, 4),
        "rounded_everywhere": moved,
        "clamped": clamped,
        **facts,
    }
    return Made(derived.ONNX_FILE, inputs, outputs, made_by, notes)


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(path: Path, graph: onnx_ir.Graph, scratch: Path, run: Runner) -> dict[str, float]:
    """The largest finite magnitude of every inner float32 tensor over the calibration cases, by name."""
    made = [out for node in graph for out in node.outputs if is_float(out) and out.name]
    names = [out.name for out in made if out.name and _viewed(out) is None]
    largest = dict.fromkeys(names, 0.0)
    tapped = derived.tap(path, scratch, [], names)
    cases = 0
    for _, values in run(tapped, [f"{name}/largest" for name in names]):
        cases += 1
        for name in names:
            largest[name] = max(largest[name], float(values[f"{name}/largest"]))
    if not cases:
        raise ConversionError("there are no calibration texts to measure ranges on")
    for out in made:
        source = _viewed(out)
        if out.name and source is not None and source.name in largest:
            largest[out.name] = largest[source.name]
    return largest


def _viewed(value: onnx_ir.Value) -> onnx_ir.Value | None:
    """The inner tensor whose elements a view (a Reshape, a Transpose, ...) holds; None for anything else."""
    node = value.producer()
    if node is None or node.op_type not in half_plan.PASSING or node.domain or node.inputs[0] is None:
        return None
    return node.inputs[0] if node.inputs[0].producer() is not None else None


def _moved(
    before: Iterable[tuple[object, Mapping[str, np.ndarray]]],
    after: Iterable[tuple[object, Mapping[str, np.ndarray]]],
    form: Format,
) -> dict[str, float]:
    """How far rounding every inner tensor moves each output over the first COMPARED cases: the root mean square of the
    differences over that of the float32 answers. What cannot be told apart from minus infinity is passed over."""
    sums: dict[str, list[float]] = {}
    for (_, reference), (_, candidate) in islice(zip(before, after, strict=True), COMPARED):
        for name, values in reference.items():
            scored = np.abs(values) < half_plan.SENTINEL
            there = candidate[name][scored]
            if not np.isfinite(there).all():
                raise ConversionError(f"{name} is not finite in {form.name} arithmetic where it is in float32")
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += float(np.square(there - values[scored], dtype=np.float64).sum())
            total[1] += float(np.square(values[scored], dtype=np.float64).sum())
    return {name: (error / norm) ** 0.5 if norm else 0.0 for name, (error, norm) in sums.items()}


# ---- rewriting ------------------------------------------------------------------------------------------------------


def rewrite(plan: Plan) -> None:
    """Makes every float node that has no reason against it a half node, in place, with the casts in between."""
    graph, form = plan.graph, plan.form
    half = {node for node in plan.nodes if node not in plan.why}
    for value in [value for value in graph.inputs if is_float(value)]:
        if in_half := _users(value, half)[1]:
            _split(value, in_half, form.dtype, graph)
    for constant in plan.constants:
        _store(constant, *_users(constant, half), plan)
    for node in plan.nodes:
        for out in [out for out in node.outputs if is_float(out)]:
            in_float, in_half = _users(out, half)
            if node not in half:
                if in_half:
                    _split(out, in_half, form.dtype, graph)
                continue
            out.dtype = form.dtype
            places = [place for place, value in enumerate(graph.outputs) if value is out]
            if not in_float and not places:
                continue
            back = _split(out, in_float, onnx_ir.DataType.FLOAT, graph)
            if places:  # the graph's outputs stay what and how they are called
                out.name, back.name = back.name, out.name
            for place in places:
                graph.outputs[place] = back


Uses = list[tuple[onnx_ir.Node, int]]


def _users(value: onnx_ir.Value, half: set[onnx_ir.Node]) -> tuple[Uses, Uses]:
    """Who reads a tensor's values in float32, and who in half."""
    uses = [(use.node, use.idx) for use in value.uses() if use.node.op_type not in half_plan.BLIND]
    return [use for use in uses if use[0] not in half], [use for use in uses if use[0] in half]


def _split(
    value: onnx_ir.Value, uses: Uses, dtype: onnx_ir.DataType, graph: onnx_ir.Graph, prefix: str = ""
) -> onnx_ir.Value:
    """Gives these users a Cast of the value to `dtype`; returns what the Cast makes."""
    maker, name = value.producer(), f"{value.name}.{prefix}{dtype.name.lower()}"
    node = onnx_ir.node("Cast", [value], attributes={"to": dtype.value}, name=f"{name}.cast")
    cast = node.outputs[0]
    cast.name, cast.shape, cast.dtype = name, value.shape, dtype
    if maker is None:
        graph.insert_before(graph[0], node)
    else:
        node.metadata_props.update(maker.metadata_props)
        graph.insert_after(maker, node)
    for user, place in uses:
        user.replace_input_with(place, cast)
    return cast


def _store(constant: onnx_ir.Value, in_float: Uses, in_half: Uses, plan: Plan) -> None:
    """A constant that half nodes read is stored as half, once: float32 nodes that share a large one read a Cast of it,
    a small one stays beside its half."""
    tensor, graph, form = constant.const_value, plan.graph, plan.form
    if tensor is None or not in_half:
        return
    if constant.is_graph_output() or (in_float and tensor.nbytes < onnx_graph.INSIDE_BYTES):
        twin = onnx_ir.Value(name=f"{constant.name}.{form.name}", const_value=_rounded(tensor, form, constant.name))
        twin.shape, twin.dtype = constant.shape, form.dtype
        graph.register_initializer(twin)
        for user, place in in_half:
            user.replace_input_with(place, twin)
        return
    constant.const_value = _rounded(tensor, form, constant.name)
    constant.dtype = form.dtype
    if in_float:
        _split(constant, in_float, onnx_ir.DataType.FLOAT, graph)


def _rounded(tensor: onnx_ir.TensorProtocol, form: Format, name: str | None) -> onnx_ir.LazyTensor:
    """The tensor in 16 bits, computed when it is written and not held."""

    def make() -> onnx_ir.TensorProtocol:
        return onnx_ir.tensor(tensor.numpy().astype(form.dtype.numpy()), dtype=form.dtype, name=name)

    return onnx_ir.LazyTensor(make, dtype=form.dtype, shape=onnx_ir.Shape(tensor.shape.numpy()), name=name)


def _clampable(plan: Plan) -> list[onnx_ir.Value]:
    return [constant for constant in dict.fromkeys(plan.held.values()) if plan.is_past(constant)]


def _clamp(plan: Plan) -> list[dict[str, Any]]:
    """Clamps the constants past the range, in place, and says which."""
    done = []
    for constant in _clampable(plan):
        assert constant.const_value is not None
        array = constant.const_value.numpy()
        within = np.where(np.isfinite(array), np.clip(array, -plan.limit, plan.limit), array).astype(array.dtype)
        done.append({"name": constant.name, "largest": plan.constants[constant].largest, "to": plan.limit})
        constant.const_value = onnx_ir.tensor(within, name=constant.name)
    return done


# ---- checking -------------------------------------------------------------------------------------------------------


def _lint(path: Path, scratch: Path) -> None:
    """ConversionError where types do not fit together: some builders crash on a graph that mixes them."""
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        onnx.shape_inference.infer_shapes_path(
            str(path), str(scratch / "typed.onnx"), check_type=True, strict_mode=True
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        raise ConversionError(f"a graph of mixed types was written: {first_line(error, 300)}") from error


def simulate(path: Path, weights: Mapping[str, onnx_ir.TensorProtocol | None], form: Format, scratch: Path) -> Path:
    """A float32 graph that rounds every weight and inner tensor where the file at `path` is 16 bits wide: what a
    runtime with float32 sums inside its products computes, on any machine.

    `weights`: the parent's tensors by name; they are rounded when they are read, so the parent's data file serves.
    """
    program = onnx_ir.load(path)
    graph, wide = program.graph, onnx_ir.DataType.FLOAT
    nodes = [node for node in graph if any(out.dtype == form.dtype for out in node.outputs)]
    for name, value in list(graph.initializers.items()):
        is_half, uses = value.dtype == form.dtype, _users(value, set())[0]
        value.const_value = weights[name.removesuffix(f".{form.name}")]
        if is_half:
            value.dtype = wide
            _split(_split(value, uses, form.dtype, graph, "rounded."), uses, wide, graph, "rounded.")
    for node in nodes:
        for out in node.outputs:
            uses = _users(out, set())[0]
            if node.op_type != "Cast":
                out.dtype = wide
                out = _split(out, uses, form.dtype, graph, "rounded.")
            _split(out, uses, wide, graph, "rounded.")
    return derived.trial(program, scratch)


# ---- telling --------------------------------------------------------------------------------------------------------


def _facts(plan: Plan) -> dict[str, Any]:
    kinds = list(WORDS)
    kept = [(node, why) for node, why in plan.why.items() if why.kind not in ("index", "join")]
    kept.sort(key=lambda each: (each[0] not in plan.products, kinds.index(each[1].kind)))
    data = [node for node in plan.nodes if node not in plan.why or plan.why[node].kind != "index"]
    makers = {out.name: node for node in data for out in node.outputs if out not in plan.held}
    top = sorted(((x, name) for name, x in plan.largest.items() if name in makers), reverse=True)[:5]
    stored = [plan.constants[each] for each in {plan.weight(node) for node in plan.half_products} if each is not None]
    return {
        "kept_float32": [
            {"node": node.name or "", "op": node.op_type, "module": onnx_graph.module_scope(node), "why": why.text}
            for node, why in kept[:LISTED]
        ],
        "kept_counts": dict(Counter(why.kind for why in plan.why.values())),
        "half_nodes": len(plan.nodes) - len(plan.why),
        "largest": [{"tensor": name, "module": onnx_graph.module_scope(makers[name]), "value": x} for x, name in top],
        "matmuls": len(plan.products),
        "half_matmuls": len(plan.half_products),
        "flops_half": round(plan.work(plan.half_products) / plan.work(plan.products), 4),
        "weights_flushed": sum(each.flushed for each in stored),
        "weights_half": sum(each.size for each in stored),
    }


def _notes(plan: Plan, clamped: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    notes = [f"{each['name']} was clamped from {number(each['largest'])} to {number(each['to'])}" for each in clamped]
    kept = [node for node in plan.products if node in plan.why and plan.why[node].kind != "head"]
    for node in kept[:1]:
        others = f", and {len(kept) - 1} more for like reasons" if len(kept) > 1 else ""
        notes.append(
            f"{len(kept)} of {len(plan.products)} products stay in float32: "
            f"{_called(node)}: {plan.why[node].text}{others}"
        )
    counts = Counter(why.kind for why in plan.why.values())
    told = ", ".join(f"{counts[kind]} {words}" for kind, words in WORDS.items() if counts[kind])
    notes.append(f"nodes in float32: {told}")
    facts = _facts(plan)
    if facts["weights_flushed"] > FLUSHED_TOLD * facts["weights_half"]:
        share = facts["weights_flushed"] / facts["weights_half"]
        notes.append(f"{share:.1%} of the weights are so small that they become zero in {plan.form.name}")
    return tuple(notes)


def _called(node: onnx_ir.Node) -> str:
    return onnx_graph.module_scope(node) or node.name or node.op_type


def _nothing(plan: Plan) -> str:
    """Why no product would be half, for a person."""
    name = plan.form.name
    if not plan.products:
        return f"no product in this graph has a constant weight, so nothing would be {name}"
    first = plan.products[0]
    stuck = f"none of {len(plan.products)} products can be {name}: {_called(first)}: {plan.why[first].text}"
    return f"{stuck}; --accept-clamped clamps the constant" if _clampable(plan) else stuck
