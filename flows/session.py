"""That a folder has one process at work in it, such as a home its supervisor, and what a supervisor that is gone has
left running: supervisord has a session of its own, and what it starts stays in it."""

from __future__ import annotations

import fcntl
import logging
import os
import time
import xmlrpc.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import psutil

from errors import ConfigurationError, StoreError

logger = logging.getLogger("trace")


@contextmanager
def alone_in(folder: Path, busy: str) -> Iterator[None]:
    """Hold a folder; a process that dies lets go of it. Raises `ConfigurationError`, which says `busy`, when another
    holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(busy) from None
        except OSError as problem:  # a file system without locks, where only this protection is missing
            logger.warning("%s cannot be locked (%s): work there once at a time only", folder, problem.strerror)
        yield
    finally:
        os.close(held)


def served_already(home: Path) -> str:
    """What a second supervisor of a home's services says."""
    return (
        f"another 'trace-agent up' is running the services of {home}; leave them to it, or stop them with "
        f"'trace-agent down --home {home}' once they have started"
    )


def held(folder: Path) -> bool:
    """Whether another process is `alone_in` a folder: its supervisor starts, runs, or ends."""
    try:
        with alone_in(folder, ""):
            return False
    except ConfigurationError:
        return True
    except OSError:  # there is no such folder, or it is somebody else's
        return False


@contextmanager
def until_stopped(running: Callable[[], bool]) -> Iterator[None]:
    """End a block without an error that fails because its supervisor is not `running` any more: `trace-agent down`
    stops what only starts, too. Whether it was stopped or has failed, its exit status says."""
    try:
        yield
    except (OSError, HTTPException, xmlrpc.client.Error, StoreError):
        if running():
            raise


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
