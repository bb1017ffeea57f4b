"""The round on capabilities that were not selected, where a language model has named them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from models.providers.client import ModelClient
from models.providers.litellm_client import Completion, ModelCall
from tasks.contrast import contrast
from tasks.methods import trace as room
from tasks.methods.run import run_method
from tasks.methods.seed.answers import Answer
from tasks.methods.seed.budget import Account
from tasks.methods.seed.seed_run import SeedRun, close_round, diagnose, find_lacking, pay
from tasks.round.context import Context
from tests.tasks.methods.seeds_made import TRAIN, seed_run, without_prefect

NAMED = [("utter_high_letters", "keep_it_short"), ("say_high_letters",)]


def test_the_placebo_draws_from_what_was_named_once(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own home the analyst was asked anew, and paid; it named the selected capability otherwise, which was drawn
    as if it had not been selected."""
    without_prefect(monkeypatch)
    for kind in ("table", "markdown"):
        monkeypatch.setattr(f"tasks.mining.llm_analyst.create_{kind}_artifact", lambda *given, **more: None)
    asked: list[ModelCall] = []

    def answer(client: ModelClient, call: ModelCall) -> Completion:
        kind = call.options["response_format"]["json_schema"]["name"]
        text = call.messages[-1]["content"]
        if kind == "FoundCapabilities":
            names = NAMED[len(asked)]
            asked.append(call)
            about = [{"name": n, "definition": f"The agent does what {n} says, in each and every turn."} for n in names]
            said: Any = {"capabilities": [c | {"failed_examples": [], "passed_examples": []} for c in about]}
        elif kind == "GivenLabels":
            first, *others = [n for n in re.findall(r"^- (\w+): ", text, re.M) if n in sum(NAMED, ())]
            said = {"labels": []}
            for alias, outcome in re.findall(r"^### (T\d+) \((PASSED|FAILED)\)", text, re.M):
                given = {first: "PRESENT" if outcome == "PASSED" else "LACKING"} | dict.fromkeys(others, "NA")
                said["labels"] += [{"trajectory": alias, "capability": n, "label": label} for n, label in given.items()]
        else:
            said = {"ready": True} if kind == "Ready" else {"reason": "it said the wrong letter", "cause": "agent"}
        return Completion(json.dumps(said), prompt_tokens=10, sampled_tokens=10, dollars=0.5)

    def play_round(run: SeedRun, context: Context, account: Account, instead: Any = None) -> Answer:
        contrast.do(context)
        instead.do(context)
        return Answer(context)

    monkeypatch.setattr(ModelClient, "_wait_for", answer)
    monkeypatch.setattr(room, "play_round", play_round)
    analyst = {
        "kind": "llm",
        "model": "openai/m",
        "blind": False,
        "batch": 50,
        "prompt_price": 1.0,
        "sampled_price": 1.0,
    }
    train = TRAIN | {"generalist": 0}
    run = seed_run(settings_folder, tiny_model, analyst=analyst, synthesizer={"kind": "llm"}, train=train)
    diagnose(run)
    with pay(run.context, "trace", run.episodes, ()).working():
        assert find_lacking(run.context) == ["utter_high_letters"]
    paid = run.context.spent()["dollars"]
    figures = run_method(run, "placebo-capabilities")
    assert figures.notes[0] == "capabilities drawn: keep_it_short"
    assert len(asked) == 1
    assert figures.dollars == paid > 0, "as its episodes count, what was said of them does"
    close_round(run.context)
