"""One GRPO step on the embedded model: this project's gradient beside TRL's own loop, on the same stored episodes.

    python -m benchmarks.grpo_step [--groups 4] [--group-size 8] [--dtype auto] [--clock wall|processor]
        [--target shop] [--adapter FOLDER] [--sides trl,whole,ours]

Episodes of the target are played once, by the base or with an adapter. Each side then makes one step from them in a
process of its own, in turns, twice: TRL's `GRPOTrainer` with a `rollout_func` that hands the episodes out, PEFT and its
own loss; and `train_adapter`'s trainer on the same ids, masks and rewards, as it is (`ours`), and with each row whole
where rows begin alike (`whole`). Prints seconds of the step without playing, the floor of exactly the tokens that this
project's side computed (`benchmarks/floor.py`), the ratios, and each process's peak memory. Exits with 1 when the step
takes more than 1.5 times its floor, is less than 3 times as fast as TRL's, or takes more memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import CLOCKS, measure
from benchmarks.groups import ROWS, grouped
from environments.targets.catalogue import load_target
from models.episodes import Player
from models.local.base import embedded_folder, load_base
from models.policy import Sampling
from models.training.learner import make_learner
from models.training.lora import lora_config
from models.training.records import TrainingSettings
from models.training.rollouts import Rollouts
from models.training.trl_trainer import EpisodeGRPO
from models.work import Work

SIDES = ("trl", "whole", "ours")


def play(target: Any, groups: int, size: int, dtype: str, adapter: Path | None) -> dict[str, Any]:
    """Rows of `groups` groups of episodes as TRL takes them. The rewards are spread within each group, so that every
    row has an advantage: what is left out otherwise is not measured here."""
    base = load_base(rows=ROWS, dtype=dtype)
    todo = grouped(target, base, groups, size, adapter)
    sampling = Sampling(0.7, 24 if target.name == "shop" else 96)
    player = Player(target.environment, base.policy, base.renderer, sampling, ROWS)
    done = {t.episode.key: t for t in player.play(todo)}
    out: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "reward": []}
    for row, episode in enumerate(todo):
        talk = done[episode.key].conversation
        first = talk.sampled.index(True)
        out["prompt_ids"].append(list(talk.ids[:first]))
        out["completion_ids"].append(list(talk.ids[first:]))
        out["logprobs"].append(list(talk.logprobs[first:]))
        out["env_mask"].append([int(s) for s in talk.sampled[first:]])
        out["reward"].append((row % size) / size)
    return out | {"shared": min(t.conversation.shared for t in done.values())}


def reward_of(reward: list[float], **_: Any) -> list[float]:
    """TRL's reward function: the rewards that came with the rows."""
    return reward


def step(side: str, rows: dict[str, Any], size: int, dtype: str, clock_name: str) -> dict[str, Any]:
    """One step of a side in this process: seconds without playing, work done, peak MiB, norm of the gradient."""
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    clock, settings = CLOCKS[clock_name], TrainingSettings(group_size=size)
    base = load_base(dtype=dtype) if side != "trl" else None
    kind = next(base.policy.model.parameters()).dtype if base else getattr(torch, dtype)
    plain = base.policy.model if base else AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=kind)
    torch.manual_seed(0)
    peft = get_peft_model(plain, lora_config(settings, plain))
    count, given = len(rows["reward"]), {k: v for k, v in rows.items() if k != "shared"}
    began: list[float] = []

    def hand_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        began.append(clock())
        return dict(given)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=1, per_device_train_batch_size=8 if base is None else count,
            gradient_accumulation_steps=count // 8 if base is None else 1,
            num_generations=size, learning_rate=1e-3, temperature=0.7, beta=0.0, loss_type="dapo",
            max_completion_length=4096, logging_steps=1, save_strategy="no", gradient_checkpointing=False,
            use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False,
        )  # fmt: skip
        common: dict[str, Any] = {
            "model": peft,
            "reward_funcs": reward_of,
            "args": config,
            "train_dataset": Dataset.from_dict({"prompt": [f"slot {i}" for i in range(2 * count)]}),
            "processing_class": AutoTokenizer.from_pretrained(embedded_folder()),
        }
        work = Work()
        if base is None:
            trainer: Any = GRPOTrainer(rollout_func=hand_out, **common)
        else:
            from models.training.actors import LocalActor

            source = Rollouts(None, LocalActor(base.policy), base.renderer, settings, lambda *_: None)  # type: ignore[arg-type]
            rewards = torch.tensor(rows["reward"]).view(-1, size)
            source.advantages_R = (
                (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            ).flatten()
            source.shared, source.hinted_R = rows["shared"], torch.zeros(count, dtype=torch.bool)
            source.rollout = hand_out  # type: ignore[method-assign, assignment]
            trainer = EpisodeGRPO(source=source, most_rows=8, **common)
            learner = make_learner(peft.get_base_model(), base.policy.decoder)
            learner.branches = side == "ours"
            trainer._learner, work = learner, learner.work
        trainer.train()
        seconds = clock() - began[0]
    norm = next(h["grad_norm"] for h in trainer.state.log_history if "grad_norm" in h)
    floor = measure(plain.config, kind, clock=clock)
    floors = {"floor": floor.seconds(work), "linear": floor.linear(work)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, **floors, "work": asdict(work), "peak": peak, "norm": float(norm)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--target", default="shop")
    parser.add_argument("--adapter", type=Path, help="folder of an adapter that plays the episodes")
    parser.add_argument("--sides", default="trl,whole,ours")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        rows = json.loads(given.rows.read_text())
        print("figures", json.dumps(step(given.side, rows, given.group_size, given.dtype, given.clock)))
        return
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "rows.json"
        played = play(load_target(given.target), given.groups, given.group_size, given.dtype, given.adapter)
        stored.write_text(json.dumps(played))
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES if side in given.sides.split(",")}
        for _ in range(given.turns):
            for side, figures in found.items():
                command = [sys.executable, "-m", "benchmarks.grpo_step", *sys.argv[1:]]
                command += ["--side", side, "--rows", str(stored)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                line = next(text for text in done.stdout.splitlines() if text.startswith("figures "))
                figures.append(json.loads(line.removeprefix("figures ")))
                print(side, line, flush=True)
    least = {side: min(figures, key=lambda f: f["seconds"]) for side, figures in found.items()}
    print(f"{given.dtype}, {torch.get_num_threads()} threads, {given.clock} time")
    print(f"{'':6} {'seconds':>8} {'peak MiB':>9} {'gradient norm':>14}")
    for name, one in least.items():
        print(f"{name:6} {one['seconds']:8.2f} {one['peak']:9.0f} {one['norm']:14.5f}")
    ours = least["ours"]
    floor, linear = (min(f[name] for f in found["ours"]) for name in ("floor", "linear"))
    above = ours["seconds"] / floor
    print(f"floor {floor:.2f} s, ratio {above:.2f}")
    print(f"floor without attention's products {linear:.2f} s, ratio {ours['seconds'] / linear:.2f}")
    for name, one in least.items():
        if name != "ours":
            print(f"{one['seconds'] / ours['seconds']:.1f} times as fast as {name}")
    theirs = least.get("trl")
    kept = theirs is None or (theirs["seconds"] >= 3 * ours["seconds"] and ours["peak"] <= theirs["peak"])
    raise SystemExit(0 if above <= 1.5 and kept else 1)


if __name__ == "__main__":
    main()
