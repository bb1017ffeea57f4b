"""A target of eight tasks, two families, for evaluations: say the task's number, or call `count` with it."""

from __future__ import annotations

from collections.abc import Sequence

from environments.contract import Action, Check, Message, Observation, Score, TargetTask, ToolCall
from environments.targets.third_party.adapter import of_split

TASKS = tuple(TargetTask(f"t{n}", "test", "even" if n % 2 == 0 else "odd", n, {"n": n}) for n in range(8))


class Counting:
    """One call, then one word."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "count",
                "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
            },
        },
    )
    instructions = "Count."
    examples: Sequence[Message] = ()
    max_steps = 5

    def reset(self, task: TargetTask) -> Observation:
        self.n, self.right = int(task.payload["n"]), False
        return Observation((Message("user", f"Count {self.n}."),))

    def step(self, action: Action) -> Observation:
        if not action.tool_calls:
            return Observation((), done=True)
        (call,) = action.tool_calls
        self.right = call.arguments.get("n") == self.n
        return Observation((Message("tool", "counted", tool_call_id=call.id, name=call.name),))

    def score(self) -> Score:
        return Score(float(self.right), self.right, (Check("count", "count", True, self.right),), {"digits": 1.0})

    def oracle(self) -> Action | None:
        return None if self.right else Action(tool_calls=(ToolCall("count", {"n": self.n}, "c"),))

    def close(self) -> None:
        return


class CountingTarget:
    name = "counting"
    licence = "Apache-2.0"
    data_hash = "counting-1"
    user = "none"

    def tasks(self, split: str) -> Sequence[TargetTask]:
        return of_split(TASKS, split)

    def environment(self) -> Counting:
        return Counting()


target = CountingTarget()
