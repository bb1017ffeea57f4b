"""The bank: what was accepted once is tried again before anything new is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from db import (
    AdapterRow,
    AdapterState,
    CalibrationRow,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    Round,
    Store,
    open_store,
    row_id,
)
from environments.synthesized.module_contract import VERSION
from errors import TargetError
from flows.cli.main import app
from tasks.synthesis.bank import MODULE_AT_FAULT, BankEntry, bank_of, entry_of, likeness, nearest
from tests.tasks.reporting.stored_rounds import Shop
from tests.tasks.synthesis.test_recorded_author import CAPABILITY, GOOD, RecordedAuthor, stored, writer

__all__ = ["stored"]
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
ENTRY = BankEntry("i", "shop", "copy_exact_address", "Copies the address that a customer says.", 1, "h", "c", VERSION)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'trace.db'}")
    yield opened
    opened.close()


def put(
    store: Store, at: Round, name: str, code: str, state: EnvironmentState = EnvironmentState.ACCEPTED, **more: Any
) -> str:
    """An environment of a capability, calibrated, in a state; its id."""
    capability, identity = row_id(at.id, name), row_id(at.id, name, code)
    store.put([CapabilityRow(id=capability, round_id=at.id, name=name, definition="Moves as said.", analyst="llm")])
    digest = sha256(code.encode()).hexdigest()
    given = {"spec": {"contract": VERSION, "reasons": []}, "created_at": BEGAN + timedelta(days=at.number), **more}
    row = EnvironmentRow(
        id=identity, round_id=at.id, capability_id=capability, version=1, kind="llm", code=code, code_hash=digest,
        state=EnvironmentState.DRAFT, **given,
    )  # fmt: skip
    store.put([row])
    figures = {"success_rate": 0.4, "informative": 0.9, "accepted": True, "detail": {"level": 1}}
    identity_of = row_id(identity, "calibration")
    store.put([CalibrationRow(id=identity_of, environment_id=identity, policy_id="p", seeds=2, samples=2, **figures)])
    way = [EnvironmentState.CHECKED, EnvironmentState.ACCEPTED, EnvironmentState.WITHDRAWN]
    if state == EnvironmentState.REJECTED:
        way = [EnvironmentState.REJECTED]
    for step in way[: way.index(state) + 1]:
        store.set_state(EnvironmentRow, identity, step)
    return identity


def promoted(store: Store, at: Round, environment: str, name: str) -> None:
    adapter = AdapterRow(
        id=f"a-{environment}", round_id=at.id, environment_id=environment, base="b", state=AdapterState.TRAINING,
        base_success=0.1, adapter_success=0.7,
    )  # fmt: skip
    store.put([adapter])
    Shop(store).release(at.number, {name: environment}, of=at)


def test_the_bank_is_what_was_accepted_last_of_each_module(store: Store) -> None:
    rounds = [store.start_round("shop", "d", seed, "test", {}) for seed in range(4)]
    elsewhere = store.start_round("other", "d", 0, "test", {})
    put(store, rounds[0], "move", "one")
    again = put(store, rounds[1], "move", "one")
    put(store, rounds[2], "ask", "two", EnvironmentState.REJECTED)
    put(store, rounds[0], "look", "three")
    put(store, rounds[3], "look", "three", EnvironmentState.WITHDRAWN)
    put(store, elsewhere, "move", "four")
    (entry,) = bank_of(store, "shop")
    assert (entry.id, entry.round, entry.capability, entry.code) == (again, rounds[1].number, "move", "one")
    assert (entry.level, entry.success, entry.informative, entry.adapter_success) == (1, 0.4, 0.9, None)
    assert (entry.promoted, entry.unusable) == (False, "")
    assert [e.target for e in bank_of(store)] == ["other", "shop"]
    promoted(store, rounds[1], again, "move")
    (entry,) = bank_of(store, "shop")
    assert (entry.promoted, entry.base_success, entry.adapter_success) == (True, 0.1, 0.7)


@pytest.mark.parametrize("at_fault", [True, False])
def test_a_module_that_broke_down_under_its_adapter_is_not_tried_every_night(store: Store, at_fault: bool) -> None:
    """It is where weights came apart: that says nothing of the module."""
    at = store.start_round("shop", "h", 0, "smoke", {})
    environment = put(store, at, "copy_address", "a = 1")
    adapter = AdapterRow(id="a", round_id=at.id, environment_id=environment, base="b", state=AdapterState.TRAINING)
    store.put([adapter])
    store.set_state(AdapterRow, "a", AdapterState.FAILED, config={"training-failed": "x", MODULE_AT_FAULT: at_fault})
    assert [entry.id for entry in bank_of(store)] == [environment] * (not at_fault)
    again = store.start_round("shop", "h", 1, "smoke", {})
    accepted = put(store, again, "copy_address", "a = 1")  # its author wrote it once more, and it passed every check
    assert [entry.id for entry in bank_of(store)] == [accepted]


def test_the_nearest_are_tried_and_what_was_promoted_with_comes_first() -> None:
    same = replace(ENTRY, id="same", round=2)
    older = replace(ENTRY, id="older", round=1)
    like = replace(ENTRY, id="like", capability="keep_address_exact", round=3, promoted=True)
    other = replace(ENTRY, id="other", capability="refund_twice", definition="Pays money back.", promoted=True)
    given = (ENTRY.capability, ENTRY.definition)
    assert [e.id for e in nearest([other, older, like, same], *given)] == ["like", "same", "older"]
    assert likeness(same, *given) == 1.0
    assert likeness(other, *given) == 0.0
    assert 0.3 < likeness(like, *given) < 1.0
    assert len(nearest([same] * 9, *given)) == 3


def test_a_module_of_another_contract_says_so_and_takes_no_other_ones_place() -> None:
    old = replace(ENTRY, contract=1, promoted=True)
    given = [*[old] * 3, *[ENTRY] * 4]
    assert [not e.unusable for e in nearest(given, ENTRY.capability, ENTRY.definition)] == [False] * 3 + [True] * 3
    assert old.unusable.startswith(f"it was written for version 1 of the module contract, this is version {VERSION}")
    assert old.as_dict()["unusable"] == old.unusable
    assert "code" not in old.as_dict()


def banked(stored: Any, source: str = GOOD, capability: str = CAPABILITY, **more: Any) -> str:
    """A module that an earlier round of the fixture's store accepted; the fixture's round becomes the later one."""
    earlier = stored.store.start_round("shop", "hash", 1, "test", {})
    object.__setattr__(stored, "round", replace(stored.round, number=earlier.number + 1))
    return put(stored.store, earlier, capability, source, **more)


@pytest.mark.usefixtures("prefect")
def test_before_a_new_one_is_asked_for_the_bank_s_is_judged_and_calibrated_again(stored: Any, tmp_path: Path) -> None:
    origin = banked(stored)
    author = RecordedAuthor()
    result = writer(stored, author, tmp_path).write(CAPABILITY)
    assert (result.accepted, result.bank, result.versions, result.passed_over) == (True, origin, 1, {})
    assert author.asked == []
    row = stored.store.row(EnvironmentRow, id=result.environment)
    assert (row.code, row.state, row.spec["contract"]) == (GOOD, EnvironmentState.ACCEPTED, VERSION)
    assert row.spec["request_hash"] == f"bank:{origin}"
    assert row.verdicts["calibration"]["figures"]["success_rate"] == 0.3  # of this round's policy, not the stored one's
    again = writer(stored, author, tmp_path).write(CAPABILITY)  # of a stopped attempt: the same, unasked
    assert again.bank == origin


@pytest.mark.usefixtures("prefect")
def test_what_fails_today_is_passed_over_with_the_reason_and_the_author_writes(stored: Any, tmp_path: Path) -> None:
    flawed = GOOD.replace("(0.05, 0.2, 1.0)[right]", "(0.05, 0.6, 1.0)[right]")
    banked(stored, flawed)
    old = put(stored.store, stored.store.start_round("shop", "hash", 2, "test", {}), CAPABILITY, "old", spec={})
    object.__setattr__(stored, "round", replace(stored.round, number=99))
    author = RecordedAuthor(GOOD)
    result = writer(stored, author, tmp_path).write(CAPABILITY)
    assert (result.accepted, result.bank, result.versions) == (True, "", 1)
    reasons = {entry.code_hash[:12]: entry for entry in bank_of(stored.store) if entry.round != 99}
    assert sorted(result.passed_over) == sorted(k for k, e in reasons.items() if e.code != GOOD)
    assert "need: the lazy policy" in result.passed_over[entry_hash(stored, flawed)]
    assert "version 1 of the module contract" in result.passed_over[entry_hash(stored, "old")]
    assert old
    assert len(author.asked) == 1
    assert "Version 1" not in author.asked[0]  # what the bank had is no version of this round
    again = writer(stored, author, tmp_path).write(CAPABILITY)  # of a stopped attempt, or after a withdrawal
    assert (again.passed_over, len(author.asked)) == (result.passed_over, 1)


def entry_hash(stored: Any, code: str) -> str:
    return next(entry.code_hash[:12] for entry in bank_of(stored.store) if entry.code == code)


@pytest.mark.usefixtures("prefect")
def test_a_module_for_a_capability_of_another_name_is_about_both(stored: Any, tmp_path: Path) -> None:
    banked(stored, GOOD.replace('"move_order_exactly"', '"move_orders_as_said"'), "move_order_exactly")
    result = writer(stored, RecordedAuthor(), tmp_path).write(CAPABILITY)
    assert result.accepted
    families = stored.store.row(EnvironmentRow, id=result.environment).spec["environment"]["families"]
    assert {"move_order_exactly", "move_orders_as_said"} <= set(families)


def test_the_commands_list_show_validate_and_play(tmp_path: Path, settings_folder: Path) -> None:
    run, home = CliRunner(), ["--home", str(tmp_path / "home")]
    open_store(f"sqlite:///{tmp_path / 'home' / 'trace.db'}").close()
    said = run.invoke(app, ["environments", "list", *home])
    assert "no environment was accepted yet" in said.output
    with open_store(f"sqlite:///{tmp_path / 'home' / 'trace.db'}") as store:
        at = store.start_round("shop", "d", 0, "test", {})
        identity = put(store, at, CAPABILITY, GOOD)
        promoted(store, at, identity, CAPABILITY)
        key = entry_of(store, identity).code_hash[:8]
        with pytest.raises(TargetError, match=f"no environment of the bank begins with 'zz'; there are: {key}"):
            entry_of(store, "zz")
    listed = run.invoke(app, ["environments", "list", *home]).output
    assert (
        f"shop  {CAPABILITY}  round 1: promoted with, calibrated at 40 % success at level 1, trained from 10" in listed
    )
    (found,) = json.loads(run.invoke(app, ["environments", "list", "--json", *home]).output)
    assert (found["promoted"], found["level"]) == (True, 1)
    assert GOOD in run.invoke(app, ["environments", "show", key, *home]).output
    assert run.invoke(app, ["environments", "validate", key, *home]).output.startswith("accepted\n")
    played = run.invoke(app, ["environments", "play", key, "--level", "1", *home], input="?\n?\n")
    assert played.output.endswith("reward 1.00, success\n")
