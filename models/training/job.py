"""A training as a job: one process, or several that `accelerate launch` starts.

    accelerate launch -m models.training.job SPEC          # python -m models.training.job SPEC where there is one

SPEC is a JSON file: `lead` names a function ("package.module:function") that rank 0 calls with `order` and that returns
the exit status; `base` is what `load_base` is given in the others. Whatever `lead` trains with `train_adapter`, and
however often, the other processes train with it; of everything else (rollouts, store, servers) they know nothing.
Processes on other machines would need the folder of the training on a shared disk; that was never tried.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from errors import TraceError
from models.deadline import end_with_parent
from models.local.base import load_base
from models.telemetry.logs import configure
from models.training.grpo import StepsOwed, make_steps
from models.training.ranks import PART, DealtRollouts, LeaderOver, Ranks, close_ranks, follow_part, open_ranks

logger = logging.getLogger("trace.models")


class _Following(TrainerCallback):
    """Ends the training where rank 0 does."""

    def __init__(self, here: Ranks) -> None:
        self.here = here

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs and self.here.hear():
            control.should_training_stop = True


def follow(here: Ranks, base: Mapping[str, Any]) -> None:
    """Make rank 0's trainings with it, until it says that there is none left."""
    loaded = None if base.get("host") else load_base(**base)
    while (message := here.hear()) is not None:
        if message == PART:
            loaded = follow_part(lambda: load_base(**base))
            continue
        assert loaded is not None, "rank 0 parts its base before it trains"
        try:
            rollouts = DealtRollouts(here, None, loaded.policy.decoder)
            owed = StepsOwed.from_json(message)
            make_steps(owed, loaded.policy.model, loaded.renderer.tokenizer, rollouts, _Following(here))
        except (LeaderOver, TraceError) as problem:  # rank 0 meets the same problem, and tells of it
            logger.info("process %d has left a training: %s", here.index, problem or "it is over")


def lead(here: Ranks, name: str, order: Any) -> int:
    """Do what the job is for; its exit status."""
    module, _, function = name.partition(":")
    try:
        status: int = getattr(importlib.import_module(module), function)(order)
    except BaseException:
        # The others may be anywhere, waiting for this process: nothing can be told any more. The launcher ends them.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    here.tell(None)
    return status


def main(arguments: list[str]) -> int:
    """One process of the job."""
    configure()  # before libraries that set logging up themselves are imported
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    here = open_ranks()
    if here.leads:
        status = lead(here, spec["lead"], spec["order"])
    else:
        status = 0
        end_with_parent()
        follow(here, spec["base"])
    close_ranks()
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
