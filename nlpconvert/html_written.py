"""Floor 4: what a step writes with its cache, for the HTML report: phases, free texts, the error over the length. Plain
data of a verdict in, plain values for the template out; None of one that does not write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nlpconvert import plots, report_written, wording


def written(data: Any, anchor: str) -> dict[str, Any] | None:
    """A row for each phase, the faults that are spoken of, free texts with their first differences, and the plot."""
    if not isinstance(data, Mapping) or not data.get("phases"):
        return None
    measure = str((data.get("tolerance") or {}).get("measure", "rel"))
    curve = data.get("curve") or {}
    bins = [each for each in curve.get("bins") or () if isinstance(each, Mapping)]
    points = [((each["first"] + each["last"]) / 2, float(each["rms"])) for each in bins]
    texts = data.get("texts") or {}
    sentence = str(curve.get("sentence", ""))
    perplexity = report_written.perplexity_words(data)
    return {
        "why": [str(each) for each in data.get("why") or ()],
        "rows": [_phase(each, measure) for each in data["phases"]],
        "texts": report_written.texts_words(texts) if texts.get("rows") else "",
        "differences": [report_written.difference(each) for each in texts.get("differences") or ()],
        "perplexity": perplexity,
        "sentence": sentence,
        "svg": plots.curve(points, f"{anchor}-length", f"Error over the length: {sentence}") if len(points) > 1 else "",
        "not_applicable": list((data.get("not_applicable") or {}).items()),
    }


def _phase(phase: Mapping[str, Any], measure: str) -> dict[str, str]:
    judged = not phase.get("not_judged")
    tone = "quiet" if not judged else "good" if phase["agrees"] else "bad"
    return {
        "name": str(phase["name"]),
        "tone": tone,
        "sign": {"good": "✓", "bad": "✗", "quiet": "–"}[tone],
        "word": {"good": "agrees", "bad": "DRIFT", "quiet": "not judged"}[tone],
        "measured": wording.measured(measure, float(phase["measured"])),
        "used": wording.used(float(phase["used"])),
        "kl": wording.drift(float(phase["kl"])),
        "changed": f"{phase['changed']:,} of {phase['positions']:,}",
    }
