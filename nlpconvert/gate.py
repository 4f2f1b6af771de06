"""Floor 5: the gate's commands: verify, locate and diff. Signatures and help; nothing is decided here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlpconvert import triton_command
from nlpconvert.errors import NlpconvertError, UsageError
from nlpconvert.options import (
    AllowUnverified,
    Columns,
    Device,
    Force,
    Json,
    MaxMemory,
    Provider,
    Quiet,
    RemoteCode,
    Revision,
    Task,
    Threads,
    Tolerance,
    Verbose,
    names,
    options,
    tell,
)
from nlpconvert.terminal import Terminal

if TYPE_CHECKING:
    from nlpconvert.artifact import Outcome

Subject = Annotated[
    Path,
    typer.Argument(help="A directory that nlpconvert has made; with --reference a model file.", show_default=False),
]
Old = Annotated[Path, typer.Argument(help="An OUT directory or a nlpconvert.json.", show_default=False)]


def verify(
    out: Subject,
    step: Annotated[list[str] | None, typer.Option(help="Only this step.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this probe case.")] = None,
    tolerance: Tolerance = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings: nlpconvert.toml, or a pyproject.toml; else those found here.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An older nlpconvert.json: what is worse than in it fails, in tolerance or not.")
    ] = None,
    recheck: Annotated[bool, typer.Option("--recheck", help="Judge what was recorded anew; run nothing.")] = False,
    prove: Annotated[bool, typer.Option("--prove", help="Break each artifact on purpose: does the gate trip?")] = False,
    data: Annotated[Path | None, typer.Option(help="Labelled rows for --metric: .jsonl or .csv.")] = None,
    columns: Columns = "",
    metric: Annotated[
        str | None, typer.Option(help="accuracy, f1, spearman, squad, perplexity or bleu, on --data.")
    ] = None,
    fail_if: Annotated[str | None, typer.Option(help='"accuracy drops by 0.5% at 95%", "f1 below 0.9".')] = None,
    reference: Annotated[
        str | None, typer.Option(help="The model to judge a file by that another tool made (or to score --data with).")
    ] = None,
    map: Annotated[list[str] | None, typer.Option("--map", help="theirs=ours: an input or output by name.")] = None,
    precision: Annotated[str | None, typer.Option(help="What to judge the file as: float32, int8, ...")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="A served model instead: http://HOST:8000/MODEL or grpc://HOST:8001/MODEL.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds that one answer of the endpoint may take (60).")
    ] = None,
    keep: Annotated[Path | None, typer.Option("-o", "--out", help="Keep file, goldens and manifest here.")] = None,
    force: Force = False,
    task: Task = None,
    revision: Revision = None,
    max_memory: MaxMemory = 4.0,
    trust_remote_code: RemoteCode = False,
    device: Device = "cpu",
    provider: Provider | None = None,
    threads: Threads = None,
    allow_unverified: AllowUnverified = "",
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write JSON here; - is standard output.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report here: one HTML file that opens offline.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Judge again what lies in OUT, on this machine; needs neither torch nor the model. Writes nothing into OUT.

    With --reference: a file that another tool made, against a model.
    """
    from nlpconvert import pipeline

    chosen = pipeline.read_settings(config)
    if html is not None:
        from nlpconvert import html as page

        page.check()
    given = options(
        tolerance=tolerance,
        device=device,
        provider=provider or chosen.provider or "cpu",
        threads=threads if threads is not None else chosen.threads,
        task=task,
        revision=revision,
        max_memory=max_memory,
        trust_remote_code=trust_remote_code,
        force=force,
    )
    forgiven = pipeline.forgivable([*names(allow_unverified), *chosen.allow_unverified])
    ours = (out / "nlpconvert.json").is_file()
    of_files: dict[str, Any] = {
        "--map": map,
        "--precision": precision,
        "-o": keep,
        "--task": task,
        "--revision": revision,
    }
    of_files |= {"--force": force, "--trust-remote-code": trust_remote_code}
    of_directories: dict[str, Any] = {
        "--step": step,
        "--recheck": recheck,
        "--prove": prove,
        "--baseline": baseline,
        "--data": data,
    }
    of_directories |= {"--columns": columns, "--metric": metric, "--fail-if": fail_if}
    _check(out, ours, reference, of_files, of_directories)
    if endpoint is not None:
        others = {"--prove": prove, "--recheck": recheck, "--baseline": baseline, "--data": data}
        _check_endpoint(ours, step, {**others, "--reference": reference})
    elif timeout is not None:
        raise UsageError("--timeout is about --endpoint")
    _check_reports(out if ours else keep, junit=junit, json=json, html=html)
    with Terminal(quiet) as terminal:
        if endpoint is not None:
            from nlpconvert.triton import serving

            outcomes = serving.endpoint(
                out, step[0] if step else None, endpoint, options=given, progress=terminal, settings=chosen,
                cases=case, timeout=timeout,
            )  # fmt: skip
        elif ours:
            wishes = pipeline.Wishes(
                recheck=recheck,
                baseline=baseline or chosen.baseline,
                prove=prove,
                data=data,
                columns=columns,
                metric=metric,
                fail_if=fail_if,
                model=reference,
            )
            outcomes = pipeline.verify(
                out, steps=step, cases=case, options=given, progress=terminal, settings=chosen, wishes=wishes
            )
        else:
            assert reference is not None
            outcomes = pipeline.verify_foreign(
                out, reference, out=keep, mapping=map or (), precision=precision, cases=case, options=given,
                progress=terminal, settings=chosen,
            )  # fmt: skip
        terminal.stop()
        code = pipeline.exit_code(outcomes, forgiven)
        typed: dict[str, Any] = {
            "--reference": reference,
            "--config": config,
            "--baseline": baseline,
            "--provider": provider,
        }
        typed |= {"--threads": threads, "--data": data, "--columns": columns or None, "--metric": metric}
        typed |= {"--fail-if": fail_if, "--endpoint": endpoint}
        said = " ".join([shlex.quote(str(out)), *_typed(typed, tolerance or (), prove)])
        tell(terminal, outcomes, said, forgiven, verbose, to_stdout=json is None or str(json) != "-")
        if endpoint is not None and not quiet:
            triton_command.tell_served(outcomes, err=str(json) == "-")
        if chosen.path is not None and not quiet:
            print(f"settings {chosen.path}", file=sys.stderr if str(json) == "-" else sys.stdout)
        try:
            _documents(outcomes, out if ours else keep, said, junit, json, html, code, forgiven)
        except (NlpconvertError, OSError) as error:
            # The verdict is told and stands; a report that could not be written must not hide it.
            print(f"nlpconvert: {error}", file=sys.stderr)
            code = code or UsageError.exit_code
    raise typer.Exit(code)


