"""The limits of a round: each is held with one sentence, and a larger one goes on."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.improve as flow
from db import Round, RoundState, StageRow, StageState, Store, open_store
from db.rows.conversations import TRAFFIC
from errors import LimitReached
from models.providers.litellm_client import Completion, ModelCall
from models.scripted import NoopPolicy
from settings import Settings, load_settings
from tasks.round.context import Context
from tasks.round.rollouts import episodes_for
from tasks.unattended.limits import RoundLimits, at_work
from tests.db.store_examples import trajectory

START = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.fixture
def store(settings_folder: Path) -> Any:
    with open_store(f"sqlite:///{settings_folder}/trace.db") as opened:
        yield opened


def limits(store: Store, folder: Path, **given: float) -> RoundLimits:
    opened = store.latest_round() or store.start_round("shop", "data", 0, "smoke", {})
    return RoundLimits(load_settings(limits=given).limits, store, opened, folder)


def test_without_limits_nothing_is_asked(settings_folder: Path) -> None:
    class Silent:
        def rows(self, *_: Any, **__: Any) -> list[Any]:
            return []

    nothing: Any = Silent()
    RoundLimits(load_settings().limits, nothing, Round(
        id="r", number=1, target="t", data_hash="", seed=0, profile="", state=RoundState.RUNNING
    ), settings_folder).check(10**9)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollouts": 2}, r"limits\.rollouts = 2: 2 episodes are played and 1 are next; .*TRACE_LIMITS__ROLLOUTS"),
        ({"tokens": 10}, r"limits\.tokens = 10: \d+ tokens are used"),
        ({"disk_gib": 1e-6}, r"limits\.disk_gib = 1e-06: its files take 0\.00 GiB"),
        ({"hours": 1e-9}, r"limits\.hours = 1e-09: it was at work"),
    ],
)
def test_each_limit_is_held(store: Store, settings_folder: Path, given: dict[str, float], said: str) -> None:
    held = limits(store, settings_folder, **given)
    rows = [trajectory(held.round.id, str(i)) for i in range(2)]
    store.add_trajectories(rows)
    (settings_folder / "file").write_bytes(b"x" * 4096)
    with pytest.raises(LimitReached, match=said):
        held.check(1)
    limits(store, settings_folder, **dict.fromkeys(given, 10**9)).check(1)


def test_conversations_that_are_imported_take_nothing_of_a_round(store: Store, settings_folder: Path) -> None:
    held = limits(store, settings_folder, rollouts=1, tokens=10)
    store.add_trajectories([trajectory(held.round.id, str(i), target=TRAFFIC) for i in range(2)])
    held.check(1)
    assert (held.episodes(), held.tokens()) == (0, 0), "users played and paid them before"
    store.add_trajectories([trajectory(held.round.id, "played")])
    assert (held.episodes(), held.tokens()) == (1, 124)


def test_a_folder_that_goes_while_sizes_are_looked_at_counts_nothing(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training renames and removes its checkpoints meanwhile."""
    for name in ("a", "b", "c"):
        (settings_folder / name / "inner").mkdir(parents=True)
        (settings_folder / name / "inner" / "file").write_bytes(b"x" * 4096)
    scandir, met = os.scandir, list[str]()

    def removing(path: Any) -> Any:
        if str(path).endswith("inner"):
            met.append(str(path))
            if len(met) == 2:
                (Path(path) / "file").unlink()
                Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    held: Any = SimpleNamespace(folder=settings_folder)
    assert RoundLimits.disk_gib(held) == 2 * 4096 / 2**30
    assert len(met) == 3


def test_time_at_work_counts_what_died_and_what_ran_side_by_side_once() -> None:
    def row(name: str, began: int, seconds: float | None, **times: int) -> StageRow:
        at = {key: START + timedelta(seconds=value) for key, value in {"started_at": began, **times}.items()}
        state = StageState.DONE if "finished_at" in times else StageState.RUNNING
        return StageRow(id=name, round_id="r", name=name, state=state, seconds=seconds, **at)

    waiting = StageRow(id="e", round_id="r", name="e")
    done = row("a", 0, 15.0, finished_at=10)  # five of them in an attempt before
    beside, within = row("b", 4, 12.0, finished_at=16), row("c", 5, 3.0, finished_at=8)
    died = row("d", 100, None, heartbeat_at=130)
    assert at_work([]) == 0.0
    assert at_work([waiting, waiting, died, within, beside, done]) == 5 + 16 + 30
    assert at_work([row("f", 0, 7.0, finished_at=-3600)]) == 7.0, "the clock was set back, after an earlier attempt"


