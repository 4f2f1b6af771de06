"""Benchmarks: training steps per second with ONNX Runtime's gradients, against PyTorch eager and compiled."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from measure import HERE, ROOT, Result, Row, Sample, Settings, child, in_turns

TITLE = "Training"
SIDES = ("ort", "eager", "compiled")
FASTER = 1.4
ROUNDS = 3
SMALL = 10_000_000
"""With fewer parameters than this wanted (--parameters), the fixture alone is measured."""


def measure(settings: Settings) -> Result:
    """The BERT fixture and a random BERT of MiniLM's size, each side in a process of its own, in turns."""
    threads = settings.threads or 2
    models = {"BERT fixture": (str(ROOT / "fixtures" / "bert-text-classifier"), 40)}
    if settings.parameters >= SMALL:
        models["MiniLM's size"] = ("minilm-size", 8)
    rows: list[Row] = []
    sizes = []
    with _onnx_runtime_for_training():
        for name, (model, steps) in models.items():
            found = in_turns(
                {
                    side: lambda side=side, model=model, steps=steps: child(  # type: ignore[misc]
                        [HERE / "train_side.py", side, model, str(steps), str(ROUNDS), str(threads)], threads=threads
                    )
                    for side in SIDES
                },
                settings.times(3),
            )
            rates = {side: _median(samples) for side, samples in found.items()}
            peaks = {side: statistics.median(sample.peak for sample in samples) for side, samples in found.items()}
            for side, words in (("eager", "PyTorch eager"), ("compiled", "`torch.compile`")):
                rows.append(
                    Row(
                        f"{name}: a step of ONNX Runtime / of {words}",
                        f"{rates['ort']:.2f} steps/s",
                        f"{rates[side]:.2f} steps/s",
                        rates[side] / rates["ort"],
                        target=round(1 / FASTER, 3) if side == "eager" else None,
                    )
                )
            rows.append(
                Row(
                    f"{name}: peak memory of ONNX Runtime / of PyTorch eager",
                    f"{peaks['ort'] / 1e6:,.0f} MB",
                    f"{peaks['eager'] / 1e6:,.0f} MB",
                    peaks["ort"] / peaks["eager"],
                )
            )
            sizes.append(f"{name}: {found['ort'][0].data()['parameters']:,} parameters")
    return Result(
        tuple(rows),
        (
            f"Batches of 16 texts of 64 tokens, {threads} threads, float32, dropout as in the config, fused AdamW on "
            f"all sides; ratios are of the time for a step, so that {round(1 / FASTER, 3):g} is {FASTER:g} times as "
            f"fast. {'; '.join(sizes)}.",
        ),
    )


def _median(samples: list[Sample]) -> float:
    return statistics.median(rate for sample in samples for rate in sample.data()["rates"])


@contextlib.contextmanager
def _onnx_runtime_for_training() -> Iterator[None]:
    """Its folder in front of the other flavour, where `make` has put it; without one, what is installed has to do."""
    folder = Path(sys.prefix) / "training"
    before = os.environ.get("PYTHONPATH")
    if folder.is_dir():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
