"""disk: swaps that are whole or not there, one lock, hashes, and a full disk told in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nlpconvert import disk
from nlpconvert.errors import ConversionError, DriftError, UsageError


def fill(directory: Path, text: str) -> Path:
    """A directory of two files, one of them in a folder."""
    (directory / "deep").mkdir(parents=True)
    (directory / "model.onnx").write_text(text)
    (directory / "deep" / "model.onnx.data").write_text(text * 2)
    return directory


def names(directory: Path) -> set[str]:
    """The entries of a directory."""
    return {path.name for path in directory.iterdir()}


# --- hashing and paths -----------------------------------------------------------------------------------------------


def test_hash_tree_names_every_file_in_order(tmp_path: Path) -> None:
    """Relative paths with "/", sorted; a link to a file inside counts as that file."""
    fill(tmp_path / "onnx", "a")
    (tmp_path / "onnx" / "again").symlink_to("model.onnx")
    hashes = disk.hash_tree(tmp_path / "onnx")
    assert list(hashes) == ["again", "deep/model.onnx.data", "model.onnx"]
    assert hashes["again"] == hashes["model.onnx"] == disk.sha256_file(tmp_path / "onnx" / "model.onnx")
    assert hashes["model.onnx"] == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


def test_hash_tree_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    """Links that lead out, linked directories, devices and pipes (reading one would wait for ever)."""
    (tmp_path / "secret").write_text("s")
    for name, message in (("out", "leads out"), ("folder", "linked directory"), ("pipe", "not a regular file")):
        directory = fill(tmp_path / name, "a")
        if name == "out":
            (directory / "x").symlink_to(tmp_path / "secret")
        elif name == "folder":
            (directory / "x").symlink_to(directory / "deep")
        else:
            os.mkfifo(directory / "x")
        with pytest.raises(UsageError, match=message):
            disk.hash_tree(directory)
    with pytest.raises(UsageError, match="not a directory"):
        disk.hash_tree(tmp_path / "nowhere")


@pytest.mark.parametrize("relative", ["", ".", "/etc/passwd", "../x", "onnx/../../x", "onnx/..", "a\0b"])
def test_inside_refuses_paths_that_lead_out(tmp_path: Path, relative: str) -> None:
    """Absolute, upwards, empty."""
    with pytest.raises(UsageError, match="is not a path inside"):
        disk.inside(tmp_path, relative)


def test_inside_follows_links(tmp_path: Path) -> None:
    """A link out is refused wherever it stands in the path, a loop too; a plain path need not exist."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "away").symlink_to(tmp_path)
    (out / "loop").symlink_to("loop")
    assert disk.inside(out, "onnx/model.onnx") == out / "onnx" / "model.onnx"
    for relative in ("away", "away/x"):
        with pytest.raises(UsageError, match=r"leads out of .* through a link"):
            disk.inside(out, relative)
    with pytest.raises(UsageError, match="loop"):
        disk.inside(out, "loop/x")


# --- building and swapping -------------------------------------------------------------------------------------------


def test_build_and_replace(tmp_path: Path) -> None:
    """The first one, then another over it: only the new one's files are there, and nothing is left aside."""
    for text in ("one", "two"):
        with disk.building(tmp_path, "onnx") as new:
            assert new.parent == tmp_path and not names(new)
            fill(new, text)
            (new / text).write_text(text)
        disk.replace_directory(new, tmp_path / "onnx")
        assert names(tmp_path / "onnx") == {"deep", "model.onnx", text}
        assert names(tmp_path) == {"onnx"}


@pytest.mark.parametrize("stop", [RuntimeError("builder"), KeyboardInterrupt(), SystemExit(3)])
def test_building_leaves_nothing_when_stopped(tmp_path: Path, stop: BaseException) -> None:
    """Any exception, Ctrl-C included, passes through and the half artifact is gone; the old one stands."""
    fill(tmp_path / "onnx", "old")
    with pytest.raises(type(stop)), disk.building(tmp_path, "onnx") as new:
        fill(new, "half")
        raise stop
    assert names(tmp_path) == {"onnx"}
    assert (tmp_path / "onnx" / "model.onnx").read_text() == "old"


