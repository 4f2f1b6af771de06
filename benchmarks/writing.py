"""Benchmarks: tokens per second of the ONNX artifact with its cache, against PyTorch, and against a decode without."""

from __future__ import annotations

import statistics
from pathlib import Path

from measure import HERE, ROOT, Result, Row, Settings, child, in_turns

TITLE = "Writing"
PARAMETERS = 160_000_000
# With random weights and unscaled attention PyTorch's own float32 differs from its float64 by 3e-4.
TOLERANCE = "rel<=1e-3"
SIDES = ("onnx", "pytorch", "uncached")


def measure(settings: Settings) -> Result:
    """The fixtures and a random GPT-Neo, converted once, then each side in turns."""
    neo = settings.scratch / "gpt-neo-160m"
    wanted = str(min(PARAMETERS, settings.parameters))
    made = child([HERE / "make_gpt_neo.py", neo, wanted], threads=settings.threads).data()
    models = {
        "gpt2-lm": (ROOT / "fixtures" / "gpt2-lm", 64, (1, 8)),
        "llama-lm": (ROOT / "fixtures" / "llama-lm", 64, (1, 8)),
        "t5-seq2seq": (ROOT / "fixtures" / "t5-seq2seq", 64, (1, 8)),
        "GPT-Neo": (neo, 32, (1, 8)),
    }
    rows: list[Row] = []
    same = True
    for name, (model, new, batches) in models.items():
        out = settings.scratch / f"written-{name}"
        own = ["--tolerance", TOLERANCE] if name == "GPT-Neo" else []
        child(["-m", "nlpconvert", "onnx", model, "-o", out, "-q", *own], threads=settings.threads)
        for batch in batches:
            rates, agree = _rates(settings, model, out, batch, new)
            same = same and agree
            rows += [
                Row(
                    f"{name}, batch {batch}: ONNX with its cache / PyTorch's `generate`",
                    _rate(rates["onnx"]),
                    _rate(rates["pytorch"]),
                    rates["pytorch"] / rates["onnx"],
                    target=1.0,
                ),
                Row(
                    f"{name}, batch {batch}: ONNX with its cache / without",
                    _rate(rates["onnx"]),
                    _rate(rates["uncached"]),
                    rates["uncached"] / rates["onnx"],
                ),
            ]
    return Result(
        tuple(rows),
        (
            "Greedy, 32 prompt tokens, 64 new ones (GPT-Neo 32), prefill included; ratios are of the time for a token. "
            f"GPT-Neo: {made['parameters']:,} random parameters ({made['words']}). "
            + ("All sides wrote the same tokens." if same else "Not all sides wrote the same tokens: near ties."),
        ),
    )


def _rates(settings: Settings, model: Path, out: Path, batch: int, new: int) -> tuple[dict[str, float], bool]:
    """Median tokens per second of each side, and whether all wrote the same."""
    found = in_turns(
        {
            side: lambda side=side: child(  # type: ignore[misc]
                [HERE / "write_side.py", side, model, out, str(batch), str(new), "3"], threads=settings.threads
            )
            for side in SIDES
        },
        settings.times(1),
    )
    rates = {
        side: statistics.median(rate for sample in samples for rate in sample.data()["rates"])
        for side, samples in found.items()
    }
    return rates, len({sample.data()["digest"] for samples in found.values() for sample in samples}) == 1


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f} tokens/s"
