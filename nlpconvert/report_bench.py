"""Floor 4: a benchmark's document (data/bench.schema.json) as lines for a person and a table. Data in, lines out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nlpconvert import wording

HEADER: tuple[str, ...] = (
    "step", "verdict", "drift", "size", "memory", "opens in", "one text", "most texts/s", "at", "times PyTorch"
)  # fmt: skip
STATUS_WORDS = {"agrees": "agrees", "drift": "DRIFT", "failed": "FAILED", "not run": "not run", "reference": ""}


def to_json(document: Mapping[str, Any]) -> str:
    """The document itself."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def seconds(value: float | None) -> str:
    """ "870 us", "8.7 ms", "1.23 s"; nothing for None."""
    if value is None:
        return ""
    for size, unit in ((1e-3, "us"), (1.0, "ms")):
        if value < 0.9995 * size:
            number = value / size * 1000
            return f"{number:.0f} {unit}" if number >= 99.5 else f"{number:.3g} {unit}"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"


def rate(value: float | None) -> str:
    """ "1,234", "12.3" a second."""
    return "" if value is None else f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def table_rows(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row a subject, under HEADER; the latency is that of one text at the smallest length."""
    rows = []
    for each in document["subjects"]:
        good = [cell for cell in each["cells"] if "failed" not in cell]
        first = next((cell for cell in good if cell["batch"] == min(document["batches"])), None)
        most = max(good, key=lambda cell: float(cell["rows_per_second"]), default=None)
        verdict = STATUS_WORDS.get(each["verdict"], each["verdict"])
        rows.append(
            {
                "step": each["step"],
                "verdict": f"not run: {each['reason']}" if each["reason"] else verdict,
                "drift": drift(each),
                "size": wording.size(each["bytes"]) if each["bytes"] else "",
                "memory": wording.size(each["peak_bytes"]) if each["peak_bytes"] else "",
                "opens in": seconds(each["load_seconds"]),
                "one text": "" if first is None else seconds(first["p50"]),
                "most texts/s": "" if most is None else rate(most["rows_per_second"]),
                "at": "" if most is None else f"{most['batch']} x {most['length']}",
                "times PyTorch": "" if each["times_pytorch"] is None else f"{each['times_pytorch']:.2f}",
            }
        )
    return rows


def drift(subject: Mapping[str, Any]) -> str:
    """The worst of it, as reports word it."""
    worst = subject["worst"]
    return "" if worst is None else wording.measured(worst["measure"], worst["value"])


def cell_table(document: Mapping[str, Any], what: str = "latency") -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows of all cells, a column for each subject: median (p90 and p99 where known) or texts/s."""
    measured = [each for each in document["subjects"] if each["cells"]]
    header = ["batch", "length", *(each["step"] for each in measured)]
    rows = []
    for place in range(len(measured[0]["cells"]) if measured else 0):
        cell = measured[0]["cells"][place]
        row = {"batch": str(cell["batch"]), "length": str(cell["length"])}
        rows.append(row | {each["step"]: _cell(each["cells"][place], what) for each in measured})
    return header, rows


def _cell(cell: Mapping[str, Any], what: str) -> str:
    if "failed" in cell:
        return "not answered"
    if what == "throughput":
        return rate(cell["rows_per_second"])
    return " / ".join(seconds(cell[key]) for key in ("p50", "p90", "p99") if cell[key] is not None)


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """What stands below the table: the machine, the findings, texts in batches, the queue."""
    yield machine(document)
    yield (
        f"latency: median / 90th / 99th percentile of passes in turns, until a median is known to "
        f"{document['rule']['narrow']:.0%} or {document['rule']['budget']:g} s are over"
    )
    for note in (*document["notes"], *(f"left out: {left_out(each)}" for each in document["left_out"])):
        yield f"note: {note}"
    for finding in document["findings"]:
        yield f"note: {finding}"
    if document["texts"]:
        yield ""
        yield from texts(document["texts"])
    if document["batching"]:
        yield ""
        yield from batching(document["batching"])


def left_out(each: Mapping[str, Any]) -> str:
    """A batch that was not asked, and why."""
    return f"batch {each['batch']}, length {each['length']}: {each['reason']}"


def machine(document: Mapping[str, Any]) -> str:
    """The processor and how it was used."""
    host = document["host"]
    words = [f"{host['cpu']}, {wording.count(host['threads'], 'thread')}"]
    words.append(f"pinned to {', '.join(map(str, host['pinned']))}" if host["pinned"] else "not pinned")
    words.append(f"governor {host['governor']}" if host["governor"] else "governor not told")
    gemm = document["gemm"]
    if gemm:
        words.append(f"products: {gemm['float32'] / 1e9:,.0f} GFLOP/s in float32, {gemm['int8'] / 1e9:,.0f} in int8")
    return "; ".join(words)


def texts(found: Mapping[str, Any]) -> Iterator[str]:
    """Batching on the user's texts: what padding wastes, which way is fastest, where batches stop paying."""
    lengths = found["lengths"]
    where = "the probes' texts" if found["source"] == "probes" else found["source"]
    yield (
        f"{wording.count(found['count'], 'text')} of {where}: {lengths['mean']:.0f} tokens on average, half under "
        f"{lengths['p50']:.0f}, 90% under {lengths['p90']:.0f}, the longest {lengths['max']}"
        + (f"; {found['cut']} cut" if found["cut"] else "")
        + (f"; {found['timed']} of them timed" if found["timed"] < found["count"] else "")
    )
    for each in found["best"]:
        yield f"  {best(each)}"
    for each in found["subjects"]:
        ways = [way for way in each["ways"] if way["texts_per_second"]]
        told = ", ".join(f"{way_words(way)} {rate(way['texts_per_second'])}" for way in _chosen(ways))
        yield f"  {each['step']}: texts/s: {told}" + (
            f"; larger batches stop paying at {each['stops_paying']}" if each["stops_paying"] else ""
        )
    ways = found["subjects"][0]["ways"] if found["subjects"] else []
    largest = max((way["batch"] for way in ways), default=1)
    waste = ", ".join(
        f"{way['policy']} {way['waste']:.0%}"
        for way in ways
        if way["batch"] == largest and way["padding"] == "longest" and largest > 1
    )
    limit = next((way for way in ways if way["batch"] == largest and way["padding"] == "limit"), None)
    if waste:
        padded = f"; all padded to {found['limit']}: {limit['waste']:.0%}" if limit else ""
        yield f"  padding in batches of {largest}: {waste}{padded}"


def _chosen(ways: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One at a time, and each policy's fastest."""
    kept: dict[str, Mapping[str, Any]] = {}
    for way in ways:
        key = "alone" if way["batch"] == 1 else f"{way['policy']} {way['padding']}"
        if key not in kept or way["texts_per_second"] > kept[key]["texts_per_second"]:
            kept[key] = way
    return list(kept.values())


def way_words(way: Mapping[str, Any]) -> str:
    """ "sorted by 16"; "one at a time"."""
    if way["batch"] == 1:
        return "one at a time"
    padded = ", all padded to the limit" if way["padding"] == "limit" else ""
    return f"{way['policy']} by {way['batch']}{padded}"


def best(each: Mapping[str, Any]) -> str:
    """The line of its own: the fastest batches against PyTorch one at a time, and what limits them."""
    words = f"{each['step']}, {way_words(each)}: {rate(each['texts_per_second'])} texts/s"
    if each["times_pytorch_alone"] is not None:
        words += (
            f", {each['times_pytorch_alone']:.1f} times PyTorch one at a time "
            f"({rate(each['pytorch_alone_per_second'])})"
        )
    if each["share_of_limit"] is not None:
        words += (
            f"; its products alone could do {rate(each['limit_per_second'])} at this machine's own rate: "
            f"{each['share_of_limit']:.0%} of that is reached"
        )
    return words


def batching(found: Mapping[str, Any]) -> Iterator[str]:
    """The queue: what to serve, how, and what is predicted."""
    goal = found["goal_p99"]
    asked = f"{rate(found['arrivals_per_second'])} requests/s" + (f", p99 below {seconds(goal)}" if goal else "")
    for name, step in found["steps"].items():
        yield f"{name}, {asked}: {settings(step)}"
        yield f"  {predicted(step)}"
        if goal and not step["met"]:
            yield f"  this does NOT meet the goal; {_instead(step)}"
        elif goal:
            yield f"  the goal holds up to {rate(step['largest_rate_in_goal'])} requests/s"
        if step["extrapolated_above"]:
            yield f"  texts above {step['extrapolated_above']} tokens were not measured: their times are extrapolated"
    if found["step"] and len(found["steps"]) > 1:
        yield f"serve {found['step']}"


def settings(step: Mapping[str, Any]) -> str:
    """A batcher's settings, as Triton names them."""
    preferred = step["preferred_batch_size"]
    return (
        f"max_batch_size {step['max_batch_size']}, "
        f"max_queue_delay_microseconds {step['max_queue_delay_microseconds']}, "
        + (f"preferred_batch_size {preferred}, " if preferred else "")
        + wording.count(step["instance_count"], "instance")
    )


def predicted(step: Mapping[str, Any]) -> str:
    """What is predicted of it."""
    found = step["predicted"]
    if found["saturated"]:
        return f"the queue grows without end: {rate(found['capacity'])} requests/s are the most that full batches give"
    return (
        f"p50 {seconds(found['p50'])}, p90 {seconds(found['p90'])}, p99 {seconds(found['p99'])} "
        f"(+- {seconds(found['p99_error'])}), {found['mean_batch']:.1f} rows a batch, busy {found['busy']:.0%}; "
        f"without the network"
    )


def _instead(step: Mapping[str, Any]) -> str:
    most = step["largest_rate_in_goal"]
    return f"up to {rate(most)} requests/s it would" if most else "not even a single request would"
