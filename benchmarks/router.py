"""Router on the shop's generated tasks: accuracy by class, milliseconds a decision, every mode on validation, and
the same with ten adapters.

python -m benchmarks.router MODEL_FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from environments.contract import TargetTask
from environments.targets.shop.families import FAMILIES
from environments.targets.shop.target import target
from models.local.attention import NAME
from models.local.policy import LocalPolicy
from models.policy import PolicyIdentity
from models.renderer import Renderer
from models.router.first_observation import embed_openings, openings
from models.router.label_prompt import Candidate
from models.router.router import RouteDecision, Router
from models.router.validation import accuracy, choose_mode, confusion

CAPABILITY = {"refund": "refund_payment", "move": "change_address", "swap": "exchange_item"}
CANDIDATES = (
    Candidate("refund_payment", "give money back", "Refund 7 of order 264."),
    Candidate("change_address", "send an order to another address", "Move order 264 to 3 Elm Street."),
    Candidate("exchange_item", "another option of an item", "Swap order 264 for blue."),
    Candidate("", "anything else", "Where is order 264?"),
)
# Ten adapters to choose from: what a request asks for, which is all that its first words show.
TEN = {
    "cancel_order": (("cancel_pending", "cancel_too_late", "cancel_other", "cancel_two"), "Cancel order 264."),
    "item_price": (("item_price",), "What does the lamp cost?"),
    "refund_payment": (
        ("refund_part", "refund_too_much", "refund_then_cancel", "refund_all"),
        "Refund 7 of order 264.",
    ),
    "change_address": (("move_pending", "move_too_late"), "Move order 264 to 3 Elm Street."),
    "exchange_item": (("swap_delivered", "swap_too_early"), "Swap order 264 for blue."),
    "order_status": (("order_status",), "Where is order 264?"),
    "item_options": (("item_options",), "Which colours does the lamp come in?"),
    "payment_method": (("payment_method",), "How did I pay?"),
    "use_coupon": (("use_coupon",), "Use coupon SPRING."),
    "hand_over": (("wants_person",), "I want to talk to a person."),
}


def drawn(seeds: Sequence[int]) -> tuple[list[TargetTask], list[str]]:
    """Generated tasks of every family, and the capability whose adapter each needs."""
    tasks = [target().generate(family, seed) for family in FAMILIES for seed in seeds]
    return tasks, [CAPABILITY.get(task.family.partition("_")[0], "") for task in tasks]


def report(name: str, decisions: Sequence[RouteDecision], truth: Sequence[str]) -> None:
    kinds = (
        ("capability", [i for i, t in enumerate(truth) if t]),
        ("no adapter", [i for i, t in enumerate(truth) if not t]),
    )
    shares = [
        f"{kind} {accuracy([decisions[i] for i in at], [truth[i] for i in at]):.3f} of {len(at)}" for kind, at in kinds
    ]
    print(f"{name}: {', '.join(shares)}")


def main(folder: Path) -> None:
    renderer = Renderer(AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    policy = LocalPolicy(model, PolicyIdentity(str(folder), "0"), renderer.stop_ids)
    make = target().environment
    tasks, labels = drawn(range(25))
    router = Router.fit(embed_openings(policy, openings(make, renderer, tasks)), labels, [t.id for t in tasks])
    router = router.described(CANDIDATES)
    print(f"fitted on {len(tasks)} tasks, temperature {router.temperature:.4f}, version {router.version}")

    tasks, truth = drawn(range(1000, 1010))
    given = openings(make, renderer, tasks)
    decisions = router.route(policy, renderer, given)
    report("retrieval, batched", decisions, truth)
    names, counts = confusion(decisions, truth)
    print("\n".join(f"  {name or '(none)':16} {row.tolist()}" for name, row in zip(names, counts, strict=True)))
    for task, decision, true in zip(tasks, decisions, truth, strict=True):
        if decision.capability != true:
            print(f"  wrong: {task.family} -> {decision.capability or '(none)'}")
    times = [router.route(policy, renderer, [one])[0].milliseconds for one in given[::3]]
    print(f"one at a time: p50 {np.median(times):.1f} ms, p90 {np.quantile(times, 0.9):.1f} ms of {len(times)}")
    print(f"batched: {decisions[0].milliseconds:.1f} ms a task")

    tasks, truth = drawn(range(2000, 2005))
    rows = list(zip(openings(make, renderer, tasks), truth, strict=True))
    choice = choose_mode(router, policy, renderer, rows)
    print(f"validation: {', '.join(f'{m} {a:.3f}' for m, a in choice.accuracies.items())}; chosen {choice.mode}")
    with_ten(policy, renderer)


def with_ten(policy: LocalPolicy, renderer: Renderer) -> None:
    """Accuracy and milliseconds of a decision among ten adapters, asked one at a time, in every mode."""
    make = target().environment
    capability = {family: name for name, (families, _) in TEN.items() for family in families}
    tasks, _ = drawn(range(25))
    labels = [capability.get(task.family, "") for task in tasks]
    router = Router.fit(embed_openings(policy, openings(make, renderer, tasks)), labels, [t.id for t in tasks])
    router = router.described([Candidate(name, "", example) for name, (_, example) in TEN.items()] + [Candidate("")])
    tasks, _ = drawn(range(1000, 1003))
    given, truth = openings(make, renderer, tasks), [capability.get(task.family, "") for task in tasks]
    for mode in ("retrieval", "label", "both"):
        chosen = router.with_mode(mode)
        chosen.route(policy, renderer, given[:1])
        decisions = [chosen.route(policy, renderer, [one])[0] for one in given]
        times = [decision.milliseconds for decision in decisions]
        report(f"ten adapters, {mode}", decisions, truth)
        print(f"  one at a time: p50 {np.median(times):.1f} ms, p90 {np.quantile(times, 0.9):.1f} ms of {len(times)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
