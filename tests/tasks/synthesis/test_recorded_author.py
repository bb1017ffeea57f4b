"""A recorded author (replies that were stored by hand, and named so) writes an environment of the shop through the
stage's own parts: real target, store and sandbox; what the base would do in it is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from db import (
    CapabilityRow,
    CheckRow,
    EnvironmentRow,
    EnvironmentState,
    LabelRow,
    SelectionRow,
    Store,
    open_store,
    row_id,
)
from environments.contract import canonical_json
from environments.targets.catalogue import load_target
from models.providers.analyst import Answer
from settings import load_settings
from settings_parts import CalibrationSettings
from tasks.round.results import RolloutResult, TrainResult
from tasks.round.rollouts import outcomes
from tasks.round.stored import StoredRound
from tasks.synthesis.author_feedback import band_text, typical_episodes
from tasks.synthesis.calibration import Calibration, find_level, judge
from tasks.synthesis.llm_synthesizer import EnvironmentWriter, accepted_environment
from tasks.synthesis.transfer import transfer_of
from tasks.synthesize import withdraw
from tests.db.store_examples import trajectory

GOOD = (Path(__file__).parents[2] / "integration" / "targets" / "module_move_order.py").read_text(encoding="utf-8")
CAPABILITY = "move_order_exactly"
# Paid for the form: the order alone, which stands in the request, earns more than half.
WEAKENED = GOOD.replace("(0.05, 0.2, 1.0)[right]", "(0.05, 0.6, 1.0)[right]")
DROPPING = GOOD.replace(', "promise": _promise}', ', "shout": _promise}')
# Orders and towns of the evidence below, and nothing else.
COPYING = GOOD.replace("rng.randint(101, 998), rng.choice(_TOWNS)", "rng.choice([70011, 70022]), rng.choice(_TOWNS)")
FIGURES = {
    "mean_reward": 0.4, "success_rate": 0.3, "std_reward": 0.3, "all_success": 0.0, "all_zero": 0.0,
    "informative": 1.0, "low": 0.2, "high": 0.4,
}  # fmt: skip


class RecordedAuthor:
    """Gives its replies in order."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.asked = list(replies), list[str]()

    def ask(self, question: Any) -> Answer[Any]:
        self.asked.append("\n".join(message["content"] for message in question.messages))
        module = question.schema(module=self.replies[len(self.asked) - 1])
        return Answer(module, f"request-{len(self.asked)}", False)


def say(name: str, reward: float, number: int) -> Any:
    messages = [
        {"role": "system", "content": "SYSTEM-PROMPT"},
        {"role": "user", "content": f"Please send {number} and 70033 to Oslo."},
        {"role": "assistant", "content": f"SAID-{name}"},
    ]
    checks = (CheckRow("moved", "move", True, reward == 1.0, "it is in Rome"),)
    return name, {"reward": reward, "success": reward == 1.0, "messages": messages, "checks": checks, "family": "move"}


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    store = open_store(f"sqlite:///{tmp_path / 'trace.db'}")
    at = store.start_round("shop", "hash", 0, "test", {})
    rows = [say("t1", 0.0, 70011), say("t2", 0.25, 70022), say("t3", 1.0, 123)]
    store.add_trajectories([trajectory(at.id, name, **changes) for name, changes in rows])
    identity = row_id(at.id, CAPABILITY)
    store.put([CapabilityRow(id=identity, round_id=at.id, name=CAPABILITY, definition="ABOUT-IT", analyst="llm")])
    evidence = [{"id": "t1", "votes": 3}, {"id": "t2", "votes": 3}]
    store.put([SelectionRow(round_id=at.id, capability_id=identity, selected=True, runs_passed=3, evidence=evidence)])
    store.put([LabelRow(round_id=at.id, run=0, trajectory_id="t1", capability_id=identity, label="LACKING", weight=1)])
    stage = store.stage(at.id, "rollout")
    assert stage.claim()
    stage.finish(RolloutResult(trajectories=["t1", "t2", "t3"], lost=0, success=1 / 3).model_dump(mode="json"))
    yield StoredRound(store, at)
    store.close()


def base_in(store: Store, accepted: bool = True) -> Any:
    def measure(environment: Any) -> Calibration:
        frame: pd.DataFrame = outcomes(store, ["t1", "t2", "t3"])
        assert environment.own(environment.own_scenario(-1))
        return Calibration(FIGURES, accepted, "as given", 3, 1, "base1", {}, exhibits=typical_episodes(store, frame))

    return measure


