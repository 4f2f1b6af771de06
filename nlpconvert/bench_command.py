"""Floor 5: the command `bench`: signature and help, and how the document is shown; nothing is decided here."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nlpconvert.errors import UsageError
from nlpconvert.options import Columns, Device, OutArgument, Provider, Quiet, RemoteCode, Threads, Verbose, names
from nlpconvert.options import options as made
from nlpconvert.terminal import ALARMS, Terminal, table

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:/|per )?\s*(s|m|min|h)?")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")


def bench(
    out: OutArgument,
    batch: Annotated[str | None, typer.Option(help="Rows of a batch, with commas (1,2,4,8,16,32).")] = None,
    length: Annotated[str | None, typer.Option(help="Tokens of a row, with commas (16,64,128,512).")] = None,
    steps: Annotated[str | None, typer.Option(help="Only these, with commas; PyTorch is always there.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Your texts: how should they be put into batches? .txt, .jsonl or .csv.")
    ] = None,
    columns: Columns = "",
    arrivals: Annotated[
        str | None, typer.Option(help="Requests that come at random, such as 200/s: which batching is best?")
    ] = None,
    p99: Annotated[str | None, typer.Option("--p99", help="What 99 of 100 answers may take, such as 50ms.")] = None,
    instances: Annotated[str | None, typer.Option(help="Instances that are tried, with commas (1,2).")] = None,
    equal_lengths: Annotated[
        bool, typer.Option("--equal-lengths", help="The server pads nothing: only texts of one length form a batch.")
    ] = False,
    budget: Annotated[float, typer.Option(help="Seconds of timing, once for batches and once for texts.")] = 120.0,
    no_texts: Annotated[bool, typer.Option("--no-texts", help="Leave out ways of putting texts into batches.")] = False,
    model: Annotated[str | None, typer.Option(help="The model for PyTorch, if not where it was.")] = None,
    trust_remote_code: RemoteCode = False,
    device: Device = "cpu",
    provider: Provider = "cpu",
    threads: Threads = None,
    json: Annotated[Path | None, typer.Option(help="Write JSON here; - is standard output.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report here: one HTML file that opens offline.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """How fast is each artifact in OUT, beside its verdict, and how should it be batched? Writes nothing into OUT.

    It ends in 1 where --p99 cannot be met. The JSON is what `nlpconvert triton --batching` reads.
    """
    from nlpconvert import report_bench
    from nlpconvert.bench import benching

    if html is not None:
        from nlpconvert import html_bench

        html_bench.check()
    chosen = names(steps) if steps is not None else None
    wishes = benching.Wishes(
        steps=chosen,
        batches=_numbers("--batch", batch),
        lengths=_numbers("--length", length),
        model=model,
        budget=budget,
        arrivals=_rate(arrivals),
        p99=_time(p99),
        equal=equal_lengths,
        instances=_numbers("--instances", instances),
        texts=not no_texts,
    )
    given = made(
        columns=columns, data=data, device=device, provider=provider, threads=threads,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    for path in (json, html):
        if path is not None and str(path) != "-" and not path.parent.is_dir():
            raise UsageError(f"{path}: there is no directory {path.parent}")
    with Terminal(quiet) as terminal:
        found = benching.bench(out, wishes, given, terminal)
        terminal.stop()
    stream = sys.stderr if str(json) == "-" else sys.stdout
    _table(stream, report_bench.HEADER, report_bench.table_rows(found))
    print(file=stream)
    if verbose:
        for what in ("latency", "throughput"):
            print("latency" if what == "latency" else "texts a second", file=stream)
            _table(stream, *report_bench.cell_table(found, what))
            print(file=stream)
    for line in report_bench.lines(found):
        print(line, file=stream)
    if str(json) == "-":
        print(report_bench.to_json(found), end="")
    elif json is not None:
        json.write_text(report_bench.to_json(found), encoding="utf-8")
    if html is not None:
        html.write_text(html_bench.render(found), encoding="utf-8")
    raise typer.Exit(benching.exit_code(found, chosen))


def _table(stream: Any, header: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    numbers = set(header) - {"step", "verdict", "at"}
    table(stream, header, rows, numbers=numbers, colours=ALARMS)


def _numbers(option: str, text: str | None) -> list[int] | None:
    """ "1,2,4" as whole numbers. UsageError for anything else."""
    if text is None:
        return None
    try:
        return [int(each) for each in names(text)]
    except ValueError:
        raise UsageError(f'{option} "{text}": whole numbers with commas, such as 1,8,32') from None


def _rate(text: str | None) -> float | None:
    """ "200/s", "90/min" or "200" as requests a second."""
    if text is None:
        return None
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f'--arrivals "{text}": requests in a time, such as 200/s or 90/min')
    return float(found[1]) / {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"]


def _time(text: str | None) -> float | None:
    """ "50ms" as seconds."""
    if text is None:
        return None
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise UsageError(f'--p99 "{text}": a time with its unit, such as 50ms or 0.2s')
    value = float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
    if not math.isfinite(value):
        raise UsageError(f'--p99 "{text}": a time')
    return value
