"""Benchmarks: one batching served by a real Triton under random arrivals, and what the queue's simulation says of it.

load.py TRITONSERVER OUT BENCH_JSON TEXTS MAX_BATCH DELAY LOAD SECONDS: prints one line of JSON. The cost surface is
that of BENCH_JSON; LOAD is the share of what one request at a time could answer. Requests leave at their times whether
the ones before were answered or not; a request's latency counts from the time at which it should have left.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import manifest, models, tokens
from nlpconvert.backends import served
from nlpconvert.bench import queueing
from nlpconvert.bench.queueing import Policy, Surface
from nlpconvert.inputs import data_cases
from nlpconvert.progress import Silent
from nlpconvert.triton import endpoints, repository
from nlpconvert.triton import server as triton_server
from nlpconvert.triton.repository import Wanted

STEP = "onnx"
NAME = "asked"
AT_ONCE = 64
ALONE = 60


def main(server: str, out: str, bench: str, texts: str, most: str, delay: str, load: str, seconds: str) -> None:
    """Predicts, serves, asks and prints."""
    surface = surface_of(json.loads(Path(bench).read_text(encoding="utf-8")))
    facts = models.facts_from_data(manifest.read(Path(out)).facts)
    rows = [json.loads(line) for line in Path(texts).read_text(encoding="utf-8").splitlines()]
    encode = tokens.load([Path(out) / STEP], facts).encode
    asked = [case.inputs for case in data_cases(facts, encode, rows, batch=1)]
    asked = [each for each in asked if each["input_ids"].shape[1] <= surface.lengths[-1]]
    lengths = [each["input_ids"].shape[1] for each in asked]
    alone = queueing.full_rate(surface, Policy(1), np.asarray(lengths))
    rate = float(load) * alone
    policy = Policy(int(most), float(delay))
    predicted = queueing.predict(surface, policy, rate, lengths)
    with tempfile.TemporaryDirectory() as place:
        repo = Path(place) / "repo"
        wanted = Wanted(
            name=NAME, backend="python", max_batch=policy.max_batch, max_delay=f"{policy.delay * 1000:g}ms", threads=1
        )
        repository.write(Path(out), STEP, repo, wanted)
        with triton_server.running(Path(server), repo, Silent()) as (http, _):
            client = served.HttpClient(endpoints.Place("http", "127.0.0.1", http, NAME))
            client.describe()
            found = ask(client, asked, surface, rate, float(seconds))
            client.close()
    print(json.dumps({"rate": rate, "predicted": predicted.to_dict()["predicted"], **found}))


def surface_of(document: dict[str, Any]) -> Surface:
    """The step's measured medians."""
    (subject,) = [each for each in document["subjects"] if each["step"] == STEP]
    cells = {(cell["batch"], cell["length"]): cell["p50"] for cell in subject["cells"]}
    batches, lengths = (tuple(sorted({cell[axis] for cell in cells})) for axis in (0, 1))
    return Surface(batches, lengths, tuple(tuple(cells[batch, length] for length in lengths) for batch in batches))


def ask(client: Any, asked: list[Any], surface: Surface, rate: float, seconds: float) -> dict[str, Any]:
    """Latencies under Poisson arrivals; `own`: what a request alone takes beyond its pass, median."""
    rng = np.random.default_rng(0)
    beyond = []
    for place in rng.integers(len(asked), size=ALONE):
        started = time.perf_counter()
        client.infer(asked[place], ["sentence_embedding"])
        taken = time.perf_counter() - started
        beyond.append(taken - surface.at(1, asked[place]["input_ids"].shape[1]))
    count = max(int(rate * seconds), 100)
    arrivals = queueing.poisson(rate, count, rng)
    chosen = rng.integers(len(asked), size=count)
    before = client.counts()
    start = time.perf_counter() + 0.2
    sent = np.zeros(count)
    done = np.zeros(count)

    def one(number: int) -> None:
        sent[number] = time.perf_counter() - start
        client.infer(asked[chosen[number]], ["sentence_embedding"])
        done[number] = time.perf_counter() - start

    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = []
        for number, arrival in enumerate(arrivals):
            time.sleep(max(start + arrival - time.perf_counter(), 0))
            jobs.append(pool.submit(one, number))
        for job in jobs:
            job.result()
    counts = client.counts().since(before)
    settled = slice(int(queueing.WARM * count), None)
    latencies = (done - arrivals)[settled]
    return {
        "p50": float(np.quantile(latencies, 0.5)),
        "p99": float(np.quantile(latencies, 0.99)),
        "throughput": count / float(done.max() - arrivals[0]),
        "rows": counts.rows / counts.executions,
        "own": float(np.median(beyond)),
        "late": float(np.median((sent - arrivals)[settled])),
        "requests": count,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
