"""Floor 2: the decomposed attentions of a graph, each put together again to one operator.

That is done only where shapes and constants of the graph prove it, and the config names the graph's number of heads;
elsewhere the reason is told. Every mask stays what it is: an additive bias over all keys, never a length that takes
padding to be on the right. Projections stay MatMuls of their own, so that they can be quantized.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import onnx_ir

from nlpconvert.convert import onnx_graph
from nlpconvert.convert.editing import Editor, Size, Unproven, only_user, scalar, shape_of, source, vector

CONTRIB = "com.microsoft"
MASKED = -1e30
"""Masks are cut off here. ONNX Runtime's Attention reads float32's smallest number as minus infinity and gives zeros
for a row without a key, where the graph has the mean of the values; a kernel that works in powers of two overflows on
it. Added to a score this is absorbed like the smallest number, so the answer is the same."""


def fuse(editor: Editor, named: Set[int], *, standard: bool) -> tuple[int, int, tuple[str, ...]]:
    """Puts every attention together that can be. Returns how many were, of how many, and why the others were not.

    `named`: the head counts that the config names. `standard`: the Attention of opset 23, which takes grouped heads and
    any layout; else ONNX Runtime's own MultiHeadAttention, which CUDA has had for longer.
    """
    done, total, reasons = 0, 0, []
    for softmax in [node for node in editor.graph if node.op_type == "Softmax"]:
        total += 1
        try:
            read = _read(softmax)
            _check(read, named)
            _write(editor, read, standard)
            done += 1
        except Unproven as reason:
            reasons.append(f"{onnx_graph.module_scope(softmax) or softmax.outputs[0].name}: {reason}")
    return done, total, tuple(reasons)


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Queries, keys or values: `split` is (batch, heads, length, width), as `sizes` are, and `rows` what it was made
    from by a transposition, (batch, length, heads, width). One of the two may be missing."""

    sizes: tuple[Size, ...]
    split: onnx_ir.Value | None
    rows: onnx_ir.Value | None


@dataclass(frozen=True)
class Attention:
    """softmax(scale * query @ keys + biases) @ values, read off the graph; `product` is its last MatMul."""

    product: onnx_ir.Node
    query: Heads
    key: Heads
    value: Heads
    scale: float
    biases: tuple[onnx_ir.Value, ...]


def _heads(value: onnx_ir.Value | None) -> Heads:
    sizes = shape_of(value)
    if len(sizes) != 4:
        raise Unproven(f"heads stand in {len(sizes)} axes, not in 4")
    turned = source(value, "Transpose", (0, 2, 1, 3))
    return Heads(sizes, value, turned.inputs[0] if turned else None)


def _keys(turned: onnx_ir.Value) -> Heads:
    """The keys behind the (batch, heads, width, length) that queries are multiplied with."""
    if node := source(turned, "Transpose", (0, 1, 3, 2)):
        return _heads(node.inputs[0])
    if node := source(turned, "Transpose", (0, 2, 3, 1)):
        batch, length, count, width = _heads(node.inputs[0]).sizes
        return Heads((batch, count, length, width), None, node.inputs[0])
    # torch's decomposition: all heads into one axis, the last two axes turned, the heads back.
    back = source(turned, "Reshape")
    middle = source(back.inputs[0], "Transpose", (0, 2, 1)) if back else None
    flat = source(middle.inputs[0], "Reshape") if middle else None
    if back is None or flat is None:
        raise Unproven("the keys are not turned by a transposition of the last two axes")
    heads = _heads(flat.inputs[0])
    batch, count, length, width = heads.sizes
    if vector(flat.inputs[1])[1:] != [length, width] or vector(back.inputs[1]) != [batch, count, width, length]:
        raise Unproven("the keys are reshaped in a way that is not known")
    return heads


def _one_of_each_group(heads: Heads) -> Heads:
    """Keys or values before each was repeated for the queries of its group; as they are where none was."""
    merged = source(heads.split, "Reshape")
    spread = source(merged.inputs[0], "Expand") if merged else None
    extra = source(spread.inputs[0], "Unsqueeze") if spread else None
    if spread is None or extra is None or vector(extra.inputs[1]) != [2]:
        return heads
    inner, wide = _heads(extra.inputs[0]), shape_of(spread.outputs[0])
    batch, count, length, width = inner.sizes
    whole = (batch, int(count) * int(wide[2]), length, width) if isinstance(wide[2], int) else None
    return inner if wide == (batch, count, wide[2], length, width) and whole == heads.sizes else heads