def _check_endpoint(ours: bool, step: Sequence[str] | None, others: Mapping[str, Any]) -> None:
    """UsageError for what does not go with a served model."""
    if not ours or len(step or ()) > 1:
        raise UsageError(
            "--endpoint is one served step of a directory that nlpconvert has made: give OUT and one --step"
        )
    for option, value in others.items():
        if value:
            raise UsageError(f"{option} does not go with --endpoint")


def _typed(given: Mapping[str, Any], tolerances: Sequence[str], prove: bool) -> list[str]:
    """The options without which the same verdict would not come about, as they are typed."""
    words: list[str] = []
    for option, value in given.items():
        words += [] if value is None else [option, shlex.quote(str(value))]
    for text in tolerances:
        words += ["--tolerance", shlex.quote(text)]
    return [*words, "--prove"] if prove else words


def _check(
    out: Path, ours: bool, reference: str | None, of_files: Mapping[str, Any], of_directories: Mapping[str, Any]
) -> None:
    """Which of the two verifications is meant, and that nothing is given that only the other one takes."""
    if ours:
        for option, value in of_files.items():
            if value:
                raise UsageError(f"{option} is about a file that another tool made, and {out} is nlpconvert's own")
        return
    if reference is None:
        if out.is_file() or (out / "model.onnx").is_file():
            raise UsageError(f"{out} is not nlpconvert's own; judge a file by a model: --reference MODEL")
        if not out.exists():
            raise UsageError(f"{out}: no such file or directory")
        from nlpconvert import manifest

        manifest.read(out)  # says what is missing
    for option, value in of_directories.items():
        if value:
            raise UsageError(f"{option} is about nlpconvert's own; keep it with -o OUT, then verify OUT")


