"""What answers: one adapter, several by family, a nested part; and which of TRACE's adapters each method takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from safetensors.torch import load_file

from db import GENERALIST, AdapterRow, AdapterState
from models.adapters.blending import TIES_DENSITY, blend
from models.adapters.deltas import folder_deltas
from models.adapters.files import adapter_digest
from tasks.measuring.lineup import Lineup
from tasks.methods import adapters
from tasks.methods.adapters import NONE_TRAINED, merge_ties, oracle_route, single
from tasks.methods.seed.answers import Answer, first_of, one_adapter, play_answer, success_of, successes
from tasks.methods.seed.seed_run import SeedRun, close_round, pay
from tasks.round.results import ChallengeResult, RouteResult, SelectResult
from tests.adapters_made import make_adapter
from tests.tasks.methods.letters_target import target
from tests.tasks.methods.seeds_made import seed_run, without_prefect

NAMES = ("say_low_letters", "say_high_letters")


@pytest.fixture
def run(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeedRun]:
    without_prefect(monkeypatch)
    opened = seed_run(settings_folder, tiny_model)
    pay(opened.context, "trace", opened.episodes, ())
    yield opened
    close_round(opened.context)


def stored_adapters(run: SeedRun) -> dict[str, str]:
    """Two live adapters, as trainings leave them; their ids by capability."""
    context, found = run.context, {}
    for n, name in enumerate(NAMES):
        folder = make_adapter(context.base.policy.model, context.folder / name, seed=n, layers=(1, 2))
        row = AdapterRow(
            id=f"id-{name}", round_id=context.round.id, base="tiny", sha256=adapter_digest(folder),
            path=str(folder.relative_to(context.settings.folder)), state=AdapterState.TRAINED,
        )  # fmt: skip
        context.store.put([row])
        found[name] = row.id
    return found


def test_families_decide_instead_of_a_router(run: SeedRun) -> None:
    members, tasks = stored_adapters(run), target.tasks("test")
    answer = Answer(run.context, Lineup(members), {"low": NAMES[0]})
    ids = play_answer(answer, tasks, 2, "test")
    rows = {r.task_id: r.adapter_id for r in run.context.store.trajectories(None, id=ids)}
    assert {rows[t.id] for t in tasks if t.family == "low"} == {members[NAMES[0]]}
    assert {rows[t.id] for t in tasks if t.family == "high"} == {None}
    whole = play_answer(one_adapter(run.context, NAMES[0], members[NAMES[0]]), tasks, 2, "test")
    assert {r.adapter_id for r in run.context.store.trajectories(None, id=whole)} == {members[NAMES[0]]}
    assert set(successes(answer, ids)) == {t.id for t in tasks}
    assert {len(x) for x in successes(answer, ids).values()} == {2}


def test_a_nested_part_leaves_the_rest_to_the_base(run: SeedRun) -> None:
    members = stored_adapters(run)
    answer = Answer(run.context, Lineup(members), nested=NAMES)
    assert [list(first_of(answer, k).lineup.members) for k in range(3)] == [[], [NAMES[0]], list(NAMES)]


@pytest.mark.parametrize(("boundary", "outcome"), [("provider", None), ("environment", None), ("policy", 0.0)])
def test_an_episode_that_was_lost_is_no_outcome_unless_the_policy_itself_could_not_answer(
    run: SeedRun, boundary: str, outcome: float | None
) -> None:
    """A method whose prompt leaves no room for half of the tasks would be measured on the others."""
    answer = Answer(run.context)
    ids = play_answer(answer, target.tasks("test")[:2], 1, "test")
    with run.context.store.transaction() as connection:
        connection.exec_driver_sql(
            f"UPDATE trajectories SET success = NULL, reward = NULL, error_boundary = '{boundary}' "
            f"WHERE id = '{ids[0]}'"
        )
    found = successes(answer, ids)
    assert found[target.tasks("test")[0].id] == [outcome]
    assert found[target.tasks("test")[1].id] in ([0.0], [1.0])


def test_what_a_policy_cannot_answer_speaks_against_it_where_one_is_chosen() -> None:
    """A prompt whose examples leave no room for half of the tasks would be taken for what it does on the others."""

    def chosen_by(*ended: tuple[str, float | None, str | None]) -> float:
        rows = [(f"{task}{i}", task, "f", i, success, 0.0, error) for i, (task, success, error) in enumerate(ended)]
        columns = ["id", "task_id", "family", "trial", "success", "reward", "error_boundary"]
        frame = pd.DataFrame(rows, columns=columns).astype({"success": "boolean"})
        store = SimpleNamespace(trajectory_frame=lambda round_id, id: frame)
        return success_of(SimpleNamespace(store=store), list(frame["id"]))  # type: ignore[arg-type]

    assert chosen_by(("a", True, None), ("b", None, "policy"), ("b", None, "policy")) == 0.5
    assert chosen_by(("a", True, None), ("a", None, "policy"), ("b", False, None)) == 0.25
    assert chosen_by(("a", True, None), ("b", None, "provider"), ("c", None, "environment")) == 1.0
    assert chosen_by(("a", None, "provider")) == chosen_by(("a", None, "policy")) == chosen_by() == 0.0


def taken(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    members = stored_adapters(run)
    monkeypatch.setattr(adapters, "registered", lambda stored: list(NAMES))
    monkeypatch.setattr(adapters, "own_adapter", lambda stored, name: members[name])
    return members


def test_single_takes_the_best_on_the_diagnosis(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    members = taken(run, monkeypatch)
    found = {ChallengeResult: ChallengeResult(passed=list(NAMES)), RouteResult: RouteResult(candidate="one")}
    monkeypatch.setattr(type(run.context), "found", lambda self, kind, *of: found[kind])
    worth = {NAMES[0]: 0.25, NAMES[1]: 0.5}
    monkeypatch.setattr(adapters, "success_of", lambda context, ids: worth[ids[0]])
    monkeypatch.setattr(adapters, "tried_on_diagnosis", lambda context, name: [name])
    answer = single(run, run.context, pay(run.context, "single", 9, ["trace"]))
    assert answer.lineup.members == {NAMES[1]: members[NAMES[1]]}
    assert set((answer.families or {}).values()) == {NAMES[1]}


def test_the_ceiling_sends_families_where_they_belong(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    members = taken(run, monkeypatch)
    families = {NAMES[0]: ("low", "both"), NAMES[1]: ("high", "both")}
    monkeypatch.setattr(adapters, "families_of", lambda context, name: families[name])
    answer = oracle_route(run, run.context, pay(run.context, "x", 9, ()))
    assert answer.families == {"low": NAMES[0], "high": NAMES[1], "both": NAMES[0]}, "the first selected wins"
    assert answer.lineup == Lineup(members)
    # Without the generalist on the rest it would be no ceiling of a release that has one.
    monkeypatch.setattr(adapters, "registered", lambda stored: [NAMES[0], GENERALIST])
    monkeypatch.setattr(adapters, "own_adapter", lambda stored, name: f"adapter-{name}")
    monkeypatch.setattr(adapters, "families_of", lambda context, name: ("low",))
    answer = oracle_route(run, run.context, pay(run.context, "x", 9, ()))
    assert answer.families is not None
    assert (answer.families["low"], answer.families["high"]) == (NAMES[0], GENERALIST)
    assert answer.lineup.members == {name: f"adapter-{name}" for name in (NAMES[0], GENERALIST)}


def test_without_an_adapter_the_base_answers_and_it_is_said(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(run.context), "result", lambda self, kind: SelectResult(selected=[]))
    monkeypatch.setattr(adapters, "registered", lambda stored: [])
    for make in (single, oracle_route, merge_ties):
        answer = make(run, run.context, pay(run.context, make.__name__, 9, ()))
        assert (answer.lineup, answer.families, answer.notes) == (Lineup(), None, (NONE_TRAINED,))


def test_a_merge_is_one_adapter_and_is_made_once(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    taken(run, monkeypatch)
    account = pay(run.context, "merge-ties", 9, ["trace"])
    first = merge_ties(run, run.context, account)
    (identity,) = first.lineup.members.values()
    row = run.context.store.row(AdapterRow, id=identity)
    assert row is not None
    before = adapter_digest(run.context.settings.folder / row.path)
    assert merge_ties(run, run.context, account).lineup == first.lineup
    assert adapter_digest(run.context.settings.folder / row.path) == before == row.sha256
    monkeypatch.setattr(adapters, "registered", lambda stored: [NAMES[0]])
    assert "nothing to merge" in merge_ties(run, run.context, account).notes[0]


def test_ties_keeps_the_largest_changes_and_their_rank(run: SeedRun, tmp_path: Path) -> None:
    """Where both agree the merge agrees; its rank is that of its parts, so servers take it."""
    model = run.context.base.policy.model
    parts = {make_adapter(model, tmp_path / str(n), seed=n, layers=(1, 2)): 1.0 for n in range(2)}
    merged = blend(model, parts, tmp_path / "ties", ties=True)
    linear = blend(model, dict.fromkeys(parts, 0.5), tmp_path / "linear")
    ranks = [{w.shape[0] for k, w in load_file(f / "adapter_model.safetensors").items() if "lora_A" in k}
             for f in (merged, linear)]  # fmt: skip
    assert ranks == [{4}, {8}]
    ties, first, second = ({n: d.whole() for n, d in folder_deltas(f)[1].items()} for f in (merged, *parts))
    for name, delta in ties.items():
        both = (first[name].sign() == second[name].sign()) & (
            first[name].abs() + second[name].abs() > 2 * first[name].abs().quantile(1 - TIES_DENSITY / 4)
        )
        if both.sum() > 10:
            assert float((delta[both].sign() == first[name][both].sign()).float().mean()) > 0.8
