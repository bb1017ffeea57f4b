"""Scores of a tau2 episode: the official evaluator, an exact and much faster one, and the checks behind both."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tau2.data_model.message import AssistantMessage, Message, ToolMessage
from tau2.data_model.message import ToolCall as OfficialCall
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.data_model.tasks import Action, EvaluationCriteria, RewardType, Task
from tau2.environment.environment import Environment as OfficialEnvironment
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.evaluator.evaluator_action import ActionEvaluator
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
from tau2.utils.utils import get_now

from environments.contract import Check, Score
from environments.targets.tau2.world import Domain, Records, changed_records, open_world, reset_class_state
from environments.targets.third_party.adapter import capability


@dataclass(frozen=True)
class Played:
    """A finished or interrupted episode, in tau2's own objects."""

    domain: Domain
    task: Task
    world: OfficialEnvironment
    messages: Sequence[Message]
    ended: bool


def _criteria(task: Task) -> EvaluationCriteria:
    return task.evaluation_criteria or EvaluationCriteria()


def _judged_only_by_a_model(task: Task) -> bool:
    """Whether the task asks for an LLM judge (retail tasks of upstream 1.0.x). That part is left out of the score."""
    return RewardType.NL_ASSERTION in _criteria(task).reward_basis


def official_reward(played: Played) -> float:
    """The reward of tau2's own evaluator: two fresh environments, every call replayed and compared.

    With an LLM judge in the task's reward basis only the environment part is official (`EvaluationType.ENV`). Raises
    ValueError, as tau2 does, when a replayed call answers otherwise than it did in the episode.
    """
    reset_class_state()
    now = get_now()
    run = SimulationRun(
        id=str(uuid.uuid4()),
        task_id=played.task.id,
        start_time=now,
        end_time=now,
        duration=0.0,
        termination_reason=TerminationReason.USER_STOP if played.ended else TerminationReason.MAX_STEPS,
        messages=list(played.messages),
    )
    kind = EvaluationType.ENV if _judged_only_by_a_model(played.task) else EvaluationType.ALL
    info = evaluate_simulation(
        simulation=run, task=played.task, evaluation_type=kind, solo_mode=False, domain=played.domain.name
    )
    return float(info.reward)


@lru_cache(maxsize=4096)
def _gold_records(domain: Domain, text: str) -> Records:
    world = open_world(domain, Task.model_validate_json(text))
    # The official evaluator does not sync the phone between reference calls, so neither may this one. `get_response`
    # turns a call that fails into a message: 23 reference calls in retail fail by design.
    world.sync_tools = lambda: None
    for action in _criteria(Task.model_validate_json(text)).actions or []:
        world.get_response(
            OfficialCall(id="gold", name=action.name, arguments=action.arguments, requestor=action.requestor)
        )
    return changed_records(world, domain)


def gold_records(domain: Domain, task: Task) -> Records:
    """The records that the task's reference actions change, computed once per task."""
    return _gold_records(domain, task.model_dump_json())


