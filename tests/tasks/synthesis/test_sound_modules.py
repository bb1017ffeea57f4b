"""Twelve sound modules of three targets are accepted by the settings that refuse the weakened ones: with the target's
own tools, at every level, and calibrated at one of them by an agent that slips now and then."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from environments.contract import Action, Environment, Message
from environments.synthesized.module_contract import WORKED_EXAMPLES, worked_examples
from environments.synthesized.module_files import validate_module
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.written import WrittenEnvironment, WrittenSpec
from environments.targets import tau2
from environments.targets.catalogue import load_target
from models.policy import PolicyIdentity
from settings import load_settings
from tasks.round.stage import forget, open_context
from tasks.round.target_prompt import target_prompt
from tasks.synthesis.calibration import measure

TESTS = Path(__file__).parents[2]
FOLDERS = {"shop": "modules_of_shop", "tau2:retail": "modules_of_retail", "tau2:airline": "modules_of_airline"}
MODULES = [("shop", TESTS / "integration" / "targets" / "module_move_order.py")] + [
    (target, path)
    for target, folder in FOLDERS.items()
    for path in sorted((TESTS / "environments" / "synthesized" / folder).glob("sound_*.py"))
]
CALIBRATION = {"seeds": 12, "samples": 8}


class Clumsy:
    """Does what the reference would do, but for nearly every other turn, in which it says hello."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("clumsy", "", "", "", "")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        right = environment.oracle() if self.rng.random() > 0.45 else None
        return right or Action(content="Hello.")


@pytest.fixture
def context(settings_folder: Path) -> Iterator[Any]:
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home", calibration=CALIBRATION))
    yield opened
    forget(opened.round.id)


def test_there_are_four_of_each_of_three_targets() -> None:
    assert [target for target, _ in MODULES] == [name for name in FOLDERS for _ in range(4)]


@pytest.mark.parametrize("name", ["apply_coupon", "look_up_item", "refund_payment"])
def test_the_yardsticks_modules_are_accepted_and_not_shown_to_the_author(name: str) -> None:
    source = (WORKED_EXAMPLES / "shop" / f"{name}.py").read_text(encoding="utf-8")
    verdict = validate_module(source, target_tools=target_prompt(load_target("shop")).tools)
    assert verdict.accepted, verdict.reasons
    assert source not in worked_examples().values()


@pytest.mark.parametrize(("target_name", "path"), MODULES, ids=lambda part: getattr(part, "stem", part))
def test_a_sound_module_is_accepted_at_some_level(context: Any, target_name: str, path: Path) -> None:
    if target_name != "shop" and (missing := tau2.describe()[0].missing):
        pytest.skip(missing)
    target, source = load_target(target_name), path.read_text(encoding="utf-8")
    verdict = validate_module(source, target_tools=target_prompt(target).tools)
    assert verdict.accepted, verdict.reasons
    needs = [verdict.figures["need"], *(found["need"] for found in verdict.figures["levels"].values())]
    assert sum(need["seconds"] for need in needs) < 60
    module = SandboxedModule(source)
    try:
        assert len(needs) == module.levels
        spec = WrittenSpec(target_name, "data", module.capability, module.code_hash, (module.capability,))
        environment = WrittenEnvironment(target, spec, module)
        measured = measure(context.engine_of(Clumsy()), context.settings, environment)
        assert measured.accepted, measured.reason
        assert measured.reason == f"within the band at level {measured.level} of {module.levels}"
    finally:
        module.close()
