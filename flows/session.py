"""What a supervisor that is gone has left running: supervisord has a session of its own, and what it starts stays in
it."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil


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