def score(played: Played, errors: int) -> Score:
    """Reward, equal to the official one, and checks. `errors` is how many of the agent's calls failed.

    The official evaluator compares hashes of whole databases; two databases of a domain are equal exactly when the same
    records changed to the same values, which is what is compared here.
    """
    task, criteria = played.task, _criteria(played.task)
    basis = set(criteria.reward_basis)
    ours, gold = changed_records(played.world, played.domain), gold_records(played.domain, task)
    database_ok = ours == gold
    asserted = [
        (item, played.world.run_env_assertion(item, raise_assertion_error=False))
        for item in criteria.env_assertions or []
    ]
    told = CommunicateEvaluator.evaluate_communicate_info(list(played.messages), criteria.communicate_info or [])
    acted = ActionEvaluator.evaluate_actions(list(played.messages), criteria.actions or [])
    parts = {
        RewardType.DB: database_ok,
        RewardType.ENV_ASSERTION: all(met for _, met in asserted),
        RewardType.ACTION: all(item.action_match for item in acted),
        RewardType.COMMUNICATE: all(item.met for item in told),
    }
    scored = set(parts) & basis
    if RewardType.NL_ASSERTION in basis:
        scored &= {RewardType.DB, RewardType.ENV_ASSERTION}
    reward = float(played.ended and all(parts[part] for part in scored))
    if task.evaluation_criteria is None:
        reward = float(played.ended)
    checks = [
        *_action_checks(played, [(item.action, item.action_match) for item in acted], RewardType.ACTION in basis),
        *(_record_checks(ours, gold) if RewardType.DB in basis else ()),
        *[
            Check(
                f"assert:{i}:{item.func_name}", capability("reach", item.func_name.removeprefix("assert_")), True, met
            )
            for i, (item, met) in enumerate(asserted)
        ],
        *[
            Check(
                f"communicate:{i}", "communicate_required_facts", RewardType.COMMUNICATE in basis, item.met, item.info
            )
            for i, item in enumerate(told)
        ],
        *_conduct_checks(played, gold, errors),
    ]
    metrics = {
        "database": float(database_ok),
        "tool_errors": float(errors),
        **{f"basis_{p.value.lower()}": float(parts[p]) for p in scored},
    }
    if RewardType.NL_ASSERTION in basis:
        metrics["nl_assertions_unscored"] = float(len(criteria.nl_assertions or []))
    return Score(reward, reward == 1.0, tuple(checks), metrics)


def _writes(domain: Domain, requestor: str) -> frozenset[str]:
    return domain.user_writes if requestor == "user" else domain.writes


def _action_checks(played: Played, acted: Sequence[tuple[Action, bool]], scored: bool) -> list[Check]:
    """One check per reference action: the agent's own calls, and the calls it must guide the user to.

    A read is required only when calls themselves are scored; a write always is, because the end state is.
    """
    checks = []
    for index, (action, matched) in enumerate(acted):
        prefix = "guide" if action.requestor == "user" else "call"
        required = scored or action.name in _writes(played.domain, action.requestor)
        checks.append(
            Check(
                f"action:{index}:{action.name}",
                capability(prefix, action.name),
                required,
                matched,
                str(action.arguments),
            )
        )
    return checks


def _record_checks(ours: Records, gold: Records) -> list[Check]:
    """One check per record that the reference or the episode changed."""
    checks = []
    for name in sorted(ours.keys() | gold.keys()):
        table = name.split("/")[0].split(".")[-1]
        passed = name in ours and name in gold and ours[name] == gold[name]
        detail = (
            ""
            if passed
            else "not changed"
            if name not in ours
            else "should not change"
            if name not in gold
            else "changed to another value"
        )
        checks.append(Check(f"record:{name}", capability("update", table, "record"), True, passed, detail))
    return checks


def _conduct_checks(played: Played, gold: Records, errors: int) -> list[Check]:
    """What holds over the whole conversation: no write that was not asked for, valid calls, an end."""
    answers: Mapping[str, bool] = {m.id: m.error for m in played.messages if isinstance(m, ToolMessage)}
    wanted = [(a.name, a.arguments) for a in _criteria(played.task).actions or [] if a.requestor == "assistant"]
    made = [
        call
        for message in played.messages
        if isinstance(message, AssistantMessage)
        for call in message.tool_calls or []
    ]
    writes = [call for call in made if call.name in played.domain.writes and not answers.get(call.id, False)]
    extra = [call.name for call in writes if (call.name, call.arguments) not in wanted]
    refuses = not any(name in played.domain.writes for name, _ in wanted)
    kind = "refuse_unauthorized_change" if refuses else "avoid_extra_writes"
    return [
        Check("no_extra_write", kind, refuses or bool(writes), not extra, ", ".join(extra)),
        Check(
            "valid_calls",
            "give_valid_arguments",
            bool(made),
            errors <= _expected_errors(played, wanted, made, answers),
            f"{errors} failed",
        ),
        Check("ended", "finish_the_conversation", True, played.ended),
    ]


def _expected_errors(
    played: Played, wanted: Sequence[tuple[str, dict]], made: Sequence[OfficialCall], answers: Mapping[str, bool]
) -> int:
    """Failed calls that the reference makes too (its authors left some in)."""
    return sum(answers.get(call.id, False) and (call.name, call.arguments) in wanted for call in made)
