"""Whether an environment needs its capability: tests that its author does not write.

Three of them: lazy policies must not be paid (`lazy`), the oracle without the capability's step must differ and fail
(`step`), and scenarios must not repeat what stands in the target's held-out tasks or in the evidence (`repeats`).
Every figure is kept, and of every policy that won, one episode to show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.contract import Environment, Message, TargetTask
from environments.sandbox.allowance import Allowance, TimeLimit
from environments.validation.lazy import LAZY_POLICIES, Plan, policy_of, unbound_reason, words_with_digits
from environments.validation.measuring import exhibit, measured
from environments.validation.playing import Played, SimplePolicy, play, replay_policy
from environments.validation.repeats import Source, repeated
from environments.validation.step import Deed, recorded, without_step

PLANS = 6
TIME = TimeLimit(processor=60.0, clock=1200.0)
# Scenarios whose oracle gives the plans; more would only add rare ones.
_RECORDED = 20
# Other scenarios of which the oracle's values are tried where its own must be made up.
_DONORS = 5


@dataclass(frozen=True)
class NeedLimits:
    """Bounds per policy: share of successes (rewards of 0.95 count) and mean reward, both in [0, 1]; `repeats` is the
    share of scenarios that may hold what other texts hold, by chance. `time_limit` bounds all of it: a module that is
    slower than that would hold up its training as well."""

    success: float = 0.10
    reward: float = 0.25
    repeats: float = 0.05
    time_limit: TimeLimit = TIME


@dataclass(frozen=True)
class Materials:
    """What stands around an environment and must not be paid for or repeated: texts of the evidence that its author
    was shown, held-out tasks of the target, the text that everybody sees (policy and tools), and the target's worked
    examples, which stand before an agent that trains."""

    evidence: Sequence[str] = ()
    held_out: Sequence[Source] = ()
    public: str = ""
    examples: Sequence[Message] = ()


@dataclass(frozen=True)
class _Bench:
    """Where lazy policies are measured, by which bounds, and what time they may still take."""

    environment: Environment
    tasks: Sequence[TargetTask]
    limits: NeedLimits
    allowed: Allowance

    @property
    def too_late(self) -> bool:
        return bool(self.allowed.over())


@dataclass
class Need:
    """The verdict of the three tests: reasons in words, figures and one episode of each winner, all JSON-able."""

    reasons: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    exhibits: list[dict[str, Any]] = field(default_factory=list)


def check_need(
    environment: Environment,
    tasks: Sequence[TargetTask],
    step: Mapping[str, str],
    materials: Materials | None = None,
    limits: NeedLimits | None = None,
    used: Callable[[], float] = time.thread_time,
) -> Need:
    """Play the tests of need on `tasks`, scenarios of a module whose oracle is known to solve them. `used` gives the
    seconds of processor time that the tests have taken up to now, wherever their code runs. Faults of the environment
    are in the reasons, never raised."""
    limits, materials = limits or NeedLimits(), materials or Materials()
    allowed = Allowance(limits.time_limit, used)
    need = Need()
    at = _Bench(environment, tasks, limits, allowed)
    deeds: list[list[Deed]] = []
    for task in tasks:
        deeds.append(recorded(environment, task))
        if at.too_late:
            break
    _check_step(need, at, deeds, step)
    _check_repeats(need, tasks, materials, limits)
    _check_lazy(need, at, plans_of(deeds[:_RECORDED]) or [()], materials)
    need.figures |= {"seconds": round(allowed.elapsed, 3), "processor_seconds": round(allowed.used, 3)}
    return need


def plans_of(deeds: Sequence[Sequence[Deed]]) -> list[Plan]:
    """The forms that a lazy agent could know by rote: the oracle's sequences of tools, the most frequent first, then
    each of their tools alone; at most `PLANS`."""
    counts: dict[Plan, int] = {}
    for episode in deeds:
        plan = tuple(call.name for deed in episode for call in deed.action.tool_calls)
        if plan:
            counts[plan] = counts.get(plan, 0) + 1
    frequent = sorted(counts, key=lambda plan: -counts[plan])
    alone = dict.fromkeys((name,) for plan in frequent for name in plan)
    return list(dict.fromkeys([*frequent, *alone]))[:PLANS]


def _check_lazy(need: Need, at: _Bench, plans: Sequence[Plan], materials: Materials) -> None:
    rows, unbound = dict[str, Any](), dict[str, str]()
    known = {
        "conversation": [],
        "examples": _example_values([*at.environment.examples, *materials.examples]),
        "evidence": list(dict.fromkeys(v for text in materials.evidence for v in words_with_digits(text)))[:200],
    }
    need.figures["lazy"], need.figures["unbound"] = rows, unbound
    for lazy in LAZY_POLICIES:
        own = plans if lazy.planned else [()]
        values = known[lazy.sources]
        why = unbound_reason(lazy, own[0], at.environment.tools, values)
        if why:
            unbound[lazy.name] = why
            continue
        if at.too_late:
            need.reasons.append(
                f"need: the module is too slow: after {at.allowed.over()} only {len(rows)} of {len(LAZY_POLICIES)} "
                f"lazy policies were played ({at.allowed.spent()}); do less in transition, reply and reward, and wait "
                "for nothing"
            )
            return
        row, best = _strongest(at, [policy_of(lazy, plan, values) for plan in own])
        plan = own[row["plan"]]
        rows[lazy.name] = row | {"plan": list(plan)}
        if row["win_rate"] > at.limits.success or row["mean_reward"] > at.limits.reward:
            by = f" calling {', '.join(plan)}" if plan else ""
            need.reasons.append(
                f"need: the lazy policy {lazy.name} ({lazy.tries}){by} has success {row['win_rate']:g} and mean reward "
                f"{row['mean_reward']:g} over {row['episodes']} episodes, 95 % interval {row['interval']}; at most "
                f"{at.limits.success:g} and {at.limits.reward:g} are allowed"
            )
            need.exhibits.append({"name": lazy.name} | best)
        if row["errors"]:
            need.reasons.append(f"need: {lazy.name} provoked a fault of the environment: {row['error']}")


def _strongest(at: _Bench, policies: Sequence[SimplePolicy]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures of the policy that is nearest to a bound or furthest beyond, with its index as "plan"; its best
    episode). At least one is measured, however late it is."""
    found = []
    for index, policy in enumerate(policies):
        row, played = measured(at.environment, at.tasks, policy)
        height = max(row["win_rate"] / at.limits.success, row["mean_reward"] / at.limits.reward)
        found.append((bool(row["errors"]), height, -index, row, played))
        if row["errors"] or at.too_late:
            break
    _, _, index, row, played = max(found, key=lambda one: one[:3])
    return row | {"plan": -index}, exhibit(played)


