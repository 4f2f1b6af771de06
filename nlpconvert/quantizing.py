"""Floor 3: the quantized steps: search or replay a recipe, write the file, say what it is.

What a layer's numbers are is `integers`, which mix is taken is `search`, the graphs are `convert/`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import calibration, host, integers, recipe, search, weight_search
from nlpconvert.artifact import Artifact, Made
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.recipe import Recipe
from nlpconvert.search import Bench, Score

if TYPE_CHECKING:
    from nlpconvert.making import Work


GRAPH_BYTES = 2**20
"""A file below this size may be larger than its source."""


def qdq(work: Work) -> Made:
    """Static int8 with explicit Q/DQ for TensorRT, as many layers as the tolerance allows.

    ConversionError where no layer can be quantized, UsageError for a recipe that is another step's or another model's.
    """

    def look(bench: Bench) -> tuple[Recipe, Score]:
        looked = search.Static(bench, activation="int8", largest=integers.INT8)
        made, score = looked.search()
        return replace(made, search={"rewrite_moves": looked.exact}), score

    return _replayed_or_searched(work, "static", look)


def int4(work: Work) -> Made:
    """Weights in 4 bits, as many layers as the tolerance allows, the others in 8 bits or float32.

    ConversionError where no layer can be quantized, UsageError for a recipe that is another step's or another model's.
    """
    return _replayed_or_searched(work, "weight-only", lambda bench: weight_search.WeightOnly(bench, bits=4).search())


def _replayed_or_searched(work: Work, kind: str, look: Callable[[Bench], tuple[Recipe, Score]]) -> Made:
    """The step by the recipe that was given, else by what `look` finds; trials are written beside it and removed."""
    scratch = work.new / ".scratch"
    notes: list[str] = []
    try:
        if work.options.recipe is not None:
            made = _replayed(work, kind)
        else:
            started = time.perf_counter()
            bench = search.Bench(work, work.above, scratch, started + work.options.search_budget)
            made, score = look(bench)
            notes = _told(made, score, work)
            made = replace(made, search={**search_facts(bench, started), **made.search})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return write_made(work, made, work.above, notes)


def weight_only_candidate(bench: Bench) -> tuple[Recipe, Score]:
    """Weights in 8 bits, and how far that is from float32."""
    return weight_search.WeightOnly(bench, bits=8).search()


def dynamic_candidate(bench: Bench) -> tuple[Recipe, Score]:
    """Dynamic int8, and how far that is from float32 in the batches of the select part."""
    return weight_search.Dynamic(bench, largest=largest_weight()).search()


def largest_weight() -> int:
    """The largest integer of a weight on this processor: 7 bits where products of full-range ones saturate."""
    return integers.INT8 if host.exact_int8() else integers.SATURATING


def search_facts(bench: Bench, started: float) -> dict[str, Any]:
    """What the recipe says about its search; `started` on the clock of time.perf_counter."""
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "evaluations": bench.tried,
        "budget_seconds": bench.work.options.search_budget,
        "late": bench.late,
        "room": search.ROOM,
        "tolerances": {name: each.text for name, each in bench.tolerances.items()},
        "select_cases": len(bench.cases),
    }


def _replayed(work: Work, kind: str) -> Recipe:
    """The recipe that was given. UsageError when it is not one for this step and this graph."""
    assert work.options.recipe is not None
    given = recipe.read(work.options.recipe)
    if given.step != work.row.name or given.kind != kind:
        raise UsageError(f"{work.options.recipe} is a recipe for {given.step} ({given.kind}), not for {work.row.name}")
    return given


def _told(made: Recipe, score: Score, work: Work) -> list[str]:
    """What the search found, for a person."""
    lines = recipe.told(made.candidates)
    back = [layer for layer in made.layers if layer.precision == "float32" and layer.share]
    if back:
        worst = ", ".join(layer.name for layer in sorted(back, key=lambda each: -each.drift)[:3])
        more = f" and {len(back) - 3} more" if len(back) > 3 else ""
        lines.append(f"{len(back)} of {len(made.layers)} layers stay in float32: {worst}{more}")
    if work.options.data is None and not calibration.plain(work.facts.task):
        lines.append(f"the shipped texts are not what a {work.facts.task} model is asked: --data gives it your own")
    if score.used > search.ROOM:
        lines.append(f"no mix stays in the tolerance with room to spare; the best found has {score.text}")
    return lines


def apply(graph: Any, made: Recipe) -> None:
    """Changes a graph in place as its recipe says. UsageError where the recipe is of a kind that is not known."""
    from nlpconvert.convert import dynamic_int8, static_int8, weight_only

    kinds = {"static": static_int8.apply, "weight-only": weight_only.apply, "dynamic": dynamic_int8.apply}
    if made.kind not in kinds:
        raise UsageError(f"a recipe of the kind {made.kind!r} is none of {', '.join(kinds)}")
    kinds[made.kind](graph, made)


def write_made(work: Work, made: Recipe, base: Artifact, notes: Sequence[str]) -> Made:
    """The recipe applied to `base` (the parent, or the parent fused), as the step's file with recipe.json beside it.

    UsageError when the recipe is another model's, ConversionError when the file is larger than the parent.
    """
    from nlpconvert.convert import derived, linear

    parent = work.above
    program = derived.load(base)
    found = linear.find(program.graph)
    unknown = {layer.name for layer in made.layers} - {weight.name for weight in found.weights} - set(found.left)
    if unknown:
        raise UsageError(f"the recipe speaks of {min(unknown)}, which is not in {base.step}: it is another model's")
    apply(program.graph, made)
    inputs, outputs = derived.write(program, parent, work.new)
    recipe.write(made, work.new)
    return Made(
        file="model.onnx",
        inputs=inputs,
        outputs=outputs,
        made_by={**_facts(made), "size_over_parent": _smaller(work, parent.directory)},
        notes=tuple(notes),
    )


def _smaller(work: Work, before: Path) -> float:
    """The file's size over its parent's. ConversionError when it has grown.

    Below a megabyte the graph outweighs the weights, and what grew is nodes.
    """
    from nlpconvert.convert import derived

    size = derived.size(work.new)
    ratio = size / derived.size(before)
    if ratio > 1 and size > GRAPH_BYTES:
        raise ConversionError(f"the quantized file is {ratio:.2f} times its float32 source: nothing was gained")
    return round(ratio, 4)


def _facts(made: Recipe) -> dict[str, Any]:
    """What the manifest keeps of a recipe."""
    return {
        "method": made.kind,
        "base": made.base,
        "share_of_linear_flops": round(made.share, 4),
        "layers": {
            precision: sum(layer.precision == precision for layer in made.layers) for precision in recipe.PRECISIONS
        },
        "largest_weight": made.largest,
        "cpu": host.host_facts(),
        "search": dict(made.search),
    }
