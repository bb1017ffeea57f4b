"""What a stage owes is played by whoever is there: nothing twice, nothing lost, and nothing drawn differently."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from db import Shards, open_store
from environments.contract import Action, Message, Observation, Prompt, TargetTask, ToolCall
from errors import ConfigurationError, LimitReached, StoreError
from models.episodes import Episode
from models.policy import PolicyIdentity
from models.templates.call_formats import CompactCalls
from tasks.methods.seed.prompts import Prompting, worked_example
from tasks.round.context import Context
from tasks.round.engine import Engine, PlayRun
from tasks.round.stage import forget
from tasks.shards import sharing, worker
from tasks.shards.sharing import SharedPlay, free_shards
from tasks.shards.work import Work, works
from tasks.shards.worker import play_part, shard_task
from tests.models.vllm_backend.vllm_stub import vllm_stub
from tests.tasks.shards.many_target import Many
from tests.tasks.shards.shared_rounds import drawn, opened, ordered, saved_base

Open = Callable[..., Context]
# Its keys are in none of the orders that a database gives them.
PAYLOAD = {"zeta": {"order": {"type": "string"}, "code": {"type": "string"}}, "a": [{"y": 1, "x": 2}], "beta": None}


@pytest.fixture
def stores(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Settings of a round's database: SQLite in its home, or one of its own on PostgreSQL."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return dict
    new_postgres = request.getfixturevalue("new_postgres")
    return lambda: {"database": new_postgres()}


ON_BOTH = pytest.mark.parametrize(
    "stores", ["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)], indirect=True
)


@pytest.fixture
def rounds(
    settings_folder: Path, tiny_model: Any, tiny_tokenizer: Any, stores: Callable[[], dict[str, Any]]
) -> Iterator[Open]:
    """Opens rounds, each in a home of its own."""
    base, made = saved_base(settings_folder / "base", tiny_model, tiny_tokenizer), list[Context]()
    with vllm_stub() as stub:

        def make(**given: Any) -> Context:
            made.append(opened(settings_folder / f"home{len(made)}", base, stub, **stores(), **given))
            return made[-1]

        yield make
        for context in made:
            forget(context.round.id)


def beside(context: Context) -> Context:
    """The same round, as another process has it open."""
    return Context(context.settings, open_store(context.settings.database_url), context.round)


def shared(context: Context) -> PlayRun:
    run = SharedPlay(context).play(context.engine.engine, *ordered(context), "it")
    assert run is not None
    return run


def count(context: Context) -> int:
    return len(context.store.trajectory_frame(None, columns=["id"]))


@ON_BOTH
def test_shared_play_draws_what_a_process_alone_draws(rounds: Open) -> None:
    alone, together = rounds(), rounds()
    ids = alone.engine.play(*ordered(alone), "it")
    run = shared(together)
    assert run.ids == ids
    assert drawn(together, run.ids) == drawn(alone, ids)
    assert (run.resumed, run.played, run.steps, count(together)) == (0, 40, 80, 40)
    assert {row.attempt for row in together.store.rows(sharing.ShardRow)} == {1}
    assert together.store.shards(together.round.id).open() == []
    again = shared(together)
    assert (again.resumed, again.played, again.ids) == (40, 0, ids)


def test_a_round_with_sharing_plays_its_stages_so(rounds: Open) -> None:
    context = rounds()
    context.sharing = SharedPlay(context)
    context.engine.play(*ordered(context), "it")
    assert len(context.store.rows(sharing.ShardRow)) == 8  # four for each of two workers
    assert context.model.seconds > 0


@ON_BOTH
def test_two_processes_share_one_stage(rounds: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rounds(
        rollout={"rows": 1, "max_tokens": 4}, policy={**rounds().settings.policy.model_dump(), "concurrency": 2}
    )
    second, helped, met = beside(first), list[bool](), threading.Event()
    step = Many.step

    def meeting(self: Many, action: Action) -> Observation:
        # The one that began waits until the other plays, too: both have then played a part.
        if threading.current_thread().name.startswith("environments") and not met.is_set():
            assert met.wait(20)
        return step(self, action)

    def help_out() -> None:
        while not helped:
            if second.store.shards(second.round.id).free():
                met.set()
                helped.append(SharedPlay(second).help())

    monkeypatch.setattr(Many, "step", meeting)
    other = threading.Thread(target=help_out)
    other.start()
    run = shared(first)
    other.join(20)
    assert helped == [True]
    assert 0 < run.played < 40
    assert first.store.stored_ids(run.ids) == set(run.ids)
    assert count(first) == 40
    second.close()


@ON_BOTH
def test_what_a_dead_worker_held_is_owed_again_without_what_it_stored(rounds: Open) -> None:
    context = rounds()
    ground, episodes = ordered(context)
    engine = context.engine.engine
    ids = engine.play(ground, episodes[:3]).ids  # stored by the worker before it died
    part = sharing.row_id(context.round.id, *engine.ids(ground, episodes))
    keyed = [sharing.replace(e, key=i) for i, e in zip(engine.ids(ground, episodes), episodes, strict=True)]
    ledger = context.store.shards(context.round.id)
    made = works(ground, keyed[:20], engine.policy.identity(), "", 2)
    ledger.owe(part, [(len(w.episodes), w.as_json()) for w in made])
    assert ledger.claim(part, "dead", 30) is not None
    with context.store.transaction() as connection:
        connection.execute(text("UPDATE shards SET lease_until = '2020-01-01 00:00:00.000000' WHERE owner = 'dead'"))
    run = shared(context)
    assert (run.resumed, run.played, count(context)) == (3, 37, 40)
    assert run.ids[:3] == ids
    taken = next(row for row in context.store.rows(sharing.ShardRow) if row.number == 0)
    assert (taken.attempt, taken.state) == (2, "done")


def test_shards_that_who_had_the_stage_before_withdraws_are_played_all_the_same(
    rounds: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that lost its stage while it was suspended, and ends, takes back the part that it had ordered: it is
    the part that whoever took the stage over has at work."""
    context = rounds()
    ground, episodes = ordered(context)
    part = sharing.row_id(context.round.id, *context.engine.engine.ids(ground, episodes))
    finish, done = Shards.finish, list[str]()

    def finished(self: Shards, shard: str, owner: str) -> bool:
        done.append(shard)
        if len(done) == 1:
            self.withdraw(part)
        return finish(self, shard, owner)

    monkeypatch.setattr(Shards, "finish", finished)
    run = SharedPlay(context).play(replace(context.engine.engine, window=2), ground, episodes, "it")
    assert run is not None
    assert context.store.stored_ids(run.ids) == set(run.ids)
    assert (run.played, count(context)) == (40, 40)


