"""Promotions and rollbacks that are killed before their n-th statement, for every n.

    python -m tests.tasks.releases.killed_releases FOLDER [--every]

This process imports everything and opens nothing of its own: each attempt is a fork, which begins from a copy of the
same two SQLite files (ours and MLflow's), counts the statements of both, and ends itself with SIGKILL before the n-th.
Another fork then starts as a program would, and looks. Counted is what can make a difference on disk: each statement
that writes, each commit after one, and the first statement after each such commit; with --every, all statements.
Prints one JSON object per scenario.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event

from db import Store, open_store
from models.adapters.registry import Registry
from tasks.releases.lifecycle import live_release, promote, publish, rollback
from tests.tasks.releases.release_homes import Home

TARGET = "shop"
Act = Callable[[Home], object]
AGAIN = 5  # after every fifth death the command is given once more


def kill_before(number: int, every: bool) -> None:
    """From now on end this process with SIGKILL before its `number`-th statement, of any database."""
    done, committed, wrote = 0, False, set[int]()

    def count(point: bool) -> None:
        nonlocal done
        if point and done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        done += point

    def before_statement(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal committed
        writes = statement.lstrip().startswith(("INSERT", "UPDATE", "DELETE"))
        count(every or writes or committed)
        committed = False
        if writes:
            wrote.add(id(connection))

    def before_commit(connection: Connection) -> None:
        nonlocal committed
        counts = id(connection) in wrote
        count(every or counts)
        committed = counts
        wrote.discard(id(connection))

    event.listen(Engine, "before_cursor_execute", before_statement)
    event.listen(Engine, "commit", before_commit)


class Stage:
    """The two stores in one folder: saved once, put back before each attempt."""

    def __init__(self, folder: Path, every: bool = False) -> None:
        self.every = every
        self.saved, self.place = folder / "saved", folder / "stores"

    @contextmanager
    def home(self) -> Iterator[Home]:
        with open_store(f"sqlite:///{self.place}/trace.db") as store:
            registry = Registry(f"sqlite:///{self.place}/mlflow.db", TARGET, self.place / "artifacts")
            yield Home(store, registry, self.place / "made")

    def save(self) -> None:
        shutil.rmtree(self.saved, ignore_errors=True)
        shutil.copytree(self.place, self.saved)

    def restore(self) -> None:
        """Every file as it was, the artifacts included: a promotion writes there too."""
        shutil.rmtree(self.place)
        shutil.copytree(self.saved, self.place)


def forked(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, as JSON; None when the child was killed. Its traceback when it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            answer = {"value": work()}
        except BaseException:
            answer = {"raised": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return None
    answer = json.loads(said)
    assert "raised" not in answer, answer["raised"]
    return answer["value"]


def act(stage: Stage, work: Act, number: int) -> bool:
    """Do the work, to be killed before the `number`-th statement; True when it ended first."""
    with stage.home() as home:
        kill_before(number, stage.every)
        work(home)
    return True


def start_again(stage: Stage, work: Act, before: int, again: bool) -> int:
    """What any program does first; then all must agree, and (`again`) the same command still comes to its end. Returns
    the live release's number as the death left it (0: the bare base); `before` is the one that was live at first."""
    with stage.home() as home:
        publish(home.store, home.registry, TARGET)
        home.check()
        found = number_of(home.store)
        if again and found == before:
            work(home)
            home.check()
            assert number_of(home.store) != before
        return found


def number_of(store: Store) -> int:
    live = live_release(store, TARGET)
    return live.number if live else 0


def scenario(stage: Stage, prepare: Act, work: Act) -> dict[str, Any]:
    """Kill `work` everywhere. The counts of deaths that left the release before it, and the one after it, live."""

    def begin() -> int:
        with stage.home() as home:
            prepare(home)
            return number_of(home.store)

    before = forked(begin)
    stage.save()
    left: dict[int, int] = {}
    number = 0
    while forked(partial(act, stage, work, number)) is None:
        found = forked(partial(start_again, stage, work, before, number % AGAIN == 0))
        left[found] = left.get(found, 0) + 1
        stage.restore()
        number += 1
    return {"killed": number, "before": before, "left": {str(k): v for k, v in sorted(left.items())}}


def first(home: Home) -> None:
    home.candidate({"refund": home.member("refund"), "exchange": home.member("exchange")})


def second(home: Home) -> None:
    """Release 1 is live; the candidate has another version, one that is new, and leaves one out."""
    promote_newest(home)
    home.candidate({"refund": home.member("refund"), "cancel": home.member("cancel")})


def promote_newest(home: Home) -> None:
    promote(home.store, home.registry, home.newest().id, "better")


def roll_back(home: Home) -> None:
    rollback(home.store, home.registry, TARGET)


def nothing(_: Home) -> None:
    pass


def main(folder: Path, every: bool) -> None:
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    tempfile.tempdir = str(folder)
    stage = Stage(folder, every)
    # All that the attempts do is done here once: imported, MLflow's tables made, statements compiled. What is open is
    # closed before the first fork.
    with stage.home() as home:
        first(home)
    stage.save()
    with stage.home() as home:
        promote_newest(home)
        home.check()
        roll_back(home)
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Models
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Runs

    for engine in (*Models._engine_map.values(), *Runs._engine_map.values()):
        engine.dispose()
    stage.restore()
    gc.freeze()
    steps: tuple[tuple[str, Act, Act], ...] = (
        ("promotion of the first", nothing, promote_newest),
        ("promotion", second, promote_newest),
        ("rollback", nothing, roll_back),
        ("rollback to the base", nothing, roll_back),
    )
    for name, prepare, work in steps:
        print(json.dumps({"name": name} | scenario(stage, prepare, work)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--every" in sys.argv)