@pytest.mark.parametrize("renames", [0, 1, 2])
@pytest.mark.parametrize("had_one", [True, False])
def test_repair_after_a_kill_at_every_stage(tmp_path: Path, renames: int, had_one: bool) -> None:
    """A process killed before the first, between the two and after the second rename: the final one is always whole."""
    if had_one:
        fill(tmp_path / "onnx", "old")
    code = f"""
import os, pathlib, signal, sys
from nlpconvert import disk
out = pathlib.Path(sys.argv[1])
left, rename = {renames}, pathlib.Path.rename
def counted(self, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return rename(self, target)
pathlib.Path.rename = counted
with disk.building(out, "onnx") as new:
    (new / "model.onnx").write_text("new")
disk._remove = lambda path: os.kill(os.getpid(), signal.SIGKILL) if left == 0 and {renames} == 2 else None
disk.replace_directory(new, out / "onnx")
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    swapped = renames == 2 or (renames == 1 and not had_one)
    assert ended.returncode == (0 if swapped and not had_one else -signal.SIGKILL)
    done = disk.repair(tmp_path)
    if swapped:
        assert (tmp_path / "onnx" / "model.onnx").read_text() == "new"
    elif had_one:
        assert (tmp_path / "onnx" / "model.onnx").read_text() == "old"
        assert (tmp_path / "onnx" / "deep").is_dir()
    assert names(tmp_path) == ({"onnx"} if swapped or had_one else set())
    assert ("put back" in " ".join(done)) == (had_one and renames == 1)
    assert disk.repair(tmp_path) == []


def test_an_error_in_the_swap_puts_the_old_one_back(tmp_path: Path) -> None:
    """The new one cannot be renamed (it is gone): the old one stands in its place again."""
    final, new = fill(tmp_path / "onnx", "old"), fill(tmp_path / "new", "new")
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self == new:
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        with pytest.raises(OSError, match="Input/output"):
            disk.replace_directory(new, final)
    assert (final / "model.onnx").read_text() == "old"
    assert names(tmp_path) == {"onnx", "new"}


def test_replace_does_not_follow_a_link(tmp_path: Path) -> None:
    """A final that is a link to a directory elsewhere is replaced itself; what it led to is left alone."""
    elsewhere = fill(tmp_path / "elsewhere", "kept")
    out = tmp_path / "out"
    out.mkdir()
    (out / "onnx").symlink_to(elsewhere)
    with disk.building(out, "onnx") as new:
        fill(new, "new")
    disk.replace_directory(new, out / "onnx")
    assert not (out / "onnx").is_symlink() and names(out) == {"onnx"}
    assert (elsewhere / "model.onnx").read_text() == "kept"


def test_repair_touches_only_its_own(tmp_path: Path) -> None:
    """Names that other programs use stay, as does a directory that is not there."""
    for name in (".onnx.new-12", ".old-1", "onnx.nlpconvert.new-1", ".git"):
        (tmp_path / name).mkdir()
    (tmp_path / ".nlpconvert.json.nlpconvert.new-77").write_text("{")
    done = disk.repair(tmp_path)
    assert len(done) == 1 and "was removed" in done[0]
    assert names(tmp_path) == {".onnx.new-12", ".old-1", "onnx.nlpconvert.new-1", ".git"}
    assert disk.repair(tmp_path / "nowhere") == []


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A text that cannot be encoded leaves the old file and nothing beside it."""
    path = tmp_path / "a.txt"
    disk.write_text_atomic(path, "räder\n")
    assert path.read_bytes() == "räder\n".encode()
    with pytest.raises(UnicodeEncodeError):
        disk.write_text_atomic(path, "half, then \ud800")
    assert path.read_bytes() == "räder\n".encode()
    assert names(tmp_path) == {"a.txt"}


