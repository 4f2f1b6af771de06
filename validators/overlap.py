"""Floor 1, validators: two verdicts that share some of their cases, and an output's numbers over those alone.

Texts that join the goldens (those that a lower precision is judged by) make other probes of them, and the cases that
were there are asked what they were asked before. What was kept of each case gives an output's number over some of them:

    abs, rel, cosine   the largest loss of one case: the share of the tolerance that it uses up, times what that allows
    kl                 mean over the positions, or, if more, a tenth of the largest mean of one case, as `parity` has it
    changed            decisions that changed, of how many

A case's positions are its scored elements over the length of the last axis. Where that length is not the same in all
cases (a decision over the sequence) decisions cannot be counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nlpconvert.validators.findings import CaseDrift, Comparison, OutputDiff
from nlpconvert.validators.tally import CASE_FACTOR

Cases = frozenset[str] | None
"""The cases that two verdicts share; None where they are of the same probes, and all of them count."""


@dataclass(frozen=True)
class Probes:
    """What two verdicts were asked. `shared`: the cases of both, None where nothing else was asked; `why_not` says why
    their numbers cannot be compared, "" where they can. `before` and `after`: how many cases each has, 0 if not told.
    """

    shared: Cases
    why_not: str = ""
    before: int = 0
    after: int = 0

    @property
    def words(self) -> str:
        """ "over the 24 shared cases", "" where the probes are the same."""
        if self.shared is None:
            return ""
        return f"over the {len(self.shared)} shared cases" if len(self.shared) != 1 else "over the one shared case"


def probes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Probes:
    """What two verdicts were asked, by the hashes in them. A case of both has to be the same in both."""
    counts = count(old), count(new)
    if old["probe_sha256"] and old["probe_sha256"] == new["probe_sha256"]:
        return Probes(None, "", *counts)
    ours, theirs = (each.get("case_sha256") or {} for each in (old, new))
    if not old["probe_sha256"] or not new["probe_sha256"] or not ours or not theirs:
        return Probes(None, "was measured with other probes", *counts)
    shared = [name for name in ours if name in theirs]
    other = [name for name in shared if ours[name] != theirs[name]]
    if other:
        more = f" and {len(other) - 1} more ask" if len(other) > 1 else " asks"
        return Probes(None, f"was measured with other probes (case {other[0]}{more} something else there)", *counts)
    if not shared:
        return Probes(None, "was measured with other probes (no case is in both)", *counts)
    return Probes(frozenset(shared), "", *counts)


def count(verdict: Mapping[str, Any]) -> int:
    """How many cases a verdict was asked; how many were compared where it does not say."""
    hashes, compared = verdict.get("case_sha256"), verdict.get("cases")
    if isinstance(hashes, Mapping) and hashes:
        return len(hashes)
    return compared if isinstance(compared, int) else 0


def read(verdict: Mapping[str, Any]) -> Comparison:
    """A verdict's comparison, with the cases for which a bound by which it was judged anew has no number (`used` is
    not a number there): they were compared. KeyError, TypeError, ValueError for what is none."""
    found = Comparison.from_dict(verdict["comparison"])
    without = (verdict.get("recheck") or {}).get("unnumbered") or {}
    if not without:
        return found
    outputs = [
        replace(o, cases={**{k: CaseDrift.from_dict(v) for k, v in without[o.name].items()}, **o.cases})
        if o.name in without and not o.only
        else o
        for o in found.outputs
    ]
    return replace(found, outputs=tuple(outputs))


def measured(output: OutputDiff, measure: str, cases: Cases) -> float | None:
    """An output's number in a measure over some of its cases; None where it was not kept."""
    whole = output.measured if output.tolerance.measure == measure else output.would_pass_at.get(measure)
    own = _own(output, cases)
    if cases is None or len(own) == len(output.cases):
        return whole
    if not own:
        return None
    if measure == "abs":
        return _finite(max(each.worst_abs for each in own.values()))
    losses = _losses(output, own) if output.tolerance.measure == measure else None
    if losses is None:
        # The worst place of all cases may be in one of these.
        worst = {"rel": output.furthest, "cosine": output.cosine}.get(measure)
        return whole if worst is not None and worst.case in own else None
    if measure == "kl":
        elements = sum(each.scored for each in own.values())
        mean = sum(losses[name] * each.scored for name, each in own.items()) / elements if elements else 0.0
        return max(mean, max(losses.values()) / CASE_FACTOR)
    return 1 - max(losses.values()) if measure == "cosine" else max(losses.values())


def decisions(output: OutputDiff, cases: Cases) -> tuple[int, int] | None:
    """(really changed, of how many) of an output over some of its cases; None where that cannot be counted."""
    own = _own(output, cases)
    if output.decisions is not None and (cases is None or len(own) == len(output.cases)):
        return output.decisions.changed - output.decisions.near_ties, output.decisions.count
    if output.tolerance.measure != "changed" or not output.vectors or output.elements % output.vectors:
        return None
    width = output.elements // output.vectors
    shares = _losses(output, own)
    if shares is None or any(each.scored % width for each in output.cases.values()):
        return None
    of = {name: each.scored // width for name, each in own.items()}
    return sum(round(shares[name] * number) for name, number in of.items()), sum(of.values())


def uncounted(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """The outputs that are judged by changed decisions, which cannot be counted over the cases of both verdicts."""
    over = probes(old, new).shared
    if over is None:
        return ()
    sides = [{(o.name, o.only): o for o in read(each).outputs} for each in (old, new)]
    judged = [
        key for key, o in sides[0].items() if o.tolerance.measure == "changed" and o.decisions and key in sides[1]
    ]
    return tuple(key[0] for key in judged if any(decisions(side[key], over) is None for side in sides))


def drift(output: OutputDiff, cases: Cases) -> float:
    """The largest absolute difference of a case, on average over some of an output's cases."""
    sizes = [each.worst_abs for each in _own(output, cases).values()]
    return sum(sizes) / len(sizes) if sizes else 0.0


def worst_case(output: OutputDiff, cases: Collection[str]) -> str:
    """The one of some cases that uses up most of the tolerance; "" where none does."""
    used = {name: output.cases[name].used for name in output.cases if name in cases}
    told = {name: each for name, each in used.items() if each > 0}
    return max(told, key=lambda name: told[name], default="")


def broken_elsewhere(output: OutputDiff, cases: Cases) -> bool:
    """Whether what cannot be compared in an output is in other cases than these."""
    if cases is None:
        return False
    broken = {name for name, each in output.cases.items() if math.isinf(each.used)}
    return bool(broken) and not broken & cases


def _own(output: OutputDiff, cases: Cases) -> dict[str, CaseDrift]:
    return {name: each for name, each in output.cases.items() if cases is None or name in cases}


def _losses(output: OutputDiff, own: Mapping[str, CaseDrift]) -> dict[str, float] | None:
    """Of each case its own loss in the measure of its tolerance; None where one is not known."""
    bound = output.tolerance
    allowed = 1 - bound.value if bound.direction == ">=" else bound.value
    found = {name: each.used * allowed for name, each in own.items()}
    # Of a bound that allows nothing everything is used up by any loss, however large.
    return found if all(math.isfinite(own[name].used) for name in found) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
