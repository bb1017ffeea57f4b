"""A target of conversations with a user played by a model, two calls of it an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from environments.contract import Action, Message, Observation, Score, TargetTask
from environments.targets.third_party.adapter import player_of
from environments.targets.third_party.simulated_user import UserModel

# A model that LiteLLM has a price for: $2 and $8 per million tokens.
MODEL = "openai/gpt-4.1"
USER = f"litellm:{MODEL}"


class Talk:
    """The user says what it wants and answers once: two calls of its model an episode."""

    tools: Sequence[Any] = ()
    instructions = "Talk."
    examples: Sequence[Message] = ()
    max_steps = 5

    def __init__(self, user: UserModel) -> None:
        self._user = user

    def reset(self, task: TargetTask) -> Observation:
        return Observation((Message("user", self._user([{"role": "user", "content": "Hi!"}], ())[0]),))

    def step(self, action: Action) -> Observation:
        return Observation((Message("user", self._user([{"role": "user", "content": action.content}], ())[0]),), True)

    def score(self) -> Score:
        return Score(1.0, True)

    def oracle(self) -> None:
        return None

    def close(self) -> None:
        return


class TalkTarget:
    """Loaded as the catalogue loads a target whose user may be a model's."""

    name, licence = "talk", "Apache-2.0"

    def __init__(self, name: str, user: str, user_model: UserModel | None) -> None:
        self.user, self.data_hash = user, f"talk-{user}"
        self._model = player_of(user, user_model)

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return [TargetTask(f"{split}-{n}", split, "talk", n) for n in range(4)]

    def environment(self) -> Talk:
        assert self._model is not None
        return Talk(self._model)
