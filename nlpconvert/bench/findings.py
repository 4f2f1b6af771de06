"""Floor 1: what a person has to know of a benchmark's numbers, in sentences. Its document in, lines out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FASTER = 1.02
"""What differs by less is as fast."""
BUSY = 0.5
"""Load for each processor, before anything was timed, above which other work is said to have run."""


def findings(document: Mapping[str, Any]) -> list[str]:
    """What a person has to know of the numbers, a sentence each."""
    found = []
    machine = document["host"]
    if machine["load"] is not None and machine["load"] > BUSY * machine["cpus"]:
        found.append(
            f"other work ran meanwhile (a load of {machine['load']:.1f} on {machine['cpus']} processors): compare "
            "these numbers with each other, not with another run's"
        )
    rows = {each["step"]: each for each in document["subjects"] if each["cells"]}
    for name, row in rows.items():
        base = rows.get("onnx") if row["format"] == "onnx" else rows.get("trt") if row["format"] == "tensorrt" else None
        if base is not None and base is not row and row["precision"] != "float32":
            found += _slower(name, row, base)
        if row["dominated_by"]:
            found.append(f"{name} is slower, larger and further off than {', '.join(row['dominated_by'])}")
        failed = sum("failed" in cell for cell in row["cells"])
        if failed:
            first = next(cell for cell in row["cells"] if "failed" in cell)
            found.append(
                f"{name} did not answer {failed} of {len(row['cells'])} batches: {first['batch']} x {first['length']}: "
                f"{first['failed']}"
            )
    cells = [cell for row in rows.values() for cell in row["cells"] if "failed" not in cell]
    loose = [cell for cell in cells if cell["ended"] == "budget"]
    if loose:
        widest = max(max(cell["p50_high"] - cell["p50"], cell["p50"] - cell["p50_low"]) / cell["p50"] for cell in loose)
        found.append(
            f"the budget of {document['rule']['budget']:g} s ended before {len(loose)} of {len(cells)} medians were "
            f"known to {document['rule']['narrow']:.0%}; the widest interval reaches {widest:.0%} from its median"
        )
    return found


def _slower(name: str, row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Lower precision that is slower than the float32 it was made from: on average, or somewhere."""
    before = {(cell["batch"], cell["length"]): cell for cell in base["cells"] if "failed" not in cell}
    ratios = {
        key: cell["p50"] / before[key]["p50"]
        for cell in row["cells"]
        if "failed" not in cell and (key := (cell["batch"], cell["length"])) in before
    }
    if not ratios:
        return []
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    worst = max(ratios, key=lambda key: ratios[key])
    where = f"{ratios[worst]:.2f} times at batch {worst[0]}, length {worst[1]}"
    if mean > 1:
        return [f"{name} is SLOWER than {base['step']}: {mean:.2f} times its latency on average, {where}"]
    if ratios[worst] > FASTER:
        count = sum(ratio > FASTER for ratio in ratios.values())
        return [f"{name} is slower than {base['step']} in {count} of {len(ratios)} batches: {where}"]
    return []