def writer(stored: StoredRound, author: RecordedAuthor, folder: Path, accepted: bool = True) -> EnvironmentWriter:
    given = {"profile": "smoke", "home": str(folder), "synthesizer": {"kind": "llm", "versions": 4}}
    settings = load_settings(**given)
    target = load_target("shop")

    def held_out() -> Any:
        return target.tasks("validation")[:20]

    return EnvironmentWriter(author, stored, target, settings, base_in(stored.store, accepted), held_out)


@pytest.mark.usefixtures("prefect")
def test_an_author_that_weakens_drops_and_copies_is_refused_until_it_does_not(stored, tmp_path):
    author = RecordedAuthor(WEAKENED, DROPPING, COPYING, GOOD)
    result = writer(stored, author, tmp_path).write(CAPABILITY)
    rows = sorted(stored.store.rows(EnvironmentRow), key=lambda row: row.version)
    reasons = ["; ".join(row.spec["reasons"]) for row in rows]
    assert "need: the lazy policy" in reasons[0]
    assert "mean reward 0.6" in reasons[0]
    assert "WRONG has no promise any more" in reasons[1]
    assert "repeat entities of other texts" in reasons[2]
    # The second version's new policy is missing in the last one, too: it has to keep that as well.
    assert not result.accepted
    assert "WRONG has no shout any more" in reasons[3]


@pytest.mark.usefixtures("prefect")
def test_the_base_s_episodes_teach_and_the_corrected_module_is_kept(stored, tmp_path):
    corrected = GOOD + "\n# Corrected.\n"
    first = RecordedAuthor(GOOD, corrected)
    verdicts = iter([base_in(stored.store, False), base_in(stored.store, True)])
    at = replace(writer(stored, first, tmp_path), measure=lambda environment: next(verdicts)(environment))
    result = at.write(CAPABILITY)
    assert (result.accepted, result.versions, len(first.asked)) == (True, 2, 2)
    rows = {row.version: row for row in stored.store.rows(EnvironmentRow)}
    assert (rows[1].state, rows[2].state) == (EnvironmentState.REJECTED, EnvironmentState.ACCEPTED)
    assert rows[2].code == corrected
    said = first.asked[1]
    for part in ("worst episode: reward 0.00", "median episode: reward 0.25", "best episode: reward 1.00, success"):
        assert part in said
    assert "checks: moved FAILED" in said
    assert "SAID-t1" in said
    assert "SYSTEM-PROMPT" not in said
    kept = next(iter(stored.store.rows(EnvironmentRow, version=1))).verdicts["calibration"]["figures"]
    assert [shown["reward"] for shown in kept["exhibits"]] == [0.0, 0.25, 1.0]


@pytest.mark.usefixtures("prefect")
def test_the_first_request_tells_what_the_author_is_judged_by_and_nothing_held_out(stored, tmp_path):
    author = RecordedAuthor(GOOD)
    at = writer(stored, author, tmp_path)
    assert at.write(CAPABILITY).accepted
    (asked,) = author.asked
    assert band_text(at.settings.calibration) in asked
    assert "ABOUT-IT" in asked
    assert "SAID-t1" in asked
    for name in ("find", "account", "move"):
        assert f"- {name}\n  good: {name} " in asked
    assert "65,536 bytes" in asked
    environment = at.target.environment()
    for task in at.held_out():
        opening = environment.reset(task).messages[0].content
        assert opening not in asked
        assert canonical_json(dict(task.payload)) not in asked


@pytest.mark.usefixtures("prefect")
def test_a_module_with_a_held_out_task_is_refused_and_the_author_is_not_told_more_of_it(stored, tmp_path):
    tasks = load_target("shop").tasks("validation")[:20]
    environment = load_target("shop").environment()
    opening = environment.reset(tasks[0]).messages[0].content
    copied = GOOD.replace("rng.choice(_ASKS).format(n=number, a=town)", repr(opening))
    author = RecordedAuthor(copied, GOOD)
    assert writer(stored, author, tmp_path).write(CAPABILITY).accepted
    (refused, _) = sorted(stored.store.rows(EnvironmentRow), key=lambda row: row.version)
    assert "has the same request, as a held-out task of the target" in "; ".join(refused.spec["reasons"])
    assert tasks[0].id not in author.asked[1]


