"""What hints bring out of a policy that never succeeds by itself, and what of it training keeps once they are gone.

    python -m benchmarks.hints [--seed 0] [--steps 4]      # about six minutes on two cores

For three families of the shop that the base never solves: success of the bare base with and without one worked example
of another scenario in its prompt (64 episodes, as in calibration), and success on 32 fresh seeds, without any example,
of the base and of an adapter trained with hints and without (the laptop profile, a third of the scenarios for
retention). One training each: a difference of a few episodes says nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from environments.synthesized.composed import ComposedEnvironment, CompositionSpec
from errors import TrainingError
from models.adapters.loading import load_folder
from models.episodes import Episode
from settings import load_settings
from tasks.round.context import Context
from tasks.round.rollouts import outcomes
from tasks.round.stage import forget, open_context
from tasks.synthesis.calibration import FRESH_SEED, measure
from tasks.synthesis.learning.course import Course
from tasks.train import train_on

FAMILIES = {"use_coupon": "apply_coupon", "payment_method": "look_up_customer", "cancel_without_number": "ask_missing"}
RETENTION = ("cancel_pending", "cancel_too_late", "item_price", "swap_too_early", "move_too_late")
FRESH = 32


def of_family(context: Context, family: str, retention: tuple[str, ...] = ()) -> ComposedEnvironment:
    """The environment of one family."""
    spec = CompositionSpec("shop", context.round.data_hash, FAMILIES[family], (family,), retention)
    return ComposedEnvironment(context.target, spec)


def success(context: Context, environment: ComposedEnvironment, adapter: str, name: str | None) -> float:
    """Success on fresh seeds, with nothing in the prompt but what the shop has there."""
    tasks = [environment.own_scenario(FRESH_SEED + i) for i in range(FRESH)]
    ground = context.training_ground(environment.spec.id, environment.environment, adapter)
    ids = context.engine.play(ground, [Episode("", t, 0, 0, name) for t in tasks], name or "base")
    return float(outcomes(context.store, ids)["success"].mean())


def trained(context: Context, family: str, hinted: bool) -> float:
    """Success of an adapter trained for the family; that of the base where there was nothing to learn from."""
    environment = of_family(context, family, RETENTION)
    name = f"{FAMILIES[family]}-{'hinted' if hinted else 'plain'}"
    folder = context.folder / name
    try:
        result = train_on(context, Course(name, environment, f"adapter-{name}", folder, hinted=hinted))
    except TrainingError as problem:
        if problem.transient:
            raise  # else an outage would be reported as nothing learnt
        return success(context, environment, "", None)
    loaded = load_folder(context.policy, folder / "final", name, context.round.id, result.sha256)
    try:
        return success(context, environment, f"adapter-{name}", loaded)
    finally:
        context.policy.unload_adapter(loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        context = open_context(
            load_settings(profile="laptop", home=Path(home), seed=given.seed, train={"steps": given.steps})
        )
        try:
            for family in FAMILIES:
                calibrated = measure(context.engine, context.settings, of_family(context, family))
                alone, shown = calibrated.figures["success_rate"], calibrated.hinted or 0.0
                base = success(context, of_family(context, family), "", None)
                plain, hinted = (trained(context, family, with_hints) for with_hints in (False, True))
                print(
                    f"{family:<22} base {100 * alone:.0f} %, shown an example {100 * shown:.0f} %; fresh: base "
                    f"{100 * base:.0f} %, trained without hints {100 * plain:.0f} %, with {100 * hinted:.0f} %",
                    flush=True,
                )
        finally:
            forget(context.round.id)


if __name__ == "__main__":
    main()
