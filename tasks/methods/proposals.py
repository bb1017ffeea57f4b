"""What GEPA tries next: the rewriting of a prompt from what its rollouts showed.

Two components: the target's instructions, and a list of worked examples by the ids of the trajectories that show them.
Examples are always chosen by the script. Instructions are written by the analyst's model where one is configured, with
GEPA's own prompt; else by the script, which adds or takes away a reminder of a check that failed. The script is no
language model: what it can find is worked examples and reminders, and every result of it says so.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from db import ReplyRow, Store
from errors import ProviderError
from models.providers.analyst import Analyst, Question, unanswered
from tasks.methods.examples import NUMBERS, Example
from tasks.methods.seed.prompts import Prompting
from tasks.mining.transcripts import RECORDED, recording

INSTRUCTIONS, EXAMPLES = "instructions", "examples"
SCRIPTED = "a script (worked examples swapped, reminders of failed checks); no language model reflects"
# GEPA's prompt asks for blocks, and the schema for a text: some models write the one in the other.
_BLOCK = re.compile(r"```(?:[\w-]*[ \t\r]*\n)?(.*)```", re.DOTALL)
Rewrite = Callable[[str, Sequence[Mapping[str, Any]]], str]
Records = Sequence[Mapping[str, Any]]


class NewInstructions(BaseModel):
    """What the reflecting model answers."""

    instructions: str

    @property
    def plain(self) -> str:
        """The instructions without blanks around them, and without the fence that a model may put around the whole."""
        text = self.instructions.strip()
        block = _BLOCK.fullmatch(text)
        return block[1].strip() if block else text


def _not_empty(given: NewInstructions) -> None:
    if not given.plain:
        raise ValueError("instructions is empty; write the new instructions, whole")


@dataclass
class Proposer:
    """Makes new texts of a candidate's components. `pool` has the worked examples by id, `families` whose each is,
    `fits` says whether a prompt leaves room for the conversation; `rewrite` is a model's, None is the script's.

    `problem` is what nothing can be proposed after, such as a model that cannot be reached. `reflections` counts the
    texts that a model was asked for, `unusable` those that it refused, or gave in no form that can be used; `used` has
    the hashes of the requests that it has answered."""

    original: str
    pool: Mapping[str, Example]
    families: Mapping[str, str]
    fits: Callable[[Prompting], bool]
    draws: random.Random
    rewrite: Rewrite | None = None
    used: set[str] = field(default_factory=set)
    reminders: list[str] = field(default_factory=list)
    problem: Exception | None = None
    reflections: int = 0
    unusable: int = 0

    def prompting(self, candidate: Mapping[str, str]) -> Prompting:
        """The prompt that a candidate stands for."""
        shown = tuple(self.pool[i] for i in candidate[EXAMPLES].split() if i in self.pool)
        return Prompting((self.original, candidate[INSTRUCTIONS]), shown)

    def propose(
        self, candidate: dict[str, str], dataset: Mapping[str, Records], components: list[str]
    ) -> dict[str, str]:
        """New texts of `components`; one that leaves no room, or that a model does not give, is given back as it was.

        What else is raised here is kept: GEPA would take it for one candidate less, ask again and go on, and whoever
        runs GEPA has to end it (see `problem`). No model is asked after it."""
        if self.problem is None:
            try:
                return self._proposed(candidate, dataset, components)
            except Exception as problem:
                self.problem = problem
        raise self.problem

    def _proposed(
        self, candidate: dict[str, str], dataset: Mapping[str, Records], components: list[str]
    ) -> dict[str, str]:
        made = {}
        for component in components:
            records = dataset[component]
            if component == EXAMPLES:
                text = self._examples(candidate[EXAMPLES].split(), records)
            elif self.rewrite is not None:
                text = self._rewritten(self.rewrite, candidate[INSTRUCTIONS], records)
            else:
                text = self._reminded(candidate[INSTRUCTIONS], records)
            tried = {**candidate, component: text}
            made[component] = text if self.fits(self.prompting(tried)) else candidate[component]
        return made

    def _rewritten(self, rewrite: Rewrite, text: str, records: Records) -> str:
        """What the model makes of the text; the text itself where it has answered with nothing that can be used."""
        self.reflections += 1
        try:
            return rewrite(text, records)
        except ProviderError as problem:
            if unanswered(problem):
                raise
            self.unusable += 1
            return text

    def _examples(self, shown: Sequence[str], records: Records) -> str:
        """One example more, of a family that failed where there is one; one swapped or taken away when there are as
        many as are ever tried."""
        failed = {str(r["Family"]) for r in records if not r["Solved"]}
        left = [i for i in self.pool if i not in shown]
        wanted = [i for i in left if self.families[i] in failed] or left
        kept = list(shown)
        if kept and (not wanted or len(kept) >= NUMBERS[-1] or self.draws.random() < 0.3):
            kept.remove(self.draws.choice(kept))
        if wanted:
            kept.append(self.draws.choice(wanted))
        return " ".join(kept)

    def _reminded(self, text: str, records: Records) -> str:
        """A reminder of what failed most often and is not there yet; where all is there, one reminder less."""
        failed = Counter(kind for r in records for kind in r["Failed checks"])
        for kind, _ in failed.most_common():
            line = f"Remember: {kind.replace('_', ' ')}."
            if line not in text:
                self.reminders.append(line)
                return f"{text}\n{line}"
        there = [line for line in dict.fromkeys(self.reminders) if f"\n{line}" in text]
        return text.replace(f"\n{self.draws.choice(there)}", "") if there else text


def by_analyst(analyst: Analyst, temperature: float, method: str, used: set[str]) -> Rewrite:
    """A model's rewriting of instructions, asked with GEPA's own prompt, what was said in episodes fenced off in it;
    replies are kept, so a run that goes on asks nothing twice. What is asked is stored as the `method`'s; the hash of
    each request that was answered, now or before, is put into `used`."""
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    def rewrite(text: str, records: Records) -> str:
        shown = [{k: recording(v) if isinstance(v, str) else v for k, v in record.items()} for record in records]
        prompt = InstructionProposalSignature.prompt_renderer(
            {"current_instruction_doc": text, "dataset_with_feedback": shown, "prompt_template": None}
        )
        asked = [{"role": "system", "content": RECORDED}, {"role": "user", "content": str(prompt)}]
        answer = analyst.ask(Question(method, asked, NewInstructions, temperature, check=_not_empty))
        used.add(answer.request_hash)
        return answer.value.plain

    return rewrite


def paid_by_others(store: Store, used: Collection[str], method: str) -> float:
    """Dollars of the `used` replies that another method of the same home has paid for: what the method would have paid
    without it, so that its figures are the same in either order."""
    rows = store.rows(ReplyRow, request_hash=list(used))
    return sum(row.dollars for row in rows if row.reply.get("stage", method) != method)
