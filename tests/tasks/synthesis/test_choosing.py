"""The checkpoint that is taken: which are played, on which seeds, and which wins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from environments.contract import Generators, TargetTask
from environments.sandbox.workers import NOT_STARTED, ModuleError
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.catalogue import load_target
from errors import ConfigurationError, EnvironmentFault
from models.training.grpo import TrainingResult
from models.training.records import GroupFigures, StepRecord
from models.training.rollouts import scenario_seed
from settings import load_settings
from tasks.synthesis.calibration import (
    CALIBRATION_SEED,
    CARRY_SEED,
    CHOOSING_SEED,
    FRESH_SEED,
    round_seed,
    seed_offset,
)
from tasks.synthesis.choosing import DRAWS, candidates, finished, fresh_scenarios, pick, retained
from tasks.synthesis.learning import course

OWN = [TargetTask(f"own-{i}", "training", "own", i) for i in range(16)]
OTHERS = [TargetTask(f"other-{i}", "training", "other", i) for i in range(8)]


def record(step: int, *wins: int) -> StepRecord:
    """Four own scenarios of eight episodes, and a retention scenario that always succeeds."""
    groups = [GroupFigures(True, 8, w, w / 8) for w in wins]
    return StepRecord(step, 0.1, 0.0, 0.0, 0.0, 1.0, (*groups, GroupFigures(False, 8, 8, 1.0)))


def outcomes(own: int, others: int = 8, reward: float = 0.0) -> pd.DataFrame:
    """Outcomes of one episode on each scenario, of which the first `own` and `others` succeed."""
    tasks = [*OWN, *OTHERS]
    success = [i < own for i in range(16)] + [i < others for i in range(8)]
    rewards = [1.0 if s else reward for s in success]
    given = {"task": [t.id for t in tasks], "success": success, "reward": rewards}
    return pd.DataFrame(given | {"error_boundary": None, "error": None})


def test_the_last_checkpoint_and_the_best_of_training_are_played() -> None:
    # The step after a checkpoint plays it: checkpoint 1 had 0, 2 had 29, 3 had 24 and 4 had 26 of 32.
    records = [record(1, 0, 0, 0, 0), record(2, 0, 0, 0, 0), record(3, 7, 8, 7, 7), record(4, 6, 6, 6, 6)]
    records.append(record(5, 6, 7, 7, 6))
    assert candidates(records, 3) == [2, 4, 5]
    assert candidates(records, 9) == [2, 3, 4, 5]  # 1 is worse than what noise explains
    assert candidates(records, 1) == [5]
    assert candidates(records[:1], 3) == [1]
    # What training began from (the first step's rollouts) is no checkpoint, however good it was.
    assert candidates([record(1, 8, 8, 8, 8), record(2, 4, 4, 4, 4)], 3) == [1, 2]


def test_a_training_that_fell_below_its_first_level_is_looked_at() -> None:
    """Only what training began from was played at the hardest one, and the last was taken unseen."""
    wins = (1, 4, 6, 6, 6, 6, 4, 2)
    records = [record(step, *[w] * 4) for step, w in enumerate(wins, 1)]
    expected = candidates(records, 3)
    assert expected == [4, 5, 8]
    for at, one in enumerate(records):
        one.metrics["level"] = 1.0 if at else 2.0
    assert candidates(records, 3) == expected


def test_the_best_on_own_scenarios_is_taken_and_of_equals_the_later() -> None:
    chosen = pick({0: outcomes(4), 2: outcomes(9), 3: outcomes(11), 4: outcomes(8)}, OWN)
    assert chosen.step == 3
    assert [(c.step, c.success, c.retention, c.forgets) for c in chosen.figures] == [
        (0, 4 / 16, 1.0, False),
        (2, 9 / 16, 1.0, False),
        (3, 11 / 16, 1.0, False),
        (4, 8 / 16, 1.0, False),
    ]
    assert pick({0: outcomes(4), 2: outcomes(9), 4: outcomes(9)}, OWN).step == 4
    assert pick({0: outcomes(4), 2: outcomes(9, reward=0.2), 4: outcomes(9)}, OWN).step == 2
    # Retention does not lift a checkpoint that is worse on its own scenarios.
    assert pick({0: outcomes(4, 4), 2: outcomes(9, 4), 4: outcomes(7, 8)}, OWN).step == 2


def test_a_checkpoint_that_forgets_is_passed_over_unless_all_do() -> None:
    chosen = pick({0: outcomes(4), 2: outcomes(9, 7), 4: outcomes(14, 1)}, OWN)
    assert [c.forgets for c in chosen.figures] == [False, False, True]
    assert chosen.step == 2
    assert pick({0: outcomes(4), 2: outcomes(9, 0), 4: outcomes(14, 1)}, OWN).step == 4


@pytest.mark.parametrize("profile", ["smoke", "laptop", "night", "bfcl", "gpu-small", "gpu", "cluster"])
def test_with_every_profile_a_checkpoint_that_lost_all_retention_is_seen_to_forget(
    settings_folder: Path, profile: str
) -> None:
    many = load_settings(profile=profile).train.choosing
    own, others = [f"own-{i}" for i in range(many)], [f"other-{i}" for i in range(retained(many))]

    def solved(own_too: int, others_too: bool) -> pd.DataFrame:
        wins = [*(i < own_too for i in range(many)), *[others_too] * len(others)]
        return pd.DataFrame({"task": [*own, *others], "success": wins, "reward": [float(w) for w in wins]})

    played = {0: solved(0, True), 1: solved(many - 1, True), 2: solved(many, False)}
    chosen = pick(played, [TargetTask(name, "generated", "f", 0) for name in own])
    assert (chosen.step, [c.forgets for c in chosen.figures]) == (1, [False, False, True])


def test_the_start_is_kept_only_where_every_checkpoint_is_surely_worse() -> None:
    assert pick({0: outcomes(8), 2: outcomes(5), 4: outcomes(7)}, OWN).step == 4
    assert pick({0: outcomes(14), 2: outcomes(2), 4: outcomes(3)}, OWN).step == 0


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ([("sandbox", "KeyError: 'slot'")] * 16, True),
        ([("sandbox", "KeyError: 'slot'")] * 15, False),
        ([("sandbox", "KeyError")] * 15 + [("sandbox", f"{NOT_STARTED}: Too many open files")], False),
        ([("sandbox", "KeyError")] * 15 + [("environment", "the shop is closed")], False),
        ([("provider", "503")] * 16, False),
    ],
)
def test_only_what_the_module_loses_of_all_of_its_own_scenarios_ends_a_capability(
    errors: list[tuple[str, str]], ends: bool
) -> None:
    frame, names = outcomes(8).astype({"success": float}), {task.id for task in OWN}
    for i, (boundary, error) in enumerate(errors):
        frame.loc[i, ["success", "error_boundary", "error"]] = [float("nan"), boundary, error]
    if ends:
        with pytest.raises(ModuleError, match="module ended all 16 episodes that were to show it with an error"):
            finished(frame, names, "it")
    else:
        left = finished(frame, names, "it")
        assert (len(left), left["success"].dtype) == (24 - len(errors), bool)
    assert len(finished(frame)) == 24 - len(errors)


def test_scenarios_without_retention_and_lost_episodes() -> None:
    own = [frame[frame["task"].str.startswith("own")] for frame in (outcomes(4), outcomes(9))]
    chosen = pick({0: own[0], 1: own[1]}, OWN)
    assert [(c.retention, c.forgets) for c in chosen.figures] == [(None, False), (None, False)]
    with pytest.raises(EnvironmentFault, match="what step 1 is worth were lost"):
        pick({0: own[0], 1: own[1].head(0)}, OWN)


def composed() -> ComposedEnvironment:
    target = load_target("shop")
    assert isinstance(target, Generators)
    families = target.families()
    needing = next(iter(next(iter(families.values()))))
    own = tuple(sorted(name for name, needs in families.items() if needing in needs))
    rest = tuple(sorted(set(families) - set(own)))
    return ComposedEnvironment(target, CompositionSpec("shop", target.data_hash, needing, own, rest, 1 / 3))


def ids(tasks: Sequence[TargetTask]) -> set[str]:
    return {task.id for task in tasks}


def test_choosing_has_scenarios_that_nothing_else_has_in_any_round() -> None:
    environment = composed()
    seen: set[str] = set()
    for number in (1, 2, 60):
        own, retention = fresh_scenarios(environment, 16, number)
        assert fresh_scenarios(environment, 16, number) == (own, retention)
        assert all(map(environment.own, own))
        assert not any(map(environment.own, retention))
        offset, seed = seed_offset(number), round_seed(0, number)
        calibration = [environment.own_scenario(CALIBRATION_SEED - offset - i) for i in range(8)]
        reported = [environment.own_scenario(FRESH_SEED + offset + i) for i in range(16)]
        training = [environment.scenario(scenario_seed(seed, step, place)) for step in range(4) for place in range(12)]
        begun = fresh_scenarios(environment, 16, number, CARRY_SEED)
        parts = [own, retention, calibration, reported, training, *begun]
        assert [len(ids(part)) for part in parts] == [16, 8, 8, 16, 48, 16, 8]
        drawn = set().union(*map(ids, parts))
        assert len(drawn) == 120
        assert not drawn & seen
        seen |= drawn


def test_an_environment_without_retention_has_none_to_choose_on() -> None:
    environment = composed()
    spec = CompositionSpec("shop", environment.target.data_hash, "x", environment.spec.families, (), 0.0)
    own, retention = fresh_scenarios(ComposedEnvironment(environment.target, spec), 6, 1)
    assert (len(own), retention) == (6, [])


def test_rounds_have_seeds_of_their_own() -> None:
    assert round_seed(11, 1) == 11
    assert len({round_seed(seed, number) for seed in range(50) for number in range(1, 61)}) == 3000
    kinds = (FRESH_SEED, CHOOSING_SEED, CARRY_SEED)
    first = sorted(kind + seed_offset(number) for kind in kinds for number in range(1, 61))
    most = 10_000  # as many as the settings allow
    assert all(b - a >= most for a, b in pairwise(first))
    # Retention scenarios are looked for among as many seeds as one round is from the next.
    longest = DRAWS * (most // 2)
    looked = sorted(kind + seed_offset(number) for kind in (CHOOSING_SEED, CARRY_SEED) for number in range(1, 61))
    assert all(b - a >= longest for a, b in pairwise(looked))


@pytest.mark.parametrize(
    ("part", "name", "most"),
    [("calibration", "seeds", seed_offset(2)), ("evaluation", "fresh", 10_000), ("train", "choosing", 10_000)],
)
def test_a_setting_that_would_meet_other_seeds_is_refused(
    settings_folder: Path, part: str, name: str, most: int
) -> None:
    load_settings(**{part: {name: most}})
    with pytest.raises(ConfigurationError, match=f"{part}.{name} = {most + 1}.*less than or equal to {most}"):
        load_settings(**{part: {name: most + 1}})


@pytest.mark.parametrize(
    ("ending", "most", "chosen", "played"),
    [
        ("nothing more to learn: no informative group", 2, 0, ["start", "one"]),
        ("budget", 2, 0, ["start", "one"]),
        ("steps", 2, 1, []),  # it was to make no more, and its plan has no episode for it
        ("budget", 1, 1, []),  # nothing is to be compared
    ],
)
def test_a_training_that_ended_after_one_step_is_compared_with_what_it_began_from(
    monkeypatch: pytest.MonkeyPatch, ending: str, most: int, chosen: int, played: list[str]
) -> None:
    context, asked = Mock(), list[str]()
    context.settings.train.candidates = most

    def play(context: Any, ground: Any, folder: Path, *given: Any) -> pd.DataFrame:
        asked.append(folder.name)
        return outcomes(16 if folder.name == "start" else 4)

    monkeypatch.setattr(course, "_played_with", play)
    monkeypatch.setattr(course, "fresh_scenarios", lambda *given: (OWN, OTHERS))
    result = TrainingResult({0: Path("start"), 1: Path("one")}, (record(1, 4, 4, 4, 4),), ending, "")
    assert course.choose(context, "adapter", Mock(), result, warm=True).step == chosen
    assert asked == played
