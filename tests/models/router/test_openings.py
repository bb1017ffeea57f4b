"""How tasks begin, where the environment does not open some of them."""

from __future__ import annotations

from typing import Any

from environments.contract import Observation, TargetTask
from environments.targets.shop.target import target
from environments.wrapping import WrappedEnvironment
from models.renderer import Renderer
from models.router.first_observation import openings, openings_by_task
from tasks.round.target_prompt import first_opening
from tests.tokenizers_trained import chatml_tokenizer


def test_a_task_that_does_not_open_has_no_opening_and_the_others_have_theirs() -> None:
    shop, renderer = target(), Renderer(chatml_tokenizer())
    tasks, prompt = shop.tasks("validation")[:4], first_opening(shop)[0]

    class Breaking(WrappedEnvironment):
        def reset(self, task: TargetTask) -> Observation:
            record: dict[str, Any] = {} if task == tasks[1] else {task.id: task}
            return super().reset(record[task.id])

    found = openings_by_task(lambda: Breaking(shop.environment()), renderer, tasks, prompt)
    sound = dict(zip((t.id for t in tasks), openings(shop.environment, renderer, tasks, prompt), strict=True))
    del sound[tasks[1].id]
    assert found == sound
