"""GEPA over our rollouts: within its budget, the same when it is begun again, and with a model's reflection."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from environments.contract import Message
from tasks.methods.proposals import EXAMPLES, INSTRUCTIONS, SCRIPTED, Proposer
from tasks.methods.run import run_method
from tasks.methods.seed.budget import TEST
from tasks.methods.seed.prompts import Prompting
from tasks.methods.seed.seed_run import close_round
from tasks.round import progress
from tests.tasks.methods.seeds_made import seed_run, without_prefect

POOL = {f"t{i}": (Message("user", f"ask {i}"), Message("assistant", f"say {i}")) for i in range(12)}
FAMILIES = {i: ("low", "high")[n % 2] for n, i in enumerate(POOL)}


def proposer(rewrite: Any = None, room: int = 99) -> Proposer:
    return Proposer("Say.", POOL, FAMILIES, lambda p: len(p.examples) <= room, Random(0), rewrite)


def record(family: str, solved: bool, *kinds: str) -> dict[str, Any]:
    return {"Family": family, "Solved": solved, "Failed checks": list(kinds)}


def test_the_script_adds_examples_of_what_failed_and_reminders_of_failed_checks() -> None:
    made = proposer()
    seed = {INSTRUCTIONS: "Say.", EXAMPLES: ""}
    failed = [record("high", False, "say_high", "look_first"), record("high", False, "say_high"), record("low", True)]
    given = dict.fromkeys((INSTRUCTIONS, EXAMPLES), failed)
    first = made.propose(seed, given, [INSTRUCTIONS])[INSTRUCTIONS]
    assert first == "Say.\nRemember: say high."
    second = made.propose({**seed, INSTRUCTIONS: first}, given, [INSTRUCTIONS])[INSTRUCTIONS]
    assert second == f"{first}\nRemember: look first."
    third = made.propose({**seed, INSTRUCTIONS: second}, given, [INSTRUCTIONS])[INSTRUCTIONS]
    assert third in (first, "Say.\nRemember: look first."), "all is there: one reminder less"
    text = ""
    for _ in range(30):
        text = made.propose({**seed, EXAMPLES: text}, given, [EXAMPLES])[EXAMPLES]
        shown = text.split()
        assert len(shown) == len(set(shown)) <= 8
    prompting = made.prompting({**seed, EXAMPLES: "t1 gone t3"})
    assert prompting == Prompting(("Say.", "Say."), (POOL["t1"], POOL["t3"]))


def test_a_prompt_that_leaves_no_room_is_not_proposed() -> None:
    made = proposer(room=1)
    records = {EXAMPLES: [record("low", False)]}
    assert made.propose({INSTRUCTIONS: "Say.", EXAMPLES: "t0"}, records, [EXAMPLES])[EXAMPLES].split() in (
        ["t0"], *([i] for i in POOL),
    )  # fmt: skip


def test_a_model_writes_instructions_where_one_is_configured() -> None:
    seen: list[str] = []
    made = proposer(lambda text, records: (seen.append(text), "Say it well.")[1])
    new = made.propose({INSTRUCTIONS: "Say.", EXAMPLES: ""}, {INSTRUCTIONS: []}, [INSTRUCTIONS])
    assert (new, seen) == ({INSTRUCTIONS: "Say it well."}, ["Say."])


def test_gepa_stays_within_its_budget_and_begun_again_plays_nothing(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gepa")
    without_prefect(monkeypatch)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    run = seed_run(settings_folder, tiny_model, budget=120)
    with caplog.at_level(logging.INFO, logger="trace"):
        first = run_method(run, "gepa")
    assert re.search(r"gepa: \d+ of \d+ calls, .* % of the last \d+", caplog.text), "its many small batches are told"
    assert SCRIPTED in first.notes[0]
    assert 10 + 10 + 3 <= first.episodes <= 120
    assert {"diagnosis", "evaluation", TEST} == set(first.purposes)
    stored = len(run.context.store.query("SELECT id FROM trajectories"))
    again = run_method(run, "gepa")
    assert again.model_dump() | {"seconds": 0} == first.model_dump() | {"seconds": 0}
    assert len(run.context.store.query("SELECT id FROM trajectories")) == stored
    close_round(run.context)
