"""Floor 5: the command `generate`: signature and help, and how texts are shown; nothing is decided here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nlpconvert.errors import UsageError
from nlpconvert.options import Json, Quiet, RemoteCode, Revision, Threads

if TYPE_CHECKING:
    from nlpconvert.generated import Generated

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

Subject = Annotated[
    Path,
    typer.Argument(help="A step's directory (out/onnx), an OUT, or graphs with config.json.", show_default=False),
]
Prompts = Annotated[
    list[str] | None,
    typer.Argument(help="Texts to write on from; - reads them from standard input, one a line.", show_default=False),
]


def generate(
    artifact: Subject,
    prompts: Prompts = None,
    data: Annotated[
        Path | None, typer.Option(help="Prompts: a .txt with one a line, or the column text of a .jsonl or .csv.")
    ] = None,
    step: Annotated[str | None, typer.Option(help="Which step of an OUT, instead of onnx.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to write at most; else as generation_config.json says.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens (transformers) instead of the best.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the drawing (0).", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the drawing.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among so many best tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the best that have this share together.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what stands already.")] = None,
    beams: Annotated[int | None, typer.Option(min=1, help="Search with so many beams (transformers).")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a row; may be given several times.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Prompts at a time; else all in one batch.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Read prompts so many tokens at a time.")] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Show token ids; prompts of numbers alone (5 17 3) are ids too.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="PyTorch writes too; the first difference of each text is marked.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The model for --compare, if not where it was.")] = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    provider: Annotated[str, typer.Option(help="What ONNX Runtime runs on: cpu or cuda.")] = "cpu",
    threads: Threads = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write on from prompts with an artifact that keeps a cache. Greedy needs neither torch nor the model.

    With --compare it ends in 1 where a float32 artifact writes something else than PyTorch and it is no near tie.
    """
    from nlpconvert import generating, report_generated, subjects

    texts = _prompts(prompts or [], data)
    subject = subjects.find(artifact, step)
    show = _Terminal(texts, ids, pair=subject.pair, whole=json)
    made = generating.generate(
        subject,
        texts,
        ids=ids,
        batch=batch,
        provider=provider,
        threads=threads,
        compare=compare,
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        on_text=show.more if show.streams else None,
        max_new_tokens=max_new_tokens,
        sample=sample,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        beams=beams,
        stop=stop or None,
        chunk=chunk,
    )
    found = made.to_dict()
    if json:
        print(report_generated.to_json(found), end="")
    else:
        show.rows(made)
        if made.compared is not None:
            print()
            for line in report_generated.comparison(found):
                print(line)
    if not quiet:
        for line in made.notes:
            print(line, file=sys.stderr)
        if not json:
            print(report_generated.speed(found), file=sys.stderr)
    raise typer.Exit(made.exit_code)


def _prompts(given: list[str], data: Path | None) -> list[str]:
    from nlpconvert import prompting

    texts: list[str] = []
    if (str(data) == "-" and "-" in given) or given.count("-") > 1:
        raise UsageError("standard input can be read once: give - once")
    for each in given:
        texts += prompting.read_prompts(Path("-")) if each == "-" else [each]
    return texts if data is None else [*texts, *prompting.read_prompts(data)]


class _Terminal:
    """Texts on standard output: prompts dimmed on a terminal, and one that is alone told as it grows."""

    def __init__(self, prompts: list[str], ids: bool, *, pair: bool, whole: bool) -> None:
        self._colours = sys.stdout.isatty()
        self._ids, self._between = ids, "\n" if pair else ""
        self._prompt = prompts[0] if prompts else ""
        self.streams = self._colours and len(prompts) == 1 and not ids and not whole
        self._begun = False

    def more(self, text: str) -> None:
        """What has come of the one text."""
        if not self._begun:
            self._begun = True
            sys.stdout.write(self._dim(self._prompt) + self._between)
        sys.stdout.write(self._safe(text))
        sys.stdout.flush()

    def rows(self, made: Generated) -> None:
        """All texts; of one that was told already its end."""
        for number, row in enumerate(made.rows):
            if self._begun:
                print()
                return
            if number:
                print()
            if self._ids:
                print(self._dim(" ".join(map(str, row.prompt_ids))) + (self._between or " "), end="")
                print(*row.ids)
            else:
                print(f"{self._dim(row.prompt)}{self._between}{self._safe(row.text)}")

    def _dim(self, text: str) -> str:
        return f"{DIM}{self._safe(text)}{PLAIN}" if self._colours else text

    def _safe(self, text: str) -> str:
        """On a terminal without what would command it: a model may write any byte."""
        return CONTROLS.sub(lambda each: repr(each[0])[1:-1], text) if self._colours else text