def by_level(store: Store, *success: float) -> Any:
    """Calibration looks through the levels of the module: the base succeeds at each in the share that is given."""

    def measure(environment: Any) -> Calibration:
        frame: pd.DataFrame = outcomes(store, ["t1", "t2", "t3"])

        def play(level: int) -> Calibration:
            figures = FIGURES | {"success_rate": success[level], "mean_reward": success[level]}
            if not success[level]:
                figures |= {"informative": 0.0, "all_zero": 1.0, "std_reward": 0.0}
            accepted, reason = judge(figures, CalibrationSettings().model_dump())
            shown = typical_episodes(store, frame)
            return Calibration(figures, accepted, reason, 3, 1, "base1", {}, exhibits=shown, level=level)

        return find_level(environment.levels, play, CalibrationSettings())

    return measure


@pytest.mark.usefixtures("prefect")
def test_an_author_whose_environments_are_never_informative_hears_of_every_level_and_gives_up(stored, tmp_path):
    author = RecordedAuthor(GOOD, GOOD, GOOD, GOOD)
    at = replace(writer(stored, author, tmp_path), measure=by_level(stored.store, 0.0, 0.0))
    result = at.write(CAPABILITY)
    assert (result.accepted, result.versions, len(author.asked)) == (False, 4, 4)
    assert all("no level is informative: level 0: mean reward 0.00 outside" in reason for reason in result.reasons)
    assert "one level after another" in author.asked[0]
    assert "no level is informative" in author.asked[1]
    assert "worst episode" in author.asked[1]
    rows = stored.store.rows(EnvironmentRow)
    assert {row.state for row in rows} == {EnvironmentState.REJECTED}
    assert all(row.verdicts["calibration"]["figures"]["levels"]["0"]["success_rate"] == 0.0 for row in rows)


@pytest.mark.usefixtures("prefect")
@pytest.mark.parametrize(("success", "level"), [((0.4, 0.1), 0), ((0.9, 0.5), 1)])
def test_the_level_that_fits_is_found_without_asking_the_author_and_trained_at(stored, tmp_path, success, level):
    author = RecordedAuthor(GOOD)
    at = replace(writer(stored, author, tmp_path), measure=by_level(stored.store, *success))
    assert at.write(CAPABILITY).accepted
    assert len(author.asked) == 1
    made = accepted_environment(stored.store, stored.round, at.target, CAPABILITY, lambda name, make: make())
    try:
        assert (made.level, made.levels) == (level, 2)
        assert ("-level1" in made.scenario(3).id) is bool(level)
    finally:
        made.close()


@pytest.mark.usefixtures("prefect")
def test_what_does_not_carry_over_goes_back_with_both_sides_and_the_next_version_is_written(stored, tmp_path):
    again = GOOD + "\n# Another one.\n"
    author = RecordedAuthor(GOOD, again)
    at = writer(stored, author, tmp_path)
    assert at.write(CAPABILITY).accepted
    store = stored.store
    checked = transfer_of(1, outcomes(store, ["t1"]), outcomes(store, ["t3"]), outcomes(store, ["t1", "t2"]))
    checked = checked.model_copy(update={"verdict": "does-not-transfer: as measured"})
    given = {"adapter": "x", "sha256": "", "steps": 1, "run": "", "ending": "", "chosen": 1}
    stage = store.stage(stored.round.id, f"train:{CAPABILITY}")
    assert stage.claim()
    stage.finish(TrainResult(**given, verdict=checked.verdict, transfer=checked).model_dump(mode="json"))
    context = SimpleNamespace(store=store, round=stored.round, settings=at.settings, found=stored.found)
    assert withdraw(context, CAPABILITY, checked.verdict)
    result = at.write(CAPABILITY)
    assert (result.accepted, result.versions, result.bank) == (True, 2, "")
    said = author.asked[1]
    assert "Version 1 was refused\n- does-not-transfer: as measured" in said
    inside, outside = said.split("the trained agent on the target, worst episode: reward 0.00, no success", 1)
    assert "SAID-t3" in inside.split("the trained agent in your environment")[1]
    assert "SAID-t1" in outside
    states = {row.version: row.state for row in store.rows(EnvironmentRow)}
    assert states == {1: EnvironmentState.WITHDRAWN, 2: EnvironmentState.ACCEPTED}
    made = accepted_environment(store, stored.round, at.target, CAPABILITY, lambda name, make: make())
    made.close()
    assert made.module.source == again
