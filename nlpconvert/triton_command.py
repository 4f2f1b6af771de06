"""Floor 5: the command `triton`: signature and help, and what is said of a repository; nothing is decided here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nlpconvert.errors import UsageError
from nlpconvert.options import AllowUnverified, OutArgument, Quiet, Threads, Tolerance, Verbose, names, options, tell
from nlpconvert.terminal import Terminal

if TYPE_CHECKING:
    from nlpconvert.artifact import Outcome
    from nlpconvert.triton.repository import Repository


def triton(
    out: OutArgument,
    repo: Annotated[Path, typer.Option("-o", "--out", help="The model repository to write.", show_default=False)],
    step: Annotated[str | None, typer.Option(help="The artifact to serve; needed where there are several.")] = None,
    name: Annotated[str | None, typer.Option(help="The served model's name; else OUT's.", show_default=False)] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="onnxruntime, pytorch, tensorrt or python; else the format's own, python with a cache."),
    ] = None,
    tokenizer: Annotated[bool, typer.Option("--tokenizer", help="NAME_text as well: a client sends text.")] = False,
    batching: Annotated[Path | None, typer.Option(help="JSON of `nlpconvert bench --arrivals`.")] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="Rows of a batch at most (32).")] = None,
    max_delay: Annotated[str | None, typer.Option(help="What a request may wait for companions: 5ms (0).")] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="Executions at a time (1).")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Instances on GPUs; engines are there anyway.")] = False,
    threads: Threads = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a repository; with --check ask one that is not what it was.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Start a Triton on the loopback and judge what it answers.")
    ] = False,
    tritonserver: Annotated[Path | None, typer.Option(help="The Triton to start; else the one on PATH.")] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="Ask by gRPC instead of HTTP.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds that one answer may take (60).")] = None,
    tolerance: Tolerance = None,
    config: Annotated[Path | None, typer.Option(help="Settings: nlpconvert.toml, or a pyproject.toml.")] = None,
    allow_unverified: AllowUnverified = "",
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write JSON here; - is standard output.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """A Triton model repository of an artifact; with --check what a real Triton answers from it, judged as always.

    With --check a repository that is there already is asked as it is.
    """
    from nlpconvert import pipeline
    from nlpconvert.triton import files, server, serving
    from nlpconvert.triton import repository as repository

    given = options(tolerance=tolerance, threads=threads)
    forgiven = pipeline.forgivable(names(allow_unverified))
    if not check:
        for option, value in {"--tritonserver": tritonserver, "--grpc": grpc, "--junit": junit, "--json": json}.items():
            if value:
                raise UsageError(f"{option} is about asking a server: give --check as well")
    else:
        server.find(tritonserver)  # told before anything is written
    wanted = repository.Wanted(
        name=name,
        backend=backend,
        tokenizer=tokenizer,
        batching=batching,
        max_batch=max_batch,
        max_delay=max_delay,
        instances=instances,
        threads=threads,
        gpu=gpu,
    )
    there = (repo / files.SIDECAR).is_file()
    if check and there:
        if wanted != repository.Wanted(threads=threads):
            raise UsageError(f"{repo} is there already and is asked as it is; leave out what describes a new one")
        files.check_step(repo, step)
    else:
        made = repository.write(out, files.one_step(out, step), repo, wanted, force=force)
        _tell_repository(made, quiet, err=str(json) == "-")
    if not check:
        return
    with Terminal(quiet) as terminal:
        outcomes = serving.check(
            out,
            repo,
            tritonserver=tritonserver,
            options=given,
            progress=terminal,
            settings=pipeline.read_settings(config),
            force=force,
            grpc=grpc,
            timeout=timeout,
        )
        terminal.stop()
        code = pipeline.exit_code(outcomes, forgiven)
        to_stdout = str(json) != "-"
        tell(terminal, outcomes, shlex.quote(str(out)), forgiven, verbose, to_stdout=to_stdout)
        if not quiet:
            tell_served(outcomes, err=not to_stdout)
        _documents(outcomes, f"{out} served from {repo}", junit, json)
    raise typer.Exit(code)


def tell_served(outcomes: list[Outcome], *, err: bool) -> None:
    """What was found on the way: who served, how many batches formed."""
    for outcome in outcomes:
        for note in outcome.notes:
            print(f"{outcome.step}: {note}", file=sys.stderr if err else sys.stdout)


def _tell_repository(made: Repository, quiet: bool, *, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    for note in made.notes:
        print(f"nlpconvert: {note}", file=sys.stderr)
    if quiet:
        return
    batching = made.batching
    waits = f", waits {batching.max_delay / 1000:g} ms" if batching.max_delay else ""
    print(f"{made.path}: {', '.join(made.models)}", file=stream)
    print(
        f"  {made.step} {made.sha256[:12]} by the {made.backend} backend, batches of {batching.max_batch} at most"
        f"{waits}, {batching.instances} at a time ({batching.source})",
        file=stream,
    )


def _documents(outcomes: list[Outcome], said: str, junit: Path | None, json: Path | None) -> None:
    from nlpconvert import disk, documents

    if junit is not None:
        disk.write_text_atomic(junit, documents.junit(outcomes, out=said))
    if json is not None and str(json) == "-":
        print(documents.to_json(outcomes), end="")
    elif json is not None:
        disk.write_text_atomic(json, documents.to_json(outcomes))
