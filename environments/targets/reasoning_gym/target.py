"""reasoning-gym as a target, `reasoning-gym:FAMILY,...`: one question a task, one line as the answer.

Success is the package's own full score; in families whose verifier is lax, it is the package's own answer. Tasks are
made by number, so every round can draw new ones; the package's settings decide how hard they are, and a level of its
own curriculum above them is the shift test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property

from environments.contract import (
    SPLITS,
    Action,
    Check,
    Draw,
    Message,
    Observation,
    Score,
    TargetTask,
    content_hash,
)
from environments.targets.reasoning_gym.problems import (
    DISTRIBUTION,
    FULL,
    HARDER_LEVEL,
    INSTALL,
    LICENCE,
    VERSION,
    Problem,
    check_families,
    check_package,
    has_harder,
    package_score,
    problem,
)
from environments.targets.third_party.adapter import TargetInfo, capability
from environments.targets.third_party.procedural import Procedural
from errors import EnvironmentFault, TargetError

# It rises when another answer is right than before: figures of two verdicts are not comparable.
ADAPTER_VERSION = 2
NAME = "reasoning-gym"
# Procedures that one line can carry out, whose questions a small base reads: copying in order, choosing, counting.
DEFAULT_FAMILIES = ("word_sequence_reversal", "number_filtering", "letter_counting", "chain_sum", "spell_backward")
INSTRUCTIONS = "Answer each question with the answer alone, in one line."
# Tasks of a split over all families, and the fewest of one family.
PER_SPLIT, LEAST_OF_A_FAMILY = 160, 8
# Worked examples over all families at most, the same number of each; one of each at least all the same.
EXAMPLES = 6
# The most that an answer earns which the package does not take for right.
NEAR_MISS = 0.5
WHOLE = "answer_in_full"


class QuestionEnvironment:
    """One question; the answer is a message, so there are no tools to call."""

    tools: Sequence[Mapping[str, object]] = ()
    instructions = INSTRUCTIONS
    max_steps = 1

    def __init__(self, examples: Sequence[Message]) -> None:
        self.examples = examples
        self._problem: Problem | None = None

    def reset(self, task: TargetTask) -> Observation:
        """Payload: `number`, and `harder` for a question of the shift test."""
        self._harder = bool(task.payload.get("harder", False))
        self._problem = asked = _asked(task)
        self._answer: str | None = None
        return Observation((Message("user", asked.question),))

    def _asked(self) -> Problem:
        if self._problem is None:
            raise EnvironmentFault("no episode is running; call reset(task) first")
        return self._problem

    def step(self, action: Action) -> Observation:
        """The first answer counts, and ends the episode."""
        self._asked()
        if self._answer is None:
            self._answer = (action.content or action.malformed).strip()
        return Observation((), done=True)

    def score(self) -> Score:
        """Success is a right answer (`package_score`). Another earns less than `NEAR_MISS`: by the package's score, or
        by how much of the reference stands in it, in order."""
        asked, answer = self._asked(), self._answer or ""
        value = package_score(asked, answer, self._harder) if answer else 0.0
        success = value == FULL
        likeness = SequenceMatcher(None, asked.answer, answer, autojunk=False).ratio()
        reward = 1.0 if success else NEAR_MISS * max(value, likeness)
        parts, given = len(asked.answer.split()), len(answer.split())
        checks = (
            Check("answer", solving(asked.family), True, success, f"{answer!r} for {asked.answer!r}"[:200]),
            Check("whole", WHOLE, True, success or given == parts, f"{given} words for {parts}"),
        )
        return Score(reward, success, checks, {"package_score": value})

    def oracle(self) -> Action | None:
        """The package's answer; None when the question is answered."""
        asked = self._asked()
        return None if self._answer is not None else Action(content=asked.answer)

    def close(self) -> None:
        """Forget the episode."""
        self._problem = None


