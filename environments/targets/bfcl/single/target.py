"""BFCL v4's single-turn categories as a target, `bfcl:single`, and the live categories as `bfcl:single:live`.

An episode is one turn: a question below the signatures of the functions on offer, and one line as the answer. Success
is BFCL's own verdict by its AST checker. Where no function fits, BFCL takes every text that is no call for right, so
that silence, an apology for anything and a call with a missing bracket would all win; here only the answer `none` does,
as the prompt asks, and `metrics["bfcl_valid"]` has BFCL's verdict beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from environments.contract import SPLITS, Action, Message, Observation, Score, TargetTask, content_hash
from environments.picking import spread
from environments.targets.bfcl.package import INSTALL, LICENCE, VERSION
from environments.targets.bfcl.single.answers import (
    Calls,
    UnreadableAnswer,
    read_answer,
    reference_answer,
    write_answer,
)
from environments.targets.bfcl.single.generate import generated
from environments.targets.bfcl.single.items import FAMILIES, LIVE, Item, files_hash, item_of, live_items, splits
from environments.targets.bfcl.single.prompt import EXAMPLES, INSTRUCTIONS, asked
from environments.targets.bfcl.single.verdicts import (
    ALL_CALLS,
    ARGUMENTS,
    CHOOSE,
    DECLINE,
    OFFERED,
    ONE_CALL,
    READABLE,
    bfcl_verdict,
    checks_of,
    credit,
)
from environments.targets.third_party.adapter import TargetInfo, of_split, seed_of, split_counts
from errors import EnvironmentFault, TargetError

ADAPTER_VERSION = 1
NAME, LIVE_NAME = "bfcl:single", "bfcl:single:live"
# Of the test split at equal distances, and of the live tasks from the first on: what comparisons played while the
# profile `bfcl` was chosen.
LOOKED_AT, LIVE_LOOKED_AT = (200, 300), 200
# The most that an answer earns which BFCL does not take for right.
NEAR_MISS = 0.5
CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "simple_python": (READABLE, ONE_CALL, OFFERED, ARGUMENTS),
    "multiple": (READABLE, ONE_CALL, CHOOSE, ARGUMENTS),
    "parallel": (READABLE, ALL_CALLS, OFFERED, ARGUMENTS),
    "parallel_multiple": (READABLE, ALL_CALLS, CHOOSE, ARGUMENTS),
    "irrelevance": (DECLINE,),
}


class SingleTurnEnvironment:
    """One question. The functions stand in the question, so there are no tools to call: the answer is a message."""

    tools: Sequence[Mapping[str, object]] = ()
    instructions = INSTRUCTIONS
    examples: Sequence[Message] = EXAMPLES
    max_steps = 1

    def __init__(self) -> None:
        self._item: Item | None = None

    def reset(self, task: TargetTask) -> Observation:
        """Payload: an item's (`Item.payload`), and optionally `without`, the places of reference calls that `oracle`
        leaves out."""
        self._item = item = item_of(task.id, task.payload)
        self._without = {int(place) for place in task.payload.get("without", ())}
        self._answered, self._problem = False, "no answer"
        self._calls: Calls | None = None
        return Observation(asked(item.functions, item.messages))

    def _asked(self) -> Item:
        if self._item is None:
            raise EnvironmentFault("no episode is running; call reset(task) first")
        return self._item

    def step(self, action: Action) -> Observation:
        """The first answer counts, and ends the episode."""
        self._asked()
        if not self._answered:
            self._answered, self._problem = True, ""
            if action.tool_calls:  # a policy that calls natively has said the same
                self._calls = [{call.name: dict(call.arguments)} for call in action.tool_calls]
            else:
                try:
                    self._calls = read_answer(action.content or action.malformed)
                except UnreadableAnswer as problem:
                    self._problem = str(problem)
        return Observation((), done=True)

    def score(self) -> Score:
        """Success is BFCL's verdict, and for declining the answer `none`. The reward of anything else is at most
        `NEAR_MISS`, by the share of checks that passed."""
        item, calls = self._asked(), self._calls
        checks = checks_of(item, calls, self._problem)
        valid, _ = bfcl_verdict(item, calls)
        success = valid and calls is not None
        reward = 1.0 if success else NEAR_MISS * credit(checks, calls, len(item.reference))
        return Score(reward, success, tuple(checks), {"bfcl_valid": float(valid)})

    def oracle(self) -> Action | None:
        """The reference's answer, as text; None when the question is answered."""
        item = self._asked()
        if self._answered:
            return None
        calls = reference_answer(item.functions, item.reference)
        kept = [call for place, call in enumerate(calls) if place not in self._without]
        return Action(content=write_answer(kept))

    def close(self) -> None:
        """Forget the episode."""
        self._item = None


