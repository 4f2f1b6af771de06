"""Benchmarks: what the queue's simulation predicts of a batching, against a real Triton under the same arrivals.

The load generator's own cost is taken out: what a request alone takes over HTTP and into the backend's process, beyond
its pass.
"""

from __future__ import annotations

import os
import shutil

from measure import HERE, Result, Row, Settings, child

TITLE = "Serving"
TEXTS = HERE / "texts.jsonl"
TRIED = ((1, 0.0, 0.5), (8, 0.0, 0.5), (8, 0.0, 0.8), (8, 0.02, 0.5))
"""Largest batch, seconds that a request may wait, and arrivals as a share of what one at a time could answer."""
SECONDS = 30
TARGET = 1.2


def measure(settings: Settings) -> Result:
    """MiniLM in float32 with one thread: the other processor is the server's and the generator's."""
    server = os.environ.get("NLPCONVERT_TRITONSERVER") or shutil.which("tritonserver")
    if not server:
        raise SystemExit("the benchmark of serving needs a Triton: scripts/triton_env.sh DIRECTORY makes one; then "
                         "NLPCONVERT_TRITONSERVER=DIRECTORY/bin/tritonserver")  # fmt: skip
    out, bench = settings.scratch / "served", settings.scratch / "bench.json"
    child(["-m", "nlpconvert", "onnx", settings.model, "-o", out, "-q"], threads=1)
    child(
        ["-m", "nlpconvert", "bench", out, "--steps", "onnx", "--threads", "1", "--no-texts", "--batch", "1,2,4,8",
         "--length", "8,16,32,64,128", "--budget", "60", "--json", bench, "-q"],
        threads=1,
    )  # fmt: skip
    rows, notes = [], []
    for most, delay, load in TRIED:
        arguments = [server, out, bench, TEXTS, most, delay, load, SECONDS * settings.times(1)]
        found = child([HERE / "load.py", *map(str, arguments)], threads=1).data()
        told = found["predicted"]
        words = f"batches of {most} at most, waiting {1000 * delay:g} ms, {found['rate']:.0f} requests/s ({load:.0%})"
        for name, target in (("p50", TARGET), ("p99", None)):
            measured = found[name] - max(found["own"], 0.0)
            rows.append(
                Row(
                    f"{words}: {name}",
                    f"{1000 * told[name]:.1f} ms",
                    f"{1000 * measured:.1f} ms",
                    _apart(told[name], measured),
                    target,
                )
            )
        rows.append(
            Row(
                f"{words}: throughput",
                f"{told['throughput']:.1f}/s",
                f"{found['throughput']:.1f}/s",
                _apart(told["throughput"], found["throughput"]),
                TARGET,
            )
        )
        notes.append(
            f"{words}: {found['requests']} requests, {found['rows']:.2f} rows of a batch (predicted "
            f"{told['mean_batch']:.2f}), {1000 * found['own']:.1f} ms taken out, sent {1000 * found['late']:.2f} ms "
            "late"
        )
    said = (
        f"Poisson arrivals, {SECONDS} s each, texts of benchmarks/texts.jsonl up to 128 tokens; the Python backend, "
        "one thread. Ours is what is predicted, against it what was measured; the ratio is "
        "1 + |predicted - measured| / measured. "
    )
    return Result(tuple(rows), (said + "; ".join(notes) + ".",))


def _apart(predicted: float, measured: float) -> float:
    return 1 + abs(predicted - measured) / measured
