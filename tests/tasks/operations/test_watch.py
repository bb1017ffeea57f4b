"""The daily watch: what is compared, what counts as a fall, what follows from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from db import ConversationRow, DrawnTaskRow, ReleaseRow, ReleaseState, Store
from db.rows.conversations import SEVERAL
from environments.contract import Draw, Drawable, TargetTask
from environments.targets.catalogue import load_target
from errors import AdapterError, ConfigurationError, StoreError
from models.router.router import ASKED
from models.scripted import NoopPolicy, OraclePolicy
from settings import load_settings
from tasks.operations import watch as watch_file
from tasks.operations.watch import BASE, fresh_tasks, level_of, watch_text
from tests.tasks.operations.watched_homes import LIVE_SINCE, NOW, Target, both, conversation, release


def test_without_a_release_there_is_nothing_to_watch(world: Any) -> None:
    found = world.watch()
    assert (found.release, found.comparisons, world.said) == (0, (), [])
    assert watch_text(found) == "**shop**: the bare base answers: there is nothing to watch"


def test_a_release_that_holds_is_compared_with_both_and_nobody_is_told(world: Any) -> None:
    both(world)
    found = world.watch(roll_back=True)
    assert {c.against: c.points for c in found.comparisons} == {BASE: 100.0, "release 1": 0.0}
    assert all("40 fresh tasks" in c.text() for c in found.comparisons)
    assert (found.falls, world.said, world.back) == ([], [], [])
    assert "no significant fall" in watch_text(found)
    played = world.store.trajectory_frame(None)
    assert world.watch().comparisons == found.comparisons
    assert played.equals(world.store.trajectory_frame(None)), "a second look of the day plays nothing"


def test_a_target_whose_own_name_is_another_is_watched_under_what_it_is_called(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(world)
    monkeypatch.setattr(Target, "name", "shop-gen")
    found = world.watch()
    assert {c.against: c.points for c in found.comparisons} == {BASE: 100.0, "release 1": 0.0}
    assert set(world.store.trajectory_frame(None)["target"]) == {"shop"}


def test_a_fall_is_told_and_left_to_a_person(world: Any) -> None:
    both(world)
    world.plays["release@2"] = NoopPolicy()
    found = world.watch()
    assert [f.against for f in found.falls] == ["release 1"]
    (notice,) = world.said
    assert notice.kind == "fell"
    assert "release 2 of shop has fallen: -100.0 points against release 1 on 40 fresh tasks" in notice.text
    assert "'trace-agent rollback --target shop' goes back" in notice.text
    assert world.back == []


def test_a_fall_is_seen_however_long_the_release_has_been_live(world: Any) -> None:
    both(world)
    world.plays["release@2"] = NoopPolicy()
    found = world.watch(LIVE_SINCE + timedelta(days=40))
    assert [f.against for f in found.falls] == ["release 1"]
    assert [n.kind for n in world.said] == ["fell"]


def test_a_fall_is_rolled_back_where_the_settings_want_it(world: Any) -> None:
    both(world)
    world.plays["release@2"] = NoopPolicy()
    found = world.watch(roll_back=True)
    assert (found.rolled_back, world.back) == ("release 1", ["shop"])
    assert [n.kind for n in world.said] == ["rolled-back"]
    assert "release 1 answers again" in world.said[0].text


def test_a_release_that_it_did_not_watch_is_never_rolled_back(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the sides play, a round promotes another release."""
    both(world)
    world.plays["release@2"] = NoopPolicy()
    judge = watch_file.level_of

    def replaced(*given: Any) -> float:
        old = world.store.row(ReleaseRow, id="r2")
        world.store.put([replace(old, state=ReleaseState.RETIRED)], replace=True)
        world.store.put([release(3, ReleaseState.LIVE, "r2")])
        return judge(*given)

    monkeypatch.setattr(watch_file, "level_of", replaced)
    found = world.watch(roll_back=True)
    assert (found.rolled_back, world.back, [n.kind for n in world.said]) == ("", [], ["fell"])
    assert "it was not rolled back: release 2 was live and no longer is" in world.said[0].text


