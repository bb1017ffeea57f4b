"""What a check finds, as a line that says what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from db.copies import problem_of_sqlite
from errors import TraceError


class Level(StrEnum):
    """`fault`: the next round, the gateway or a rollback will fail or be wrong. `warning`: it goes on, look at it."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One line of `trace-agent doctor`. `do` is empty where all is well."""

    check: str
    level: Level
    said: str
    do: str = ""


def well(check: str, said: str) -> Finding:
    return Finding(check, Level.OK, said)


def warning(check: str, said: str, do: str) -> Finding:
    return Finding(check, Level.WARNING, said, do)


def fault(check: str, said: str, do: str) -> Finding:
    return Finding(check, Level.FAULT, said, do)


def of_error(check: str, problem: TraceError) -> Finding:
    """The fault that an error of ours is: such a message ends with what to do."""
    said, _, do = str(problem).rpartition("; ")
    return fault(check, said or do, do if said else "mend it, then look again")


def refused(check: str, work: Callable[[], object]) -> Finding | None:
    """The fault that keeps `work` from being done; None when it can be."""
    try:
        work()
    except TraceError as problem:
        return of_error(check, problem)
    return None


def of_sqlite(check: str, file: Path) -> Finding | None:
    """What is wrong with a SQLite file; None where it is whole. Only a damaged one is to be restored."""
    try:
        problem = problem_of_sqlite(file)
    except TraceError as refusal:
        return of_error(check, refusal)
    if not problem:
        return None
    return fault(check, f"{file} is damaged: {problem}", "restore a backup ('trace-agent restore')")
