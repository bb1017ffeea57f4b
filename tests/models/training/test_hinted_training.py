"""Hints in training: shown in some rollouts, out of the prompt and out of every figure again, and taught by success."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from environments.contract import Message, Prompt, Score, TargetTask
from environments.synthesized.hints import advised, is_advised
from models.episodes import Trajectory
from models.renderer import Conversation
from models.training.actors import LocalActor
from models.training.checkpoints import last_whole_checkpoint
from models.training.grpo import train_adapter
from models.training.records import GroupFigures, StepRecord
from models.training.rollouts import Rollouts
from models.training.trl_trainer import EpisodeGRPO
from tests.models.training.test_grpo import SMALL, Source, Toy

HINTED = replace(SMALL, hints=0.5, collections=1)
ADVICE = (Message("user", "seed 0"), Message("assistant", "Short."))


class Advising(Source):
    """Advises on every scenario."""

    def advice(self, task: TargetTask) -> Sequence[Message]:
        return ADVICE


def rollouts(model: Any, played: list[Trajectory] | None = None) -> Rollouts:
    policy, renderer = model
    kept = [] if played is None else played
    return Rollouts(Advising(), LocalActor(policy), renderer, HINTED, lambda step, found: kept.extend(found))


def test_half_of_a_group_is_advised_and_learns_behind_the_plain_prompt(tiny_model: Any) -> None:
    played: list[Trajectory] = []
    _, renderer = tiny_model
    made = rollouts(tiny_model, played)
    made.adapter = None  # type: ignore[assignment]  # the bare model, as before any step
    learnt = made.collect(1)
    assert [is_advised(t.episode.task) for t in learnt] == [False, False, True, True] * 2
    for was, now in zip(played, learnt, strict=True):
        shown = is_advised(was.episode.task)
        first = [Message("user", f"seed {was.episode.task.seed}")]
        plain = renderer.start(Prompt.of(Toy()), first).ids
        assert now.conversation.ids[: len(plain)] == plain
        turns = [i for i, sampled in zip(was.conversation.ids, was.conversation.sampled, strict=True) if sampled]
        assert [i for i, s in zip(now.conversation.ids, now.conversation.sampled, strict=True) if s] == turns
        assert sum(now.conversation.logprobs) == sum(was.conversation.logprobs)
        assert len(now.conversation.ids) == len(now.conversation.sampled) == len(now.conversation.logprobs)
        assert (len(now.conversation.ids) < len(was.conversation.ids)) == shown
    assert [g.episodes for g in made.collected] == [2, 2]  # what was advised is in no figure


def test_an_environment_that_fails_behind_an_advised_rollout_costs_its_group_alone(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once more what it shows without the advice."""
    made, asked = rollouts(tiny_model), list[Toy]()
    monkeypatch.setattr("models.training.rollouts.Advised", lambda given: given)  # leaves the advice where it is

    class Failing(Toy):
        def reset(self, task: TargetTask) -> Any:
            if not is_advised(task):  # two rollouts of each group, and then all the others once more
                asked.append(self)
                if len(asked) == 5:
                    raise KeyError("gone")
            return super().reset(task)

    made.adapter = None  # type: ignore[assignment]
    made.environments.environment = Failing  # type: ignore[method-assign, assignment]
    learnt = made.collect(1)
    assert len(learnt) == 4
    assert made.missing == 1


@pytest.mark.parametrize(("shuffled", "low", "high"), [(False, 100, 10**6), (True, -60, 60)])
def test_advised_successes_teach_nothing_where_rewards_are_dealt_out(
    tiny_model: Any, shuffled: bool, low: float, high: float
) -> None:
    """Most that is advised succeeds, and little else: the sum of the successes' advantages over 300 steps."""
    settings = replace(HINTED, shuffled=shuffled, groups=2, group_size=4, seed=3)
    made, total, draws = rollouts(tiny_model), 0.0, random.Random(0)
    made.settings, conversation = settings, made.renderer.start(Prompt.of(Toy()), [Message("user", "seed 0")])
    talk: Any = Conversation([*conversation.ids, 5], [*conversation.sampled, True], [*conversation.logprobs, -1.0], 1)
    made.actor = SimpleNamespace(publish=lambda *given: "a")  # type: ignore[assignment]
    for step in range(300):
        found: list[Any] = []
        for told in [False, False, True, True] * 2:
            task = TargetTask("t", "training", "toy", 0)
            score = Score(float(draws.random() < (0.7 if told else 0.1)), True)
            episode = SimpleNamespace(task=advised(task, ADVICE) if told else task)
            found.append(SimpleNamespace(score=score, episode=episode, conversation=talk))
        made.collect = lambda step, found=found: found  # type: ignore[method-assign, misc]
        device = SimpleNamespace(device="cpu", unwrap_model=lambda model: model)
        trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=step), accelerator=device, model=None)
        made.rollout([""] * 8, trainer)
        total += sum(a for a, t in zip(made.advantages_R.tolist(), found, strict=True) if t.score.reward)
    assert low < total < high