@pytest.mark.parametrize("ended", [True, False])
def test_shards_that_a_clock_ahead_holds_are_free_once_their_process_has_ended(
    rounds: Open, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    context = rounds()
    ledger = context.store.shards(context.round.id)
    ledger.owe("part", [(1, {}), (1, {}), (1, {})])
    for owner in ("dead", "dead", "alive"):
        assert ledger.claim("part", owner, 30) is not None
    monkeypatch.setattr(sharing, "has_ended", lambda owner: ended and owner == "dead")
    assert free_shards(ledger, "part") == [], "these leases run out by themselves"
    later = "'2099-01-01 00:00:00.000000'"
    with context.store.transaction() as connection:
        connection.execute(text(f"UPDATE shards SET heartbeat_at = {later}, lease_until = {later}"))
    assert [row.number for row in free_shards(ledger, "part")] == ([0, 1] if ended else [])


@ON_BOTH
def test_a_worker_that_fails_gives_back_what_it_held(rounds: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    context = rounds()

    def fail(self: Engine, *_: Any) -> PlayRun:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Engine, "play_given", fail)
    monkeypatch.setattr(Shards, "withdraw", lambda self, part: None)
    with pytest.raises(StoreError, match="the disk is full"):
        shared(context)
    ledger = context.store.shards(context.round.id)
    assert len(ledger.free()) == len(ledger.open()) == 8


def test_what_no_other_process_could_play_is_not_shared(rounds: Open) -> None:
    context = rounds()
    ground, episodes = ordered(context)
    play = SharedPlay(context).play
    engine = context.engine.engine
    assert play(engine, context.training_ground("made", Many, "a"), episodes, "it") is None  # another environment
    assert play(engine, ground, episodes[: sharing.FEWEST - 1], "it") is None
    assert play(sharing.replace(engine, renderer=None), ground, episodes, "it") is None  # a policy without tokens
    assert context.store.rows(sharing.ShardRow) == []


@ON_BOTH
def test_work_survives_the_database(rounds: Open) -> None:
    context = rounds()
    ground, episodes = ordered(context)
    episodes = [replace(e, task=replace(e.task, payload=PAYLOAD)) for e in episodes]
    (*_, last) = made = works(ground, episodes, context.policy.identity(), "", 3)
    ledger = context.store.shards(context.round.id)
    ledger.owe("p", [(len(w.episodes), w.as_json()) for w in made])
    stored = [Work.from_json(row.work) for row in ledger.open()]
    assert stored == made
    assert {json.dumps(e.task.payload) for w in stored for e in w.episodes} == {json.dumps(PAYLOAD)}
    assert sum(len(w.episodes) for w in made) == 40
    assert len(last.episodes) <= len(made[0].episodes) == 4


def as_jsonb(value: Any) -> Any:
    """A JSON value as PostgreSQL gives it back: keys by their length, then by their bytes."""
    if isinstance(value, dict):
        return {k: as_jsonb(value[k]) for k in sorted(value, key=lambda k: (len(k.encode()), k.encode()))}
    return [as_jsonb(v) for v in value] if isinstance(value, list | tuple) else value


def test_a_payload_comes_back_in_its_own_order() -> None:
    """What an agent is shown is written in that order; shards that an earlier version owed hold the object itself."""
    task = TargetTask("t", "diagnosis", "all", 1, PAYLOAD, ("a_b",))
    work = Work((Episode("k", task, 0, 0),), "diagnosis", 1.0, 8, "it", PolicyIdentity("base", "1"))
    assert json.dumps(as_jsonb(PAYLOAD)) != json.dumps(PAYLOAD)
    assert json.dumps(Work.from_json(as_jsonb(work.as_json())).episodes[0].task.payload) == json.dumps(PAYLOAD)
    assert Work.from_json(as_jsonb(asdict(work))) == work


def test_the_calls_of_a_stored_conversation_are_shown_as_they_were_made() -> None:
    """The compact form writes values by their place."""
    coupon = {"function": {"name": "coupon", "parameters": {"properties": {"order": {}, "code": {}}}}}
    call = ToolCall("coupon", {"order": 418, "code": "SAVE55"})
    said = [Message("user", "SAVE55 for 418."), Message("assistant", "", (call,))]
    worked = worked_example(as_jsonb([m.as_dict() for m in said]))
    shown = Prompting(examples=(worked,)).of(Prompt(tools=(coupon,)))[1]
    assert CompactCalls().write("", shown[1].tool_calls) == "coupon(418, SAVE55)"
    assert CompactCalls().write("", worked[1].tool_calls) == "coupon(SAVE55, 418)", "as the database ordered them"


def test_a_worker_of_another_version_plays_nothing(rounds: Open) -> None:
    context = rounds()
    with pytest.raises(ConfigurationError, match="the flow runs code 0123"):
        shard_task.fn(context.round.id, "part", "0123", "it")


def test_a_worker_with_another_base_plays_nothing(rounds: Open) -> None:
    context = rounds()
    ground, episodes = ordered(context)
    other = sharing.replace(context.policy.identity(), base="another")
    keyed = [sharing.replace(e, key=f"k{i}") for i, e in enumerate(episodes)]
    ledger = context.store.shards(context.round.id)
    ledger.owe("part", [(len(w.episodes), w.as_json()) for w in works(ground, keyed, other, "", 1)])
    with pytest.raises(ConfigurationError, match=r"base='another'.*give every worker the same base"):
        play_part(context, "part", context.engine.engine)
    assert count(context) == 0
    assert len(ledger.free()) == len(ledger.open())


def test_a_worker_needs_no_weights(rounds: Open) -> None:
    context = rounds()
    ground, episodes = ordered(context)
    engine = context.engine.engine
    keyed = [sharing.replace(e, key=i) for i, e in zip(engine.ids(ground, episodes), episodes, strict=True)]
    made = works(ground, keyed, engine.policy.identity(), "", 2)
    context.store.shards(context.round.id).owe("part", [(len(w.episodes), w.as_json()) for w in made])
    for weights in Path(context.settings.base_model).glob("*.safetensors"):
        weights.unlink()
    other = beside(context)
    assert play_part(other, "part").played == 40
    assert "base" not in other.__dict__
    other.close()


class Staged:
    """Stands for a cluster: its tasks are played when they are asked for, and end as `ends` says, one after another."""

    workers = 2

    def __init__(self, context: Context, ends: list[Exception | None]) -> None:
        self.context, self.ends, self.submitted = context, ends, 0

    def submit(self, task: Any, given: Any) -> Any:
        self.submitted += 1
        problem = self.ends.pop(0) if self.ends else None
        if problem is not None:
            return problem
        run = play_part(self.context, given["part"])
        return {"played": run.played, "steps": run.steps}

    def done(self, future: Any) -> bool:
        return True

    def wait(self, future: Any) -> None: ...

    def result(self, future: Any) -> Any:
        if isinstance(future, Exception):
            raise future
        return future

    def close(self) -> None: ...


@pytest.fixture
def staged(rounds: Open, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Context, Staged]]:
    monkeypatch.setattr(sharing, "POLL_SECONDS", 0.0)

    def make(*ends: Exception | None) -> tuple[Context, Staged]:
        context = rounds(runner="dask")
        cluster = Staged(beside(context), list(ends))
        monkeypatch.setattr(sharing, "open_cluster", lambda settings, code: cluster)
        return context, cluster

    return make


