"""Floor 2: which nodes of a float32 ONNX graph stay in float32 when the others become float16 or bfloat16, and why.

Nothing is changed here: the graph is read, with what was measured of its tensors. Measuring and rewriting is `half`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir


@dataclass(frozen=True)
class Format:
    """A 16-bit format: its largest number, its smallest normal one, and the largest relative error of a rounding."""

    name: str
    dtype: onnx_ir.DataType
    largest: float
    smallest: float
    rounding: float


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("float16", onnx_ir.DataType.FLOAT16, (2 - 2.0**-10) * 2.0**15, 2.0**-14, 2.0**-11),
        Format("bfloat16", onnx_ir.DataType.BFLOAT16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-8),
    )
}

HEADROOM = 4.0
"""What was measured may grow this many times on other texts and still fit."""

PASSING = frozenset("Expand Flatten Identity Reshape Slice Split Squeeze Tile Transpose Unsqueeze".split())
"""Operators whose outputs hold elements of their first input and nothing else."""

ELEMENTWISE = frozenset(
    "Abs Add Clip Div Erf Exp Gelu Max Min Mul Neg Pow Reciprocal Relu Sigmoid Sqrt Sub Tanh Where".split()
)
NORMS = frozenset(
    "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization LpNormalization "
    "MeanVarianceNormalization RMSNormalization SimplifiedLayerNormalization SkipLayerNormalization".split()
)
SUMS = frozenset(
    "CumSum LogSoftmax ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSum "
    "ReduceSumSquare Softmax".split()
)
BOUNDED = NORMS | frozenset("Cos Erf HardSigmoid Sigmoid Sign Sin Softmax Tanh".split())
"""Operators whose outputs are small whatever their inputs hold."""

FLOORS = frozenset("Add Clip Max Min Pow Reciprocal Sqrt Where".split())
"""Operators through which a small number keeps a divisor from zero."""

PRODUCTS = frozenset("Conv Einsum Gemm MatMul".split())
BLIND = frozenset({"Shape", "Size"})
"""Operators that read no values."""

SENTINEL = 1e30
"""Values of this size stand for minus infinity."""

HEAD_SHARE = 0.01
"""Share of all products' work up to which a last one is kept."""

PIECE = 2**22
"""Elements of a weight that are looked at together."""


