"""Floor 0: the one place that swaps, locks, repairs and hashes files and directories.

Everything that is written becomes visible by a rename: a file or a directory under its own name is always whole, and
what is not yet whole has a name beginning with a dot. What the files mean is not known here: see `manifest`, `golden`.

    OUT/.onnx.nlpconvert.new-1234    being built by process 1234
    OUT/.onnx.nlpconvert.old-1234    the one before, aside for the moment of the swap
    OUT/.lock                        there while a process works in OUT (a killed one leaves it behind, unlocked)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from nlpconvert.errors import ConversionError, NlpconvertError, UsageError

LOCK = ".lock"
# The tool's own name is in it: `repair` deletes by this pattern, and OUT may be a directory with other things in it.
_ASIDE = re.compile(r"\.(?P<name>.+)\.nlpconvert\.(?P<kind>new|old)-\d+")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_WRONG_PATH = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
# Below this the disk counts as full when a library failed without saying why (torch: "file write failed").
_NO_ROOM = 1 << 20
_WINDOW = 64 << 20


# --- hashing ---------------------------------------------------------------------------------------------------------


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes; memory does not grow with the file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Few long calls: no copies are made, and another thread works on meanwhile.
        for start in range(0, size, _WINDOW):
            with mmap.mmap(file.fileno(), min(_WINDOW, size - start), access=mmap.ACCESS_READ, offset=start) as part:
                digest.update(part)
    return digest.hexdigest()


def hash_tree(directory: Path) -> dict[str, str]:
    """The sha256 of every file below `directory`, by its relative path with "/", sorted.

    A link to a file inside is hashed as that file. A link that leads out, a linked directory and whatever is neither
    file nor directory raise UsageError: their content is not the directory's own.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory")
    root = directory.resolve()
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(directory):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise UsageError(f"{Path(folder) / name} is a linked directory; put the real one there")
        for name in files:
            path = Path(folder) / name
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UsageError(f"{path} is a link that leads out of {directory}; put the real file there")
            if not path.is_file():
                raise UsageError(f"{path} is not a regular file; remove it")
            found[path.relative_to(directory).as_posix()] = sha256_file(path)
    return dict(sorted(found.items()))


def inside(directory: Path, relative: str) -> Path:
    """`directory / relative`, when that lies inside `directory`, links followed; else UsageError. It need not exist."""
    pure = PurePosixPath(relative)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in relative:
        raise UsageError(f"{relative!r} is not a path inside {directory}")
    path = directory / pure
    try:
        leads_in = path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links
        raise UsageError(f"{relative!r} cannot be followed in {directory}: {error}") from error
    if not leads_in:
        raise UsageError(f"{relative!r} leads out of {directory} through a link")
    return path


# --- what a full or closed disk is told as ---------------------------------------------------------------------------


def _existing(path: Path) -> Path:
    """The nearest directory above `path` that exists."""
    path = path.absolute()
    return next((above for above in (path, *path.parents) if above.is_dir()), Path("/"))


def _free(path: Path) -> int:
    """Bytes that this user may still write where `path` lies."""
    return shutil.disk_usage(_existing(path)).free


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} bytes"
    power = min(int(math.log(count, 1024)), 4)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def _lasting(path: Path) -> Path:
    """`path`, or the directory it lies in when its name is one that is about to go."""
    return path.parent if _ASIDE.fullmatch(path.name) else path


class _NoRoom(ConversionError):
    """Told once, by the innermost `disk_errors`."""


