"""What a round says to a language model, on two targets: every request of its stages, rendered to files and read.

The model is recorded (`recorded_model`); target, store, client, sandbox and stages are real, and so are the episodes: a
scripted agent played them, the reference solution on some diagnosis tasks and a clumsy one on the others.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db import EnvironmentRow
from environments.contract import Action, Environment, Message, Target, TargetTask, ToolCall, canonical_json
from environments.targets import tau2
from environments.targets.bfcl.single import target as bfcl
from environments.targets.bfcl.single.answers import reference_answer, write_answer
from environments.targets.bfcl.single.items import item_of, plain
from environments.validation.playing import oracle_policy, play
from environments.validation.repeats import entities
from models.policy import PolicyIdentity
from settings import load_settings
from tasks.contrast import contrast
from tasks.mining.transcripts import reports_error
from tasks.round.context import Context
from tasks.round.results import RolloutResult, SynthesizeResult
from tasks.round.rollouts import episodes_for, outcomes
from tasks.round.stage import forget, open_context
from tasks.round.target_prompt import target_prompt
from tasks.select import select
from tasks.synthesize import synthesize
from tests.models.providers.scripted_analyst import ScriptedAnalyst
from tests.tasks.synthesis.recorded_model import RecordedModel, render

MODULES = Path(__file__).parents[2] / "environments" / "synthesized"
MARKER = "I have no idea."
_retail = [line.missing for line in tau2.describe() if line.missing]
_bfcl = [line.missing for line in bfcl.describe() if line.missing]


@dataclass(frozen=True)
class Case:
    """A target, the sound module that is accepted in the end, an edit that pays for the form, and words of the reason
    why that version is refused."""

    target: str
    module: str
    pays: tuple[str, str]

    @property
    def sound(self) -> str:
        return (MODULES / self.module).read_text(encoding="utf-8")

    @property
    def weak(self) -> str:
        assert self.pays[0] in self.sound
        return self.sound.replace(*self.pays, 1)


CASES = [
    pytest.param(
        Case(
            "tau2:retail",
            "modules_of_retail/sound_look_up_customer_by_name.py",
            ("if looked else 0.0", "if looked else 0.6"),
        ),
        marks=pytest.mark.skipif(bool(_retail), reason=f"no tau2: {_retail[:1]}"),
        id="retail",
    ),
    pytest.param(
        Case("bfcl:single", "modules_of_bfcl/sound_fill_exact_arguments.py", ("else 0.0", "else 0.6")),
        marks=pytest.mark.skipif(bool(_bfcl), reason=f"no bfcl-eval: {_bfcl[:1]}"),
        id="bfcl",
    ),
]


@dataclass
class Agent:
    """The reference's next action in a share of the turns (`right`), else a call of the first tools with values that
    are not there, and a sentence. It learns nothing."""

    right: float
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def identity(self, adapter: str | None = None) -> PolicyIdentity:
        return PolicyIdentity("scripted", f"{self.right}", "", "", "")

    def act(self, environment: Environment, messages: Sequence[Message], seed: int) -> Action:
        if self.rng.random() < self.right:
            return environment.oracle() or Action(content="Is there anything else?")
        turn = sum(message.role == "assistant" for message in messages)
        if turn >= min(3, len(environment.tools)):
            return Action(content=MARKER)
        function = environment.tools[turn]["function"]
        given = dict.fromkeys(function["parameters"].get("required", ()), "nowhere")
        return Action(tool_calls=(ToolCall(function["name"], given, f"c{turn}"),))


@dataclass
class Round:
    """A round whose stages were played: what it opened, the requests that were sent and the last stage's result."""

    case: Case
    context: Context
    said: list[tuple[str, str]]
    result: SynthesizeResult

    def of(self, kind: str) -> list[str]:
        return [text for named, text in self.said if named == kind]