@pytest.mark.parametrize("blocked", [AdapterError("files gone"), StoreError("no MLflow"), ConfigurationError("no way")])
def test_a_fall_is_told_where_the_way_back_is_blocked(
    world: Any, monkeypatch: pytest.MonkeyPatch, blocked: Exception
) -> None:
    def refused(*given: Any, **named: Any) -> None:
        raise blocked

    both(world)
    world.plays["release@2"] = NoopPolicy()
    monkeypatch.setattr(watch_file, "rollback", refused)
    assert world.watch(roll_back=True).rolled_back == ""
    (notice,) = world.said
    assert notice.kind == "fell"
    assert notice.text.endswith(f"it was not rolled back: {blocked}")


def test_worse_than_the_base_alone_goes_back_to_no_parent(world: Any) -> None:
    """A parent that is as bad is no better place to be."""
    both(world)
    world.plays.update({"release@2": NoopPolicy(), "release@1": NoopPolicy(), "local:smollm2-135m": OraclePolicy()})
    found = world.watch(roll_back=True)
    assert [f.against for f in found.falls] == [BASE]
    assert (world.back, [n.kind for n in world.said]) == ([], ["fell"])


def test_the_first_of_a_lineage_goes_back_to_the_base_that_it_was_compared_with(world: Any) -> None:
    """What it replaced was proven on other data and cannot play the day's tasks."""
    replaced = release(1, ReleaseState.RETIRED, data_hash="data-0", ended_at=LIVE_SINCE)
    world.store.put([replaced, release(2, ReleaseState.LIVE)])
    world.plays.update({"release@2": NoopPolicy(), "local:smollm2-135m": OraclePolicy()})
    assert (world.watch(roll_back=True).rolled_back, world.back) == (BASE, ["shop to 0"])


def test_a_release_of_other_data_cannot_be_watched(world: Any) -> None:
    world.store.put([release(2, ReleaseState.LIVE, data_hash="data-0")])
    found = world.watch()
    assert "proven on data data-0, the target has data-1" in found.reason
    assert [n.kind for n in world.said] == ["fell"]


@pytest.mark.parametrize(("successes", "fell"), [(4, True), (27, False)])
def test_what_users_say_is_compared_too(world: Any, successes: int, fell: bool) -> None:
    both(world)
    before = [conversation(n, n < 27, LIVE_SINCE - timedelta(hours=1)) for n in range(30)]
    after = [conversation(100 + n, n < successes, LIVE_SINCE + timedelta(hours=1)) for n in range(30)]
    silent = [conversation(200 + n, None, NOW) for n in range(50)]
    world.store.put([*before, *after, *silent])
    found = world.watch(roll_back=True)
    traffic = found.comparisons[-1]
    assert traffic.what == "traffic"
    assert (traffic.what, traffic.against, traffic.significant) == ("traffic", "release 1", fell)
    assert traffic.seen == "30 and 30 conversations with feedback"
    assert world.back == (["shop"] if fell else [])


def test_what_a_client_asked_of_the_base_by_its_name_is_not_held_against_the_release(world: Any) -> None:
    """As one does who tries both beside each other: the base fails as it did before."""
    both(world)
    routed = [conversation(n, True, LIVE_SINCE - timedelta(hours=1)) for n in range(30)]
    routed += [conversation(100 + n, True, LIVE_SINCE + timedelta(hours=1)) for n in range(30)]
    by_name = [conversation(200 + n, False, LIVE_SINCE + timedelta(hours=1)) for n in range(30)]
    world.store.put([*routed, *(replace(one, mode=ASKED) for one in by_name)])
    found = world.watch(roll_back=True)
    assert (found.comparisons[-1].points, found.comparisons[-1].seen) == (0.0, "30 and 30 conversations with feedback")
    assert (found.falls, world.back) == ([], [])


def test_feedback_counts_for_the_release_that_answered(world: Any) -> None:
    """A gateway that is pinned to release 1 goes on with it, one is pinned to release 7, which is neither of the two,
    and of some conversations the first turns are of release 1 and the last of release 2."""
    both(world)
    hour = timedelta(hours=1)
    said = [conversation(n, True, LIVE_SINCE - hour, 1) for n in range(30)]
    said += [conversation(100 + n, True, LIVE_SINCE + hour, 2) for n in range(30)]
    said += [conversation(200 + n, False, LIVE_SINCE + hour, 1) for n in range(20)]
    said += [conversation(300 + n, False, LIVE_SINCE + hour, 7) for n in range(30)]
    said += [conversation(400 + n, False, LIVE_SINCE + hour, SEVERAL) for n in range(30)]
    world.store.put(said)
    found = world.watch(roll_back=True)
    traffic = found.comparisons[-1]
    assert (traffic.points, traffic.seen) == (40.0, "30 and 50 conversations with feedback")
    assert (found.falls, world.back) == ([], [])


