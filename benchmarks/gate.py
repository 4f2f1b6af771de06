"""Benchmarks: what the gate costs beside verifying: in CI without torch, with `--prove`, and `locate`.

All against ONNX Runtime's bare passes of the same inputs, which is what a person who checks nothing waits for.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from measure import HERE, Result, Settings, child, in_turns, row

TITLE = "The gate"

# As a machine in CI has it: the base and the extra `verify`, and nothing that only converting needs.
ALONE = """
import sys

ABSENT = "torch transformers onnxscript onnx_ir polygraphy tensorrt tensorrt_rtx huggingface_hub sentencepiece".split()


class Blind:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Blind(finder) for finder in sys.meta_path]
from nlpconvert import cli

sys.argv[0] = "nlpconvert"
cli.main()
"""


def measure(settings: Settings) -> Result:
    """Converts once, then every side in turns."""
    threads, out = settings.threads, settings.scratch / "gate"
    own: list[str | Path] = [] if threads is None else ["--threads", str(threads)]
    child(["-m", "nlpconvert", "run", settings.model, "-o", out, "--to", "onnx-optimized", "-q", *own], threads=threads)
    verify: list[str | Path] = ["verify", out, "--step", "onnx", *own]
    ours: dict[str, list[str | Path]] = {
        "alone": ["-c", ALONE, *verify, "-q"],
        "prove": ["-m", "nlpconvert", *verify, "--prove", "--json", "-"],
        "between": ["-m", "nlpconvert", "locate", out, "--step", "onnx-optimized", "--json", "-q", *own],
        "model": ["-m", "nlpconvert", "locate", out, "--step", "onnx", "--model", settings.model, "--json", "-q", *own],
    }
    bare: list[str | Path] = [HERE / "bare_forward.py", out, *([] if threads is None else [str(threads)])]
    sides = {name: (lambda arguments=arguments: child(arguments, threads=threads)) for name, arguments in ours.items()}
    found = in_turns({**sides, "bare": lambda: child(bare, threads=threads)}, settings.times(3))
    said = {name: json.loads(_object(found[name][0].printed)) for name in ("prove", "between", "model")}
    proof = said["prove"]["steps"][0]["verdict"]["proof"]
    tried = [trial for trial in proof["trials"] if trial["status"] != "does not apply"]
    seen = sum(trial["status"] == "seen" for trial in tried)
    rows = (
        row("`nlpconvert verify` where torch is not installed / bare passes", found["alone"], found["bare"]),
        row("`nlpconvert verify --prove` / bare passes", found["prove"], found["bare"]),
        row("`nlpconvert locate`, two ONNX files / bare passes", found["between"], found["bare"]),
        row("`nlpconvert locate --model`, in PyTorch / bare passes", found["model"], found["bare"]),
    )
    smallest = proof["smallest"]
    notes = (
        f"The proof breaks the file in {len(tried)} ways, of which the gate saw {seen}, and judges all "
        f"{said['prove']['steps'][0]['verdict']['cases']} cases each time; the smallest nudge it sees of "
        f"`{smallest['module']}` is {100 * smallest['share']:.2g} %. `locate` asked "
        f"{len(said['between']['cases'])} cases and held {len(said['between']['modules'])} tensors of the two files, "
        f"{len(said['model']['modules'])} of the model, against each other.",
    )
    return Result(rows, notes)


def _object(printed: str) -> str:
    """The JSON object among what was printed."""
    found = re.search(r"\{.*\}", printed, re.DOTALL)
    assert found is not None, printed[-500:]
    return found.group()