def _check_reports(out: Path | None, **targets: Path | None) -> None:
    """UsageError for a report that would destroy another, or what is verified: told before any work."""
    seen: dict[Path, str] = {}
    for name, target in targets.items():
        if target is None or (name == "json" and str(target) == "-"):
            continue
        place = target.absolute()
        if str(target) in ("-", ".") or place.is_dir():
            raise UsageError(f"--{name} {target}: give the name of a file")
        above = next(parent for parent in place.parents if parent.exists())
        if not above.is_dir():
            raise UsageError(f"--{name}: cannot write {target}: {above} is not a directory")
        if place in seen:
            raise UsageError(f"--{name} and --{seen[place]} would both write {target}")
        seen[place] = name
        home = None if out is None else out.absolute()
        if home is not None and home in place.parents:
            inside = place.relative_to(home)
            if (len(inside.parts) > 1 and (home / inside.parts[0]).is_dir()) or inside.name == "nlpconvert.json":
                raise UsageError(f"--{name} {target} lies in what is verified; write it elsewhere")


def _documents(
    outcomes: Sequence[Outcome],
    out: Path | None,
    said: str,
    junit: Path | None,
    json: Path | None,
    html: Path | None,
    code: int,
    forgiven: Sequence[str],
) -> None:
    from nlpconvert import disk, documents, github

    if junit is not None:
        disk.write_text_atomic(junit, documents.junit(outcomes, out=said))
    if json is not None and str(json) == "-":
        print(documents.to_json(outcomes), end="")
    elif json is not None:
        disk.write_text_atomic(json, documents.to_json(outcomes))
    if html is not None:
        from datetime import UTC, datetime

        from nlpconvert import html as page
        from nlpconvert import manifest

        recorded = manifest.read(out).to_json() if out is not None else None
        when = datetime.now(UTC).isoformat(timespec="seconds")
        text = page.render(
            outcomes, out=said, recorded=recorded, recipes=page.recipes(outcomes), exit_code=code, when=when
        )
        disk.write_text_atomic(html, text)
    if github.here(os.environ):
        shown = f"{out}/nlpconvert.json" if out is not None and not out.is_absolute() else ""
        for line in github.annotations(outcomes, forgiven=forgiven, file=shown):
            print(line, file=sys.stderr)
        place = os.environ.get(github.SUMMARY)
        if place:
            try:
                with open(place, "a", encoding="utf-8") as file:
                    file.write(github.summary(outcomes, out=said))
            except OSError as error:
                print(f"nlpconvert: the step summary was not written: {error}", file=sys.stderr)


def locate(
    out: Annotated[Path, typer.Argument(help="A directory that nlpconvert has made.", show_default=False)],
    step: Annotated[str, typer.Option(help="The step that moved.", show_default=False)],
    against: Annotated[str | None, typer.Option(help="Another ONNX step; else the one it was made from.")] = None,
    model: Annotated[str | None, typer.Option(help="The model it was made from, run in PyTorch.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this probe case.")] = None,
    threads: Threads = None,
    trust_remote_code: RemoteCode = False,
    svg: Annotated[Path | None, typer.Option(help="Write the plot here.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Which module of a step moved first: the drift that arrives at each, and what it introduces itself."""
    from nlpconvert import disk, pipeline, report_located

    given = options(threads=threads, trust_remote_code=trust_remote_code)
    with Terminal(quiet) as terminal:
        found = pipeline.locate(out, step, against=against, model=model, cases=case, options=given, progress=terminal)
        terminal.stop()
    if svg is not None:
        disk.write_text_atomic(svg, report_located.plot(found))
    if json:
        import json as format_json

        print(format_json.dumps(found.to_dict(), indent=2))
    else:
        for line in report_located.lines(found, verbose=verbose):
            print(line)


def diff(
    old: Old,
    new: Old,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 1 where task, checkpoint, probes or any step differs.")
    ] = False,
    json: Json = False,
) -> None:
    """What differs between two manifests: verdicts, measures, bounds, files, versions, machine. Nothing is run."""
    from nlpconvert import comparing, report_diff

    found = comparing.diff(old, new)
    if json:
        import json as format_json

        print(format_json.dumps(found.to_dict(), indent=2))
    else:
        for line in report_diff.lines(found):
            print(line)
    if exit_code and found.differs:
        raise typer.Exit(1)