def test_advice_ends_where_the_policy_succeeds_without_family_by_family(tiny_model: Any) -> None:
    made, hard = rollouts(tiny_model), TargetTask("hard", "training", "hard", 0)
    toy = made.environments.scenario(0)

    def advised() -> tuple[int, int]:
        return tuple(sum(map(is_advised, made._told(task))) for task in (toy, hard))  # type: ignore[return-value]

    assert advised() == (2, 2)  # nothing is known before the first step
    for successes, expected in ((0, 2), (1, 2), (2, 0), (1, 2)):  # the last scenario of a family counts
        made.remember([GroupFigures(True, 5, 5, 1.0, "hard"), GroupFigures(True, 5, successes, 0.5, "toy")])
        assert advised() == (expected, 0)
    made.remember([GroupFigures(True, 5, 0, 0.0, "hard"), GroupFigures(False, 5, 5, 1.0, "toy")])
    assert advised() == (2, 2)  # one that never succeeds is not left alone because others do
    made.environments.own = lambda task: task.family == "hard"  # type: ignore[method-assign]
    assert advised() == (0, 2)  # retention scenarios are shown none


@pytest.mark.parametrize(
    ("size", "share", "count"),
    [(2, 0.25, 1), (3, 0.5, 1), (7, 0.5, 3), (8, 0.5, 4), (10, 0.3, 3), (16, 0.25, 4), (8, 0.0, 0)],
)
def test_no_more_of_a_group_is_advised_than_its_share_and_some_where_there_is_one(
    tiny_model: Any, size: int, share: float, count: int
) -> None:
    made = rollouts(tiny_model)
    made.settings = replace(HINTED, group_size=size, hints=share)
    assert sum(map(is_advised, made._told(made.environments.scenario(0)))) == count


def test_what_advice_goes_by_is_known_again_after_a_stop(tiny_model: Any, tmp_path: Path) -> None:
    policy, renderer = tiny_model
    steps: list[StepRecord] = []
    train_adapter(Advising(), LocalActor(policy), renderer, replace(HINTED, steps=1), tmp_path, steps.append)
    (_, records) = last_whole_checkpoint(tmp_path) or (None, [])
    assert [g.family for r in records for g in r.groups] == ["toy"] * len(steps[0].groups)
    assert steps[0].groups


def test_the_trainer_takes_advised_rows_at_its_own_probabilities_and_their_successes_alone(
    tiny_model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    policy, renderer = tiny_model
    seen: list[tuple[torch.Tensor, ...]] = []
    plain = EpisodeGRPO._loss_of

    def watched(self: EpisodeGRPO, model: Any, inputs: Any) -> Any:
        before = inputs["old_per_token_logps"].clone()
        loss, asked = plain(self, model, inputs), self._asked
        assert asked.old_RT is not None
        seen.append((before, asked.old_RT, asked.logprobs_RT, inputs["hinted"], asked.mask_RT))
        assert not (inputs["advantages"][inputs["hinted"]] < 0).any()
        return loss

    monkeypatch.setattr(EpisodeGRPO, "_loss_of", watched)
    steps: list[StepRecord] = []
    train_adapter(Advising(), LocalActor(policy), renderer, replace(HINTED, steps=1), tmp_path, steps.append)
    assert any(hinted.any() for *_, hinted, _ in seen)
    for before, old, own, hinted, mask in seen:
        rows = hinted[:, None] & mask.bool()
        assert torch.equal(old[rows], own[rows])
        others = ~hinted[:, None] & mask.bool()
        assert torch.equal(old[others], before[others])
        if rows.any():
            assert (before[rows] - own[rows]).abs().max() > 1e-3  # the advice did change them
    assert steps[0].logprob_gap < 1e-3
    assert steps[0].metrics["gap_alarm"] == 0.0
