"""Floor 4: one output's part of the HTML report, as plain values for the template. Data in, data out.

Keys of an output that have no place of their own here are shown as a table (`values`), never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nlpconvert import plots, values, wording
from nlpconvert.errors import UsageError
from nlpconvert.validators.findings import Element, OutputDiff, Score
from nlpconvert.validators.tolerance import passing

SIGN = {True: "✓", False: "✗"}
OUTPUT_KEYS = frozenset(
    "name dtype unit tolerance scale agrees measured used would_pass_at elements vectors out_of_tolerance worst "
    "furthest mean_abs relative_l2 cosine decisions kl worst_case_score padded padded_nonfinite nonfinite "
    "first_nonfinite cases problems notes only histogram normalised spread sqnr_db top_k neighbours sequences interval "
    "detectable noise".split()
)
ELEMENTWISE = ("abs", "rel", "noise")


def used_words(used: float, *, short: bool = False) -> str:
    """How far a verdict is from turning, in words; `short` for a table that says what of."""
    if not math.isfinite(used):
        return "no measure" if short else "cannot be held against it"
    if used > 1:
        times = f"{used:,.0f}" if used >= 100 else f"{used:.3g}"
        return f"{times} x" if short else f"{times} times what is allowed"
    share = f"{used:.0%}" if used >= 0.095 else f"{used * 100:.2g}%"
    return share if short else f"{share} of what is allowed"


def output_view(
    output: OutputDiff,
    plain: Mapping[str, Any],
    anchor: str,
    before: Mapping[str, Any] | None,
    cases: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    measure = output.tolerance.measure
    would = output.would_pass_at.get(measure)
    bound = None if would is None else passing(measure, would)
    total, unit = _counted(output)
    return {
        "name": output.name,
        "only": plain.get("only", ""),
        "id": anchor,
        "word": "agrees" if output.agrees else "DRIFT",
        "tone": "good" if output.agrees else "bad",
        "sign": SIGN[output.agrees],
        "kind": f"{output.dtype} ({', '.join(str(n) for n in output.worst.shape)})" if output.worst else output.dtype,
        "measured": measured(output),
        "bound": output.tolerance.text,
        "given": output.tolerance.given,
        "allowed": wording.allowed(output),
        "used": used_words(output.used),
        "used_short": used_words(output.used, short=True),
        "share": min(output.used, 1.0) if math.isfinite(output.used) else 1.0,
        "turns": f"{1 / output.used:,.3g} times this drift" if 0 < output.used <= 1 else "",
        "would_pass": "" if output.agrees else bound or "no tolerance",
        "worst": " in case ".join(_place(output.worst)) if output.worst else "",
        "outside": f"{output.out_of_tolerance:,} of {total:,} {unit}" if output.elements else "nothing was compared",
        "problems": list(output.problems),
        "notes": list(output.notes),
        "measures": _measures(output, plain),
        "then": _then(before, output),
        "histogram": _histogram(plain.get("histogram"), output, anchor),
        "cases": _cases(output, cases),
        "more": _more(plain),
    }


def measured(output: OutputDiff) -> str:
    """The number that was held against the tolerance, in the unit in which the tolerance was given."""
    tolerance = output.tolerance
    multiple = getattr(tolerance, "multiple", None)
    if multiple and tolerance.value > 0 and math.isfinite(output.measured):
        times = output.measured * multiple / tolerance.value
        return f"noise {times:,.0f}" if times >= 100 else f"noise {times:.2g}"
    return wording.measured(tolerance.measure, output.measured)


def _counted(output: OutputDiff) -> tuple[int, str]:
    if output.tolerance.measure in ELEMENTWISE:
        return output.elements, "elements"
    if output.tolerance.measure == "changed":
        return (output.decisions.count if output.decisions else 0), "decisions"
    return output.vectors, f"{output.unit}s"


def _measures(output: OutputDiff, plain: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Rows of (measure, on average or over all, at worst, where, case)."""
    rows: list[tuple[str, str, str, str, str]] = []
    if output.first_nonfinite is not None:
        where, case = _place(output.first_nonfinite)
        rows.append(("not finite", "", f"{output.nonfinite:,} elements", where, case))
    if output.worst is not None:
        where, case = _place(output.worst)
        rows.append(("absolute", wording.drift(output.mean_abs), wording.drift(output.worst.difference), where, case))
        rows.append(("relative L2", wording.drift(output.relative_l2), "", "", ""))
    if output.furthest is not None and output.worst is not None and output.furthest.index != output.worst.index:
        where, case = _place(output.furthest)
        rows.append(("furthest for its size", "", wording.drift(output.furthest.difference), where, case))
    if output.cosine is not None:
        rows.append(("cosine", wording.cosine(output.cosine.mean), wording.cosine(output.cosine.worst),
                     *_vector(output.cosine, output.unit)))  # fmt: skip
    if output.kl is not None:
        rows.append(("KL, nats", wording.drift(output.kl.mean), wording.drift(output.kl.worst),
                     *_vector(output.kl, output.unit)))  # fmt: skip
    if output.decisions is not None:
        found = output.decisions
        near = f"{found.near_ties:,} of them near ties" if found.changed else ""
        rows.append(("changed decisions", f"{found.changed:,} of {found.count:,}", "", near, ""))
    rows += _agreement(plain)
    if output.worst_case_score is not None:
        name, alone = output.worst_case_score
        rows.append(("one case decides", "", wording.measured(output.tolerance.measure, alone), "", name))
    if output.padded is not None or output.padded_nonfinite:
        where, case = _place(output.padded) if output.padded else ("", "")
        bad = f", {output.padded_nonfinite:,} not finite" if output.padded_nonfinite else ""
        worst = wording.drift(output.padded.difference) if output.padded else "0"
        rows.append(("padding, not judged", "", worst + bad, where, case))
    return rows


