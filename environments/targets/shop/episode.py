"""One episode at the desk: the scripted customer, the tools, and the verifier."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from environments.contract import Action, Check, Message, Observation, Score, TargetTask, ToolCall
from environments.targets.shop.families import CAPABILITY_OF_TOOL
from environments.targets.shop.world import TOOLS, Database, call_tool, plain_arguments
from errors import EnvironmentFault, TargetError

MAX_STEPS = 8
MAX_ERRORS = 2
AVOID_UNREQUESTED = "avoid_unrequested_change"


def says(text: str, fact: str) -> bool:
    """Whether `text` states `fact` as whole words, whatever the case."""
    return re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text, re.IGNORECASE) is not None


class ShopEnvironment:
    """Environment of one shop task. Success: the database ends as the reference solution leaves it, the customer was
    told the required facts, and nothing else was written."""

    def __init__(self, instructions: str, examples: Sequence[Message]) -> None:
        self.instructions = instructions
        self.examples: Sequence[Message] = tuple(examples)
        self.tools: Sequence[Mapping[str, Any]] = [tool.schema() for tool in TOOLS.values()]
        self.max_steps = MAX_STEPS
        self._db: Database | None = None

    def reset(self, task: TargetTask) -> Observation:
        payload = task.payload
        try:
            self._db = copy.deepcopy(payload["database"])
            self._reference: list[Mapping[str, Any]] = list(payload["reference"])
            self._replies: list[Mapping[str, str]] = list(payload["replies"])
            self._facts: list[Mapping[str, Any]] = list(payload["facts"])
            opening = payload["opening"]
        except KeyError as missing:
            raise TargetError(
                f"shop task {task.id!r} has no {missing}; draw it again from its family and seed"
            ) from None
        self._goal = copy.deepcopy(payload["database"])
        for step in self._reference:
            if "call" in step:
                _, worked = call_tool(self._goal, step["call"], step["arguments"])
                if not worked:
                    raise EnvironmentFault(
                        f"reference call {step['call']} of task {task.id!r} fails; the family is wrong"
                    )
        self._start = copy.deepcopy(self._db)
        self._calls: list[tuple[str, dict[str, Any], bool]] = []
        self._said: list[tuple[str, str]] = []  # what was said, and what the tools had told until then
        self._learnt = ""
        self._next, self._played, self._errors, self._done = 0, 0, 0, False
        return Observation((Message("user", opening),))

    def _database(self) -> Database:
        if self._db is None:
            raise EnvironmentFault("step before reset; call reset(task) first")
        return self._db

    def step(self, action: Action) -> Observation:
        db = self._database()
        if self._done:
            return Observation((), done=True)
        if action.malformed:
            self._errors += 1
            return (
                self._lose_patience()
                if self._errors > MAX_ERRORS
                else Observation((Message("tool", "error: unreadable"),))
            )
        if action.tool_calls:
            results = []
            asked = [(call, plain_arguments(db, call.arguments)) for call in action.tool_calls]
            if any((call.name, arguments) in [c[:2] for c in self._calls] for call, arguments in asked):
                return self._lose_patience()
            for call, arguments in asked:
                line, worked = call_tool(db, call.name, arguments)
                self._learnt += f" {line}"
                self._calls.append((call.name, arguments, worked))
                self._errors += not worked
                self._advance(call.name, arguments)
                results.append(Message("tool", line, tool_call_id=call.id, name=call.name))
            return Observation(tuple(results)) if self._errors <= MAX_ERRORS else self._lose_patience()
        self._said.append((action.content, self._learnt))
        if self._played < len(self._reference) and "say" in self._reference[self._played]:
            self._played += 1
        return self._customer(action.content)

    def _lose_patience(self) -> Observation:
        """The customer hangs up on a desk that repeats itself or keeps failing."""
        self._done = True
        return Observation((Message("user", "I will call another time."),), done=True)

    def _advance(self, name: str, arguments: dict[str, Any]) -> None:
        """Follow the reference solution, for `oracle`."""
        if self._played < len(self._reference):
            step = self._reference[self._played]
            if step.get("call") == name and step["arguments"] == arguments:
                self._played += 1

    def _customer(self, text: str) -> Observation:
        """The customer answers a question, brings up the next want, or leaves."""
        if self._next < len(self._replies):
            reply = self._replies[self._next]
            if reply["when"] == "any" or "?" in text or says(text, "number"):
                self._next += 1
                return Observation((Message("user", reply["line"]),))
        self._done = True
        return Observation((Message("user", "Thanks, bye."),), done=True)

    def oracle(self) -> Action | None:
        if self._done or self._played >= len(self._reference):
            return None
        step = self._reference[self._played]
        if "say" in step:
            return Action(content=step["say"])
        return Action(tool_calls=(ToolCall(step["call"], step["arguments"], f"call_{self._played}"),))

    def score(self) -> Score:
        db = self._database()
        checks = []
        reference = [step for step in self._reference if "call" in step and not step.get("optional")]
        for index, step in enumerate(reference):
            hit = any(n == step["call"] and a == step["arguments"] and ok for n, a, ok in self._calls)
            # A look-up is judged by having been made, a write by having been made as asked.
            detail = f"{step['call']} {step['arguments']}"
            checks.append(Check(f"{index}:{step['call']}", CAPABILITY_OF_TOOL[step["call"]], True, hit, detail))
        for fact in self._facts:
            checks.append(Check(f"told:{fact['text']}", fact["why"], True, self._told(fact), f"told {fact['text']}"))
        for step in self._reference:
            if step.get("why"):
                asked = self._next > 0
                checks.append(Check("asked", step["why"], True, asked, "asked the customer for what was missing"))
        expected = [(s["call"], s["arguments"]) for s in reference if TOOLS[s["call"]].writes]
        stray = [n for n, a, ok in self._calls if ok and TOOLS[n].writes and (n, a) not in expected]
        wrote = bool(stray)
        checks.append(
            Check(
                "nothing_else_written",
                AVOID_UNREQUESTED,
                True,
                not wrote,
                f"wrote {stray}" if wrote else "no unrequested write",
            )
        )
        success = db == self._goal and self._done and all(c.passed for c in checks if c.required and self._decides(c))
        needed = [c for c in checks if c.required]
        share = sum(c.passed for c in needed) / len(needed)
        return Score(1.0 if success else 0.5 * share * (not wrote), success, tuple(checks))

    def _told(self, fact: Mapping[str, Any]) -> bool:
        """Whether a message stated the fact after a tool had, and nothing against it. Guessing is not telling."""
        return any(
            says(text, fact["text"])
            and says(learnt, fact["text"])
            and not any(says(text, other) for other in fact["instead_of"])
            for text, learnt in self._said
        )

    @staticmethod
    def _decides(check: Check) -> bool:
        """Look-ups serve the result and are not demanded for themselves (the tools insist where policy does)."""
        tool = TOOLS.get(check.name.partition(":")[2])
        return tool is None or tool.writes

    def close(self) -> None:
        self._db = None