def _check_step(need: Need, at: _Bench, deeds: Sequence[Sequence[Deed]], step: Mapping[str, str]) -> None:
    """On the scenarios that the oracle was recorded on. Of a module that is too slow the figures are kept, and the lazy
    policies' test says so."""
    played: list[Played] = []
    differing = 0
    for i, task in enumerate(at.tasks[: len(deeds)]):
        donors = [deeds[(i + k) % len(deeds)] for k in range(1, min(_DONORS + 1, len(deeds)))]
        actions = without_step(step, _request(task), deeds[i], donors)
        differing += actions != [deed.action for deed in deeds[i]]
        played.append(play(at.environment, task, replay_policy(actions)))
        if at.too_late:
            break
    wins = sum(episode.won for episode in played)
    faults = [episode.error for episode in played if episode.error]
    if faults:
        need.reasons.append(f"need: the oracle without its step provoked a fault of the environment: {faults[0]}")
    share = wins / len(played) if played else 0.0
    need.figures["step"] = {
        "step": dict(step), "episodes": len(played), "differing": differing, "success_rate": round(share, 4)
    }  # fmt: skip
    named = " ".join(f"{key} {value}" for key, value in step.items())
    if at.too_late:
        return
    if not differing:
        need.reasons.append(
            f"need: the oracle never takes the step that STEP names ({named}), or never needs its result"
        )
    elif share > at.limits.success:
        need.reasons.append(
            f"need: without the step that STEP names ({named}) the oracle still succeeds in {share:g} of {len(played)} "
            f"episodes ({differing} differ from the oracle's own); at most {at.limits.success:g} is allowed"
        )
        need.exhibits.append({"name": "oracle without its step"} | exhibit(played))


def _check_repeats(need: Need, tasks: Sequence[TargetTask], materials: Materials, limits: NeedLimits) -> None:
    evidence = [
        # A compacted trajectory begins with "user: " and the request; then come the numbered turns.
        Source(f"trajectory {i + 1} of the evidence", text, shown=True, opening=text.partition("\n1. ")[0])
        for i, text in enumerate(text.removeprefix("user: ") for text in materials.evidence)
    ]
    texts, requests = [_text_of(task) for task in tasks], [_request(task) for task in tasks]
    found = repeated(texts, [*evidence, *materials.held_out], materials.public, requests)
    share = len(found) / len(tasks) if tasks else 0.0
    need.figures["repeats"] = {
        "scenarios": len(tasks), "repeating": len(found), "sources": len(evidence) + len(materials.held_out)
    }  # fmt: skip
    if share > limits.repeats:
        index, words, source = found[0]
        need.reasons.append(
            f"need: {len(found)} of {len(tasks)} scenarios repeat entities of other texts, e.g. seed "
            f"{tasks[index].seed} has {', '.join(words)}, as {source}; make up entities of your own"
        )


def _request(task: TargetTask) -> str:
    return str(task.payload.get("scenario", {}).get("request", ""))


def _text_of(task: TargetTask) -> str:
    """What a scenario is about: its request and its goal, not the state around them."""
    scenario = task.payload.get("scenario", {})
    return f"{scenario.get('request', '')}\n{scenario.get('goal', '')}"


def _example_values(examples: Sequence[Message]) -> list[str]:
    values: list[str] = []
    for message in examples:
        values += words_with_digits(message.content)
        values += [str(value) for call in message.tool_calls for value in call.arguments.values()]
    return list(dict.fromkeys(values))
