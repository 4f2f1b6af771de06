"""Floor 4: what a gate saw of the breaks of one artifact, as lines. Data in, lines out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nlpconvert.proofs import Proof, Trial

WORDS = 100
"""Characters of the gate's own words in a line of the table; the JSON has all of them."""


def lines(proof: Proof) -> Iterator[str]:
    """A table of breaks, what did not apply, and the smallest nudge that is seen."""
    tried = len(proof.seen) + len(proof.unseen)
    bounds = f", judged by {', '.join(proof.tolerances)}" if proof.tolerances else ""
    yield f"{proof.step} ({proof.format}, {proof.precision}){bounds}: {len(proof.seen)} of {tried} breaks seen"
    yield ""
    rows = [(trial.words, trial.module or trial.what, _sight(trial)) for trial in (*proof.seen, *proof.unseen)]
    heads = ("break", "where", "seen by")
    wide = [max(len(row[i]) for row in (heads, *rows)) for i in (0, 1)]
    for first, where, sight in (heads, *rows):
        yield f"  {first:<{wide[0]}}  {where:<{wide[1]}}  {sight}".rstrip()
    absent = [trial for trial in proof.trials if trial.status == "does not apply"]
    if absent:
        yield ""
        width = max(len(trial.words) for trial in absent)
        for trial in absent:
            yield f"  does not apply  {trial.words:<{width}}  {trial.reason}"
    yield ""
    missed = [trial.words for trial in proof.unseen if trial.gross]
    if missed:
        yield f"This gate does not hold: it has to see {'; '.join(missed)}, and did not."
    elif not proof.holds:
        yield "This gate does not hold: no gross break could be tried."
    yield _smallest(proof)


def _sight(trial: Trial) -> str:
    """ "logits in case padded-left: 12 times the tolerance", or NOT SEEN."""
    if trial.status != "seen":
        near = "" if math.isnan(trial.times) else f", {trial.times:.2g} times the tolerance"
        return f"NOT SEEN{'' if not trial.gross else ' and gross'}: {trial.reason}{near}"
    where = f"{trial.output} in case {trial.case}: " if trial.case else f"{trial.output}: " if trial.output else ""
    if math.isinf(trial.times) or math.isnan(trial.times):
        return f"{where}{_cut(trial.reason)}"
    return f"{where}{trial.times:.3g} times the tolerance"


def _smallest(proof: Proof) -> str:
    found = proof.smallest
    if found is None:
        return "the smallest nudge that is seen: no weight could be nudged"
    where = found.module or found.what
    if found.share is None:
        return f"the smallest nudge of {where} that is seen: none, not even {_percent(found.unseen)}"
    return f"the smallest nudge of {where} that is seen: {_percent(found.share)}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share >= 0.01 else f"{100 * share:.2g} %"


def _cut(text: str) -> str:
    """A runtime's own words may be long: as much of them as a line takes."""
    return text if len(text) <= WORDS else f"{text[: WORDS - 3]}..."