def test_work_that_is_taken_back_still_counts(store: Store, settings_folder: Path) -> None:
    """An environment that was trained on is withdrawn, and its stages are owed again: a round that goes on later has
    had those hours all the same, and its history, too."""
    round_id = limits(store, settings_folder).round.id
    for stage in (store.stage(round_id, "train:refund"), store.stage(round_id, "train:exchange")):
        assert stage.claim()
        stage.finish({"adapter": "a"})
    with store.transaction() as connection:
        connection.exec_driver_sql("UPDATE stages SET seconds = 7200.0")
    store.reopen_stages(round_id, ["train:refund"])
    again = store.stage(round_id, "train:refund")
    row = again.row()
    assert (row.state, row.result, row.seconds, row.owner) == (StageState.PENDING, None, 7200.0, None)
    assert limits(store, settings_folder).hours() == pytest.approx(4, abs=0.01)
    assert store.worked() == {round_id: 14_400.0}
    assert again.claim()
    again.finish({"adapter": "b"})
    assert again.row().seconds == pytest.approx(7200, abs=60)


def test_episodes_are_refused_before_they_are_played(store: Store, settings_folder: Path) -> None:
    held = limits(store, settings_folder, rollouts=5)
    store.add_trajectories([trajectory(held.round.id, str(i)) for i in range(2)])
    held.check(3)
    with pytest.raises(LimitReached, match="2 episodes are played and 4 are next"):
        held.check(4)


def test_a_round_that_reached_a_limit_goes_on_with_a_larger_one(settings_folder: Path) -> None:
    given = {"profile": "smoke", "home": settings_folder / "home"}

    def play(settings: Settings) -> int:
        with flow.opened(settings, fresh=False) as context:
            tasks = context.tasks("diagnosis")[:6]
            engine = context.engine_of(NoopPolicy())
            engine.play(context.ground("diagnosis"), episodes_for(tasks[:3], 1, 0))
            engine.play(context.ground("diagnosis"), episodes_for(tasks, 1, 0))
            return context.limits.episodes()

    small, large = (load_settings(**given, limits={"rollouts": n}) for n in (5, 6))
    for _ in range(3):  # a schedule that meets the limit every night leaves the round as it is
        with pytest.raises(LimitReached, match="3 episodes are played and 3 are next"):
            play(small)
    with open_store(small.database_url) as store:
        (row,) = store.rows(Round)
        assert row.state == RoundState.INTERRUPTED
    assert play(large) == 6


def test_a_round_whose_time_is_over_does_not_begin_to_work(settings_folder: Path) -> None:
    settings = load_settings(profile="smoke", home=settings_folder / "home", limits={"hours": 1e-9})
    with pytest.raises(LimitReached, match="at work"), flow.opened(settings, fresh=False):
        pytest.fail("it was opened for work")


def test_a_language_model_is_asked_nothing_beyond_a_limit(
    store: Store, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labelling asks for hours, and plays nothing meanwhile."""
    asked: list[ModelCall] = []

    async def answered(call: ModelCall) -> Completion:
        asked.append(call)
        return Completion("yes", finish="stop", prompt_tokens=900, sampled_tokens=100)

    monkeypatch.setattr("models.providers.client.send", answered)
    monkeypatch.setattr("tasks.unattended.limits.EVERY_SECONDS", 0.0)
    call = ModelCall("label", "a/model", [{"role": "user", "content": "lacking?"}])
    opened = store.start_round("shop", "data", 0, "smoke", {})
    context = Context(load_settings(limits={"tokens": 1500}), store, opened)
    with closing(context.client):
        context.client.complete(call)
        context.client.complete(call)
        with pytest.raises(LimitReached, match=r"limits\.tokens = 1500: 2000 tokens are used"):
            context.client.complete(call)
    assert len(asked) == 2
