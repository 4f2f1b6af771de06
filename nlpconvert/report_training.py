"""Floor 4: a run of training as lines and as JSON. Takes the plain record of `training_run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nlpconvert import disk, wording


def to_json(record: Mapping[str, Any]) -> str:
    """One JSON object: the record as OUT/training.json has it."""
    return disk.json_text(record)


def header(record: Mapping[str, Any]) -> list[str]:
    """The columns of the table of epochs."""
    scores = [name for each in record["epochs"][:1] for name in each.get("scores", {})]
    return ["epoch", "loss", *(f"{name} {side}" for name in scores for side in ("PyTorch", "ONNX")), "verdict", ""]


def table_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row an epoch: its mean loss, its scores by both, the export's verdict, and which is kept."""
    rows = []
    best = (record.get("best") or {}).get("epoch")
    for each in record["epochs"]:
        row = {"epoch": str(each["epoch"]), "loss": f"{each['loss']:.4g}"}
        for name, both in each.get("scores", {}).items():
            row |= {f"{name} PyTorch": _number(both["pytorch"]), f"{name} ONNX": _number(both["onnx"])}
        verdict = each.get("verdict", "")
        row["verdict"] = {"drift": "DRIFT", "failed": "FAILED"}.get(verdict, verdict)
        row[""] = "kept" if each["epoch"] == best else ""
        rows.append({name: row.get(name, "") for name in header(record)})
    return rows


def lines(record: Mapping[str, Any], out: str) -> Iterator[str]:
    """How it went and what lies where, in lines."""
    if "verified" in record or record["status"] in ("verified", "drift"):
        yield from _verified(record)
        return
    for each in record["epochs"]:
        if each.get("reason"):
            yield f"epoch {each['epoch']}: {each['reason']}"
    told = f", {record['why']}" if record["why"] else ""
    steps = record["epochs"][-1]["step"] if record["epochs"] else 0
    engine = record["engine"]
    yield (
        f"{record['status']} after {wording.count(steps, 'step')}{told}: {engine['name']}, "
        f"{wording.count(record['world']['size'], 'rank')}, {record['asked']['--optimizer']}, seed "
        f"{record['asked']['--seed']}, {record['seconds']:.1f} s"
    )
    if record["best"] is None:
        yield "no epoch was worth keeping: there is no model"
        return
    best = record["best"]["epoch"]
    yield f"epoch {best} is kept: {out}/model (a checkpoint) and {out}/converted (its ONNX model with the verdict)"


def _verified(record: Mapping[str, Any]) -> Iterator[str]:
    gradients = record["gradients"]
    if not gradients["agrees"]:
        yield f"gradients of {gradients['engine']} are wrong: {'; '.join(gradients['problems'][:5])}"
        return
    yield (
        f"gradients  agree      {gradients['parameters']:,} parameters, the worst error {gradients['times_noise']:.2g} "
        f"times the noise of float32 (allowed: {gradients['allowed_times']:g})"
    )
    found = record["verified"]
    losses = "agree    " if found["worst_loss"] <= found["allowed_loss"] else "DISAGREE "
    yield (
        f"losses     {losses}  {wording.count(found['steps'], 'step')}, the worst off by {found['worst_loss']:.1e} of "
        f"it (allowed: {found['allowed_loss']:.1e})"
    )
    worst = found["worst_weights"][0]
    weights = "agree    " if worst["share"] <= worst["allowed"] else "DISAGREE "
    yield (
        f"weights    {weights}  the worst, {worst['name']}, off by {worst['share']:.1e} of what it moved by (allowed: "
        f"{worst['allowed']:.1e}); {found['left_out']:,} of {found['elements']:,} elements have no gradient "
        "but noise and are left out"
    )


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)
