"""Benchmarks: what quantization leaves of a sentence encoder, on texts that neither calibration nor search saw.

For every step of an OUT: the cosine of the pooled embedding with float32's, worst, first percentile and mean over 260
texts, for each composition of batches; and the latency of ONNX Runtime on the CPU over the plain float32 file's, in
turns within one run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import HERE, Result, Row, Settings, child

TITLE = "Quantization"
TEXTS = HERE / "texts.jsonl"
STEPS = ("onnx-qdq", "onnx-int8", "onnx-int4", "onnx-fp16")
TARGETS = {"onnx-int8": 0.65}
"""Latency over float32's, at most."""
BATCH = 16
LIMIT = 512


@dataclass(frozen=True)
class Cosines:
    """Over all texts, against float32 of the same text alone."""

    worst: float
    first: float
    mean: float

    def __str__(self) -> str:
        return f"{self.worst:.6f} / {self.first:.6f} / {self.mean:.6f}"


class Encoder:
    """An ONNX file with the tokenizer beside it."""

    def __init__(self, directory: Path, threads: int | None) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # Several sessions take turns: one whose threads still spin would slow the next one down.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(LIMIT)
        self.names = [value.name for value in self.session.get_inputs()]

    def batch(self, texts: Sequence[str], extra: int = 0) -> dict[str, np.ndarray]:
        """int64 arrays (texts, tokens), padded at the right to the longest and `extra` more."""
        rows = [encoded.ids for encoded in self.tokenizer.encode_batch(list(texts))]
        size = min(max(map(len, rows)) + extra, LIMIT)
        ids = np.zeros((len(rows), size), np.int64)
        mask = np.zeros_like(ids)
        for row, found in enumerate(rows):
            ids[row, : len(found)], mask[row, : len(found)] = found, 1
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        return {name: given[name] for name in self.names}

    def embed(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """(texts, width), float32."""
        return np.asarray(self.session.run(["sentence_embedding"], dict(batch))[0], np.float32)


def compositions(encoder: Encoder, texts: Sequence[str]) -> dict[str, list[tuple[list[int], dict[str, np.ndarray]]]]:
    """By name: batches with the numbers of the texts in their first rows."""
    ordered = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    groups = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    longest = texts[ordered[-1]]
    return {
        "alone": [([n], encoder.batch([texts[n]])) for n in ordered],
        "16, like lengths": [(group, encoder.batch([texts[n] for n in group])) for group in groups],
        "one long companion": [([n], encoder.batch([texts[n], longest])) for n in ordered[::5]],
        "40 more pads": [([n], encoder.batch([texts[n]], 40)) for n in ordered],
    }


def cosines(found: np.ndarray, reference: np.ndarray) -> Cosines:
    """Row by row, in float64."""
    a, b = found.astype(np.float64), reference.astype(np.float64)
    score = np.sort((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))
    return Cosines(float(score[0]), float(score[int(len(score) * 0.01)]), float(score.mean()))


def drift(encoder: Encoder, plain: Encoder, texts: Sequence[str]) -> dict[str, Cosines]:
    """Cosines by composition."""
    made = compositions(plain, texts)
    alone = {tuple(numbers): plain.embed(batch)[0] for numbers, batch in made["alone"]}
    found = {}
    for name, batches in made.items():
        answers, wanted = [], []
        for numbers, batch in batches:
            answers.append(encoder.embed(batch)[: len(numbers)])
            wanted += [alone[(n,)] for n in numbers]
        found[name] = cosines(np.concatenate(answers), np.stack(wanted))
    return found


def latency(encoders: Mapping[str, Encoder], texts: Sequence[str], repeats: int) -> dict[str, float]:
    """Time over all texts in batches of 16 of like length, over the first encoder's: medians of runs in turns."""
    first = next(iter(encoders.values()))
    batches = [batch for _, batch in compositions(first, texts)["16, like lengths"]]
    times: dict[str, list[float]] = {name: [] for name in encoders}
    for round_number in range(repeats + 1):
        for name, encoder in encoders.items():
            started = time.perf_counter()
            for batch in batches:
                encoder.embed(batch)
            if round_number:
                times[name].append(time.perf_counter() - started)
    base = statistics.median(next(iter(times.values())))
    return {name: statistics.median(taken) / base for name, taken in times.items()}


def read_texts() -> list[str]:
    """The texts that are judged on."""
    return [json.loads(line)["text"] for line in TEXTS.read_text(encoding="utf-8").splitlines() if line]


def compare(out: Path, steps: Sequence[str], threads: int | None, repeats: int) -> list[dict[str, Any]]:
    """One row a step: cosines by composition, latency, size, share of the linear FLOPs in lower precision."""
    texts = read_texts()
    encoders = {step: Encoder(out / step, threads) for step in ("onnx", *steps)}
    times = latency(encoders, texts, repeats)
    manifest = json.loads((out / "nlpconvert.json").read_text(encoding="utf-8"))
    rows = []
    for step in steps:
        made_by = manifest["steps"][step]["artifact"]["made_by"]
        rows.append(
            {
                "step": step,
                "cosines": drift(encoders[step], encoders["onnx"], texts),
                "latency": times[step],
                "bytes": sum(file.stat().st_size for file in (out / step).glob("model.onnx*")),
                "made_by": made_by,
            }
        )
    return rows


def measure(settings: Settings) -> Result:
    """Makes the steps one by one, then measures them all."""
    out = settings.scratch / "quantized"
    seconds: dict[str, float] = {}
    for step in ("onnx", *STEPS):
        started = time.perf_counter()
        # 1 is a drift: its numbers are printed all the same.
        child(["-m", "nlpconvert", "run", settings.model, "-o", out, "--to", step, "-q"], may_end=(0, 1))
        seconds[step] = time.perf_counter() - started
    notes = [
        "Cosine of the embedding with float32's, worst / first percentile / mean, by composition of the batch:",
        "",
        "| step | alone | 16 of like length | beside a long text | 40 more pads | lower precision | size | made in |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    rows = []
    plain = sum(file.stat().st_size for file in (out / "onnx").glob("model.onnx*"))
    for found in compare(out, STEPS, settings.threads, settings.times(5)):
        step = found["step"]
        share = found["made_by"].get("share_of_linear_flops", found["made_by"].get("flops_half"))
        scores = " | ".join(str(score) for score in found["cosines"].values())
        notes.append(f"| `{step}` | {scores} | {share:.1%} | {found['bytes'] / plain:.2f} | {seconds[step]:.0f} s |")
        target = TARGETS.get(step)
        rows.append(Row(f"`{step}` / `onnx`, latency on the CPU", "", "", found["latency"], target=target))
    return Result(tuple(rows), tuple(notes))


if __name__ == "__main__":
    import sys

    for row in compare(Path(sys.argv[1]), sys.argv[2:], None, 5):
        print(
            row["step"],
            f"latency {row['latency']:.2f}",
            f"{row['bytes'] / 1e6:.1f} MB",
            row["made_by"].get("share_of_linear_flops"),
        )
        for name, score in row["cosines"].items():
            print(f"  {name:<20} {score}")
