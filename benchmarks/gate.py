"""What the gate lets through, by simulation on resampled real episodes: 1,000 nights of each kind.

    python -m benchmarks.gate --home FOLDER    (a home with episodes of the base and of adapters alone on validation)
    python -m benchmarks.gate                  (plays the shop's validation split with the base first, 8 trials a task)
    python -m benchmarks.gate --episodes FILE  (what an earlier run wrote with --save FILE)

A night draws its tasks from those that were really played, and every episode from the real episodes of its task: those
of the base, of the adapter alone, or of either at a rate that makes the gain or the loss in question. The rules that
judge are those of the pipeline. Without an adapter in the home one is assumed: always right on its own families, always
wrong elsewhere. Required: see `SCENARIOS`; exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from db import AdapterRow, EnvironmentRow, Store, open_store
from settings import load_settings
from tasks.measuring.gate_plan import GateRules, Look, alpha_at
from tasks.measuring.gate_rules import judge_capabilities, judge_release
from tasks.measuring.statistics import sign_flip_p_of_rows

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

RULES = GateRules()
# Share of a capability's own tasks that the router sends to its adapter; the others stay as they were.
ROUTED = 0.95


@dataclass(frozen=True)
class Skill:
    """A capability's adapter: the families it is about, its success alone on every task, (T,), and what of that is
    assumed ("": nothing)."""

    families: tuple[str, ...]
    alone: Floats
    assumed: str = ""


@dataclass(frozen=True)
class Played:
    """Real tasks: family and success of the base on each, (T,), and the adapters that were played on them."""

    source: str
    families: npt.NDArray[np.str_]
    base: Floats
    skills: dict[str, Skill]

    def own(self, skill: Skill) -> npt.NDArray[np.bool_]:
        return np.isin(self.families, skill.families)

    def save(self, path: Path) -> None:
        path.write_text(
            json.dumps(
                asdict(self),
                default=lambda values: np.round(values, 4).tolist() if values.dtype.kind == "f" else values.tolist(),
            )
            + "\n"
        )

    @classmethod
    def read(cls, path: Path) -> Played:
        stored = json.loads(path.read_text())
        skills = {
            name: Skill(tuple(s["families"]), np.array(s["alone"]), s["assumed"])
            for name, s in stored["skills"].items()
        }
        return cls(stored["source"], np.array(stored["families"]), np.array(stored["base"]), skills)


@dataclass(frozen=True)
class Scenario:
    """One kind of night. Of `tried` capabilities the first changes by `points` on its own tasks, from the base or (with
    `champion`) from its adapter; the others not at all. `uneven`: no change on average, but other tasks succeed than
    before. `whole`: a share of tasks is learnt, not a share of every task. `elsewhere`: points that wrong routes cost
    on all other families. `looks`: nights at one fixed split, promoted when any of them is (1: drawn anew every night).
    Required is `most` or `least` percent promoted (neither: shown beside)."""

    name: str
    points: float = 0.0
    champion: bool = False
    uneven: bool = False
    whole: bool = False
    elsewhere: float = 0.0
    tried: int = 3
    looks: int = 1
    own_tasks: int = 60
    other_tasks: int = 120
    trials: int = 8
    most: float | None = None
    least: float | None = None


SCENARIOS = (
    Scenario("no effect at all", most=5),
    Scenario("no effect on average, but other tasks succeed", uneven=True, most=5),
    Scenario("no effect at all, any of 30 looks at one split", looks=30, most=5),
    Scenario("no effect on average, any of 30 looks", uneven=True, looks=30, most=5),
    Scenario("+14 points on its own families, 60 tasks x 8 trials", points=14, least=80),
    Scenario("5 points worse than its champion", points=-5, champion=True, tried=1, most=5),
    Scenario("+14 points, and 5 lost elsewhere by wrong routes", points=14, elsewhere=5, tried=1, most=10),
    Scenario("all that was learnt, and 5 lost elsewhere", points=100, elsewhere=5, tried=1, most=10),
    Scenario("beside: +14 points as whole tasks learnt", points=14, whole=True),
    Scenario("beside: +14 points, 20 tasks x 2 trials", points=14, own_tasks=20, other_tasks=84, trials=2),
    Scenario(
        "beside: all that was learnt, 5 lost elsewhere, 20 + 84 tasks x 2 trials",
        points=100, elsewhere=5, tried=1, own_tasks=20, other_tasks=84, trials=2,
    ),
)  # fmt: skip


def simulate(played: Played, scenario: Scenario, nights: int, seed: int) -> npt.NDArray[np.bool_]:
    """Whether each of `nights` nights (of as many runs of `looks` nights) promoted anything, (nights,). The skills take
    turns at being the one that changes."""
    parts = np.array_split(np.arange(nights), len(played.skills))
    names = list(played.skills)
    return np.concatenate(
        [
            _of_one_skill(
                played, scenario, len(part), ([*names[i:], *names[:i]], np.random.default_rng([seed, i, nights]))
            )
            for i, part in enumerate(parts)
        ]
    )


def _of_one_skill(
    played: Played, scenario: Scenario, nights: int, turn: tuple[list[str], np.random.Generator]
) -> npt.NDArray[np.bool_]:
    names, rng = turn
    slots = [played.skills[names[s % len(names)]] for s in range(scenario.tried)]
    first, trials = slots[0], scenario.trials
    own = [rng.choice(np.flatnonzero(played.own(s)), (nights, scenario.own_tasks)) for s in slots]
    elsewhere = ~np.logical_or.reduce([played.own(s) for s in slots])
    others = rng.choice(np.flatnonzero(elsewhere), (nights, scenario.other_tasks))
    rates = [(played.base[tasks], played.base[tasks]) for tasks in own]
    rates[0] = _changed(played, scenario, own[0], (first, rng))
    wrong = _share(scenario.elsewhere, played.base[elsewhere] - first.alone[elsewhere], "wrong routes")
    promoted = np.zeros(nights, dtype=bool)
    for number in range(1, scenario.looks + 1):
        look = Look(alpha_at(number, RULES.alpha, drawn=scenario.looks == 1), number)
        if scenario.uneven:
            rates = [(before, played.base[_others_of_family(played, tasks, rng)])
                     for (before, _), tasks in zip(rates, own, strict=True)]  # fmt: skip
        sides = [(rng.binomial(trials, before), rng.binomial(trials, after)) for before, after in rates]
        hopeful = np.logical_or.reduce([_may_pass((after - before) / trials, look.alpha) for before, after in sides])
        for night in np.flatnonzero(hopeful & ~promoted):
            mine = [(tasks[night], before[night], after[night])
                    for tasks, (before, after) in zip(own, sides, strict=True)]  # fmt: skip
            promoted[night] = _judged(played, scenario, look, mine, (others[night], first.alone, wrong, rng))
    return promoted


def _changed(
    played: Played, scenario: Scenario, tasks: Counts, by: tuple[Skill, np.random.Generator]
) -> tuple[Floats, Floats]:
    """Rates of the live release and of the candidate on a capability's own tasks."""
    skill, rng = by
    base, alone, own = played.base[tasks], skill.alone[tasks], played.own(skill)
    gap = skill.alone[own] - played.base[own]
    if scenario.points >= 100:
        return base, alone
    share = _share(abs(scenario.points), gap, "the adapter's gain")
    if scenario.champion:
        return alone, alone + share * (base - alone)
    if scenario.whole:
        return base, np.where(rng.random(tasks.shape) < share, alone, base)
    return base, base + share * (alone - base)


