"""Floor 2: what a run of training has come to, on disk: checkpoints to go on from, and models to take away.

    checkpoints/step-00000120/weights.safetensors      parameters by name
    checkpoints/step-00000120/optimizer.safetensors    the optimizer's tensors, as "exp_avg/<parameter>"
    checkpoints/step-00000120/state.json               the step, what the loop remembers, what the run was; hashes

No pickle. A checkpoint is built aside and renamed when it is whole; its hashes are checked when it is read, and where
it is not whole the one before is taken.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nlpconvert import disk
from nlpconvert.errors import UsageError
from nlpconvert.models import TOKENIZER_FILES

DIRECTORY = "checkpoints"
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_PREFIX = "step-"


@dataclass(frozen=True)
class State:
    """A checkpoint: after how many steps, what the loop remembers (`memory`, plain JSON), what the run was (`run`)."""

    step: int
    memory: Mapping[str, Any]
    run: Mapping[str, Any]
    path: Path


class States:
    """The checkpoints of one run. The lock of `out` must be held by whoever saves."""

    def __init__(self, out: Path, run: Mapping[str, Any]) -> None:
        self.directory = out / DIRECTORY
        self.run = json.loads(json.dumps(run))

    # -- writing --------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        memory: Mapping[str, Any],
        best: int | None = None,
    ) -> Path:
        """Writes the checkpoint of a step, then removes all others but the one before and that of step `best`.

        The one before stays because a checkpoint is proven good only by the loss of the step after it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        final = self.path(step)
        with disk.building(self.directory, final.name) as new, disk.disk_errors(self.directory):
            save_file({name: each.detach().contiguous() for name, each in parameters.items()}, new / WEIGHTS)
            tensors, plain = _flatten(optimizer, parameters)
            save_file(tensors, new / OPTIMIZER)
            hashes = {name: disk.sha256_file(new / name) for name in (WEIGHTS, OPTIMIZER)}
            kept = {"step": step, "memory": memory, "run": self.run, "optimizer": plain, "sha256": hashes}
            disk.write_json_atomic(new / STATE, kept)
            disk.replace_directory(new, final)
        for other in self._all()[:-2]:
            if other != self.path(step if best is None else best):
                _remove(other)
        return final

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.directory / f"{_PREFIX}{step:08d}"

    def drop(self, step: int) -> None:
        """Removes the checkpoint of a step."""
        _remove(self.path(step))

    # -- reading --------------------------------------------------------------------------------------------------

    def newest(self) -> State | None:
        """The newest whole checkpoint; None where there is none. UsageError where it is of another run."""
        for path in reversed(self._all()):
            found = _read(path)
            if found is not None:
                self._same_run(found)
                return found
        return None

    def load(
        self, state: State, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Puts a checkpoint's tensors into parameters and optimizer, in place."""
        kept = json.loads((state.path / STATE).read_text(encoding="utf-8"))
        weights = load_file(state.path / WEIGHTS)
        if set(weights) != set(parameters):
            differing = sorted(set(weights) ^ set(parameters))
            raise UsageError(f"{state.path} is of another model: it differs in {', '.join(differing[:3])}")
        with torch.no_grad():
            for name, each in parameters.items():
                each.copy_(weights[name])
        _restore(optimizer, parameters, load_file(state.path / OPTIMIZER), kept["optimizer"])

    def _all(self) -> list[Path]:
        """Directories by step, those that are being built or removed left out."""
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if path.name.startswith(_PREFIX))

    def _same_run(self, found: State) -> None:
        """UsageError, by name, where what a checkpoint was made with is not what is asked for now."""
        for name, now in self.run.items():
            was = found.run.get(name)
            if was != now:
                raise UsageError(
                    f"{found.path} was made with another {name} ({_short(was)}, now {_short(now)}): give the same to "
                    "go on, or another -o to begin anew"
                )


def _short(value: Any) -> str:
    return str(value)[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _read(path: Path) -> State | None:
    """A checkpoint whose hashes are right, or None."""
    try:
        kept = json.loads((path / STATE).read_text(encoding="utf-8"))
        whole = all(disk.sha256_file(path / name) == said for name, said in kept["sha256"].items())
        return State(int(kept["step"]), kept["memory"], kept["run"], path) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remove(path: Path) -> None:
    """Removes a checkpoint; what an interruption leaves of it is no checkpoint, for its state goes first."""
    (path / STATE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


# -- an optimizer's state by parameter names ---------------------------------------------------------------------------


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """The parameters' names in the optimizer's own order."""
    by_id = {id(each): name for name, each in parameters.items()}
    return [by_id[id(each)] for group in optimizer.param_groups for each in group["params"]]


def _flatten(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's tensors by "key/parameter", and what else it keeps for a parameter."""
    names = _names(optimizer, parameters)
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{key}/{names[index]}"] = value.detach().contiguous()
            elif value is not None:
                plain[f"{key}/{names[index]}"] = value
    return tensors, plain


def _restore(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any],
) -> None:
    index = {name: number for number, name in enumerate(_names(optimizer, parameters))}
    state: dict[int, dict[str, Any]] = {}
    for joined, value in (*tensors.items(), *plain.items()):
        key, _, name = joined.partition("/")
        state.setdefault(index[name], {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


# -- a model to take away ----------------------------------------------------------------------------------------------


def write_model(module: Any, tokenizer: Any, source: Path, into: Path) -> None:
    """A trained model as a Hugging Face checkpoint in the empty directory `into`: config, safetensors, tokenizer.

    `source`: the checkpoint it began as, whose tokenizer files are taken as they are.
    """
    with disk.disk_errors(into):
        module.save_pretrained(into)
        there = [name for name in TOKENIZER_FILES if (source / name).is_file()]
        if tokenizer is not None and "tokenizer.json" not in there:
            tokenizer.save_pretrained(into)
        for name in there:
            shutil.copyfile(source / name, into / name)
