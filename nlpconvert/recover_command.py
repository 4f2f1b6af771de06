"""Floor 5: the command `recover`: signature and help; nothing is decided here."""

from __future__ import annotations

from typing import Annotated

import typer

from nlpconvert.options import (
    Columns,
    Data,
    Json,
    OutArgument,
    Quiet,
    RemoteCode,
    Revision,
    Threads,
    Tolerance,
    Verbose,
    options,
    tell,
)
from nlpconvert.terminal import Terminal


def recover(
    out: OutArgument,
    step: Annotated[str, typer.Option(help="onnx-qdq or a static onnx-int8.")] = "onnx-qdq",
    data: Data = None,
    columns: Columns = "",
    train: Annotated[str, typer.Option(help="weights, scales (a recipe that --recipe replays) or all.")] = "weights",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Texts of a step.")] = 16,
    rate: Annotated[float, typer.Option(help="A factor on the learning rates.")] = 1.0,
    hidden: Annotated[float, typer.Option(help="What the layers' hidden states weigh in the loss.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of texts.")] = 0,
    all_int8: Annotated[
        bool, typer.Option("--all-int8", help="Put what stayed in float32 into integers first.")
    ] = False,
    tolerance: Tolerance = None,
    model: Annotated[str | None, typer.Option(help="The model, if not where it was.")] = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    threads: Threads = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Win back what int8 lost: train it to answer as the float32 model does, on texts without labels; judge it anew.

    The step is replaced when the new one is whole and no further from PyTorch; else it ends in 1 and nothing changes.
    """
    from nlpconvert import pipeline, recovered, recovering, report_recover

    chosen = pipeline.read_settings()
    wishes = recovered.Wishes(train, steps, batch, rate, hidden, seed, all_int8, model)
    given = options(
        columns=columns, tolerance=tolerance, data=data, revision=revision, trust_remote_code=trust_remote_code,
        threads=threads or chosen.threads,
    )  # fmt: skip
    with Terminal(quiet) as terminal:
        found = recovering.recover(out, step, wishes, given, terminal, chosen)
        terminal.stop()
        if json:
            print(report_recover.to_json(found.to_dict()), end="")
        elif not quiet:
            for line in report_recover.lines(found.to_dict()):
                print(line)
            print()
        tell(terminal, [found.after], out, (), verbose, to_stdout=not json)
    raise typer.Exit(found.exit_code)
