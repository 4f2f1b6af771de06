"""Floor 4: the verdict on a model that writes, as lines: a line for each phase, free texts, the curve, what is wrong.

Takes the plain data that `writing.judge` gives and the manifest keeps; keys it does not know are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nlpconvert import wording

SHOWN = 5
"""Free texts whose first difference is told."""


def lines(verdict: Mapping[str, Any], *, verbose: bool = True) -> Iterator[str]:
    """What was measured while it wrote; what is wrong with it stands among the step's problems. Unless `verbose`, a
    verdict without problems is two lines."""
    for why in verdict.get("why", ()):
        yield _detail("looks like", why)
    phases = verdict.get("phases", ())
    if verbose or verdict.get("problems"):
        for phase in phases:
            yield _detail(phase["name"], _phase(phase, verdict))
    elif judged := [phase for phase in phases if not phase.get("not_judged")]:
        worst = max(judged, key=lambda phase: float(phase["used"]))
        yield _detail("with its cache", f"{worst['name']} {_phase(worst, verdict)}")
    texts = verdict.get("texts", {})
    if texts.get("rows"):
        yield _detail("written freely", texts_words(texts))
        for each in texts.get("differences", ())[:SHOWN]:
            yield _detail("", difference(each))
        more = texts["rows"] - texts["identical"] - SHOWN
        if more > 0:
            yield _detail("", f"and {more:,} more")
    perplexity = perplexity_words(verdict)
    if perplexity and (verbose or verdict.get("problems") or verdict["precision"] != "float32"):
        yield _detail("perplexity", perplexity)
    curve = verdict.get("curve", {})
    if curve.get("bins") and (verbose or verdict.get("problems")):
        yield _detail("over the length", f"{curve['sentence']}   {_bins(curve['bins'])}")
    for name, why in verdict.get("not_applicable", {}).items():
        yield _detail("not applicable", f"{name}: {why}")


def worst(verdict: Mapping[str, Any]) -> str:
    """What is furthest off, where something is: "single steps rel 7.4e-01"; "" where all agrees."""
    off = [phase for phase in verdict.get("phases", ()) if not phase["agrees"] and not phase.get("not_judged")]
    if not off:
        return "other texts" if verdict.get("problems") else ""
    most = max(off, key=lambda phase: float(phase["used"]))
    return f"{most['name']} {wording.measured(verdict['tolerance']['measure'], float(most['measured']))}"


def difference(each: Mapping[str, Any]) -> str:
    """Where a free text first differs."""
    other = "nothing" if each["candidate"] < 0 else each["candidate"]
    near = "a near tie: what follows is not judged" if each["near_tie"] else "no near tie"
    near = "not judged: PyTorch is unsure of the text" if each.get("unsure") else near
    return (
        f"{each['passage']} row {each['row']}: new token {each['position']} is {other}, the reference's "
        f"{each['reference']} (margin {each['margin']:.2g}, {near})"
    )


def _phase(phase: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    if phase["nonfinite"]:
        return f"DRIFT   not finite at {wording.count(phase['nonfinite'], 'position')}"
    status = "not judged" if phase.get("not_judged") else "agrees" if phase["agrees"] else "DRIFT"
    measure = verdict.get("tolerance", {}).get("measure", "rel")
    words = [f"{status:<7} {wording.measured(measure, float(phase['measured']))}"]
    if math.isfinite(float(phase["used"])):
        words.append(wording.used(float(phase["used"])))
    if measure != "kl":
        words.append(f"KL {wording.drift(float(phase['kl']))}")
    near = f", {phase['near_ties']:,} of them near ties" if phase["changed"] else ""
    words.append(f"top-1 changed in {phase['changed']:,} of {wording.count(phase['positions'], 'token')}{near}")
    if phase.get("not_judged"):
        words.append(str(phase["not_judged"]))
    return ", ".join(words)


def texts_words(texts: Mapping[str, Any]) -> str:
    """How many free texts are the reference's, and what was not judged of them."""
    rows = texts["rows"]
    told = [f"{texts['identical']:,} of {rows:,} free texts are the reference's"]
    if texts["near_ties"]:
        told.append(wording.count(texts["near_ties"], "near tie"))
    unsure = rows - texts.get("judged", rows) - texts["near_ties"]
    if unsure > 0:
        told.append(f"{unsure:,} not judged: PyTorch itself is unsure of them (your own texts, by --data, all are)")
    return ", ".join(told)


def perplexity_words(verdict: Mapping[str, Any]) -> str:
    """Both perplexities and their ratio; "" where there is none."""
    found = verdict.get("perplexity") or {}
    if not found.get("tokens"):
        return ""
    allowed = (verdict.get("allowed") or {}).get("perplexity")
    bound = "" if allowed is None else f", allowed {allowed:g}"
    out = found.get("left_out", 0)
    left = f"; {wording.count(out, 'text')} left out, which PyTorch finds less likely than a guess" if out else ""
    return (
        f"{found['candidate']:.5g} against {found['reference']:.5g}: {found['ratio']:.6f} times over "
        f"{wording.count(found['tokens'], 'token')}{bound}{left}"
    )


def _bins(bins: list[Mapping[str, Any]]) -> str:
    return ", ".join(f"{each['first']}-{each['last']}: {wording.drift(float(each['rms']))}" for each in bins)


def _detail(label: str, value: str) -> str:
    return f"  {label:<24} {value}"