@pytest.fixture(params=CASES, scope="module")
def played(request: Any, prefect: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Round]:
    folder = tmp_path_factory.mktemp("prompts")
    case: Case = request.param
    capability = re.search(r'CAPABILITY = "(\w+)"', case.sound)[1]  # type: ignore[index]
    agent = Agent(0.0)

    def asked(version: int) -> None:
        """Of the second version nothing succeeds in calibration; of the third about half."""
        agent.right = 0.65 if version == 3 else 0.0

    model = RecordedModel(capability, MARKER, [case.weak, case.sound, case.sound + "\n# Once more.\n"], asked)
    with ScriptedAnalyst(model) as server:
        context = open_context(settings_of(case, folder, server.api_base))
        try:
            stored_rollout(context)
            vars(context)["backend"] = SimpleNamespace(policy=agent)
            contrast.do(context)
            assert select.do(context).selected == [capability]
            result = synthesize.do(context, capability)
            (folder / "requests").mkdir()
            yield Round(case, context, render(server.requests, folder / "requests"), result)
        finally:
            forget(context.round.id)


def settings_of(case: Case, folder: Path, api_base: str) -> Any:
    analyst = {
        "kind": "llm", "model": "hosted_vllm/recorded", "api_base": api_base, "batch": 6, "prompt_price": 0,
        "sampled_price": 0,
    }  # fmt: skip
    return load_settings(
        profile="smoke", home=folder / "home", target=case.target, analyst=analyst,
        synthesizer={"kind": "llm", "versions": 3}, selection={"runs": 2, "required": 2},
        rollout={"tasks": 12}, calibration={"seeds": 6, "samples": 6, "distinct": 40},
    )  # fmt: skip


def stored_rollout(context: Context) -> None:
    """Every diagnosis task that the round has, played by the reference solution or by an agent that knows nothing, in
    turn; stored as the stage stores it."""
    tasks, ids = context.tasks("diagnosis"), []
    for right in (0.0, 1.0):
        mine = [task for i, task in enumerate(tasks) if i % 2 == right]
        ids += context.engine_of(Agent(right)).play(context.ground("diagnosis"), episodes_for(mine, 1, 0))
    frame = outcomes(context.store, ids)
    assert len(frame) == len(tasks)
    assert 0.2 <= frame["success"].mean() <= 0.6
    stage = context.store.stage(context.round.id, "rollout")
    assert stage.claim()
    stage.finish(RolloutResult(trajectories=ids, lost=0, success=0.5).model_dump(mode="json"))


def test_every_kind_of_request_of_a_round_is_made(played: Round) -> None:
    made = Counter(kind for kind, _ in played.said)
    # Twelve trajectories in batches of six, in two runs, and one answer that was asked for once more.
    assert made == {"probe": 1, "discovery": 1, "labelling": 5, "judging": 3, "authoring": 3}
    assert played.result.accepted, played.result.reasons
    assert played.result.versions == 3
    first, second, third = played.of("authoring")
    assert "was refused" not in first
    assert "need: the lazy policy" in second.split("## Version 1 was refused")[1]
    assert "calibration: no level is informative" in third.split("## Version 2 was refused")[1]
    # Both refusals came with what was played.
    assert re.search(r"## Episodes in it\n### \w+: reward 0.60, no success", second)
    assert "### the agent that will train, worst episode: reward 0.00, no success" in third
    assert MARKER in third.split("## Episodes in it")[1]


def test_no_text_of_a_held_out_task_stands_in_any_request(played: Round) -> None:
    target = played.context.target
    secret = held_out_texts(target)
    assert len(secret) > 100
    for kind, text in played.said:
        words, flat = entities(text), plain(text)
        leaked = [one for one in secret if one in flat or one in words]
        assert not leaked, (kind, leaked[:3])


def test_scenarios_are_compared_with_every_held_out_task_also_with_those_that_the_round_does_not_play(
    played: Round,
) -> None:
    rows = played.context.store.rows(EnvironmentRow, kind="llm")
    (known,) = {row.verdicts["validation"]["figures"]["need"]["repeats"]["sources"] for row in rows}
    every = sum(len(played.context.target.tasks(split)) for split in ("validation", "test"))
    shown = len(re.findall("### Failed trajectory", played.of("authoring")[0]))
    assert len(played.context.tasks("test")) == 12
    assert known == every + shown + len(answers_of(played.of("authoring")[0]))