def _share(points: float, gap: Floats, what: str) -> float:
    """How much of a real difference makes one of so many points."""
    if not points:
        return 0.0
    if 100 * float(gap.mean()) < points:
        raise SystemExit(f"error: {what} is {100 * gap.mean():.1f} points in this home, and {points:g} are simulated")
    return points / 100 / float(gap.mean())


def _others_of_family(played: Played, tasks: Counts, rng: np.random.Generator) -> Counts:
    """For each task any task of its family."""
    found = tasks.copy()
    for family in np.unique(played.families[tasks]):
        mine = played.families[tasks] == family
        found[mine] = rng.choice(np.flatnonzero(played.families == family), int(mine.sum()))
    return found


def _may_pass(differences: Floats, alpha: float) -> npt.NDArray[np.bool_]:
    """Rows whose own p-value is at most alpha with a gain; the others cannot pass after Holm. A sum of random signs is
    beyond one standard deviation so often that no row below it need be tested."""
    sums, spread = differences.sum(axis=1), np.sqrt((differences**2).sum(axis=1))
    may = (sums > 0) & (sums >= spread)
    may[may] = sign_flip_p_of_rows(differences[may]) <= alpha
    return may


def _judged(
    played: Played,
    scenario: Scenario,
    look: Look,
    mine: list[tuple[Counts, Counts, Counts]],
    rest: tuple[Counts, Floats, float, np.random.Generator],
) -> bool:
    """Both phases of the gate on one night."""
    (others, wrong_alone, wrong, rng), trials = rest, scenario.trials
    frames, own = {}, {}
    for slot, (tasks, before, after) in enumerate(mine):
        # Two slots may hold the same skill: their families are told apart by the slot.
        families = np.array([f"{family} {slot}" for family in played.families[tasks]])
        own[f"capability {slot}"] = tuple(sorted(set(families)))
        frames[f"capability {slot}"] = _frame(f"own {slot}", families, (before, after), trials)
    passed = [name for name, d in judge_capabilities(frames, own, RULES, look).items() if d.passed]
    if not passed:
        return False
    whole = []
    for slot, (name, frame) in enumerate(frames.items()):
        kept = rng.random(len(mine[slot][0])) < ROUTED if name in passed else np.zeros(len(mine[slot][0]), dtype=bool)
        whole.append(frame.assign(other=np.where(np.repeat(kept, trials), frame["other"], frame["base"])))
    before = rng.binomial(trials, played.base[others])
    after = np.where(rng.random(len(others)) < wrong, rng.binomial(trials, wrong_alone[others]), before)
    whole.append(_frame("other", played.families[others], (before, after), trials))
    return judge_release(pd.concat(whole), RULES, look, trials, {n: own[n] for n in passed}).promoted


