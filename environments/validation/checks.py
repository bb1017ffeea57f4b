"""What an environment must show before it may train anything: checks 2 and 3 of the method's section 4.

The same checks judge synthesized modules and environments composed from a target's own generators. No model is
needed. Every figure is in the verdict, with the interval that its sample size leaves.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from environments.contract import Action, Environment, Message, TargetTask, ToolCall
from environments.validation.contrast import Contrast, Grounds, grounds
from environments.validation.distinct import Distinct
from environments.validation.measuring import exhibit, measured
from environments.validation.need import Need
from environments.validation.playing import (
    ENOUGH_FAULTS,
    FAULTS,
    FULL_REWARD,
    OUTSIDE,
    Played,
    SimplePolicy,
    TooSlow,
    oracle_policy,
    play_all,
    recorded,
    replay_policy,
)
from environments.validation.redteam import play_attack, red_team_details

MakeEnvironment = Callable[[], Environment]
# The scenario of a seed.
Scenario = Callable[[int], TargetTask]
# Tests of need (`need.check_need`, bound to what they need to know): an environment and its distinct scenarios.
NeedTest = Callable[[Environment, Sequence[TargetTask]], Need]
# Episodes of winners that a verdict keeps.
EXHIBITS = 3
# What the names of a module's own wrong policies begin with in a verdict.
WRONG = "wrong."
CONSTANT_DONE = "Done. Is there anything else I can help you with?"
CONSTANT_REFUSAL = "I am sorry, but I cannot do that."


@dataclass(frozen=True)
class Limits:
    """Sample sizes and bounds; the defaults are the published values. Rates are of success, in [0, 1].

    `episodes` seeds are played by each policy, `attack_seeds` by each attack; `distinct` of the first `searched` seeds
    must give distinct scenarios. A small profile may take fewer; the verdict's intervals show what that leaves.
    """

    distinct: int = 100
    searched: int = 200
    episodes: int = 100
    attack_seeds: int = 5
    replayed: int = 20
    oracle: float = 0.95
    null: float = 0.05
    constant: float = 0.05
    random: float = 0.20
    wrong: float = 0.05


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class ValidationVerdict:
    """Whether the environment is accepted, why not (in the order of the checks), and every figure, JSON-able."""

    accepted: bool
    reasons: tuple[str, ...]
    figures: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """What is stored."""
        return {"accepted": self.accepted, "reasons": list(self.reasons), "figures": dict(self.figures)}


def null_policy(environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
    """Says nothing of use and never calls a tool."""
    return Action(content="...")


def constant_policy(text: str) -> SimplePolicy:
    """Says the same sentence in every turn."""
    return lambda environment, messages, rng: Action(content=text)


def random_policy(environment: Environment, messages: Sequence[Message], rng: random.Random) -> Action | None:
    """A random tool with arguments drawn from the schema and from what the conversation shows; sometimes a sentence."""
    if not environment.tools or rng.random() < 0.25:
        return Action(content=rng.choice([CONSTANT_DONE, CONSTANT_REFUSAL, "Yes.", "No."]))
    function = rng.choice(list(environment.tools))["function"]
    schema = function.get("parameters", {})
    seen = re.findall(r"[#\w][\w.@-]*\w", "\n".join(message.content for message in messages)) or ["1"]
    required = set(schema.get("required", ()))
    arguments = {
        name: _random_value(kind, seen, rng)
        for name, kind in schema.get("properties", {}).items()
        if name in required or rng.random() < 0.5
    }
    return Action(tool_calls=(ToolCall(str(function["name"]), arguments, f"call_{len(messages)}"),))


def validate_environment(
    make_environment: MakeEnvironment,
    scenario: Scenario,
    limits: Limits = DEFAULT_LIMITS,
    *,
    wrong: Mapping[str, SimplePolicy] | None = None,
    twins: Sequence[Scenario] = (),
    make_twin: MakeEnvironment | None = None,
    need: NeedTest | None = None,
    contrast: Contrast | None = None,
    content: Callable[[TargetTask], str] | None = None,
) -> ValidationVerdict:
    """Determinism, distinct scenarios, policies, red team and need for the environment that plays `scenario(seed)`.

    `contrast` is for a capability that has one right answer (`contrast.py`). `content` is a target's own word on which
    scenarios are the same (`Drawable.content`); without it they are looked at (`distinct.py`). `need` tests whether the
    capability is needed, once the oracle is known to solve the scenarios. `wrong` adds policies that must fail.
    `make_twin` builds the environment again from nothing (another process, where there is one), so that what a process
    remembers shows as a difference; default: `make_environment` once more. `twins` give the scenarios as other
    processes do: sets have another order there. What the environment raises, whatever it is, is a reason and not
    raised here, but for `ProviderError` and `BudgetExceeded` of the model that plays its user, and `WorkerNotStarted`
    of a machine that starts no worker. `TooSlow`, which whoever sets a limit of time raises in scenario, reset or step,
    ends the checks with its text as a reason.
    Checks go on after a failure where they can, so that one version's verdict names everything that is wrong.
    """
    started = time.monotonic()
    try:
        with closing(Distinct(make_environment, content)) as met:
            tasks, figures, reasons = _scenarios(scenario, twins, limits, met)
    except TooSlow as slow:
        return ValidationVerdict(False, (str(slow),), {"limits": asdict(limits)})
    except OUTSIDE:
        raise
    except FAULTS as error:
        return ValidationVerdict(False, (raised("scenario", error),), {"limits": asdict(limits)})
    figures["limits"] = asdict(limits)
    exhibits: list[dict[str, Any]] = []
    try:
        determinism, trouble = _determinism(make_environment, make_twin or make_environment, tasks[: limits.replayed])
        figures["determinism"], reasons = determinism, [*reasons, *trouble]
        if determinism["faults"]:
            # The oracle cannot play: every further episode would only fail the same way, at a deadline each.
            return ValidationVerdict(False, tuple(reasons), figures)
        ground, missing = grounds(tasks[: limits.episodes], contrast)
        reasons += [missing] if missing else []
        if contrast is not None:
            figures["contrast"] = {"scenarios": len(ground.constant), "of": len(ground.every)}
        figures["policies"], trouble = _policies(make_environment, ground, limits, wrong or {}, exhibits)
        reasons += trouble
        figures["red_team"], trouble = _red_team(make_environment, ground.constant[: limits.attack_seeds], exhibits)
        reasons += trouble
        if need is not None and figures["policies"]["oracle"]["success_rate"] >= limits.oracle:
            environment = make_environment()
            try:
                found = need(environment, tasks)
            finally:
                environment.close()
            figures["need"], reasons, exhibits = found.figures, [*reasons, *found.reasons], [*found.exhibits, *exhibits]
    except TooSlow as slow:
        reasons.append(str(slow))
    except OUTSIDE:
        raise
    except FAULTS as error:  # what plays is kept with its episode; this comes of making and closing
        reasons.append(raised("play", error))
    figures["exhibits"] = exhibits[:EXHIBITS]
    figures["seconds"] = round(time.monotonic() - started, 3)
    return ValidationVerdict(not reasons, tuple(reasons), figures)


def raised(check: str, error: BaseException) -> str:
    """The reason that a check gives when it raised on what the environment holds."""
    return f"{check}: raised {type(error).__name__}: {error}"[:500]


def _scenarios(
    scenario: Scenario, twins: Sequence[Scenario], limits: Limits, met: Distinct
) -> tuple[list[TargetTask], dict[str, Any], list[str]]:
    """Distinct scenarios in the order of their seeds, with the figures of both checks on the generator."""
    tasks: list[TargetTask] = []
    differing, searched = [], 0
    for seed in range(limits.searched):
        searched = seed + 1
        task = scenario(seed)
        if seed < limits.replayed and any(_in_order(again(seed)) != _in_order(task) for again in (scenario, *twins)):
            differing.append(seed)
        if met.add(task):
            tasks.append(task)
        if len(tasks) >= max(limits.distinct, limits.episodes):
            break
    reasons = []
    if differing:
        reasons.append(
            f"determinism: equal seeds gave different scenarios for seeds {differing[:5]}; draw everything from "
            "random.Random(seed), and sort a set before anything is drawn from it: its order is another in each process"
        )
    if len(tasks) < limits.distinct:
        reasons.append(f"scenarios: {len(tasks)} distinct of {searched} seeds; {limits.distinct} are needed")
    figures = {"scenarios": {"searched": searched, "distinct": len(tasks), "differing": differing}}
    return tasks, figures, reasons


def _in_order(task: TargetTask) -> str:
    """What a scenario is, with the keys of objects in their order: what plays it may go through them."""
    return json.dumps([task.family, dict(task.payload)], ensure_ascii=False)


def _determinism(
    make: MakeEnvironment, make_twin: MakeEnvironment, tasks: Sequence[TargetTask]
) -> tuple[dict[str, Any], list[str]]:
    """Same seed, same actions, twice: forwards in one environment, backwards in its twin."""
    first, second = make(), make_twin()
    policies: dict[str, SimplePolicy] = {"oracle": oracle_policy, "random": random_policy}
    differing: list[str] = []
    broken: list[str] = []
    compared = 0
    try:
        for name, policy in policies.items():
            there = play_all(first, tasks, policy)
            if sum(bool(episode.error) for episode in there) >= ENOUGH_FAULTS:
                fault = next(episode.error for episode in there if episode.error)
                broken = [f"{name}: {ENOUGH_FAULTS} episodes ended in a fault of the environment: {fault}"]
                break
            back = play_all(second, list(reversed(tasks[: len(there)])), policy)
            pairs = zip(tasks[len(there) - len(back) :], there[len(there) - len(back) :], reversed(back), strict=False)
            compared += len(back)
            differing += [f"{name}/seed {task.seed}" for task, a, b in pairs if a.transcript != b.transcript]
    finally:
        first.close()
        second.close()
    figures = {"episodes": compared, "differing": len(differing), "examples": differing[:5], "faults": bool(broken)}
    reasons = broken
    if differing:
        share = f"{len(differing)} of {compared}"
        reasons = [f"determinism: {share} episodes differed when replayed, e.g. {differing[0]}", *broken]
    return figures, reasons


def _policies(
    make: MakeEnvironment,
    ground: Grounds,
    limits: Limits,
    wrong: Mapping[str, SimplePolicy],
    exhibits: list[dict[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """Figures and reasons; of every policy that won too often, an episode goes to `exhibits`."""
    figures: dict[str, Any] = {}
    reasons: list[str] = []
    environment = make()
    try:
        solution = recorded(environment, ground.shown, oracle_policy)
        rows: list[tuple[str, SimplePolicy, float]] = [
            ("null", null_policy, limits.null),
            ("constant_done", constant_policy(CONSTANT_DONE), limits.constant),
            ("constant_refusal", constant_policy(CONSTANT_REFUSAL), limits.constant),
            ("constant_replay", replay_policy(solution), limits.constant),
            ("random", random_policy, limits.random),
            *((f"{WRONG}{name}", policy, limits.wrong) for name, policy in wrong.items()),
        ]
        row, played = measured(environment, ground.every, oracle_policy)
        figures["oracle"] = row
        if row["success_rate"] < limits.oracle:
            reasons.append(_reason("oracle", row, f"at least {limits.oracle:g} is needed"))
        reasons += _underpaid(played)
        if row["errors"] >= ENOUGH_FAULTS:
            rows = []
        for name, policy, bound in rows:
            row, played = measured(environment, ground.of(name), policy)
            figures[name] = row
            if row["errors"] >= ENOUGH_FAULTS:
                break
            if name.startswith(WRONG) and not row["mean_steps"]:
                reasons.append(f"{name}: it never acts; a wrong policy must look plausible, so that it tests something")
            if row["win_rate"] > bound:
                reasons.append(_reason(name, row, f"at most {bound:g} is allowed"))
                exhibits.append({"name": name} | exhibit(played))
        reasons += [
            f"{name}: {row['errors']} of {row['episodes']} episodes ended in a fault of the environment: {row['error']}"
            for name, row in figures.items()
            if row["errors"]
        ]
    finally:
        environment.close()
    return figures, reasons


def _underpaid(played: Sequence[Played]) -> list[str]:
    """Why the oracle's successes are not paid as such; nothing when they are."""
    won = [episode.score.reward for episode in played if episode.score is not None and episode.score.success]
    low = [reward for reward in won if reward < FULL_REWARD]
    if not low:
        return []
    return [
        f"oracle: {len(low)} of its {len(won)} successes have a reward below {FULL_REWARD:g}, the lowest {min(low):g}: "
        "training would unlearn them; let reward give 1 whenever the goal is reached, and less for everything else"
    ]