@dataclass(frozen=True)
class Why:
    """Why a node stays in float32: a kind to count by ("range", "weights", ...) and the sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class Constant:
    """What is known of a float32 constant: largest finite magnitude, what rounding it costs as a share of its norm, how
    many of its elements become zero, and how many there are."""

    largest: float
    lost: float
    flushed: int
    size: int


def look_at(array: np.ndarray, form: Format) -> Constant:
    """Reads a constant piece by piece; infinities, which every format has, are passed over."""
    flat = array.reshape(-1)
    largest = norm = error = 0.0
    flushed = 0
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE]
        piece = piece[np.isfinite(piece)]
        with np.errstate(over="ignore"):
            rounded = piece.astype(form.dtype.numpy()).astype(np.float32)
        largest = max(largest, float(np.abs(piece).max(initial=0.0)))
        fits = np.isfinite(rounded)
        norm += float(np.square(piece[fits], dtype=np.float64).sum())
        error += float(np.square((rounded - piece)[fits], dtype=np.float64).sum())
        flushed += int(((rounded == 0) & (piece != 0)).sum())
    return Constant(largest, math.sqrt(error / norm) if norm else 0.0, flushed, flat.size)


class Plan:
    """Which nodes of a graph stay in float32. `why` has a reason for each of them; all other float nodes become half.

    `held` names, for each tensor that may hold one, the constant that the format cannot hold and that it came from.
    """

    def __init__(self, graph: onnx_ir.Graph, form: Format, largest: Mapping[str, float]) -> None:
        self.graph, self.form, self.largest = graph, form, largest
        self.limit = form.largest / HEADROOM
        self.nodes = [node for node in graph if node.op_type not in BLIND and any(map(is_float, _values(node)))]
        self.constants = {
            value: look_at(value.const_value.numpy(), form)
            for value in graph.initializers.values()
            if is_float(value) and value.const_value is not None
        }
        self.why: dict[onnx_ir.Node, Why] = {}
        self.held: dict[onnx_ir.Value, onnx_ir.Value] = {}
        self.products = [node for node in self.nodes if self.weight(node) is not None]
        index, statistics, heads = self._index(), _statistics(self.nodes), self._heads()
        for node in self.nodes:
            origins = [found for v in node.inputs if (found := self._held(node, v)) is not None]
            origin = next((each for each in origins if self._passes(node, each)), None)
            if origin is not None:
                self.held.update(dict.fromkeys(filter(is_float, node.outputs), origin))
            reason = self._why(node, node in index, node in statistics, next(iter(origins), None))
            if reason is None and node in heads:
                reason = Why("head", "its result is the answer, and it costs next to nothing")
            if reason is not None:
                self.why[node] = reason
        self._join(statistics)
        self.half_products = [node for node in self.products if node not in self.why]

    def constant(self, value: onnx_ir.Value | None) -> onnx_ir.Value | None:
        """The initialiser that a value is, or is a view of."""
        while value is not None and value not in self.constants:
            node = value.producer()
            value = node.inputs[0] if node is not None and node.op_type in PASSING and not node.domain else None
        return value

    def weight(self, node: onnx_ir.Node) -> onnx_ir.Value | None:
        """The weight of a product: a constant with two axes or more."""
        if node.op_type not in PRODUCTS or node.domain:
            return None
        found = (self.constant(value) for value in node.inputs)
        return next((value for value in found if value is not None and _is_table(value)), None)

    def work(self, products: Iterable[onnx_ir.Node]) -> int:
        """Multiplications for one token: the elements of the weights."""
        weights = (self.weight(node) for node in products)
        return sum(self.constants[weight].size for weight in weights if weight is not None)

    def _heads(self) -> set[onnx_ir.Node]:
        """Small last products: a few scores that are rounded to 16 bits tie where they were close."""
        found, todo = set(), [value.producer() for value in self.graph.outputs]
        most = HEAD_SHARE * self.work(self.products)
        while todo:
            node = todo.pop()
            if node is None:
                continue
            weight = self.weight(node)
            if weight is not None and weight.shape is not None and weight.shape[0] != weight.shape[-1]:
                found |= {node} if self.constants[weight].size <= most else set()
            elif node.op_type in PASSING | ELEMENTWISE and weight is None:
                todo += node.predecessors()
        return found

    def _held(self, node: onnx_ir.Node, value: onnx_ir.Value | None) -> onnx_ir.Value | None:
        """The constant that does not fit which an input is or may hold. A product's own weight is judged by itself."""
        if value in self.held:
            return self.held[value]
        constant = self.constant(value)
        if constant is None or constant is self.weight(node):
            return None
        return constant if self.is_past(constant) or self._vanishes(constant) else None

    def is_past(self, constant: onnx_ir.Value) -> bool:
        """Whether a constant lies past what the format holds, headroom included."""
        return self.constants[constant].largest > self.limit

    def _vanishes(self, constant: onnx_ir.Value) -> bool:
        """Whether a single number is too small to be told from zero, or to be told well."""
        known = self.constants[constant]
        return known.size == 1 and known.lost > self.form.rounding

    def _passes(self, node: onnx_ir.Node, constant: onnx_ir.Value) -> bool:
        """Whether outputs may hold what an input holds. A small number is the floor of a divisor: that is its end."""
        if self.is_past(constant):
            return node.op_type not in BOUNDED
        return node.op_type in PASSING | FLOORS

    def _index(self) -> set[onnx_ir.Node]:
        """Mask and position arithmetic: what is computed from integers and small constants, before it meets data."""
        found: set[onnx_ir.Node] = set()
        for node in self.nodes:
            reads = [v for v in node.inputs if v is not None and v.const_value is None and self.constant(v) is None]
            tables = [v for v in map(self.constant, node.inputs) if v is not None and _is_table(v)]
            if reads and not tables and all(v.producer() in found for v in reads if is_float(v)):
                found.add(node)
        return found

    def _why(self, node: onnx_ir.Node, index: bool, statistics: bool, held: onnx_ir.Value | None) -> Why | None:
        form, weight = self.form, self.weight(node)
        if index:
            return Why("index", "mask or position arithmetic")
        if not _has_form(node, form):
            return Why("operator", f"{node.op_type} has no {form.name} form")
        if node.op_type in NORMS or statistics:
            return Why("normalisation", "the statistics of a normalisation")
        for constant in filter(None, map(self.constant, node.inputs)):
            known = self.constants[constant]
            if constant is weight and known.largest > form.largest:
                return Why("weights", f"its weights reach {number(known.largest)}, past {form.name}")
            if known.lost > form.rounding and known.size > 1:
                what = "its weights are" if constant is weight else f"the constant {constant.name} is"
                return Why("weights", f"{what} too small for {form.name}, {known.lost:.2%} would be lost")
        if held is not None:
            where = "past" if self.is_past(held) else "too small for"
            size = number(self.constants[held].largest)
            return Why("constant", f"it may hold the constant {held.name} ({size}), {where} {form.name}")
        for value in filter(is_float, _values(node)):
            reached = self.largest.get(value.name or "", 0.0)
            if reached > self.limit:
                room = f" with a headroom of {HEADROOM:g}" if reached <= form.largest else ""
                return Why("range", f"reaches {number(reached)}, past {form.name}{room}")
            if 0 < reached < form.smallest:
                return Why("range", f"reaches {reached:.1e} at most, below {form.name}'s normal numbers")
        if node.op_type in SUMS:
            return Why("sum", "a sum over many elements")
        return None

    def _join(self, statistics: set[onnx_ir.Node]) -> None:
        """Nodes between float32 ones stay there too, where that saves a cast."""
        changed = True
        while changed:
            changed = False
            for node in self.nodes:
                if node in self.why or node.op_type not in PASSING | ELEMENTWISE:
                    continue
                reads = [v for v in node.inputs if v is not None and is_float(v) and self.constant(v) is None]
                makers = [v.producer() for v in reads]
                if not all(maker is None or maker in self.why for maker in makers):
                    continue
                # A view that half nodes read is cheaper after the cast, arithmetic is exacter before it. What follows a
                # written-out normalisation is left half: ONNX Runtime fuses the two and wants them of one type.
                ends = all(map(self._read_as_float, node.outputs))
                after = any(maker in statistics for maker in makers)
                if not after and (ends or (reads and node.op_type in ELEMENTWISE)):
                    self.why[node] = Why("join", "between float32 nodes")
                    changed = True

    def _read_as_float(self, value: onnx_ir.Value) -> bool:
        """Whether no half node reads a value, nor a view of it."""
        return all(
            user in self.why
            or user.op_type in BLIND
            or (user.op_type in PASSING and all(map(self._read_as_float, user.outputs)))
            for user in value.consumers()
        )


