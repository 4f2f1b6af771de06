"""memory: garbage is left alone where that is asked, and collected and given back where that is."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from nlpconvert import memory


class Cycle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_inside_and_all_is_as_before_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), memory.uncollected():
        assert not gc.isenabled()
        with memory.uncollected():
            pass
        assert not gc.isenabled()  # the inner one has found it off
        raise ZeroDivisionError
    assert gc.isenabled()


def test_give_back_frees_what_only_a_cycle_holds() -> None:
    with memory.uncollected():
        held = weakref.ref(Cycle())
        assert held() is not None
        memory.give_back()
        assert held() is None


def test_give_back_where_the_system_has_no_malloc_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    memory.give_back()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_give_back_returns_freed_memory_to_the_system() -> None:
    """Many small blocks freed below one that is still in use: glibc alone would keep them."""
    code = """
from nlpconvert import memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [bytearray(4000) for _ in range(50_000)]
last = blocks[-1]
del blocks
before = resident()
memory.give_back()
print(before - resident())
"""
    freed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(freed) > 100 << 20


def test_leaving_quickly_still_runs_what_others_have_to_do_at_the_end() -> None:
    code = "import atexit, nlpconvert.memory as m; atexit.register(print, 'last words'); m.leave_quickly()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "last words\n"