def test_a_client_that_gives_one_id_to_all_its_conversations_is_heard(world: Any) -> None:
    """Its row was first written before either release was live, and is of the conversation that it has now."""
    both(world)
    hour, long_ago = timedelta(hours=1), LIVE_SINCE - timedelta(days=400)
    said = [replace(conversation(n, True, long_ago, 1), updated_at=LIVE_SINCE - hour) for n in range(20)]
    said += [replace(conversation(100 + n, True, long_ago, 2), updated_at=LIVE_SINCE + hour) for n in range(30)]
    world.store.put(said)
    assert world.watch().comparisons[-1].seen == "30 and 20 conversations with feedback"


def test_what_the_releases_own_router_did_not_decide_is_not_held_against_it(world: Any) -> None:
    """Another gateway of the home was started with `--mode off`, or the adapter that was chosen was missing there: the
    base fails as it did before, and is signed with the release that is served."""
    both(world, router="own", router_path="x/router")
    hour = timedelta(hours=1)
    routed = [conversation(n, True, LIVE_SINCE - hour, 1) for n in range(30)]
    own = replace(conversation(0, True, LIVE_SINCE + hour, 2), router_version="own")
    routed += [replace(own, id=f"own{n}", capability="refund", adapter="refund@v1-aaaaaaaa") for n in range(20)]
    routed += [replace(own, id=f"base{n}") for n in range(10)]
    off = [conversation(200 + n, False, LIVE_SINCE + hour, 2) for n in range(30)]
    off = [replace(one, mode="off", router_version="always") for one in off]
    missing = [replace(own, id=f"missing{n}", capability="refund", success=False) for n in range(30)]
    world.store.put([*routed, *off, *missing])
    found = world.watch(roll_back=True)
    assert (found.comparisons[-1].points, found.comparisons[-1].seen) == (0.0, "30 and 30 conversations with feedback")
    assert (found.falls, world.back) == ([], [])


def test_a_router_whose_version_was_not_kept_is_the_releases(world: Any) -> None:
    both(world, router_path="x/router")
    said = [conversation(n, True, LIVE_SINCE - timedelta(hours=1), 1) for n in range(3)]
    after = [conversation(100 + n, True, LIVE_SINCE + timedelta(hours=1), 2) for n in range(3)]
    world.store.put([*said, *(replace(one, router_version="any") for one in after)])
    assert world.watch().comparisons[-1].seen == "3 and 3 conversations with feedback"


def test_feedback_on_the_bare_base_is_the_bases(world: Any) -> None:
    world.store.put([release(2, ReleaseState.LIVE)])
    said = [conversation(n, n < 10, LIVE_SINCE - timedelta(hours=1), 0) for n in range(20)]
    said += [conversation(100 + n, n < 9, LIVE_SINCE + timedelta(hours=1), n % 2 * 2) for n in range(20)]
    world.store.put(said)
    assert world.watch().comparisons[-1].seen == "10 and 30 conversations with feedback"


def test_what_an_earlier_release_was_told_is_not_the_bases(world: Any) -> None:
    """Release 1 was rolled back to the bare base, which answered until release 2 did."""
    gone = LIVE_SINCE - timedelta(days=2)
    world.store.put([
        release(1, ReleaseState.ROLLED_BACK, ended_at=gone),
        release(2, ReleaseState.LIVE),
        release(3, ReleaseState.REFUSED, live_at=None, ended_at=LIVE_SINCE - timedelta(minutes=1)),
    ])  # fmt: skip
    said = [conversation(n, True, gone - timedelta(hours=1)) for n in range(30)]
    said += [conversation(100 + n, False, gone + timedelta(hours=1)) for n in range(20)]
    said += [conversation(200 + n, n < 15, LIVE_SINCE + timedelta(hours=1)) for n in range(30)]
    world.store.put(said)
    found = world.watch(roll_back=True)
    traffic = found.comparisons[-1]
    assert (traffic.against, traffic.points) == (BASE, 50.0)
    assert traffic.seen == "30 and 20 conversations with feedback"
    assert (found.falls, world.back) == ([], [])


