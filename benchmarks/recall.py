"""What an adapter learns from the successes of a round, by where they come from: is it the training, or the advice?

    python -m benchmarks.recall --home HOME/compare/shop-5000-.../seed-17 [--fresh 12] [--passes 3]

For the home of a round, of `trace-agent compare-methods` or any other: one adapter each learns from its successes at
diagnosis alone; from these and those of its calibrations, most of which were shown advice; from these and those of the
trainings of its capabilities; and from all, with what their adapters solved of the diagnosis tasks. `advice` is the
sceptic's: nothing is trained, and the base plays scenarios of every family with advice instead, as many as a family of
the generalist is shown that hardly succeeded. Success on fresh scenarios of every family of the target, which no
training draws, with 95 % intervals over scenarios. One training each: a difference of a few points says nothing.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from db import AdapterRow, Store, TrajectoryRow, open_store
from environments.contract import Prompt, TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.synthesized.hints import Advised, advised, unadvised
from environments.targets.catalogue import load_target
from models.adapters.files import adapter_digest
from models.adapters.loading import load_folder
from models.episodes import Episode, Player
from models.local.base import BaseModel, load_base
from models.policy import Sampling
from models.renderer import Conversation
from models.training.actors import LocalActor
from models.training.grpo import recall_adapter
from models.training.recall import recall_steps
from settings import Settings, load_settings
from tasks.measuring.lineup import TRIED
from tasks.measuring.statistics import clustered_interval
from tasks.synthesis.learning.recalling import COLUMNS, conversation_of, picked
from tasks.synthesis.learning.shown import SAMPLES, SCENARIOS
from tasks.synthesis.learning.training import training_settings

# Each with all before it, but the last.
SOURCES: Mapping[str, Sequence[str]] = {
    "diagnosis": ("diagnosis",),
    "and calibrations": ("diagnosis", "calibration"),
    "and trainings": ("diagnosis", "calibration", "training"),
    "and diagnosis tasks that adapters tried": ("diagnosis", "calibration", "training", TRIED),
}
# Seeds of the fresh scenarios, and of those that are shown with advice: no training draws below 10^9 at these places.
FIRST, SHOWN = 70_000_133, 77_000_000


def rows_of(store: Store, purposes: Sequence[str]) -> list[TrajectoryRow]:
    """What is learnt from, of these purposes, as the generalist does."""
    own = {row.id for row in store.rows(AdapterRow) if row.capability_id}
    frame = store.trajectory_frame(None, columns=COLUMNS, purpose=list(purposes))
    return picked(store, frame[frame["purpose"].isin(("diagnosis", "calibration")) | frame["adapter_id"].isin(own)])


def shown(base: BaseModel, target: Any, settings: Settings) -> tuple[list[Conversation], int]:
    """What the bare base solves of every family with advice, behind the plain prompt; and how many episodes it took."""
    environment = ComposedEnvironment(
        target, CompositionSpec(target.name, target.data_hash, "x", tuple(target.families()))
    )
    tasks = [target.generate(f, SHOWN + i) for f in target.families() for i in range(SCENARIOS)]
    told = [advised(t, advice) for t in tasks if (advice := environment.advice(t))]
    player = Player(
        lambda: Advised(target.environment()),
        base.policy,
        base.renderer,
        Sampling(settings.train.temperature, settings.rollout.max_tokens),
    )
    episodes = [Episode(f"{t.id}/{k}", t, 0, k) for t in told for k in range(SAMPLES)]
    found = [_plain(base, target, played) for played in player.play(episodes) if played.score and played.score.success]
    return found, len(episodes)


def _plain(base: BaseModel, target: Any, played: Any) -> Conversation:
    environment = target.environment()
    first = environment.reset(unadvised(played.episode.task)).messages
    start, was = base.renderer.start(Prompt.of(environment), first), played.conversation
    environment.close()
    at = was.sampled.index(True)
    return Conversation([*start.ids, *was.ids[at:]], [*start.sampled, *was.sampled[at:]], [0.0] * len(was.ids))


def played_by_family(
    base: BaseModel, settings: Settings, target: Any, tasks: Sequence[TargetTask], name: str | None
) -> dict[str, list[float]]:
    """What one episode on each of `tasks` came to (1: success), by family, at the temperature of evaluation."""
    sampling = Sampling(settings.rollout.temperature, settings.rollout.max_tokens)
    player = Player(target.environment, base.policy, base.renderer, sampling)
    families: dict[str, list[float]] = {}
    for played in player.play([Episode(t.id, t, 0, 0, name) for t in tasks]):
        won = float(bool(played.score and played.score.success))
        families.setdefault(played.episode.task.family, []).append(won)
    return dict(sorted(families.items()))


def success(base: BaseModel, settings: Settings, target: Any, tasks: Sequence[TargetTask], name: str | None) -> str:
    """Success on `tasks` with its interval, and the families below a half."""
    families = played_by_family(base, settings, target, tasks, name)
    wins = [won for family in families.values() for won in family]
    found = clustered_interval(wins, list(range(len(wins))))
    low = [f"{f} {100 * sum(w) / len(w):.0f}" for f, w in families.items() if sum(w) < len(w) / 2]
    interval = f"{100 * found.low:.0f} to {100 * found.high:.0f}"
    return f"{100 * found.rate:.1f} % ({interval}); families below a half: {', '.join(low) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="folder with trace.db of a round")
    parser.add_argument("--profile", default="night")
    parser.add_argument("--target", default="shop")
    parser.add_argument("--fresh", type=int, default=12, help="fresh scenarios of each family")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--only", default="", help="one of the sources, or advice")
    given = parser.parse_args()
    settings = load_settings(profile=given.profile, target=given.target)
    target: Any = load_target(given.target)
    base = load_base(dtype=settings.dtype, calls=settings.calls, rows=settings.rollout.rows)
    tasks = [target.generate(f, FIRST + i) for f in target.families() for i in range(given.fresh)]
    print(f"bare base: {success(base, settings, target, tasks, None)}", flush=True)
    environment = target.environment()
    environment.reset(tasks[0])
    prompt = Prompt.of(environment)
    with open_store(f"sqlite:///{given.home / 'trace.db'}") as store, tempfile.TemporaryDirectory() as folder:
        for name in (*SOURCES, "advice"):
            if given.only not in ("", name):
                continue
            episodes = 0
            if name == "advice":
                learnt, episodes = shown(base, target, settings)
                learnt += [conversation_of(row, base.renderer, prompt) for row in rows_of(store, ("diagnosis",))]
            else:
                learnt = [conversation_of(row, base.renderer, prompt) for row in rows_of(store, SOURCES[name])]
            random.Random(0).shuffle(learnt)
            wanted = training_settings(settings)
            wanted = replace(wanted, steps=recall_steps(len(learnt), given.passes, wanted), temperature=1.0, hints=0.0)
            output = Path(folder) / name.replace(" ", "-")
            made = recall_adapter(learnt, LocalActor(base.policy), base.renderer, wanted, output, lambda _: None)
            adapter = load_folder(base.policy, made.folder, "recall", name, adapter_digest(made.folder))
            told = f", {episodes} episodes" if episodes else ""
            print(
                f"{name}: {len(learnt)} successes{told}, {success(base, settings, target, tasks, adapter)}", flush=True
            )
            base.policy.unload_adapter(adapter)


if __name__ == "__main__":
    main()