def _agreement(plain: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Measures that only some outputs have, from the plain values."""
    rows: list[tuple[str, str, str, str, str]] = []
    numbers = {key: number(plain.get(key)) for key in ("noise", "normalised", "sqnr_db", "detectable")}
    if numbers["noise"] is not None:
        rows.append(("the reference's own noise", wording.drift(numbers["noise"]), "", "in the unit of rel", ""))
    if numbers["normalised"]:
        rows.append(("over the reference's spread", "", wording.drift(numbers["normalised"]), "", ""))
    if numbers["sqnr_db"] is not None:
        rows.append(("SQNR", f"{numbers['sqnr_db']:.1f} dB", "", "", ""))
    if plain.get("top_k"):
        found = plain["top_k"]
        rows.append((f"top-{found['k']} agreement", f"{float(found['agreement']):.2%}", "",
                     f"over {found['count']:,} vectors", ""))  # fmt: skip
    if plain.get("neighbours"):
        found = plain["neighbours"]
        where = f"nearest neighbour changed in {found['changed']:,} of {found['rows']:,} texts"
        rows.append(("rank correlation of neighbours", f"{float(found['correlation']):.4f}",
                     f"{float(found['worst']):.4f}", where, ""))  # fmt: skip
    if plain.get("sequences"):
        found = plain["sequences"]
        rows.append(("changed label sequences", f"{found['changed']:,} of {found['count']:,}", "", "", ""))
    if plain.get("interval"):
        low, high = (float(end) for end in plain["interval"])
        rows.append(("changed, 95% interval", f"{low:.2%} to {high:.2%}", "", "", ""))
    if numbers["detectable"] is not None:
        rows.append(("smallest change so many could show", f"{numbers['detectable']:.2%}", "", "", ""))
    return rows


def number(value: Any) -> float | None:
    """A finite number; None for what is none (JSON's words "inf" and "nan" included)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _place(element: Element) -> tuple[str, str]:
    return (
        f"{list(element.index)}: reference {element.reference:.5g}, candidate {element.candidate:.5g}",
        element.case,
    )


def _vector(score: Score, unit: str) -> tuple[str, str]:
    return f"{unit} {list(score.index)}", score.case


def _then(before: Mapping[str, Any] | None, output: OutputDiff) -> str:
    """What this output measured when it was recorded, in words; empty where that is not known or is the same."""
    if before is None:
        return ""
    try:
        kept = OutputDiff.from_dict(before)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError):
        return ""  # another version's, or a stranger's: nothing rests on it
    measure = kept.tolerance.measure
    now = output.would_pass_at.get(measure)
    if now == kept.measured and kept.tolerance == output.tolerance:
        return f"{measured(kept)}: the same"
    return f"{measured(kept)}, {used_words(kept.used)} ({kept.tolerance.text})"


def _histogram(data: Any, output: OutputDiff, anchor: str) -> dict[str, Any] | None:
    """The plot and what stands under it; None where no differences were counted."""
    if not isinstance(data, Mapping) or not (data.get("counts") or data.get("equal")):
        return None
    edges, counts = [float(edge) for edge in data.get("edges", ())], [int(n) for n in data.get("counts", ())]
    equal = int(data.get("equal", 0))
    told = f"{equal:,} of {output.elements:,} elements are exactly equal." if equal else ""
    if len(edges) != len(counts) + 1 or not any(counts):
        return {"svg": "", "told": told} if told else None
    bound = None
    if output.tolerance.measure == "abs" and output.tolerance.value > 0:
        bound = (math.log10(output.tolerance.value), "allowed")
    elif output.tolerance.measure == "rel" and output.tolerance.value * output.scale > 0:
        bound = (math.log10(output.tolerance.value * output.scale), "allowed")
        told = f"{told} The dashed line is what is allowed where the reference is 0.".strip()
    label = f"{output.name}: how many elements differ by how much, from 1e{edges[0]:.0f} to 1e{edges[-1]:.0f}"
    return {"svg": plots.histogram(edges, counts, f"{anchor}-histogram", label, bound), "told": told}


def _cases(output: OutputDiff, known: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every case in this output, the one that uses most of the tolerance first."""
    rows = sorted(output.cases.items(), key=lambda item: (-item[1].used, -_finite(item[1].worst_abs)))
    return [
        {
            "name": name,
            "about": str(known.get(name, {}).get("about", "")),
            "worst": wording.drift(drift.worst_abs) if math.isfinite(drift.worst_abs) else "not finite",
            "used": used_words(drift.used, short=True),
            "share": min(drift.used, 1.0),
            "over": drift.used > 1 and not output.agrees,
            "scored": f"{drift.scored:,}",
        }
        for name, drift in rows
    ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _more(plain: Mapping[str, Any]) -> values.Table | None:
    unknown = {key: value for key, value in plain.items() if key not in OUTPUT_KEYS and values.worth_showing(value)}
    return values.table(unknown) if unknown else None
