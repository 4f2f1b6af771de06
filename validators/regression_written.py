"""Floor 1, validators: does an artifact write worse than it did before? Two verdicts' `written` in, plain data.

For each phase of writing, loss and slack are `regression`'s: L_new > FACTOR * L_old + slack, with e = SLACK * noise

    rel   e
    abs   e * 2 * scale
    kl    sqrt(2 L_old) * e * scale + (e * scale)^2 / 2

The perplexity's loss is the logarithm of its ratio, with the slack of `kl`. Free texts that are really others are
counts, held against each other by a sign test, as changed decisions are. Other passages cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nlpconvert.validators.regression_rules import ALPHA, FACTOR, NOISE, SLACK, Regression, scatter

NAME = "written"
"""What stands for an output's name."""


def regressions(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, baseline: str) -> Iterator[Regression]:
    """All that is worse in what is written; nothing where the old one was not judged while it wrote."""
    if not old:
        return
    if not new:
        yield Regression("output", NAME, f"it is no longer judged while it writes, as it was in {baseline}")
        return
    if old["passages_sha256"] != new["passages_sha256"]:
        yield Regression("probes", NAME, f"{baseline} was asked other passages, so what is written cannot be compared")
        return
    noise = float(old["noise"].get("floor") or NOISE)
    e, scale = SLACK * noise, float(old["scale"])
    after = {each["name"]: each for each in new["phases"]}
    for phase in old["phases"]:
        name = phase["name"]
        if phase.get("not_judged"):
            continue
        if name not in after:
            yield Regression("output", NAME, f"{name} is no longer measured, as it was in {baseline}")
            continue
        measure = old["tolerance"]["measure"]
        key = {"rel": "worst_rel", "abs": "worst_abs", "kl": "kl"}.get(measure, "kl")
        was, now = float(phase[key]), float(after[name][key])
        yield from _loss(f"{name}: {'kl' if key == 'kl' else measure}", was, now, _slack(key, was, e, scale), baseline)
    yield from _texts(old["texts"], new["texts"], baseline)
    if old["perplexity"]["tokens"] and new["perplexity"]["tokens"] == old["perplexity"]["tokens"]:
        was, now = (math.log(max(float(each["perplexity"]["ratio"]), 1e-300)) for each in (old, new))
        yield from _loss("log perplexity ratio", max(was, 0.0), now, _slack("kl", max(was, 0.0), e, scale), baseline)


def _slack(key: str, was: float, e: float, scale: float) -> float:
    if key == "kl":
        return math.sqrt(2 * max(was, 0.0)) * e * scale + (e * scale) ** 2 / 2
    return e if key == "worst_rel" else 2 * e * scale


def _loss(what: str, was: float, now: float, slack: float, baseline: str) -> Iterator[Regression]:
    if now <= FACTOR * was + slack:
        return
    times = now / was if was > 0 else math.inf
    many = "there was none" if math.isinf(times) else f"{times:.2g} times the loss"
    text = f"while it writes, {what} {was:.3g} -> {now:.3g} ({many}), worse than {baseline}"
    yield Regression("loss", NAME, text, was, now, times)


def _texts(old: Mapping[str, Any], new: Mapping[str, Any], baseline: str) -> Iterator[Regression]:
    before, after = (_others(each) for each in (old, new))
    if after <= before or scatter(before, after) >= ALPHA:
        return
    others = f"{before:,} -> {after:,} of {new['judged']:,} free texts are others than the reference's"
    text = f"{others}, worse than {baseline}"
    yield Regression("changed", NAME, text, float(before), float(after), after / before if before else math.inf)


def _others(texts: Mapping[str, Any]) -> int:
    """Judged texts that are not the reference's."""
    return round((1 - float(texts["share"])) * texts["judged"]) if texts["judged"] else 0
