"""Floor 5: the command `train`: signature and help, and how the record is shown; nothing is decided here."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from nlpconvert.options import (
    Budget,
    Columns,
    Json,
    MaxMemory,
    MissingWeights,
    Model,
    Quiet,
    RemoteCode,
    Revision,
    Task,
    Threads,
    Tolerance,
    Verbose,
)
from nlpconvert.options import options as made
from nlpconvert.terminal import ALARMS, Terminal, table


def train(
    model: Model,
    data: Annotated[Path, typer.Option(help="Labelled rows to learn from: .jsonl or .csv.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="A new directory for all that comes of it.")],
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="Labelled rows that every epoch is scored on.")
    ] = None,
    columns: Columns = "",
    metric: Annotated[
        str | None, typer.Option(help="Of --eval: accuracy, f1, squad, perplexity or bleu; else the task's usual one.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="ort (ONNX Runtime, where it is installed for training) or torch.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Times through the data (3).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps at most; alone, as many epochs as they take.")] = None,
    batch: Annotated[int, typer.Option(help="Rows that go through the model at once, on each rank.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Batches whose gradients make one step.")] = 1,
    optimizer: Annotated[str, typer.Option(help="adamw, lamb or sgd.")] = "adamw",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate at its highest (adamw 5e-5, lamb 1e-3, sgd 1e-2).")
    ] = None,
    warmup: Annotated[float, typer.Option(help="Steps of warm-up; below 1, a share of all steps.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Not of biases and normalisation.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of all gradients together; 0 for no limit.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the rows' order and of dropout.")] = 0,
    dropout: Annotated[bool, typer.Option("--dropout/--no-dropout", help="As the model's config has it.")] = True,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, beside those at the ends of epochs.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUT.")] = False,
    patience: Annotated[int | None, typer.Option(help="Stop after so many epochs without a better score.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hold the engine against PyTorch over some steps (10), and no more.")
    ] = False,
    task: Task = None,
    revision: Revision = None,
    threads: Threads = None,
    tolerance: Tolerance = None,
    golden_budget: Budget = 32,
    max_memory: MaxMemory = 4.0,
    allow_missing_weights: MissingWeights = False,
    trust_remote_code: RemoteCode = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Fine-tune a model; gradients are verified first, and every epoch is exported to ONNX and judged.

    Starts as it is, or under torchrun, mpirun or srun. It ends in 1 where gradients are wrong, the loss is no number,
    or an exported model drifts from PyTorch. OUT/model is a checkpoint that every other command takes.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what a lost connection means is said in our words
    from nlpconvert import report_training, training_run, training_wishes

    wishes = training_wishes.Wishes(
        data=data, evaluation=evaluation, columns=columns, metric=metric, engine=engine, epochs=epochs, steps=steps,
        batch=batch, accumulate=accumulate, optimizer=optimizer, lr=lr, warmup=warmup, weight_decay=weight_decay,
        clip=clip, seed=seed, dropout=dropout, checkpoint_every=checkpoint_every, resume=resume, patience=patience,
        verify=verify,
    )  # fmt: skip
    given = made(
        tolerance=tolerance, golden_budget=golden_budget, task=task, revision=revision, threads=threads,
        max_memory=max_memory, allow_missing_weights=allow_missing_weights, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with Terminal(quiet) as terminal:
        try:
            trained = training_run.train(model, out, wishes, given, terminal)
        except training_run.SaidByFirst as error:
            raise typer.Exit(error.exit_code) from error
        terminal.stop()
    if trained.record["world"]["rank"] == 0:
        stream = sys.stderr if json else sys.stdout
        if json:
            print(report_training.to_json(trained.record), end="")
        if not quiet:
            if trained.record.get("epochs"):
                header = report_training.header(trained.record)
                numbers = set(header) - {"verdict", ""}
                rows = report_training.table_rows(trained.record)
                table(stream, header, rows, numbers=numbers, colours=ALARMS)
            for line in report_training.lines(trained.record, shlex.quote(str(out))):
                print(line, file=stream)
    raise typer.Exit(trained.exit_code)