def _no_room(where: Path, cause: BaseException) -> _NoRoom:
    free = _size(_free(where))
    return _NoRoom(
        f"no room left for {_lasting(where)}: {free} free; make room or give another directory", detail=str(cause)
    )


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Tell what a disk refused while `path` (a directory, or a file) was written, in one line.

    Full or over quota: ConversionError with how much was free. Not writable, read-only, a file where a directory should
    be: UsageError. Libraries that hide the reason are caught too: their error says "No space left", or they fail while
    the disk is full. Anything else, errors of other paths among it, passes unchanged.
    """
    try:
        yield
    except OSError as error:
        here = path.absolute()
        named = Path(error.filename).absolute() if isinstance(error.filename, str) else None
        # Of this path, of what lies in it, or of a directory above it.
        ours = named if named and (named.is_relative_to(here) or here.is_relative_to(named)) else None
        if error.errno in _FULL:  # of another path too: the directory for temporary files may be the full one
            raise _no_room(path if ours else named or path, error) from error
        if error.errno in (*_NOT_WRITABLE, *_WRONG_PATH) and ours:
            advice = "a directory you may write to" if error.errno in _NOT_WRITABLE else "another directory"
            raise UsageError(f"cannot write {_lasting(ours)}: {error.strerror}; give {advice}") from error
        if error.errno is None and _free(path) < _NO_ROOM:  # numpy: "2000000 requested and 786432 written"
            raise _no_room(path, error) from error
        raise
    except Exception as error:
        if isinstance(error, NlpconvertError) and type(error) is not ConversionError:
            raise
        words = f"{error} {error.detail}" if isinstance(error, ConversionError) else str(error)
        if any(os.strerror(code) in words for code in _FULL) or _free(path) < _NO_ROOM:
            raise _no_room(path, error) from error
        raise


# --- writing ---------------------------------------------------------------------------------------------------------


def _aside(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.nlpconvert.{kind}-{os.getpid()}"


def is_bookkeeping(name: str) -> bool:
    """Whether an entry of OUT is this module's own: the lock, or something aside."""
    return name == LOCK or _ASIDE.fullmatch(name) is not None


def _remove(path: Path) -> None:
    """Delete a file, a link (not what it leads to) or a directory; what is not there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush one file or directory to the disk; file systems that cannot sync a directory are taken as they are."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            if stat.S_ISREG(os.lstat(Path(folder) / name).st_mode):
                _sync(Path(folder) / name)
        _sync(Path(folder))


def write_text_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text so that `path` holds the old text or the new one, never a part. Errors: see `disk_errors`.

    Directories above it are made. What cannot be swapped, a device or a pipe (/dev/stdout), is written to as it is.
    """
    if path.absolute().is_relative_to("/dev") or path.is_fifo():
        with disk_errors(path):
            path.write_text(text, encoding="utf-8")
        return
    new = _aside(path, "new")
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _remove(new)
            with new.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
            _sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                new.unlink(missing_ok=True)
            raise