def _statistics(nodes: Sequence[onnx_ir.Node]) -> set[onnx_ir.Node]:
    """The nodes of normalisations that are written out: from the squares over the mean and its root to the quotient."""
    found: set[onnx_ir.Node] = set()
    for root in nodes:
        if root.op_type != "Sqrt" and not (root.op_type == "Pow" and _is_scalar(root.inputs[1], -0.5)):
            continue
        chain, todo = [root], list(root.predecessors())
        while todo:
            node = todo.pop()
            if node in chain or node.op_type not in {"Add", "Clip", "Max", *SUMS}:
                continue
            chain.append(node)
            if node.op_type not in SUMS:
                todo += node.predecessors()
                continue
            squares = [p for p in node.predecessors() if _is_square(p)]
            centred = [p for each in squares for p in each.predecessors() if p.op_type == "Sub"]
            means = [p for each in centred for p in each.predecessors() if p.op_type == "ReduceMean"]
            chain += [*squares, *centred, *means]
        if not any(node.op_type in SUMS for node in chain):
            continue
        inverse = [user for user in root.successors() if user.op_type == "Reciprocal"]
        chain += inverse
        chain += [user for end in (root, *inverse) for user in end.successors() if user.op_type in {"Div", "Mul"}]
        found.update(chain)
    return found


def _is_square(node: onnx_ir.Node) -> bool:
    return node.op_type in {"Abs", "Pow"} or (node.op_type == "Mul" and node.inputs[0] is node.inputs[1])


def _has_form(node: onnx_ir.Node, form: Format) -> bool:
    """Whether the standard lets every float32 input and output of a node be of the format."""
    inner = any(a.type in {onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS} for a in node.attributes.values())
    version = node.version or (node.graph.opset_imports.get("") if node.graph is not None else None)
    if inner or node.domain or version is None or not onnx.defs.has(node.op_type, version, ""):
        return False
    if node.op_type in {"Cast", "DFT"}:  # a Cast says its type itself; no runtime has a 16-bit DFT
        return False
    schema = onnx.defs.get_schema(node.op_type, version, "")
    allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for place, value in enumerate(values):
            kind = formals[min(place, len(formals) - 1)].type_str
            if is_float(value) and f"tensor({form.name})" not in allowed.get(kind, {kind}):
                return False
    return True


def _values(node: onnx_ir.Node) -> list[onnx_ir.Value]:
    return [value for value in (*node.inputs, *node.outputs) if value is not None]


def is_float(value: onnx_ir.Value | None) -> bool:
    """Whether a tensor is float32."""
    return value is not None and value.dtype == onnx_ir.DataType.FLOAT


def _is_table(value: onnx_ir.Value) -> bool:
    return value.shape is not None and sum(size != 1 for size in value.shape) >= 2


def _is_scalar(value: onnx_ir.Value | None, number: float) -> bool:
    tensor = None if value is None else value.const_value
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().item()) == number


def number(value: float) -> str:
    """A magnitude for a person: 81,000 or 3.4e+38."""
    return f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.2g}"