def _frame(name: str, families: Any, sides: tuple[Counts, Counts], trials: int) -> pd.DataFrame:
    """Pairs of a night: successes by task as outcomes by trial."""
    number, count = np.arange(trials), len(families)
    before, after = (np.asarray(number < side[:, None], dtype=float).ravel() for side in sides)
    return pd.DataFrame(
        {
            "task": np.repeat([f"{name} {i}" for i in range(count)], trials),
            "family": np.repeat(families, trials),
            "trial": np.tile(number, count),
            "base": before,
            "other": after,
        }
    )


def played_in(store: Store) -> Played:
    """The episodes of validation that a store holds: the base's, and those of every adapter that played its own
    families. Where it never played another one (it was routed only), it is taken as always wrong there."""
    rows = store.query(
        "SELECT base, adapter_id, task_id, family, success FROM trajectories WHERE split = 'validation' "
        "AND error_boundary IS NULL AND sampled_tokens > 0"
    )
    plain = rows[rows["adapter_id"].isna()]
    if plain.empty:
        raise SystemExit(f"error: {store.url} holds no episode of a base on validation; leave --home out to play some")
    most = plain["base"].value_counts().index[0]
    rows, plain = rows[rows["base"] == most], plain[plain["base"] == most]
    base = plain.groupby("task_id").agg(family=("family", "first"), success=("success", "mean"), n=("success", "size"))
    families = base["family"].to_numpy(dtype=str)
    success = base["success"].to_numpy(dtype=float)
    skills, specs = {}, {e.id: e.spec for e in store.rows(EnvironmentRow)}
    for adapter in store.rows(AdapterRow):
        own = tuple(specs.get(adapter.environment_id or "", {}).get("families", ()))
        alone = rows[rows["adapter_id"] == adapter.id].groupby("task_id")["success"].mean().reindex(base.index)
        played, mine = alone.notna().to_numpy(), np.isin(families, own)
        if not mine.any() or played[mine].mean() < 0.8:
            continue
        unseen = np.where(mine, success, 0.0)
        skills[str(adapter.registered_model)] = Skill(
            own,
            np.where(played, alone.to_numpy(dtype=float), unseen),
            "" if played.all() else f"played on {played.sum()} tasks, taken as always wrong on the others",
        )
    return Played(
        f"{len(base)} tasks, {base['n'].min()} to {base['n'].max()} episodes of {most} on each",
        families,
        success,
        skills or _assumed(families, success),
    )