def test_tasks_that_died_are_submitted_again(staged: Callable[..., tuple[Context, Staged]]) -> None:
    context, cluster = staged(*[ConnectionError("worker died")] * 3)
    run = shared(context)
    assert (run.played, run.steps, count(context)) == (40, 80, 40)
    assert cluster.submitted == 8  # one a shard; those after the fourth found nothing left


def test_a_cluster_on_which_every_task_dies_is_given_up(staged: Callable[..., tuple[Context, Staged]]) -> None:
    context, _ = staged(*[ConnectionError("worker died")] * 99)
    with pytest.raises(StoreError, match=r"ended .* times, at last with ConnectionError: worker died"):
        shared(context)
    assert context.store.shards(context.round.id).open() == []


def test_a_refusal_ends_the_stage_at_once(staged: Callable[..., tuple[Context, Staged]]) -> None:
    context, _ = staged(ConfigurationError("another version"))
    with pytest.raises(ConfigurationError, match="another version"):
        shared(context)


def test_a_limit_holds_while_others_play(staged: Callable[..., tuple[Context, Staged]]) -> None:
    context, _ = staged(*[ConnectionError("worker died")] * 99)
    engine = context.engine.engine

    def reached() -> None:
        raise LimitReached("hours")

    engine = sharing.replace(engine, options=sharing.replace(engine.options, flushed=reached))
    with pytest.raises(LimitReached):
        SharedPlay(context).play(engine, *ordered(context), "it")
    assert context.store.shards(context.round.id).open() == []


