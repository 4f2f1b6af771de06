"""Floor 4: what int8 lost, what came back and what it cost, as lines and as JSON.

Takes the plain data of `recovered.Recovered.to_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nlpconvert import disk, wording

WHAT = {
    "weights": "weights",
    "scales": "scales alone (the weights are the checkpoint's)",
    "all": "weights and scales",
}


def to_json(data: Mapping[str, Any]) -> str:
    """One JSON object."""
    return disk.json_text(data)


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """The headline, each output before and after, and what it was trained on."""
    facts = data["recovered"]
    yield _headline(data)
    yield ""
    for name, before in facts["before"].items():
        yield from _output(name, before, facts["after"][name])
    back = _came_back(facts)
    if back:
        yield _detail("came back", back)
    yield _detail("trained", _trained(facts))
    yield _detail("on", _texts(facts))
    yield _detail("simulated", _parity(facts["parity"]))
    yield _detail("cost", f"{facts['seconds']:,.0f} s, {facts['training_seconds']:,.0f} of them training")


def _headline(data: Mapping[str, Any]) -> str:
    step, facts = data["step"], data["recovered"]
    if data["replaced"]:
        return f"{step} was recovered by training {WHAT[facts['trained']]}"
    if not facts["best_step"]:
        return f"{step} was not replaced: no step of the training was better on the select part than what lies there"
    return f"{step} was not replaced: what was trained is further from PyTorch than what lies there"


def _output(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    measure = before["measure"]
    yield _detail(
        name,
        f"{wording.measured(measure, float(before['measured']))} -> "
        f"{wording.measured(measure, float(after['measured']))}, allowed {after['allowed']}, "
        f"{wording.used(float(after['used']))}",
    )
    if before["mean_cosine"] is not None and after["mean_cosine"] is not None:
        yield _detail(
            "  on average",
            f"cosine {wording.cosine(float(before['mean_cosine']))} -> "
            f"{wording.cosine(float(after['mean_cosine']))}, relative L2 {wording.drift(before['relative_l2'])} -> "
            f"{wording.drift(after['relative_l2'])}, {after['vectors']:,} vectors",
        )


def _came_back(facts: Mapping[str, Any]) -> str:
    """How much of the energy that was lost came back, by output."""
    words = []
    for name, before in facts["before"].items():
        lost, left = float(before["relative_l2"]) ** 2, float(facts["after"][name]["relative_l2"]) ** 2
        if lost:
            words.append(f"{(lost - left) / lost:.0%} of {name}'s squared error")
    return ", ".join(words)


def _trained(facts: Mapping[str, Any]) -> str:
    rest = f", hidden states weigh {facts['hidden']:g}" if facts["hidden"] else ""
    whole = ", all layers in integers" if facts["all_int8"] else ""
    return (
        f"{WHAT[facts['trained']]}, {wording.count(facts['steps'], 'step')} of {facts['batch']} texts, best at step "
        f"{facts['best_step']}, seed {facts['seed']}{rest}{whole}"
    )


def _texts(facts: Mapping[str, Any]) -> str:
    data = facts["data"]
    own = f", {facts['texts_of_data']:,} of them of {data['name']} ({data['sha256'][:12]})" if data else ""
    out = facts["left_out_as_judged"]
    left = f"; {out:,} left out because they are judged" if out else ""
    return f"{wording.count(facts['texts'], 'text')}{own}, chosen on {facts['select_texts']:,} others{left}"


def _parity(found: Mapping[str, Any]) -> str:
    return (
        f"{found['layers']} of {found['of']} layers as ONNX Runtime computes them, within "
        f"{wording.drift(float(found['worst_layer']))}; drift {wording.drift(float(found['drift_simulated']))}, the "
        f"artifact's {wording.drift(float(found['drift_artifact']))}"
    )


def _detail(label: str, value: str) -> str:
    return f"  {label:<24} {value}"
