"""Folders in which something is made that appears elsewhere when it is whole: hidden, and nobody's when their process
has died.

A process that is killed, or a machine that stops, removes nothing. So the next one that makes such a thing in the same
place does it: a folder whose lock nobody holds is a dead one's. The lock is the kernel's, which takes it back however a
process ends.

Covered: processes of one machine, also in containers that share the place, and of several on a file system whose locks
they share. Not covered: a file system without locks. There nothing that was left is removed.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

logger = logging.getLogger("trace")
# Its name says whose folder it is: others may call theirs alike.
_LOCK = "trace-agent.lock"


@contextmanager
def unfinished(place: Path, kind: str) -> Iterator[Path]:
    """A new folder `.KIND-XXXXXXXX` in `place` that goes at the end, whatever that is; it is readable by its owner
    alone. Those of dead processes are removed before. Raises `OSError` where it cannot be made."""
    prefix = f".{kind}-"
    _remove_left(place, prefix)
    folder, lock = _begun(place, prefix)
    try:
        yield folder
    finally:
        _remove(folder, lock)


def _begun(place: Path, prefix: str) -> tuple[Path, IO[bytes]]:
    """A folder of one's own, and its lock. Another process may take it for a dead one's between the two: then it is
    gone, and another one is made."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            lock = (folder / _LOCK).open("xb")
        except FileNotFoundError:
            continue
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise
        if _locked(lock) is not False and (folder / _LOCK).exists():
            return folder, lock
        lock.close()


def _locked(lock: IO[bytes]) -> bool | None:
    """Hold a lock; False where another process does, None where the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_left(place: Path, prefix: str) -> None:
    """Remove the folders of dead processes. One without a lock is just being made, and empty, or is none of these."""
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):  # another process removes it, or it is somebody else's
            lock = (folder / _LOCK).open("r+b")
            if _locked(lock):
                logger.warning("%s, which a process that was killed has left, is removed", folder)
                _remove(folder, lock)
            lock.close()


def _remove(folder: Path, lock: IO[bytes]) -> None:
    """Remove a folder whose lock is held. The lock goes last, so that what a death in here leaves is found again."""
    with lock, suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink()
        if [entry.name for entry in folder.iterdir()] == [_LOCK]:
            (folder / _LOCK).unlink()
    with suppress(OSError):  # on NFS a file that is open keeps its folder
        folder.rmdir()
