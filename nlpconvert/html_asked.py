"""Floor 4: what else was asked of a step, for the HTML report: scores on labelled rows, and the proof that the gate
trips. Plain data of a verdict in, plain values for the template out; None where it was not asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nlpconvert import report_scores
from nlpconvert.proofs import Proof, Trial
from nlpconvert.validators.scores import Scored, Scores

SIGHTS = {"seen": ("✓", "seen", "good"), "not seen": ("✗", "NOT SEEN", "bad"), "does not apply": ("–", "", "quiet")}


def proof(data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The breaks and what the gate saw of them, those not seen first."""
    if not data:
        return None
    found = Proof.from_dict(data)
    order = ("not seen", "seen", "does not apply")
    trials = sorted(found.trials, key=lambda trial: order.index(trial.status))
    applied = [trial for trial in trials if trial.status != "does not apply"]
    smallest = found.smallest
    told = ""
    if smallest is not None:
        told = f"The smallest nudge of {smallest.module or smallest.what} that is seen: "
        told += "none" if smallest.share is None else f"{smallest.share:.2g} of it"
    return {
        "holds": found.holds,
        "words": f"{len(found.seen)} of {len(applied)} breaks seen, judged by {', '.join(found.tolerances)}",
        "smallest": told,
        "rows": [_trial(trial) for trial in trials],
    }


def _trial(trial: Trial) -> dict[str, str]:
    sign, word, tone = SIGHTS[trial.status]
    if trial.status != "seen":
        told = trial.reason
    elif math.isfinite(trial.times):
        told = f"{trial.output} in case {trial.case}: {trial.times:,.3g} times the tolerance"
    else:
        told = ": ".join(part for part in (trial.output, trial.reason) if part)
    return {
        "words": trial.words,
        "gross": "yes" if trial.gross else "",
        "where": trial.module or trial.what,
        "sign": sign,
        "word": word or trial.status,
        # A finer break may pass a gate that holds; only a gross one may not.
        "tone": "open" if trial.status == "not seen" and not trial.gross else tone,
        "told": told,
    }


def scores(data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The scores beside the reference's, what the rows can say, and each condition of --fail-if."""
    if not data:
        return None
    found = Scores.from_dict(data)
    pairs = [("rows", f"{found.rows:,}"), ("reference", found.reference or "none: there is the score alone")]
    pairs += [("data", found.data), ("sha256 of the data", found.data_sha256)]
    if found.changed is not None:
        pairs.append(("changed decisions", f"{found.changed.count:,} of {found.changed.rows:,}"))
        pairs.append(("cannot be seen", f"a change below {report_scores.percent(found.changed.unseen)}"))
    return {
        "reason": found.reason,
        "conditions": [
            {
                "failed": each.failed,
                "status": each.status,
                "text": each.text,
                "reason": each.reason,
                "warning": each.warning,
            }
            for each in found.fail_if
        ],
        "rows": [_score(each) for each in found.scores],
        "pairs": [(label, value) for label, value in pairs if value],
        "notes": list(found.notes),
    }


def _score(each: Scored) -> tuple[str, str, str, str, str, str]:
    """Name, candidate, reference, difference, its interval (the score's own without one), what could be shown."""
    reference = "" if each.reference is None else report_scores.number(each.reference, each)
    difference = "" if each.difference is None else report_scores.moved(each.difference, each)
    span = each.interval if each.difference_interval is None else each.difference_interval
    least = "" if each.detectable is None else report_scores.moved(each.detectable, each, signed=False)
    interval = report_scores.interval(span, each, signed=each.difference_interval is not None)
    return each.name, report_scores.number(each.candidate, each), reference, difference, interval, least
