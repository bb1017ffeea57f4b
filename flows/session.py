"""That a home has one supervisor, and what one that is gone has left running: supervisord has a session of its own, and
what it starts stays in it."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from errors import ConfigurationError

logger = logging.getLogger("trace")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder, from before its supervisor listens until that has ended; a process that dies lets go of it. Raises
    `ConfigurationError` when another holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another 'trace-agent up' is running the services of {folder.parent}; leave them to it, or stop them "
                f"with 'trace-agent down --home {folder.parent}' once they have started"
            ) from None
        except OSError as problem:  # a file system without locks, where only this protection is missing
            logger.warning("%s cannot be locked (%s): start its services once only", folder, problem.strerror)
        yield
    finally:
        os.close(held)


def end_session(leader: int, seconds: float) -> None:
    """End all processes of the session of `leader`, which is gone: they would hold their ports and files for ever. They
    may take so many seconds before they are killed."""
    deadline = time.monotonic() + seconds
    try:
        left = session_of(leader)
        for one in left:
            with suppress(psutil.Error):
                one.terminate()
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = session_of(leader)
    finally:
        for one in session_of(leader):
            with suppress(psutil.Error):
                one.kill()


def session_of(leader: int) -> list[psutil.Process]:
    """The processes of a session that live."""
    found = []
    for one in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(one.pid) == leader and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found