def _assumed(families: npt.NDArray[np.str_], base: Floats) -> dict[str, Skill]:
    """Where no adapter was played: one for each of the three largest families that the base mostly fails."""
    lacking = [f for f in np.unique(families) if base[families == f].mean() < 0.5]
    lacking.sort(key=lambda f: -np.count_nonzero(families == f))
    return {f: Skill((f,), (families == f).astype(float), "assumed") for f in map(str, lacking[:3])}


def play(home: Path) -> Path:
    """Play the shop's validation split with the base of the settings, 8 trials a task, into `home`."""
    from tasks.measuring.policy_names import PolicyOptions
    from tasks.measuring.targets import EvaluateRequest, evaluate_targets

    settings = load_settings(home=home)
    rollout = settings.rollout
    request = EvaluateRequest("shop", "validation", settings.base_model, trials=8, home=home)
    evaluate_targets(request, PolicyOptions(rollout.temperature, rollout.max_tokens))
    return home


def load(home: Path | None) -> Played:
    """What was played in a home; without one the base plays first, in a folder that is gone afterwards."""
    if home is not None:
        with open_store(load_settings(home=home).database_url) as store:
            return played_in(store)
    with tempfile.TemporaryDirectory() as folder:
        return load(play(Path(folder)))


def report(scenario: Scenario, promoted: npt.NDArray[np.bool_]) -> tuple[str, bool]:
    """A line, and whether what is required holds."""
    count, nights = int(promoted.sum()), len(promoted)
    interval = stats.binomtest(count, nights).proportion_ci(method="wilson")
    share = 100 * count / nights
    held = (scenario.most is None or share <= scenario.most) and (scenario.least is None or share >= scenario.least)
    required = scenario.most is not None or scenario.least is not None
    bound = f"at most {scenario.most:g} %" if scenario.most is not None else f"at least {scenario.least or 0:g} %"
    return (
        f"{('met   ' if held else 'MISSED') if required else '      '} {share:5.1f} % promoted "
        f"[{100 * interval.low:4.1f}, {100 * interval.high:4.1f}]"
        f"{', ' + bound if required else '':<17} {scenario.name}"
    ), held


def run(played: Played, scenarios: Iterable[Scenario], nights: int, seed: int) -> bool:
    """Print every scenario; whether all that is required holds."""
    all_held = True
    for scenario in scenarios:
        began = time.perf_counter()
        line, held = report(scenario, simulate(played, scenario, nights, seed))
        print(f"{line} ({time.perf_counter() - began:.0f} s)", flush=True)
        all_held = all_held and held
    return all_held


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--home", type=Path)
    arguments.add_argument("--episodes", type=Path)
    arguments.add_argument("--save", type=Path)
    arguments.add_argument("--nights", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    played = Played.read(given.episodes) if given.episodes else load(given.home)
    if given.save:
        played.save(given.save)
    print(f"{played.source}; base {100 * played.base.mean():.1f} %")
    for name, skill in played.skills.items():
        own = played.own(skill)
        print(
            f"  {name} ({', '.join(skill.families)}; {skill.assumed or 'played on all tasks'}): own tasks "
            f"{100 * played.base[own].mean():.0f} -> {100 * skill.alone[own].mean():.0f} %, all others "
            f"{100 * played.base[~own].mean():.0f} -> {100 * skill.alone[~own].mean():.0f} %"
        )
    raise SystemExit(0 if run(played, SCENARIOS, given.nights, given.seed) else 1)


if __name__ == "__main__":
    main()