def test_the_texts_that_are_looked_for_would_be_found(played: Round) -> None:
    """The same search finds the diagnosis tasks that the round was played on."""
    target = played.context.target
    shown = plain("\n".join(text for _, text in played.said))
    found = [task for task in played.context.tasks("diagnosis") if any(t in shown for t in texts_of(target, task))]
    assert len(found) == 12


def test_the_author_sees_real_answers(played: Round) -> None:
    """Of every tool; a target without tools has its verifier's verdicts in their place, for every kind of check."""
    target, tools = played.context.target, target_prompt(played.context.target).tools
    names = [tool["function"]["name"] for tool in tools] or sorted({k for t in target.families().values() for k in t})
    for text in played.of("authoring"):
        answers = answers_of(text)
        assert sorted(answers) == sorted(names)
        assert not [name for name, shown in answers.items() if "(none seen)" in shown.values()]
        for name, shown in answers.items():
            if tools:
                assert shown["good"].startswith(f"{name} {{")
                assert not reports_error(shown["good"].partition(" -> ")[2])
                assert reports_error(shown["failing"].partition(" -> ")[2])
            else:
                assert shown["good"].endswith(" passed")
                assert " FAILED: " in shown["failing"]


def test_what_the_agent_itself_met_is_shown_as_it_was(played: Round) -> None:
    shown = answers_of(played.of("authoring")[0])
    if not target_prompt(played.context.target).tools:
        assert f"-> {MARKER} -> readable FAILED" in shown["write_readable_call"]["failing"]
        return
    rows = played.context.store.trajectories(None, purpose="diagnosis")
    met = {m["content"] for row in rows for m in row.messages if m["role"] == "tool"}
    real = [name for name, s in shown.items() if any(m.startswith(s["good"].partition(" -> ")[2]) for m in met)]
    assert len(real) >= 8
    assert '"nowhere"' in shown[target_prompt(played.context.target).tools[0]["function"]["name"]]["failing"]


def answers_of(text: str) -> dict[str, dict[str, str]]:
    """Name -> the good and the failing answer, from an author's request."""
    part = re.search(r"## What its [^\n]*real\)\n<recording>\n(.*?)\n</recording>\n\n## Evidence", text, re.S)
    assert part is not None
    found = re.findall(r"^- (\w+)\n  good: (.*?)\n  failing: (.*?)(?=\n- \w+\n  good: |\Z)", part[1], re.S | re.M)
    return {name: {"good": good, "failing": failing} for name, good, failing in found}


def held_out_texts(target: Target) -> set[str]:
    """What validation and test tasks say and ask for, and no diagnosis task shows in any way that it may."""
    held = {text for split in ("validation", "test") for task in target.tasks(split) for text in texts_of(target, task)}
    environment, open_texts = target.environment(), []
    for task in target.tasks("diagnosis"):
        open_texts += [m.content for m in play(environment, task, oracle_policy).messages]
        open_texts += texts_of(target, task)
    shown = "\n".join(open_texts)
    words, flat = entities(shown), plain(shown)
    return {text for text in held if text not in words and text not in flat}


def texts_of(target: Target, task: TargetTask) -> list[str]:
    """What a task alone has: its opening, its scenario or question, and the values of the calls that solve it."""
    environment = target.environment()
    opening = environment.reset(task).messages[0].content
    if target.name == "bfcl:single":
        item = item_of(task.id, task.payload)
        answer = write_answer(reference_answer(item.functions, item.reference))
        asked = [text for role, text in item.messages if role == "user"]
        return [plain(text) for text in [opening, *asked, answer] if len(text) >= 30]
    from tau2.data_model.tasks import StructuredUserInstructions

    official = environment._task  # type: ignore[attr-defined]
    told, gold = official.user_scenario.instructions, official.evaluation_criteria.actions or []
    parts = [told]
    if isinstance(told, StructuredUserInstructions):
        parts = [told.reason_for_call, told.known_info, told.unknown_info, told.task_instructions]
    values = entities(canonical_json([action.arguments for action in gold]))
    # Shorter ones (a zip code, a flat) meet others of tau2's one database by chance.
    values = {value for value in values if len(value) >= 8}
    return [*(plain(text) for text in [opening, *parts] if text and len(text) >= 30), *sorted(values)]
