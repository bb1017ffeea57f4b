"""Do nights add up: several rounds in a row in one home, as a schedule runs them, measured on tasks that none saw.

    python -m benchmarks.nights --rounds 5 --seed 11 [--home FOLDER]     # goes on with a home that has rounds already

After the last night everything that was live is played on the same *sealed* tasks: drawn for this benchmark, with no
content of any night's draw, of training or of the test split. Prints success after each night with its interval
(clustered by task), the paired difference to the night before, and whether

- no night is significantly below the one before (paired, two-sided 5 %, Holm over the nights);
- the last night is above the first by at least 10 points with p < 0.05;
- each night's diagnosis tasks were new (no content in common with any earlier night);
- what earlier nights learnt was kept: no capability left the live release, and none of its families fell significantly.

Exits with 1 when one is missed. The bare base stands beside, and for each night the target's shift test, where it has
one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pandas as pd

from db import DrawnTaskRow, ReleaseRow, Round, RoundState, VerdictRow, open_store
from environments.contract import Draw, Drawable, ShiftTested, TargetTask
from settings import load_settings
from tasks.measuring.gate_plan import p_phrase
from tasks.measuring.lineup import Trials, lineup_of, play_lineup
from tasks.measuring.statistics import PairedDifference, align, holm, paired_difference, success_interval
from tasks.round.context import Context
from tasks.round.results import GateResult, ReportResult, SelectResult, TrainResult
from tasks.round.rollouts import outcomes
from tasks.round.stored import StoredRound

# Numbers that no schedule reaches: the sealed draws of this benchmark.
SEALED = (1_000_001, 1_000_002)
POINTS, LEVEL = 10.0, 0.05
ENDED = (RoundState.DONE, RoundState.FAILED)


@dataclass(frozen=True)
class Night:
    """What was live after a round (None: the base), and how the round ended."""

    number: int
    release: ReleaseRow | None
    selected: Sequence[str]
    endings: str
    reason: str
    minutes: float
    row: Round


def run(rounds: int, seed: int, profile: str, home: Path) -> None:
    """Rounds until the home has as many as wanted, each in a process of its own."""
    command = [sys.executable, "-m", "flows.cli.main", "improve", "--profile", profile, "--seed", str(seed)]
    while True:
        ended = []
        if (home / "trace.db").is_file():  # the first round makes it
            listed = subprocess.run(
                [*command[:3], "rounds", "--json", "--home", str(home)], check=True, capture_output=True, text=True
            )
            ended = [r for r in json.loads(listed.stdout) if r["state"] in ENDED]
        if len(ended) >= rounds:
            return
        began = time.monotonic()
        subprocess.run([*command, "--home", str(home)], check=False)
        print(f"night {len(ended) + 1}: {(time.monotonic() - began) / 60:.1f} min", flush=True)


def nights_of(context: Context) -> list[Night]:
    """The rounds of a home that have ended, with what was live after each."""
    store, found = context.store, []
    live: ReleaseRow | None = None
    rounds = [r for r in store.rows(Round, target=context.round.target) if r.state in ENDED]
    for row in sorted(rounds, key=lambda r: r.number):
        stored = StoredRound(store, row)
        gated, select, told = stored.found(GateResult), stored.found(SelectResult), stored.found(ReportResult)
        # A challenge that nothing passes leaves no gate to ask, and its verdicts all the same.
        verdicts = {v.subject: v.verdict for v in store.rows(VerdictRow, round_id=row.id)}
        if gated and gated.release:
            live = store.row(ReleaseRow, target=row.target, number=gated.release)
        chosen = list(select.selected) if select else []
        endings = ", ".join(f"{c}: {verdicts.get(c, 'not tried')}" for c in chosen if stored.found(TrainResult, c))
        whole = f" | release: {verdicts['release']}" if "release" in verdicts else ""
        reason = (told.reason if told else "") or row.reason
        found.append(Night(row.number, live, chosen, endings + whole, reason, (row.seconds or 0) / 60, row))
    return found


def sealed_tasks(context: Context) -> list[TargetTask]:
    """Tasks whose content no night has drawn; training draws from other contents altogether."""
    target = context.target
    assert isinstance(target, Drawable), f"{context.round.target} cannot draw; nights need fresh tasks"
    used = {r.content for r in context.store.rows(DrawnTaskRow, target=context.round.target)}
    tasks: list[TargetTask] = []
    for number in SEALED:
        for split in ("diagnosis", "validation"):
            drawn = target.drawn(split, Draw(context.settings.seed, number, frozenset(used)))
            tasks += drawn
            used |= {target.content(t) for t in drawn}
    return tasks


def repeated_contents(context: Context) -> int:
    """Contents that two draws of diagnosis have in common."""
    rows = [r for r in context.store.rows(DrawnTaskRow, target=context.round.target) if r.split == "diagnosis"]
    return len(rows) - len({r.content for r in rows})


def play(context: Context, release: ReleaseRow | None, tasks: Sequence[TargetTask], trials: int) -> pd.DataFrame:
    """Outcomes of what answers with a release, routed as in production."""
    name = f"sealed (release {release.number if release else 0})"
    played = play_lineup(context, lineup_of(context, release), Trials(tasks, trials, 0), name)
    return outcomes(context.store, played.ids)


def success(frame: pd.DataFrame) -> str:
    interval = success_interval(frame)
    return f"{100 * interval.rate:5.1f} % ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def shifted(frames: Sequence[pd.DataFrame], place: int) -> str:
    """Success on the target's shift test, which is only reported; "" where it has none."""
    return f", shift test {success(frames[place]).strip()}" if frames else ""


