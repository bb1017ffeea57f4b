"""Prompts that a method made: what they change, that episodes behind them are others, and which examples are taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from environments.contract import Message, Prompt, ToolCall
from tasks.methods import examples as room
from tasks.methods.examples import Worked, examples, worked_examples
from tasks.methods.gepa import behind, proposer_of
from tasks.methods.run import run_method
from tasks.methods.seed.prompts import PromptedEnvironment, Prompting, opening_tokens, prompted, worked_example
from tasks.methods.seed.seed_run import SeedRun, close_round, diagnose, pay, solved_at_diagnosis
from tests.tasks.counting_target import TASKS, Counting
from tests.tasks.methods.letters_target import solved, target
from tests.tasks.methods.seeds_made import TRAIN, seed_run, without_prefect

SHOWN = (Message("user", "Count 3."), Message("assistant", "", (ToolCall("count", {"n": 3}, "c"),)),
         Message("tool", "counted", tool_call_id="c", name="count"), Message("assistant", "Three."))  # fmt: skip


@pytest.fixture
def run(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    without_prefect(monkeypatch)
    opened = seed_run(settings_folder, tiny_model)
    yield opened
    close_round(opened.context)


def test_a_stored_conversation_becomes_a_worked_example() -> None:
    stored = [m.as_dict() for m in (*SHOWN, Message("user", "Thanks."))]
    assert worked_example(stored) == SHOWN, "to the agent's last turn"
    assert worked_example(stored[1:]) == ()
    assert worked_example([{"role": "user", "content": "Hello."}]) == ()


def test_a_prompt_changes_words_and_adds_examples_and_nothing_else() -> None:
    prompting = Prompting(("Count.", "Count well."), (SHOWN,))
    environment = PromptedEnvironment(Counting(), prompting)
    first = environment.reset(TASKS[3])
    assert (environment.instructions, environment.examples) == ("Count well.", SHOWN)
    assert first == Counting().reset(TASKS[3])
    assert environment.tools == Counting.tools
    environment.step(environment.oracle())  # type: ignore[arg-type]
    assert environment.score().success
    assert Prompting(("", "Count well.")).of(Prompt("")) == ("Count well.", ()), "where the target has no instructions"
    assert Prompting(("", "Count well.")).of(Prompt("Count."))[0] == "Count."
    assert Prompting().is_none
    assert Prompting(("a", "a")).is_none
    assert len({p.id for p in (prompting, Prompting(), Prompting(examples=(SHOWN,)))}) == 3


def test_episodes_behind_another_prompt_are_others(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, changed = (prompted(run.context, p, "evaluation") for p in (Prompting(), Prompting(("Say", "Tell"))))
    assert plain.where != changed.where
    environment = changed.make()
    environment.reset(target.tasks("test")[0])
    assert environment.instructions == "Tell letters."
    clone = behind(target, Prompting(("Say", "Tell")))
    assert (clone.tasks("test"), clone.data_hash) == (target.tasks("test"), target.data_hash)
    assert clone.environment() is not target.environment()
    assert isinstance(clone.environment(), PromptedEnvironment)
    assert not isinstance(target.environment(), PromptedEnvironment)
    assert behind(target, Prompting()) is target
    # In a round on that target, too; and not where a training environment is played.
    context, ground = run.context, run.context.ground("evaluation")
    monkeypatch.setitem(context.__dict__, "target", clone)
    assert context.ground("evaluation").where == f"{ground.where}|behind:{Prompting(('Say', 'Tell')).id}"
    assert context.training_ground("made", clone.environment, "").where == ground.where.replace(target.name, "made")


def test_worked_examples_are_of_each_family_in_turn_and_fit(run: SeedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnose(run)
    found = worked_examples(run.context)
    there = room.solved_at_diagnosis(run.context)
    assert sorted(w.id for w in found) == sorted(there["id"])
    assert {w.family for w in found[:2]} == set(there["family"].unique())
    assert found == worked_examples(run.context), "the seed decides"
    short = opening_tokens(run.context, Prompting())
    assert opening_tokens(run.context, Prompting(examples=(found[0].turns,))) > short
    monkeypatch.setattr(run.context.policy, "context", 2 * short)
    assert worked_examples(run.context) == []


@pytest.mark.parametrize(("rates", "taken"), [((0.1, 0.2, 0.4, 0.3), 2), ((0.5, 0.4, 0.5, 0.5), 0)])
def test_the_best_number_of_examples_is_taken(
    run: SeedRun, monkeypatch: pytest.MonkeyPatch, rates: Sequence[float], taken: int
) -> None:
    diagnose(run)
    pool = [
        Worked(f"t{i}", "low", (Message("user", f"letters {i}"), Message("assistant", "abc")), i == 1) for i in range(4)
    ]
    monkeypatch.setattr(room, "worked_examples", lambda context: pool)
    given = iter(rates)
    monkeypatch.setattr(room, "success_of", lambda context, ids: next(given))
    account = pay(run.context, "examples", run.episodes, ["diagnosis"])
    answer = examples(run, run.context, account)
    assert len(answer.prompting.examples) == taken
    assert answer.notes[0].startswith(f"{taken} examples; on validation 0: {100 * rates[0]:.1f} %")
    told = f"reference solutions of diagnosis tasks: {taken // 2} of the {taken} examples, 1 of the 4 to choose from"
    assert answer.notes[-1] == told


@pytest.mark.parametrize("count", [0, 2])
def test_families_that_were_never_solved_have_reference_solutions(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Where TRACE may learn from such; of diagnosis tasks, for `examples` and in GEPA's pool."""
    without_prefect(monkeypatch)
    opened = seed_run(
        settings_folder / "solved", tiny_model, target=solved.name, train=TRAIN | {"demonstrations": count}
    )
    diagnose(opened)
    context = opened.context
    never = solved_at_diagnosis(context).query("family == 'low'")
    monkeypatch.setattr(room, "solved_at_diagnosis", lambda context: never)
    found = worked_examples(context)
    references = [w for w in found if w.reference]
    assert [w.family for w in references] == ["high"] * count
    assert {w.id for w in found} - {w.id for w in references} == set(never["id"])
    asked = {f"letters {task.payload['n']}" for task in context.tasks("diagnosis") if task.family == "high"}
    assert {w.turns[0].content for w in references} <= asked, "no other split's"
    assert {w.turns[-1].content for w in references} <= {"a"}, "and they are right"
    assert {i for i, f in proposer_of(context, found).families.items() if f == "high"} == {w.id for w in references}
    close_round(context)


def test_examples_stop_with_what_they_have_when_the_budget_ends(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_prefect(monkeypatch)
    poor = seed_run(settings_folder / "poor", tiny_model, budget=25)
    figures = run_method(poor, "examples")
    assert figures.episodes == 20
    assert figures.notes[1] == "the budget ended before 1 examples were tried"
    close_round(poor.context)