class ReasoningGymTarget:
    """Some families of reasoning-gym as a target with splits, draws and generators."""

    licence = LICENCE
    user = "none"

    def __init__(self, families: Sequence[str] = DEFAULT_FAMILIES) -> None:
        """Raises TargetError when the package is absent or lacks a family, or when a family has too few questions."""
        check_package()
        check_families(list(families))
        self.name = NAME if tuple(families) == DEFAULT_FAMILIES else f"{NAME}:{','.join(families)}"
        self._families = tuple(families)
        self._per_family = max(LEAST_OF_A_FAMILY, PER_SPLIT // len(families))
        self._shown = max(1, EXAMPLES // len(families))
        self._made = Procedural(self._families, _make, self.content, self._per_family)
        self._made.check()

    @cached_property
    def data_hash(self) -> str:
        """Covers the package's version, the questions of every split, and the prompt."""
        asked = [[task.id, task.payload] for split in SPLITS for task in self.tasks(split)]
        prompt = [INSTRUCTIONS, [message.as_dict() for message in self.examples]]
        return content_hash([DISTRIBUTION, VERSION, ADAPTER_VERSION, HARDER_LEVEL, asked, prompt])

    @cached_property
    def examples(self) -> Sequence[Message]:
        """Questions of each family with their answers. Their contents are for training, so no task asks them."""
        messages: list[Message] = []
        for place in range(self._shown):
            for family in self._families:
                shown = _asked(self._made.fresh(family, place))
                messages += [Message("user", shown.question), Message("assistant", shown.answer)]
        return tuple(messages)

    def tasks(self, split: str) -> Sequence[TargetTask]:
        """The fixed tasks of a split, of all families from the first on."""
        if split not in SPLITS:
            raise TargetError(f"split {split!r} does not exist; the splits are {', '.join(SPLITS)}")
        return self._made.fixed[split]

    def environment(self) -> QuestionEnvironment:
        return QuestionEnvironment(self.examples)

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {family: _needs(family) for family in self._families}

    def generate(self, family: str, seed: int) -> TargetTask:
        """A scenario to train on; the first seeds inside show how questions are answered."""
        self._refuse_other(family)
        return self._made.fresh(family, seed + self._shown)

    def drawn(self, split: str, draw: Draw) -> Sequence[TargetTask]:
        return self._made.drawn(split, draw)

    def further(self, draw: Draw, family: str, count: int) -> Sequence[TargetTask]:
        self._refuse_other(family)
        return self._made.further(draw, family, count)

    def _refuse_other(self, family: str) -> None:
        if family not in self._families:
            raise TargetError(f"{self.name} has no family {family!r}; its families are {', '.join(self._families)}")

    def content(self, task: TargetTask) -> str:
        """Hash of question and answer."""
        asked = _asked(task)
        return content_hash([asked.question, asked.answer])

    def shift_test(self) -> Sequence[TargetTask]:
        """Harder questions of the families that the package has harder ones of."""
        return self._made.further_apart([f for f in self._families if has_harder(f)], _make_harder, self._per_family)


def families_of(name: str) -> tuple[str, ...]:
    """The families in a target's name `reasoning-gym:FAMILY,...`, known or not; none for any other name."""
    begin, colon, rest = name.partition(":")
    return tuple(part.strip() for part in rest.split(",")) if begin == NAME and colon else ()


def solving(family: str) -> str:
    """The capability that a family needs."""
    return capability("solve", family)


def _needs(family: str) -> tuple[str, ...]:
    return (solving(family), WHOLE)


def _make(family: str, number: int) -> TargetTask | None:
    return _task(family, number, {"number": number})


def _make_harder(family: str, number: int) -> TargetTask | None:
    return _task(family, number, {"number": number, "harder": True})


def _task(family: str, number: int, payload: Mapping[str, object]) -> TargetTask | None:
    harder = bool(payload.get("harder", False))
    if problem(family, number, harder) is None:
        return None
    name = f"{family}-{'harder-' if harder else ''}{number}"
    return TargetTask(name, "generated", family, number, dict(payload), _needs(family))


def _asked(task: TargetTask) -> Problem:
    """The question of a task that was made here. Raises TargetError for any other."""
    found = problem(task.family, int(task.payload["number"]), bool(task.payload.get("harder", False)))
    if found is None:
        raise TargetError(f"task {task.id!r} has no question that the package itself can answer")
    return found


def describe() -> list[TargetInfo]:
    """The target with its default families, whether the package is there or not."""
    try:
        target = ReasoningGymTarget()
        counts = {split: len(target.tasks(split)) for split in SPLITS}
        return [TargetInfo(NAME, LICENCE, counts, target.data_hash, "none", draws=True)]
    except TargetError as error:
        return [TargetInfo(NAME, LICENCE, missing=str(error), how_to_get=INSTALL)]