def _reason(name: str, row: Mapping[str, Any], bound: str) -> str:
    text = f"{name}: success {row['success_rate']:g} over {row['episodes']} episodes"
    if row["win_rate"] > row["success_rate"]:
        text += f", and full reward without success in {row['win_rate'] - row['success_rate']:.2g} of them"
    return f"{text}; {bound} (mean reward {row['mean_reward']:g}, 95 % interval {row['interval']})"


def _red_team(
    make: MakeEnvironment, tasks: Sequence[TargetTask], exhibits: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    rows = red_team_details(make, tasks)
    winner = next((attack for attack, wins, _, _ in rows if wins), None)
    if winner is not None and len(exhibits) < EXHIBITS:
        environment = make()
        try:
            played = [play_attack(environment, task, winner) for task in tasks]
        finally:
            environment.close()
        exhibits.append({"name": f"attack {winner.name}"} | exhibit(played))
    figures = {
        "attacks": len(rows),
        "episodes": len(rows) * len(tasks),
        "successes": {attack.name: wins for attack, wins, _, _ in rows if wins},
        "errors": {attack.name: error for attack, _, errors, error in rows if errors},
    }
    reasons = [f"red team: {a.name} ({a.tries}) won {wins} of {len(tasks)} episodes" for a, wins, _, _ in rows if wins]
    reasons += [f"red team: {a.name} provoked a fault in {n} of {len(tasks)}: {e}" for a, _, n, e in rows if n]
    return figures, reasons


def _random_value(schema: Mapping[str, Any], seen: Sequence[str], rng: random.Random) -> Any:
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    kind = schema.get("type")
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        numbers = [word for word in seen if word.isdecimal()]
        return int(rng.choice(numbers)) if numbers and rng.random() < 0.5 else rng.randint(0, 100)
    if kind == "array":
        return [_random_value(schema.get("items", {}), seen, rng)]
    if kind == "object":
        return {name: _random_value(part, seen, rng) for name, part in schema.get("properties", {}).items()}
    return rng.choice(list(seen))
