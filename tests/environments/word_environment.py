"""An environment of one word, for targets whose generators or calls are what is tested."""

from __future__ import annotations

from collections.abc import Sequence

from environments.contract import Action, Message, Observation, Score, TargetTask


class Word:
    """The word of the task has to be said."""

    tools, instructions, max_steps = (), "", 2
    examples: Sequence[Message] = ()

    def reset(self, task: TargetTask) -> Observation:
        self.word, self.said = f"word{task.payload['n']}", ""
        return Observation((Message("user", f"Say {self.word}."),))

    def step(self, action: Action) -> Observation:
        self.said = action.content
        return Observation((), done=True)

    def score(self) -> Score:
        return Score(float(self.said == self.word), self.said == self.word)

    def oracle(self) -> Action | None:
        return None if self.said else Action(content=self.word)

    def close(self) -> None: ...