def test_a_write_makes_its_directory_and_leaves_devices_alone(tmp_path: Path) -> None:
    """A rename over /dev/null or /dev/stdout would take it from every program on the machine."""
    disk.write_text_atomic(tmp_path / "reports" / "deep" / "a.xml", "x")
    assert (tmp_path / "reports" / "deep" / "a.xml").read_text() == "x"
    disk.write_text_atomic(Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(ConversionError, match="no room left for /dev/full"):
        disk.write_text_atomic(Path("/dev/full"), "x")
    with pytest.raises(UsageError, match=r"cannot write .*: Is a directory"):
        disk.write_text_atomic(tmp_path / "reports", "x")


def test_json_is_strict_and_keeps_its_order(tmp_path: Path) -> None:
    """NaN and infinities are words that float() reads back, numpy scalars numbers, keys in the order given."""
    data = {"b": (1, np.int64(2), np.float32(0.5), np.bool_(True)), "a": [float("nan"), -np.inf, np.float32("inf")]}
    disk.write_json_atomic(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text()

    def refuse(word: str) -> float:
        raise AssertionError(word)

    assert json.loads(text, parse_constant=refuse) == {"b": [1, 2, 0.5, True], "a": ["nan", "-inf", "inf"]}
    assert list(json.loads(text)) == ["b", "a"]
    with pytest.raises(TypeError):
        disk.json_text({"a": object()})


# --- what a disk refuses ---------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """/dev/full is the kernel's own full device."""
    with pytest.raises(ConversionError) as told, disk.disk_errors(tmp_path), open("/dev/full", "w") as file:
        file.write("x" * 100_000)
    assert str(told.value).startswith(f"no room left for {tmp_path}: ") and " free; make room" in str(told.value)
    assert "No space left" in told.value.detail and told.value.exit_code == 3


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        ConversionError("torch.onnx.export failed", detail="OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_by_other_words(tmp_path: Path, error: Exception) -> None:
    """Quotas, and libraries and converters that wrap the reason; said once however many ask."""
    inner = tmp_path / "inner"
    with pytest.raises(ConversionError) as told, disk.disk_errors(tmp_path), disk.disk_errors(inner):
        raise error
    assert str(told.value).startswith(f"no room left for {inner}: ")
    assert str(told.value).count("no room") == 1


def test_a_library_that_hides_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says "unexpected pos", numpy "requested and written": the disk is asked; with room the error passes."""
    hidden = (RuntimeError("unexpected pos 576 vs 534"), OSError("2000 requested and 7 written"))
    for error in hidden:
        with pytest.raises(type(error)) as passed, disk.disk_errors(tmp_path):
            raise error
        assert passed.value is error
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    for error in hidden:
        with pytest.raises(ConversionError, match="0 bytes free"), disk.disk_errors(tmp_path):
            raise error
    with pytest.raises(DriftError), disk.disk_errors(tmp_path):
        raise DriftError("moved")


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of two megabytes, where this process may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_really_full_disk(tmp_path: Path) -> None:
    """Half an artifact on a full disk is removed, the line names OUT and what was free, and the old one stands."""
    with small_disk(tmp_path):
        fill(tmp_path / "onnx", "old")
        with pytest.raises(ConversionError) as told, disk.building(tmp_path, "onnx") as new:
            np.zeros(1 << 20, np.float32).tofile(new / "model.onnx.data")
        assert str(told.value).startswith(f"no room left for {tmp_path}: ")
        assert names(tmp_path) == {"onnx"}
        text = "x" * (3 << 20)
        with pytest.raises(ConversionError, match="no room left"):
            disk.write_text_atomic(tmp_path / "a.json", text)
        assert names(tmp_path) == {"onnx"}
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(UsageError, match=r"cannot write .*Read-only"):
            disk.write_text_atomic(tmp_path / "a.json", "x")
        with pytest.raises(UsageError, match=r"cannot write .*Read-only"), disk.lock(tmp_path):
            pass


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_what_may_not_be_written_is_a_usage_error(tmp_path: Path, code: int) -> None:
    """Of this path, or a directory above it; an error of another path is not this one's and passes."""
    for named in (tmp_path / "onnx", tmp_path.parent):
        with pytest.raises(UsageError, match=f"cannot write {named}: {os.strerror(code)}"), disk.disk_errors(tmp_path):
            raise OSError(code, os.strerror(code), str(named))
    with pytest.raises(OSError), disk.disk_errors(tmp_path):
        raise OSError(code, os.strerror(code), "/elsewhere/model.safetensors")


# --- the lock --------------------------------------------------------------------------------------------------------

HOLD = """
import pathlib, sys
from nlpconvert import disk
with disk.lock(pathlib.Path(sys.argv[1]), "nlpconvert run"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(out: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its input closes."""
    command = [sys.executable, "-c", HOLD, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process


def test_two_processes_contend_for_the_lock(tmp_path: Path) -> None:
    """The second is told who holds it and since when; when the first leaves, it may go on."""
    out = tmp_path / "new" / "out"
    with holder(out) as process:
        with pytest.raises(UsageError) as told, disk.lock(out):
            pass
        assert f"{out} is in use by process {process.pid} (nlpconvert run, since " in str(told.value)
        assert str(told.value).endswith("); wait for it or give another directory")
        assert (out / disk.LOCK).exists()
        process.communicate("")
        assert process.returncode == 0
    assert not out.exists()
    with disk.lock(out):
        assert names(out) == {disk.LOCK}


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    """Its file is still there, but the kernel has dropped the lock."""
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert names(tmp_path) == {disk.LOCK}
        with disk.lock(tmp_path):
            pass
    assert not names(tmp_path)


def test_the_lock_is_dropped_on_an_error_and_what_was_made_stays(tmp_path: Path) -> None:
    """Also within one process a second lock of the same OUT is refused."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), disk.lock(out):
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"), disk.lock(out):
            pass
        (out / "onnx").mkdir()
        raise KeyboardInterrupt
    assert names(out) == {"onnx"}


def test_a_lock_file_deleted_meanwhile_locks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder before deletes the file between our opening and our locking it: ours must be the one others open."""
    flock = fcntl.flock
    calls: list[int] = []

    def late(handle: int, operation: int) -> None:
        if not calls:
            (tmp_path / disk.LOCK).unlink()
        calls.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with disk.lock(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UsageError, match="in use"), disk.lock(tmp_path):
            pass


def test_a_lock_file_that_never_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network disks give a file another identity at every look: told, not tried for ever."""
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    with pytest.raises(UsageError, match="does not stay the same"), disk.lock(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A stranger's OUT must not make us write into another file; a file where OUT should be is refused too."""
    (tmp_path / "precious").write_text("kept")
    out = tmp_path / "out"
    out.mkdir()
    (out / disk.LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match="cannot write"), disk.lock(out):
        pass
    with pytest.raises(UsageError, match=r"cannot write .*precious"), disk.lock(tmp_path / "precious"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_lock_note_of_another_hand(tmp_path: Path) -> None:
    """What stands in the lock file is shown only when it is plain words."""
    with disk.lock(tmp_path):
        note = {"pid": 1, "command": "\x1b[2J", "since": "2026-01-02T10:31:00", "host": "elsewhere"}
        for text in (json.dumps(note), "no json", "[]", ""):
            (tmp_path / disk.LOCK).write_text(text)
            with pytest.raises(UsageError, match="in use by another process"), disk.lock(tmp_path):
                pass
        (tmp_path / disk.LOCK).write_text(json.dumps(note | {"command": "x"}))
        shown = r"process 1 on elsewhere \(x, since 2026-01-02 10:31\)"
        with pytest.raises(UsageError, match=shown), disk.lock(tmp_path):
            pass