def test_who_waits_for_what_another_process_plays_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: the other one has a watch of its own, and its lease runs out when it dies."""
    left, pulses = [["shard"]] * 5, list[int]()
    shards = SimpleNamespace(open=lambda part: left.pop() if left else [], free=lambda part: [], ahead=lambda part: [])
    monkeypatch.setattr(sharing, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(sharing, "play_part", lambda *given: PlayRun([], 0))
    monkeypatch.setattr(sharing, "pulse", lambda: pulses.append(len(left)))
    waits: Any = SimpleNamespace(shards=shards, context=None)
    engine: Any = SimpleNamespace(options=SimpleNamespace(flushed=lambda: None))
    SharedPlay._alone(waits, engine, "part", "it", PlayRun([], 0))
    assert pulses == [4, 3, 2, 1, 0]


def test_the_fingerprint_is_of_the_code_that_plays() -> None:
    first = worker.code_fingerprint()
    assert len(first) == 16
    worker.check_same(first, "the worker at tcp://x")
    with pytest.raises(ConfigurationError, match="the worker at tcp://x runs code 00"):
        worker.check_same("00", "the worker at tcp://x")


def test_the_rounds_identity_knows_nothing_of_it(rounds: Open) -> None:
    assert rounds(runner="dask", runner_workers=7).settings.identity() == rounds().settings.identity()
