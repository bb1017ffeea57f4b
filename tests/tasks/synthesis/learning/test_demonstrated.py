"""Demonstrations are different reference solutions that succeed: what the agent says in them solves the scenario."""

from __future__ import annotations

import logging
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import Observation, Prompt, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.hints import solved
from environments.targets.shop.families import FAMILIES
from environments.targets.shop.target import target
from environments.wrapping import WrappedEnvironment
from errors import Untrainable
from models.local.base import embedded_folder
from models.renderer import Conversation, Renderer
from tasks.round.target_prompt import first_opening
from tasks.synthesis.learning import demonstrated
from tasks.synthesis.learning.demonstrated import demonstrations


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    from transformers import AutoTokenizer

    return Renderer(AutoTokenizer.from_pretrained(embedded_folder()))


def shown(renderer: Renderer, families: tuple[str, ...], count: int, context: int = 8192) -> list[Conversation]:
    environment = ComposedEnvironment(target(), CompositionSpec("shop", target().data_hash, "x", families))
    base: Any = SimpleNamespace(renderer=renderer, policy=SimpleNamespace(context=context))
    return demonstrations(environment, base, dict.fromkeys(families, count))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_turns_of_a_demonstration_solve_its_scenario(family: str, renderer: Renderer) -> None:
    """Played as a policy plays that samples these very ids, the conversation comes out the same, id for id."""
    task, environment = target().generate(family, 123), target().environment()
    made = renderer.demonstration(first_opening(target())[0], solved(environment, task))
    marked = zip(made.ids, made.sampled, strict=True)
    turns = [[i for i, _ in part] for mine, part in groupby(marked, key=lambda pair: pair[1]) if mine]
    played = renderer.start(Prompt.of(environment), environment.reset(task).messages)
    for place, ids in enumerate(turns):
        said = environment.step(renderer.read(ids, environment.tools))
        renderer.answer(played, ids, [0.0] * len(ids), () if place == len(turns) - 1 else said.messages)
    assert environment.score().success
    assert (played.ids, played.sampled) == (made.ids, made.sampled)


def test_so_many_of_each_family_and_no_two_alike(renderer: Renderer) -> None:
    found = shown(renderer, ("item_price", "cancel_without_number"), 12)
    assert len({tuple(made.ids) for made in found}) == len(found) == 24
    asks = renderer.text_ids("What is your order number?")
    assert sum(_has(made.ids[made.shared :], asks) for made in found) == 12


def test_what_fails_is_not_shown(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    def now_and_then(environment: Any, task: Any) -> Any:
        return () if task.seed % 2 else solved(environment, task)

    monkeypatch.setattr(demonstrated, "solved", now_and_then)
    some = shown(renderer, ("item_price",), 400)
    assert 300 < len(some) <= 400, "others are drawn for those that fail, up to twice as many"
    monkeypatch.setattr(demonstrated, "solved", lambda environment, task: ())
    assert shown(renderer, ("item_price",), 12) == []


def test_what_the_base_cannot_hold_is_left_out_and_said(renderer: Renderer, caplog: pytest.LogCaptureFixture) -> None:
    """No policy could sample what stands behind the context, and nothing in a training would refuse it."""
    families = ("item_price", "cancel_without_number")
    lengths = sorted(len(made.ids) for made in shown(renderer, families, 12))
    assert caplog.text == ""
    most = lengths[len(lengths) // 2]
    assert lengths[0] < most < lengths[-1]
    with caplog.at_level(logging.WARNING, "trace"):
        some = shown(renderer, families, 12, context=most)
    assert 12 <= len(some) <= 24, "others are drawn for them"
    assert max(len(made.ids) for made in some) <= most
    (said,) = caplog.messages
    assert f"are longer than the base's context of {most} tokens" in said
    assert "of cancel_without_number" in said
    with pytest.raises(Untrainable, match=rf"all 48 .* context of {lengths[0] - 1} tokens .*longer context"):
        shown(renderer, families, 12, context=lengths[0] - 1)


class ByTask(WrappedEnvironment):
    """Its instructions are the task's own."""

    def reset(self, task: TargetTask) -> Observation:
        observation = super().reset(task)
        self.instructions = f"Today's subject: {task.family}."
        return observation


def test_each_stands_behind_the_prompt_of_its_own_scenario(renderer: Renderer) -> None:
    """Where prompts differ by task, what is learnt behind another's is not what is played."""
    shop, families = target(), ("item_price", "refund_all")
    own: Any = SimpleNamespace(
        name="shop", environment=lambda: ByTask(shop.environment()), families=shop.families, generate=shop.generate,
        tasks=shop.tasks, data_hash=shop.data_hash, licence="",
    )  # fmt: skip
    base: Any = SimpleNamespace(renderer=renderer, policy=SimpleNamespace(context=8192))
    environment = ComposedEnvironment(own, CompositionSpec("shop", shop.data_hash, "x", families))
    made = demonstrations(environment, base, dict.fromkeys(families, 1))
    said = [renderer.tokenizer.decode(conversation.ids[: conversation.shared]) for conversation in made]
    assert [f"subject: {family}." in text for family, text in zip(families, said, strict=True)] == [True, True]


def _has(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))