def _plain(value: Any) -> Any:
    """JSON's own values: NaN and infinities as words, numpy scalars as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, float):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    return value


def json_text(data: Any) -> str:
    """Strict JSON (RFC 8259) with a final newline, keys in the order given.

    Not-a-number and infinities, which JSON lacks, become the words "nan", "inf" and "-inf": `float()` reads them back.
    """
    return json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json_atomic(path: Path, data: Any) -> None:
    """`write_text_atomic` of `json_text`."""
    write_text_atomic(path, json_text(data))


@contextlib.contextmanager
def building(out: Path, name: str) -> Iterator[Path]:
    """A new empty directory inside `out` to build OUT/`name` in; removed on any exception, Ctrl-C included.

    On success it stays, for `replace_directory(new, out / name)`. The lock of `out` must be held.
    """
    new = _aside(out / name, "new")
    try:
        with disk_errors(out):  # inside the removal: how much was free is asked before room is made
            _remove(new)
            new.mkdir(parents=True)
            yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def replace_directory(new: Path, final: Path) -> None:
    """Put the whole directory `new` in the place of `final`, which may exist and hold files.

    A directory cannot be renamed over a non-empty one, so there is a moment in which `final` is missing and the old one
    lies aside: an error then puts the old one back, a kill then is mended by `repair`. Both must lie in one directory.
    """
    old = _aside(final, "old")
    with disk_errors(final.parent):
        _sync_tree(new)
        _remove(old)
        had_one = os.path.lexists(final)
        try:
            if had_one:
                final.rename(old)
            new.rename(final)
        except BaseException:
            if had_one and not os.path.lexists(final):
                old.rename(final)
            raise
        _sync(final.parent)
    # From here the new one is in place; what cannot be deleted now, the next repair deletes.
    with contextlib.suppress(OSError):
        _remove(old)


def repair(out: Path) -> list[str]:
    """Mend what a killed process left in `out`, and say in lines what was done.

    An old directory whose place is empty goes back; every other old and new one is deleted. The lock must be held: then
    whoever left them is gone, whatever its process number means today (in a container it is always the same few).
    """
    done: list[str] = []
    if not out.is_dir():
        return done
    with disk_errors(out):
        left = {path: found for path in sorted(out.iterdir()) if (found := _ASIDE.fullmatch(path.name))}
        for path, found in left.items():
            final = out / found["name"]
            if found["kind"] == "old" and not os.path.lexists(final):
                path.rename(final)
                done.append(f"{final} was put back: an interrupted run had not replaced it yet")
            else:
                _remove(path)
                done.append(f"{path} was removed: an interrupted run left it")
        if done:
            _sync(out)
    return done


# --- one lock per OUT ------------------------------------------------------------------------------------------------


_TRIES = 1000  # how often a lock file may turn out to be one that its holder has just deleted


def _holder(path: Path) -> str:
    """Who holds the lock, in words. The file's text is only shown, never trusted."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        since = datetime.fromisoformat(held["since"])
        day = "" if since.date() == datetime.now().date() else f"{since:%Y-%m-%d} "
        host = "" if held["host"] == socket.gethostname() else f" on {held['host']}"
        words = f"process {int(held['pid'])}{host} ({held['command']}, since {day}{since:%H:%M})"
    except (OSError, ValueError, TypeError, KeyError):  # not written yet, or written by another hand
        return "another process"
    return words if words.isprintable() else "another process"


def _acquire(out: Path, command: str) -> int:
    """The descriptor of OUT/.lock, locked."""
    path = out / LOCK
    for _ in range(_TRIES):
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            try:
                # O_NOFOLLOW: a link of that name must not make us write somewhere else.
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except FileNotFoundError:  # another process took its own empty OUT away just now
                continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before has deleted the file on leaving: ours must be the one that others will open.
            if os.path.lexists(path) and os.path.samestat(os.fstat(handle), os.lstat(path)):
                note = {
                    "pid": os.getpid(),
                    "command": command,
                    "since": datetime.now().isoformat(timespec="seconds"),
                    "host": socket.gethostname(),
                }
                with disk_errors(out):
                    os.ftruncate(handle, 0)
                    os.write(handle, json.dumps(note).encode())
                return handle
        except BlockingIOError:
            os.close(handle)
            raise UsageError(f"{out} is in use by {_holder(path)}; wait for it or give another directory") from None
        except FileNotFoundError:  # deleted between the two looks
            os.close(handle)
            continue
        except OSError as error:
            os.close(handle)
            raise UsageError(f"{out} cannot be locked ({error.strerror}); put it on a local disk") from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise UsageError(f"{out} cannot be locked (its lock file does not stay the same one); put it on a local disk")


@contextlib.contextmanager
def lock(out: Path, command: str = "nlpconvert") -> Iterator[None]:
    """Hold the one lock of `out`, which is made when it is not there; a held one is a UsageError that says by whom.

    `command` is what the others are told. The kernel drops the lock of a process that dies. On leaving, the lock file
    is deleted, and so is an `out` that was made here and stayed empty.
    """
    made_here = not out.exists()
    handle = _acquire(out, command)
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)
        os.close(handle)
        if made_here:
            with contextlib.suppress(OSError):  # not empty: something was made
                out.rmdir()