def _unscaled(value: onnx_ir.Value) -> tuple[onnx_ir.Value, float]:
    """A value without the constants that it is multiplied with or divided by, and what they come to."""
    scale = 1.0
    while node := source(value, "Mul") or source(value, "Div"):
        inner, number = node.inputs[0], scalar(node.inputs[1])
        if inner is None or not number:
            break
        value, scale = inner, scale * number if node.op_type == "Mul" else scale / number
    return value, scale


def _read(softmax: onnx_ir.Node) -> Attention:
    product = only_user(softmax.outputs[0])
    if product is None or product.op_type != "MatMul":
        raise Unproven(f"its weights go to {product.op_type if product else 'several nodes'}, not to one MatMul")
    if product.inputs[0] is not softmax.outputs[0]:
        raise Unproven("its weights are the right side of a MatMul")
    scores, biases = softmax.inputs[0], list[onnx_ir.Value]()
    assert scores is not None and product.inputs[1] is not None
    while node := source(scores, "Add"):
        sides = [each for each in node.inputs if each is not None]
        inner = [each for each in sides if source(_unscaled(each)[0], "MatMul")]
        inner = inner or [each for each in sides if source(each, "Add")]
        if len(inner) != 1:
            break
        biases.insert(0, sides[1] if inner[0] is sides[0] else sides[0])
        scores = inner[0]
    scores, scale = _unscaled(scores)
    node = source(scores, "MatMul")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        made = scores.producer()
        raise Unproven(f"its scores come from {made.op_type if made else 'an input'}, not from MatMul and additions")
    (query, query_scale), (turned, key_scale) = _unscaled(node.inputs[0]), _unscaled(node.inputs[1])
    return Attention(
        product,
        _heads(query),
        _keys(turned),
        _heads(product.inputs[1]),
        scale * query_scale * key_scale,
        tuple(biases),
    )


def _check(read: Attention, named: Set[int]) -> None:
    """Unproven unless all sizes fit each other and the config's number of heads is the graph's."""
    batch, count, queries, width = read.query.sizes
    keys = read.key.sizes[2]
    if read.key.sizes != (batch, count, keys, width) or read.value.sizes[:3] != (batch, count, keys):
        raise Unproven("queries, keys and values do not fit each other")
    if not all(isinstance(size, int) for size in (count, width, read.value.sizes[3])):
        raise Unproven("heads or their width are not fixed")
    if count not in named:
        said = " or ".join(map(str, sorted(named))) or "no number"
        raise Unproven(f"the graph has {count} heads, config.json says {said}")
    for bias in read.biases:
        sizes = shape_of(bias)
        if len(sizes) != 4 or sizes[0] not in (1, batch) or sizes[1] not in (1, count) or sizes[3] != keys:
            raise Unproven("what is added to the scores is not of their shape")
        if sizes[2] not in (1, queries):
            raise Unproven("what is added to the scores is not of their shape")


def _bias(editor: Editor, read: Attention) -> onnx_ir.Value | None:
    """What is added to the scores: one tensor, never below MASKED, (1 or batch, 1 or heads, queries, keys)."""
    if not read.biases:
        return None
    before, name = read.product, f"{read.biases[0].name}.{len(editor.made)}"
    queries = read.query.sizes[2]

    def make() -> onnx_ir.Value:
        total = read.biases[0]
        for number, each in enumerate(read.biases[1:]):
            sizes = [other if size == 1 else size for size, other in zip(shape_of(total), shape_of(each), strict=True)]
            total = editor.add("Add", [total, each], before, f"{name}.sum.{number}", sizes)
        sizes = list(shape_of(total))
        total = editor.add("Max", [total, editor.constant(MASKED)], before, f"{name}.finite", sizes)
        if sizes[2] != queries:
            rows, axis = (read.query.split, 2) if read.query.split is not None else (read.query.rows, 1)
            span = {"start": axis, "end": axis + 1}
            int64, one = onnx_ir.DataType.INT64, editor.constant(1)
            length = editor.add("Shape", [rows], before, f"{name}.queries", [1], span, dtype=int64)
            parts = [one, one, length, one]
            full = editor.add("Concat", parts, before, f"{name}.full", [4], {"axis": 0}, dtype=int64)
            total = editor.add("Expand", [total, full], before, f"{name}.wide", [*sizes[:2], queries, sizes[3]])
        return total

    return editor.once(("bias", queries, *read.biases), make)


