"""A target that hangs or raises while an environment is composed of it and validated: a reason, not the stage's end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from environments.contract import Generators, Target, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.catalogue import load_target
from environments.validation.checks import Limits
from errors import ConfigurationError
from tasks import synthesize
from tasks.synthesis.environments import validated
from tasks.synthesis.guarded import GuardedTarget
from tests.environments.word_environment import Word

LIMITS = Limits(distinct=5, searched=10, episodes=5, attack_seeds=1, replayed=4)


def hang(*_: Any) -> Any:
    while True:
        time.sleep(0.01)


def trip(*_: Any) -> Any:
    raise re.error("unterminated character set")


def refuse(*_: Any) -> Any:
    raise ConfigurationError("no such folder")


class Words:
    name, licence, data_hash, user = "words", "none", "words-1", "none"

    def __init__(self, **changes: Callable[..., Any]) -> None:
        self.changes = changes

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {"say": ("say_word",)}

    def generate(self, family: str, seed: int) -> TargetTask:
        self.changes.get("generate", bool)()
        return TargetTask(f"{family}-{seed}", "generated", family, seed, {"n": seed})

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return []

    def environment(self) -> Word:
        self.changes.get("make", bool)()
        made = Word()
        for name in {"reset", "step", "score", "oracle", "close"} & self.changes.keys():
            setattr(made, name, self.changes[name])
        return made


def judged(target: Target) -> Any:
    spec = CompositionSpec("words", "words-1", "say_word", ("say",))
    return validated(ComposedEnvironment(GuardedTarget(target, seconds=0.2), spec), LIMITS)[1]


def test_a_guarded_target_is_the_target() -> None:
    target = Words()
    guarded = GuardedTarget(target)
    assert isinstance(guarded, Target)
    assert isinstance(guarded, Generators)
    assert (guarded.name, guarded.data_hash, guarded.user) == ("words", "words-1", "none")
    assert guarded.generate("say", 3) == target.generate("say", 3)
    assert judged(target).accepted


@pytest.mark.parametrize("name", ["generate", "make", "reset", "step", "score", "oracle"])
@pytest.mark.parametrize(
    ("problem", "said"), [(hang, "did not return within 0.2 s"), (trip, "raised error: unterminated character set")]
)
def test_what_raises_or_hangs_is_a_reason(name: str, problem: Callable[..., Any], said: str) -> None:
    began = time.monotonic()
    verdict = judged(Words(**{name: problem}))
    assert not verdict.accepted
    assert f"the environment's {name} {said}" in "\n".join(verdict.reasons)
    assert time.monotonic() - began < 5


def test_the_stage_composes_of_the_guarded_target_and_ends_for_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def compose(target: GuardedTarget, context: Any, capability: str) -> Any:
        target.generate("say", 0)
        return target, ""

    monkeypatch.setattr(synthesize, "_composed_from", compose)
    context: Any = SimpleNamespace(target=Words())
    found, reason = synthesize._composed(context, "say_word")
    assert (type(found), reason) == (GuardedTarget, "")
    assert type(context.target) is Words, "the round's own stays as it is"
    context.target = Words(generate=trip)
    assert synthesize._composed(context, "say_word") == (
        None,
        "compose: the environment's generate raised error: unterminated character set; mend the environment",
    )
    context.target = Words(generate=refuse)
    with pytest.raises(ConfigurationError, match="no such folder"):
        synthesize._composed(context, "say_word")


@pytest.mark.parametrize("name", ["shop", "bfcl:single"])
def test_built_in_targets_are_as_sound_when_they_are_guarded(name: str) -> None:
    """Also for what the red team alone says, such as half a character, which the shop repeats."""
    target = load_target(name)
    assert isinstance(target, Generators)
    for family, needs in list(target.families().items())[:3]:
        spec = CompositionSpec(name, target.data_hash, needs[0], (family,))
        limits = Limits(distinct=5, searched=20, episodes=5, attack_seeds=1, replayed=4)
        _, verdict = validated(ComposedEnvironment(GuardedTarget(target), spec), limits)
        assert [reason for reason in verdict.reasons if "fault" in reason] == []
        assert verdict.figures["red_team"]["attacks"]
