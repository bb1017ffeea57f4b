"""What a training that goes on from a round's generalist wins on the families of its capability, and loses there and
elsewhere, by its learning rate: for choosing `train.carry_rate` on development seeds.

    python -m benchmarks.behind --home HOME/compare/shop-2000-.../seed-98 --families refund_all,refund_part,... \\
        --rates 5e-4 2e-4 --seeds 1 2

For the home of a round with a generalist, of `trace-agent compare-methods` or any other. Every rate has the same seeds
of training, scenarios and most episodes; what calibration has played is not used, and each family is drawn alike.
Success in per cent, at the temperature of evaluation, on `--fresh` scenarios of each family that no training draws:
the families trained on, each by itself, and all others together. One training each: trust what all seeds say alike.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.recall import FIRST, played_by_family
from db import GENERALIST, AdapterRow, CapabilityRow, open_store
from environments.contract import TargetTask
from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from environments.targets.catalogue import load_target
from errors import ConfigurationError
from models.adapters.files import adapter_digest
from models.adapters.loading import load_folder
from models.local.base import BaseModel, load_base
from models.training.actors import LocalActor
from models.training.grpo import train_adapter
from settings import Settings, load_settings
from tasks.synthesis.learning.training import training_settings


def generalist_in(home: Path) -> Path:
    """The folder of the generalist's weights in a round's home; raises `ConfigurationError` where there is none."""
    with open_store(f"sqlite:///{home / 'trace.db'}") as store:
        names = {row.id: row.name for row in store.rows(CapabilityRow)}
        for row in store.rows(AdapterRow):
            if names.get(row.capability_id or "") == GENERALIST and row.path:
                return home / row.path
    raise ConfigurationError(f"{home} has no round with a generalist; name the home of a seed that has run")


def success(
    base: BaseModel, settings: Settings, target: Any, tasks: Sequence[TargetTask], folder: Path
) -> Mapping[str, float]:
    """Success by family, in per cent, with the weights in a folder."""
    name = load_folder(base.policy, folder, "behind", folder.name, adapter_digest(folder))
    wins = played_by_family(base, settings, target, tasks, name)
    base.policy.unload_adapter(name)
    return {family: 100 * sum(found) / len(found) for family, found in wins.items()}


def line(found: Mapping[str, float], trained: Sequence[str]) -> str:
    """Means over the families trained on and over the others, and each of the former."""
    own = [found[family] for family in trained]
    others = [rate for family, rate in found.items() if family not in trained]
    each = ", ".join(f"{family} {found[family]:.0f}" for family in trained)
    rest = f"others {sum(others) / len(others):.1f}" if others else "no others"
    return f"own {sum(own) / len(own):.1f} ({each}), {rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--home", type=Path, required=True, help="folder with trace.db of a round that has a generalist"
    )
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--target", default="shop")
    parser.add_argument("--families", required=True, help="those that are trained on, commas between")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 2e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--most", type=int, default=300, help="episodes of a training")
    parser.add_argument("--fresh", type=int, default=16, help="fresh scenarios of each family")
    given = parser.parse_args()
    settings, start = load_settings(profile=given.profile, target=given.target), generalist_in(given.home)
    target: Any = load_target(given.target)
    trained = given.families.split(",")
    if unknown := [family for family in trained if family not in target.families()]:
        raise ConfigurationError(f"{given.target} has no family {unknown[0]!r}; it has {', '.join(target.families())}")
    base = load_base(dtype=settings.dtype, calls=settings.calls, rows=settings.rollout.rows)
    tasks = [target.generate(f, FIRST + i) for f in target.families() for i in range(given.fresh)]
    spec = CompositionSpec(target.name, target.data_hash, "behind", tuple(trained))
    print(f"what it begins from: {line(success(base, settings, target, tasks, start), trained)}", flush=True)
    for seed in given.seeds:
        for rate in given.rates:
            wanted = replace(
                training_settings(settings), seed=seed, learning_rate=rate, most_episodes=given.most, hints=0.0
            )
            with tempfile.TemporaryDirectory() as folder:
                made = train_adapter(
                    ComposedEnvironment(target, spec), LocalActor(base.policy), base.renderer, wanted, Path(folder),
                    lambda _: None, start=start,
                )  # fmt: skip
                figures = line(success(base, settings, target, tasks, made.folder), trained)
            print(f"seed {seed}, rate {rate:g}, {len(made.records)} steps ({made.ending}): {figures}", flush=True)


if __name__ == "__main__":
    main()