def _way_out(product: onnx_ir.Node) -> tuple[onnx_ir.Node | None, onnx_ir.Node | None]:
    """(the Transpose that puts heads beside each other again, the Where that gives zeros for rows without a key, before
    it), as far as nothing else reads what is between."""
    user, zeroed = only_user(product.outputs[0]), None
    if user is not None and user.op_type == "Where" and user.inputs[2] is product.outputs[0]:
        condition = user.inputs[0]
        if scalar(user.inputs[1]) is not None and condition is not None and len(condition.shape or ()) == 4:
            zeroed, user = user, only_user(user.outputs[0])
    turned = source(user.outputs[0], "Transpose", (0, 2, 1, 3)) if user is not None else None
    return turned, zeroed if turned is not None else None


def _flat(editor: Editor, heads: Heads, before: onnx_ir.Node, name: str) -> onnx_ir.Value:
    """Heads as (batch, length, heads * width); where they were split from that, that."""
    batch, count, length, width = heads.sizes
    rows = heads.rows
    if rows is None:
        sizes = [batch, length, count, width]
        rows = editor.add("Transpose", [heads.split], before, f"{name}.rows", sizes, {"perm": [0, 2, 1, 3]})
    whole = (batch, length, int(count) * int(width))
    split = source(rows, "Reshape")
    given = split.inputs[0] if split is not None else None
    if given is not None and given.shape is not None and given.shape == onnx_ir.Shape(whole):
        return given
    return editor.add("Reshape", [rows, editor.constant(0, 0, -1)], before, name, whole)


def _write(editor: Editor, read: Attention, standard: bool) -> None:
    """Adds the operator and puts its answer where the graph's own was read."""
    batch, count, queries, _ = read.query.sizes
    width = read.value.sizes[3]
    key, value = read.key, read.value
    if standard:
        key, value = _one_of_each_group(key), _one_of_each_group(value)
        if key.sizes[1] != value.sizes[1]:
            key, value = read.key, read.value
    bias = _bias(editor, read)
    turned, zeroed = _way_out(read.product)
    beside = turned is not None and all(heads.rows is not None for heads in (read.query, key, value))
    name, before = read.product.outputs[0].name, read.product
    if standard and not beside:
        whole = [_split(editor, heads, before, f"{name}.{word}") for heads, word in _named(read.query, key, value)]
        made = editor.add(
            "Attention", [*whole, bias], before, f"{name}.fused", [*read.query.sizes[:3], width], {"scale": read.scale}
        )
        editor.replace(before.outputs[0], made)
        return
    if turned is not None:
        before = turned
    flat = [_flat(editor, heads, before, f"{name}.{word}") for heads, word in _named(read.query, key, value)]
    sizes = [batch, queries, int(count) * int(width)]
    if standard:
        counts = {"q_num_heads": int(count), "kv_num_heads": int(key.sizes[1])}
        made = editor.add("Attention", [*flat, bias], before, f"{name}.flat", sizes, {**counts, "scale": read.scale})
    else:
        made = editor.add(
            "MultiHeadAttention",
            [*flat, None, None, bias],
            before,
            f"{name}.flat",
            sizes,
            {"num_heads": int(count), "scale": read.scale},
            domain=CONTRIB,
        )
    rows = [batch, queries, count, width]
    made = editor.add("Reshape", [made, editor.constant(0, 0, int(count), int(width))], before, f"{name}.rows", rows)
    if turned is None:
        made = editor.add(
            "Transpose", [made], before, f"{name}.fused", [*read.query.sizes[:3], width], {"perm": [0, 2, 1, 3]}
        )
        editor.replace(read.product.outputs[0], made)
        return
    if zeroed is not None:
        condition, zero = zeroed.inputs[0], zeroed.inputs[1]
        assert condition is not None
        made = editor.add("Where", [_beside(editor, condition, before), zero, made], before, f"{name}.zeroed", rows)
    editor.replace(turned.outputs[0], made)


def _named(query: Heads, key: Heads, value: Heads) -> tuple[tuple[Heads, str], ...]:
    return (query, "query"), (key, "key"), (value, "value")


def _split(editor: Editor, heads: Heads, before: onnx_ir.Node, name: str) -> onnx_ir.Value:
    """Heads as (batch, heads, length, width)."""
    if heads.split is not None:
        return heads.split
    return editor.add("Transpose", [heads.rows], before, name, heads.sizes, {"perm": [0, 2, 1, 3]})


def _beside(editor: Editor, condition: onnx_ir.Value, before: onnx_ir.Node) -> onnx_ir.Value:
    """A condition over (batch, heads, length, width) for (batch, length, heads, width)."""
    batch, count, length, width = shape_of(condition)

    def make() -> onnx_ir.Value:
        return editor.add(
            "Transpose",
            [condition],
            before,
            f"{condition.name}.rows",
            [batch, length, count, width],
            {"perm": [0, 2, 1, 3]},
            dtype=onnx_ir.DataType.BOOL,
        )

    return editor.once(("condition", condition), make)
