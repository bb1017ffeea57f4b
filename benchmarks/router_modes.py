"""What a router can tell from where tasks lie: votes of neighbours against regressions, by layers.

    python -m benchmarks.router_modes --target bfcl:single --profile bfcl --family irrelevance
    python -m benchmarks.router_modes --profile laptop --seed 15 --home HOME [--beyond]

With `--family`: fitted on the target's diagnosis tasks, how well both rank the validation tasks of this family before
all others (AUC), for several ranges of layers. With `--home`, the folder of one seed of a comparison whose methods
`base`, `single` and `generalist` have played the test split: the router of its first release is fitted again in each
mode, on the stored diagnosis, and told is the success on test of the members that it would choose, where that is known.
Nothing is played. The home is not written to.

With `--beyond` the base and each member of that release play a test split and two shift tests of draws of their own
(some minutes), and told is what the router is worth on both: as it was before regressions decided on requests that are
unlike all examples ("rule"), as it is, and what single members come to.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from db import ReleaseRow
from environments.contract import Draw, DrawsTests
from models.router.first_observation import embed_openings, openings
from models.router.regression import expect
from models.router.router import nearest_columns, unit
from settings import load_settings
from tasks.measuring.gate_plan import p_phrase
from tasks.measuring.lineup import BARE_BASE, Trials, members_of, play_alone, play_lineup
from tasks.measuring.statistics import paired_difference
from tasks.round.context import Context
from tasks.round.rollouts import outcomes
from tasks.round.stage import open_context
from tasks.routing.examples import definitions_of, examples_of
from tasks.routing.fitting import MOST, fitted

# Numbers of draws that no round of a comparison has.
DRAWS = (7001, 7002)
LAYERS = ((3, 8), (9, 16), (14, 22), (22, 28))


def auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """How often one of `truth` has a higher score than one that is not."""
    apart = scores[truth][:, None] - scores[~truth][None, :]
    return float((apart > 0).mean() + (apart == 0).mean() / 2)


def by_layers(context: Context, family: str) -> None:
    splits = {name: list(context.tasks(name)) for name in ("diagnosis", "validation")}
    truth = {name: np.array([t.family == family for t in tasks]) for name, tasks in splits.items()}
    make, renderer = context.target.environment, context.base.renderer
    given = {name: openings(make, renderer, tasks) for name, tasks in splits.items()}
    for name, found in truth.items():
        print(f"{name}: {len(found)} tasks, {found.sum()} of {family}")
    for layers in LAYERS:
        with context.model:
            known, asked = (embed_openings(context.base.policy, given[name], layers) for name in splits)
        centre = known.mean(axis=0)
        nearest = nearest_columns(unit(asked - centre) @ unit(known - centre).T, MOST)
        votes = truth["diagnosis"][nearest].mean(axis=1)
        found_by = expect(known - centre, truth["diagnosis"].astype(float)[:, None])
        expected = ((asked - centre) @ found_by.slopes + found_by.offsets)[:, 0]
        print(
            f"layers {layers[0]} to {layers[1]}: AUC of votes {auc(votes, truth['validation']):.2f}, "
            f"of a regression {auc(expected, truth['validation']):.2f}",
            flush=True,
        )


def by_mode(context: Context) -> None:
    """The release of a stored round with its router fitted again."""
    release = min(context.store.rows(ReleaseRow, target=context.settings.target), key=lambda row: row.number)
    context.round = context.store.round(str(release.round_id))
    members = members_of(release)
    tasks = list(context.tasks("test"))
    frame = context.store.trajectory_frame(
        context.round.id, columns=["task_id", "adapter_id", "success", "environment", "policy_id"]
    )
    own = frame["task_id"].isin([t.id for t in tasks]) & (frame["environment"] == context.settings.target)
    frame = frame[own].dropna(subset=["success"])
    bare = frame[frame["policy_id"] == context.base.identity.id]
    played = {"": bare} | {name: frame[frame["adapter_id"] == identity] for name, identity in members.items()}
    known = {name: rows.groupby("task_id")["success"].first().astype(float) for name, rows in played.items()}
    examples = examples_of(context, members)
    with context.model:
        unlike, definitions = str(release.evidence.get("unlike", "")), definitions_of(context, members)
        found = fitted(context, examples, unlike, definitions=definitions)
        given = openings(context.target.environment, context.base.renderer, tasks)
        decided = found.router.route(context.base.policy, context.base.renderer, given)
    got = np.array([known[d.capability].get(t.id, np.nan) for d, t in zip(decided, tasks, strict=True)])
    alone = ", ".join(f"{name or 'base'} {100 * rows.mean():.1f}" for name, rows in known.items())
    right = "" if found.right is None else f", {100 * found.right:.1f} % of {found.judged} kept out right"
    print(
        f"{found.router.mode}: {100 * np.nanmean(got):.1f} % of {np.isfinite(got).sum()} test tasks{right} ({alone})",
        flush=True,
    )


def beyond(context: Context) -> None:
    """What the first release's router, fitted again, is worth on its own distribution and beyond it."""
    release = min(context.store.rows(ReleaseRow, target=context.settings.target), key=lambda row: row.number)
    context.round = context.store.round(str(release.round_id))
    target, members, seed = context.target, members_of(release), context.settings.seed
    assert isinstance(target, DrawsTests), f"{context.settings.target} draws no tests"
    near, far = DRAWS
    parts = {
        "test": list(target.drawn_test(Draw(seed, near))),
        "shift test": [t for number in (near, far) for t in target.drawn_shift(Draw(seed, number))],
    }
    tasks = [task for part in parts.values() for task in part]
    owed = Trials(tasks, 1, seed)
    played = {"": play_lineup(context, BARE_BASE, owed, "base").ids}
    played |= {c: play_alone(context, c, a, owed, "tests") for c, a in members.items()}
    known = {c: outcomes(context.store, ids).groupby("task")["success"].first() for c, ids in played.items()}
    unlike = str(release.evidence.get("unlike", ""))
    examples, definitions = examples_of(context, members), definitions_of(context, members)
    with context.model:
        router = fitted(context, examples, unlike, definitions=definitions).router
        given = openings(target.environment, context.base.renderer, tasks)
        now = router.route(context.base.policy, context.base.renderer, given)
    chosen = {"rule": [unlike if d.unlike else d.capability for d in now], "now": [d.capability for d in now]}
    chosen |= {f"{name or 'base'} alone": [name] * len(tasks) for name in played}
    got = {
        way: pd.Series([known[c].get(t.id, np.nan) for c, t in zip(names, tasks, strict=True)], dtype=float)
        for way, names in chosen.items()
    }
    first = 0
    for name, part in parts.items():
        at = slice(first, first + len(part))
        first += len(part)
        rates = ", ".join(f"{way} {100 * values[at].mean():.1f}" for way, values in got.items())
        new = 100 * np.mean([d.unlike for d in now[at]])
        change = paired_difference(got["rule"][at], got["now"][at], [t.id for t in part])
        print(
            f"{name}, {len(part)} tasks, {new:.0f} % unlike all ({unlike or 'base'} by the rule): {rates}; now "
            f"minus rule {change.points:+.1f} ({change.low:+.1f} to {change.high:+.1f}), {p_phrase(change.p, 4)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="shop")
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="", help="that is to be told from the others")
    parser.add_argument("--home", type=Path, help="of one seed of a comparison")
    parser.add_argument("--beyond", action="store_true", help="of its release, on tests of draws of their own")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        if given.home:
            shutil.copytree(given.home, home)
        for mode in ("retrieval", "linear") if given.home and not given.beyond else ("linear",):
            context = open_context(
                load_settings(target=given.target, profile=given.profile, seed=given.seed, home=home, router=mode)
            )
            if given.family:
                by_layers(context, given.family)
            if given.home:
                (beyond if given.beyond else by_mode)(context)


if __name__ == "__main__":
    main()