class SingleTurnTarget:
    """Items as tasks, by split. Without generators: it can be evaluated, and neither mined nor trained on."""

    licence = LICENCE
    user = "none"

    def __init__(self, name: str, where: Mapping[str, Sequence[Item]], categories: Sequence[str]) -> None:
        self.name, self._categories = name, categories
        tasks = [_task(item, split) for split, items in where.items() for item in items]
        # By a hash of the id, so that the first tasks of a split are of all families.
        self._tasks = sorted(tasks, key=lambda task: (task.seed, task.id))

    @cached_property
    def data_hash(self) -> str:
        """Covers every item that the splits were made from, BFCL's checker, and the prompt."""
        prompt = [INSTRUCTIONS, [message.as_dict() for message in EXAMPLES]]
        files = files_hash(self._categories)
        return content_hash(["bfcl-eval", VERSION, ADAPTER_VERSION, self.name, files, prompt])

    def tasks(self, split: str) -> Sequence[TargetTask]:
        """The tasks of a split, of all families from the first on."""
        return of_split(self._tasks, split)

    def environment(self) -> SingleTurnEnvironment:
        return SingleTurnEnvironment()


class SingleTarget(SingleTurnTarget):
    """The five families of `bfcl:single`, with generators that recompose items of the diagnosis split."""

    def __init__(self) -> None:
        super().__init__(NAME, splits(), FAMILIES)

    def shift_test(self) -> Sequence[TargetTask]:
        """The live categories, which `bfcl:single:live` has as a target."""
        return live_target().tasks("test")

    def held_back_test(self) -> Sequence[TargetTask]:
        test = self.tasks("test")
        seen = {task.id for most in LOOKED_AT for task in spread(test, most)}
        return [task for task in test if task.id not in seen]

    def held_back_shift(self) -> Sequence[TargetTask]:
        return self.shift_test()[LIVE_LOOKED_AT:]

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return CAPABILITIES

    def generate(self, family: str, seed: int) -> TargetTask:
        return replace(_task(generated(family, seed), "generated"), seed=seed)


def live_target() -> SingleTurnTarget:
    """The live categories: a shift test. All their tasks are in the split test, which decides nothing, so that the
    figure is reported and nothing is ever chosen by it."""
    return SingleTurnTarget(LIVE_NAME, {"test": live_items()}, FAMILIES + LIVE)


def _task(item: Item, split: str) -> TargetTask:
    family = item.category.removeprefix("live_")
    needs = CAPABILITIES["simple_python" if family == "simple" else family]
    return TargetTask(item.id, split, item.category, seed_of(item.id), item.payload(), needs)


def describe() -> list[TargetInfo]:
    """Both targets, whether the package is there or not; imports nothing of it."""
    lines = []
    builders: dict[str, Callable[[], SingleTurnTarget]] = {NAME: SingleTarget, LIVE_NAME: live_target}
    for name, build in builders.items():
        try:
            target = build()
            counts = split_counts([task for split in SPLITS for task in target.tasks(split)])
            lines.append(TargetInfo(name, LICENCE, counts, target.data_hash, "none"))
        except TargetError as error:
            lines.append(TargetInfo(name, LICENCE, missing=str(error), how_to_get=INSTALL))
    return lines