def judge(frames: Sequence[pd.DataFrame], nights: Sequence[Night], repeated: int) -> list[tuple[str, bool, str]]:
    """What nights must reach: name, whether they did, the figure."""
    steps = [paired(before, after) for before, after in pairwise(frames)]
    adjusted = holm([d.p for d in steps])
    fell = [i + 2 for i, (d, p) in enumerate(zip(steps, adjusted, strict=True)) if d.points < 0 and p < LEVEL]
    whole = paired(frames[0], frames[-1])
    kept = all(
        set(a.release.members) <= set(b.release.members) if a.release and b.release else not a.release
        for a, b in pairwise(nights)
    )
    lost = lost_families(frames[0], frames[-1])
    return [
        ("no night significantly below the one before", not fell, f"nights {fell}" if fell else "none"),
        (
            f"last night above the first by {POINTS:g} points, p < {LEVEL:g}",
            whole.points >= POINTS and whole.p < LEVEL,
            f"{whole.points:+.1f} ({whole.low:+.1f} to {whole.high:+.1f}), {p_phrase(whole.p, 4)}",
        ),
        ("each night's diagnosis is new", repeated == 0, f"{repeated} contents repeated"),
        ("what was learnt is kept", kept and not lost, f"families that fell: {', '.join(lost) or 'none'}"),
    ]


def paired(before: pd.DataFrame, after: pd.DataFrame) -> PairedDifference:
    """The paired difference, in points, clustered by task."""
    pairs = align(before, after)
    return paired_difference(pairs["base"], pairs["other"], pairs["task"])


def lost_families(first: pd.DataFrame, last: pd.DataFrame) -> list[str]:
    """Families that the last night solves significantly less often than the first (Holm over the families)."""
    families = sorted(set(first["family"]))
    changes = [paired(first[first["family"] == f], last[last["family"] == f]) for f in families]
    adjusted = holm([d.p for d in changes])
    return [f for f, d, p in zip(families, changes, adjusted, strict=True) if d.points < 0 and p < LEVEL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--trials", type=int, default=1, help="episodes per sealed task")
    parser.add_argument("--home", type=Path, help="keep the rounds here, and go on with those that are here")
    options = parser.parse_args()
    home = options.home or Path(tempfile.mkdtemp(prefix="nights-"))
    run(options.rounds, options.seed, options.profile, home)
    settings = load_settings(home=home, profile=options.profile, seed=options.seed)
    with open_store(settings.database_url) as store:
        last = store.latest_round(settings.target)
    assert last is not None
    context = Context(settings, open_store(settings.database_url), last)
    try:
        nights = nights_of(context)[: options.rounds]
        tasks = sealed_tasks(context)
        base = play(context, None, tasks, options.trials)
        frames = [play(context, night.release, tasks, options.trials) for night in nights]
        far = context.target.shift_test() if isinstance(context.target, ShiftTested) else ()
        shifts = [play(context, release, far, 1) for release in (None, *(n.release for n in nights))] if far else []
    finally:
        context.close()
    print(f"\n{len(tasks)} sealed tasks x {options.trials} trials, seed {options.seed}, {home}")
    print(f"bare base   {success(base)}{shifted(shifts, 0)}")
    for i, (night, frame) in enumerate(zip(nights, frames, strict=True)):
        change = paired(frames[i - 1] if i else base, frame)
        members = ", ".join(night.release.members) if night.release else "none"
        print(
            f"night {night.number}     {success(frame)}{shifted(shifts, i + 1)}  "
            f"{change.points:+.1f} points, {p_phrase(change.p, 4)}; "
            f"release {night.release.number if night.release else 0}: {members}\n"
            f"            {night.minutes:.1f} min; {night.endings or night.reason}"
        )
    good = True
    for name, reached, figure in judge(frames, nights, repeated_contents(context)):
        good &= reached
        print(f"  {'reached' if reached else 'MISSED ':<8} {name}: {figure}")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
