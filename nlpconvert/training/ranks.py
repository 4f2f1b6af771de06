"""Floor 2: the processes that train together: gradients summed over them, and one's failure told to all.

Which process this is says `world`. Gradients travel in one flat buffer, each rank's weighted with its number of
targets, so that any division of the same rows gives the same step. What a rank fails with lies in the store where they
met before it leaves, so that the others end with its words and not with a broken connection.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from nlpconvert.errors import CannotRunHere, NlpconvertError, first_line
from nlpconvert.training.world import World

dist: Any = torch.distributed

MEETING = datetime.timedelta(seconds=120)
"""How long the ranks wait for each other at the start."""
PATIENCE = datetime.timedelta(hours=12)
"""How long a rank waits for another that is alive: the first one converts and judges a model meanwhile."""
GRACE = 5.0
"""Seconds that a failing rank waits for the first one to have read its words."""
_FAILED, _HEARD, _READ = "failed", "heard by the first", "read"


class RankFailed(NlpconvertError):
    """Another rank ended the run: its words, and its exit code. `heard`: whether the first rank is there to say so."""

    def __init__(self, message: str, code: int, heard: bool = True) -> None:
        super().__init__(message)
        self.exit_code = code
        self.heard = heard


class Ranks:
    """The processes of a run, of which there may be one. Made by `meet`."""

    def __init__(self, world: World, store: Any = None) -> None:
        self.world = world
        self._store = store
        self._processes: list[str] = []
        if store is not None:
            self._processes = [store.get(f"process {rank}").decode() for rank in range(world.size)]

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world.size > 1

    # -- sums -----------------------------------------------------------------------------------------------------

    def sum(self, buffer: torch.Tensor) -> None:
        """Adds a tensor up over all ranks, in place. RankFailed where another has ended."""
        if self.several:
            with self._watched():
                dist.all_reduce(buffer)

    def total(self, *values: float) -> list[float]:
        """Each value's sum over all ranks, in float64."""
        held = torch.tensor(values, dtype=torch.float64)
        if self.several:
            with self._watched():
                dist.all_reduce(held)
        return [float(each) for each in held]

    def told_by_first(self, value: Any) -> Any:
        """What the first rank says, as plain data; the others' value is not looked at."""
        if not self.several:
            return value
        words = [json.dumps(value)] if self.world.first else [""]
        with self._watched():
            dist.broadcast_object_list(words, src=0)
        return json.loads(words[0])

    # -- ends -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except NlpconvertError:
            raise
        except Exception as error:  # what a broken connection raises differs by backend
            raise self.reason(error) from error

    def reason(self, error: BaseException) -> RankFailed:
        """Why a rank cannot go on with the others: what one of them said, or which of them is gone."""
        told, gone = self._news()
        if told is not None:
            return RankFailed(f"rank {told['rank']} ended the run: {told['message']}", int(told["code"]))
        if gone:
            who = f"rank {gone[0]} has" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} have"
            words = f"{who} ended without a word (killed, or out of memory)"
        else:
            words = f"the connection to another rank broke ({first_line(error, 120)})"
        advice = "the run is ended on all ranks; --resume goes on from the last checkpoint"
        return RankFailed(f"{words}: {advice}", 1, heard=0 not in gone)

    def ended(self) -> bool:
        """Whether another rank has failed, or is gone."""
        told, gone = self._news()
        return told is not None or bool(gone)

    def tell(self, message: str, code: int) -> bool:
        """Says why this rank ends. Whether the first rank, which speaks, has read it or ends by itself."""
        if not self.several:
            return False
        try:
            mine = json.dumps({"rank": self.world.rank, "message": message, "code": code})
            first = self._store.compare_set(_FAILED, "", mine).decode() == mine
            self.leave()  # whoever waits for this rank in a sum is woken by it
            if self.world.first:
                self._store.set(_HEARD, "1")  # it ends by itself, and speaks
                # The store may be this process's own: the others read before it goes.
                _wait(lambda: self._store.add(_READ, 0) >= self.world.size - 1)
                return True
            heard = not first or _wait(lambda: self._store.check([_HEARD]))
            self._store.add(_READ, 1)
            return heard
        except Exception:  # the store has gone with its process: then nobody is left to be told
            return False

    def leave(self) -> None:
        """Closes the connections to the other ranks."""
        if self.several and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    def _news(self) -> tuple[Mapping[str, Any] | None, list[int]]:
        """What a failing rank has said, and which ranks on this machine are gone.

        A rank speaks before it leaves, but its leaving may be noticed first.
        """
        with contextlib.suppress(Exception):
            if _wait(lambda: bool(self._gone()) or self._store.check([_FAILED]), 2.0) and (
                0 not in self._gone() and self._store.check([_FAILED])
            ):
                found: Mapping[str, Any] = json.loads(self._store.get(_FAILED))
                self._store.add(_READ, 1)
                if self.world.first:
                    self._store.set(_HEARD, "1")
                return found, []
        # A process closes its connections a moment before it is gone.
        _wait(lambda: bool(self._gone()), 1.0)
        return None, self._gone()

    def _gone(self) -> list[int]:
        """Ranks on this machine whose process is no more."""
        here = f"{_machine()} "
        told = enumerate(self._processes)
        return [rank for rank, each in told if each.startswith(here) and not _lives(int(each.removeprefix(here)))]