def test_of_what_users_said_only_that_is_read_and_no_conversation(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both(world)
    world.store.put([conversation(n, n == 0, LIVE_SINCE + timedelta(seconds=n - 1)) for n in range(3)])
    rows = Store.rows

    def seen(store: Store, kind: Any, /, **equals: Any) -> Any:
        assert kind is not ConversationRow, "messages, which may be many and long, come with it"
        return rows(store, kind, **equals)

    monkeypatch.setattr(Store, "rows", seen)
    assert world.watch().comparisons[-1].seen == "2 and 1 conversations with feedback"


def test_traffic_has_half_of_the_level_and_is_left_out_where_it_is_not_the_parents_alone(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(world)
    said = [conversation(n, n < 20, LIVE_SINCE - timedelta(hours=1)) for n in range(30)]
    said += [conversation(100 + n, n < 9, LIVE_SINCE + timedelta(hours=1)) for n in range(30)]
    world.store.put(said)
    p = world.watch().comparisons[-1].p
    for share, significant in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(watch_file, "level_of", lambda *given, level=share * p: level)
        assert world.watch().comparisons[-1].significant is significant
    restored = {"history": [{"state": "live", "at": "", "reason": ""}] * 2}
    live = world.store.row(ReleaseRow, id="r2")
    world.store.put([replace(live, evidence=restored)], replace=True)
    assert {c.what for c in world.watch().comparisons} == {"fresh tasks"}, "part of what came before was its own"
    world.store.put([live], replace=True)
    world.store.put([release(3, ReleaseState.RETIRED, "r1", ended_at=LIVE_SINCE)])
    assert {c.what for c in world.watch().comparisons} == {"fresh tasks"}, "release 3 came between"


def test_a_days_look_is_the_dates_own(settings_folder: Path) -> None:
    settings, evening = load_settings(), datetime(2026, 5, 4, 23, 30, tzinfo=UTC)
    live = release(2, ReleaseState.LIVE, live_at=evening)
    first, second = (level_of(settings, live, evening + timedelta(minutes=m)) for m in (10, 60))
    assert second == pytest.approx(first / 4), "after midnight it is the second"


def test_every_day_spends_less_and_all_days_together_the_whole_level(settings_folder: Path) -> None:
    settings, live = load_settings(), release(2, ReleaseState.LIVE, live_at=NOW)
    levels = [level_of(settings, live, NOW + timedelta(days=d, minutes=5)) for d in range(4000)]
    assert levels == sorted(levels, reverse=True)
    assert sum(levels) == pytest.approx(settings.evaluation.alpha, rel=1e-3)


def test_a_target_that_draws_gives_each_day_its_own_tasks(settings_folder: Path) -> None:
    settings, shop = load_settings(unattended={"watch_tasks": 12}), load_target("shop")
    assert isinstance(shop, Drawable)
    first, second = (fresh_tasks(settings, shop, day) for day in (1, 2))
    assert len(first) == len(second) == 12
    assert first == fresh_tasks(settings, shop, 1)
    assert not {shop.content(t) for t in first} & {shop.content(t) for t in second}


def test_what_rounds_had_is_not_fresh(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[Draw] = []

    class Drawing(Target):
        def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
            draws.append(draw)
            return self.tasks(split)

        def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
            raise AssertionError

        def content(self, task: TargetTask) -> str:
            raise AssertionError

    monkeypatch.setattr(watch_file, "target_of", lambda *given: Drawing())
    both(world)
    round_ = world.store.start_round("shop", "data-1", 0, "smoke", {})
    had = {"round_id": round_.id, "split": "validation", "target": "shop", "family": "odd"}
    world.store.put([
        DrawnTaskRow(**had, task_id="t1", data_hash="data-1", content="had"),
        DrawnTaskRow(**had, task_id="t2", data_hash="data-0", content="of other data"),
    ])  # fmt: skip
    world.watch()
    assert [draw.used for draw in draws] == [{"had"}]
