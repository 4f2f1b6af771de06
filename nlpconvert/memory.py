"""Floor 0: what this process does with its own memory: when garbage is collected, when freed memory goes back.

Exporters make millions of small objects that live to the end, and Python's collector visits them over and over. Where
it is switched off here, `give_back` collects at the moments when it pays.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection of Python's own accord inside; afterwards it is as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def give_back() -> None:
    """Frees what is held by cycles alone (a model by its exporter), and hands freed memory back to the system."""
    gc.collect()
    if sys.platform == "linux":
        import ctypes

        # glibc keeps what was freed below something still in use; musl has no such function and no need of it.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def leave_quickly() -> None:
    """At the end of the process nothing is collected once more: the system takes all of it back anyway."""
    atexit.register(gc.freeze)