@contextlib.contextmanager
def meet(world: World, device: str = "cpu") -> Iterator[Ranks]:
    """The ranks, connected: by NCCL where they compute on GPUs, else by gloo. They part when this is left.

    Raises CannotRunHere, in one line, where they do not find each other. An error that leaves it is told to the others:
    of another rank than the first it becomes a RankFailed where the first one says it.
    """
    if world.size == 1:
        yield Ranks(world)
        return
    ranks = Ranks(world, _store(world))
    try:
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            store=dist.PrefixStore("group", ranks._store),
            rank=world.rank,
            world_size=world.size,
            timeout=PATIENCE,
        )
        yield ranks
    except RankFailed:
        raise
    except KeyboardInterrupt as error:
        # A launcher that sees one rank end stops the others.
        if ranks.ended():
            raise ranks.reason(error) from error
        ranks.tell("it was interrupted", 130)
        raise
    except NlpconvertError as error:
        if ranks.tell(str(error), error.exit_code) and not world.first:
            raise RankFailed(str(error), error.exit_code) from error
        raise
    except BaseException as error:
        ranks.tell(f"{type(error).__name__}: {first_line(error)}", 3)
        raise
    finally:
        ranks.leave()


def use_threads(count: int | None, world: World) -> int:
    """Sets PyTorch's threads, to `count` or, of several ranks on a machine that nobody has told, to a fair share.

    How many they are now.
    """
    if count is None and world.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        count = max(1, (os.cpu_count() or 1) // world.local_size)
    if count is not None:
        torch.set_num_threads(count)
    return int(torch.get_num_threads())


def _store(world: World) -> Any:
    """Where the ranks leave words for each other; each leaves its process number."""
    try:
        # torchrun keeps one for its workers and says so; else the first rank keeps it.
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            world.address, world.port, world.size, is_master=world.first and not kept, timeout=MEETING
        )
        store = dist.PrefixStore(f"nlpconvert {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(f"process {world.rank}", f"{_machine()} {os.getpid()}")
        store.wait([f"process {rank}" for rank in range(world.size)], MEETING)
    except Exception as error:
        raise CannotRunHere(
            f"rank {world.rank} of {world.size} ({world.launcher}) did not meet the others at {world.address}:"
            f"{world.port}: {first_line(error, 120)}"
        ) from error
    return store


def _wait(done: Any, seconds: float = GRACE) -> bool:
    """Whether something comes true within some seconds."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _machine() -> str:
    """Where process numbers mean the same: a host, and in it a container."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{space}"


def _lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and was not fetched by its parent does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except OSError:
        return True


# -- gradients ---------------------------------------------------------------------------------------------------------


class Gradients:
    """Gradients of several micro-batches and ranks as those of one batch: a mean over all targets.

    `add` after each micro-batch, `finish` once a step: then `.grad` of every parameter holds the mean, in the tensor
    that the engine writes to.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], ranks: Ranks) -> None:
        self._parameters, self._ranks = parameters, ranks
        for each in parameters:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._loss, self._targets, self._alone = 0.0, 0, False

    @property
    def _gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self._parameters if each.grad is not None]

    def add(self, loss: float, targets: int, alone: bool = False) -> None:
        """The gradients that an engine has just made, of a mean over so many targets.

        `alone`: nothing else is added in this step. Of one process they then stay where they are.
        """
        self._loss += loss * targets
        self._targets += targets
        self._alone = alone and not self._ranks.several
        if targets and not self._alone:
            self._hold()
            torch._foreach_add_(self._views, self._gradients, alpha=float(targets))

    def finish(self) -> tuple[float, int]:
        """The step's mean loss and its targets, over all ranks; without any target a loss and gradients of 0."""
        loss, targets = self._ranks.total(self._loss, float(self._targets))
        if not self._alone or not targets:
            flat = self._hold()
            self._ranks.sum(flat)
            flat.div_(max(targets, 1.0))
            torch._foreach_copy_(self._gradients, self._views)
            flat.zero_()
        self._loss, self._targets, self._alone = 0.0, 0, False
        return loss / max(targets, 1.0), int(targets)

    def _hold(self) -> torch.Tensor:
        """One buffer for all gradients: one message to the other ranks."""
        if self._flat is None:
            size = sum(each.numel() for each in self._parameters)
            self._flat = self._parameters[0].detach().new_zeros(size)
            start = 0
            for each in self._parameters:
                self._views.append(self._flat[start : start + each.numel()].view_as(each))
                start += each.numel()
        return self._flat
