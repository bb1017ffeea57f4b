"""Releases become live, are retired, refused, rolled back and barred; MLflow says the same (SQLite stores)."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from db import AdapterRow, BarredRow, ReleaseRow, ReleaseState
from errors import AdapterError, ConfigurationError, StoreError, TransitionError
from models.adapters.registry import CHAMPION, Registry
from models.adapters.releases import read_aliases, release_model
from models.router.router import Router
from tasks import evaluate as evaluate_file
from tasks.releases import publication
from tasks.releases.lifecycle import (
    barred,
    heal,
    live_release,
    member_adapters,
    promote,
    publish,
    refuse,
    release_numbered,
    release_router,
    rollback,
)
from tasks.round.results import GateResult, SuccessRate
from tests.tasks.releases.release_homes import DATA, Home


def test_promotions_move_releases_adapters_and_aliases_together(home: Home) -> None:
    assert live_release(home.store, home.target) is None
    one, two, other = home.member("refund"), home.member("refund"), home.member("exchange")
    first = home.promoted({"refund": one})
    assert (first.number, first.state, first.parent_id, first.ended_at) == (1, ReleaseState.LIVE, None, None)
    assert first.reason == "better"
    home.check()
    second = home.promoted({"refund": two, "exchange": other})
    assert (second.number, second.parent_id) == (2, first.id)
    assert home.states() == {1: "retired", 2: "live"}
    first = release_numbered(home.store, home.target, 1)
    assert first.ended_at is not None
    assert first.reason == "replaced by release 2"
    assert [entry["state"] for entry in first.evidence["history"]] == ["live", "retired"]
    assert [home.state(m) for m in (one, two, other)] == ["retired", "champion", "champion"]
    home.check()
    # Again it changes nothing, in the store and in MLflow.
    assert promote(home.store, home.registry, second.id, "again") == second
    assert publish(home.store, home.registry, home.target) == []
    assert sorted(member_adapters(home.registry, second)) == ["exchange", "refund"]
    version = home.registry.client.get_model_version_by_alias(release_model(home.registry), "live")
    assert (version.tags["release"], version.tags["number"]) == (second.id, "2")
    assert two["sha256"] in version.tags["member.refund"]
    with pytest.raises(StoreError, match=r"no release 7; it has 1, 2"):
        release_numbered(home.store, home.target, 7)


def test_the_same_round_and_members_give_the_same_candidate(home: Home) -> None:
    one, two = home.member("refund"), home.member("refund")
    round_id = home.store.row(AdapterRow, id=one["adapter_id"]).round_id  # type: ignore[union-attr]
    first = home.candidate({"refund": one}, round_id=round_id)
    assert home.candidate({"refund": one}, round_id=round_id) == first
    assert home.candidate({"refund": two}, round_id=round_id).number == 2
    with pytest.raises(ConfigurationError, match=r"'refund' is .*it needs adapter_id, model, version, sha256"):
        home.candidate({"refund": one | {"version": ""}})
    with pytest.raises(ConfigurationError, match="give the stored one"):
        home.candidate({"refund": one | {"sha256": "0" * 64}})
    with pytest.raises(ConfigurationError, match="is the bare base"):
        home.candidate({})


def test_a_refused_candidate_rejects_its_own_adapters_and_is_live_only_by_hand(home: Home) -> None:
    one, two = home.member("refund"), home.member("exchange")
    home.promoted({"refund": one})
    row = home.candidate({"refund": one, "exchange": two})
    refused = refuse(home.store, row.id, "no better than release 1")
    assert refuse(home.store, row.id, "no better than release 1") == refused
    assert (refused.state, refused.reason) == (ReleaseState.REFUSED, "no better than release 1")
    assert [home.state(one), home.state(two)] == ["champion", "rejected"]
    with pytest.raises(TransitionError, match=r"release 2 of .* is refused, not a candidate; .*trace-agent promote 2"):
        promote(home.store, home.registry, row.id, "better")
    home.check()
    assert promote(home.store, home.registry, row.id, "I know better", by_hand=True).state == ReleaseState.LIVE
    home.check()


def test_rollback_walks_back_through_the_parents_and_bars_what_was_left(home: Home) -> None:
    one, two, other = home.member("refund"), home.member("refund"), home.member("exchange")
    home.promoted({"refund": one})
    home.promoted({"refund": two})
    home.promoted({"refund": two, "exchange": other})
    back = rollback(home.store, home.registry, home.target)
    assert back is not None
    assert (back.number, home.states()) == (2, {1: "retired", 2: "live", 3: "rolled-back"})
    assert set(barred(home.store, home.target)) == {other["sha256"]}
    assert [home.state(m) for m in (one, two, other)] == ["retired", "champion", "retired"]
    home.check()
    again = home.candidate({"refund": two, "exchange": other})
    with pytest.raises(
        ConfigurationError, match=r"exchange version 1 .*barred: release 3 was rolled back to release 2"
    ):
        promote(home.store, home.registry, again.id, "better")
    home.check()
    assert rollback(home.store, home.registry, home.target).number == 1  # type: ignore[union-attr]
    assert set(barred(home.store, home.target)) == {other["sha256"], two["sha256"]}
    assert rollback(home.store, home.registry, home.target) is None
    assert home.states() == {1: "rolled-back", 2: "rolled-back", 3: "rolled-back", 4: "candidate"}
    home.check()
    with pytest.raises(ConfigurationError, match="nothing to go back to: the bare base answers"):
        rollback(home.store, home.registry, home.target)
    # A person lifts the bars of what they promote, and of nothing else.
    promote(home.store, home.registry, again.id, "by me", by_hand=True)
    assert set(barred(home.store, home.target)) == {one["sha256"]}
    assert home.store.row(BarredRow, target=home.target, sha256=two["sha256"]).allowed_at is not None  # type: ignore[union-attr]
    home.check()


@pytest.mark.parametrize(
    ("to", "states", "data"),
    [(0, {1: "retired", 2: "rolled-back"}, DATA), (1, {1: "live", 2: "rolled-back"}, "data of tomorrow")],
)
def test_a_release_that_is_rolled_back_while_its_test_plays_stays_so(
    home: Home, monkeypatch: pytest.MonkeyPatch, to: int, states: dict[int, str], data: str
) -> None:
    """Its figures are kept with it where they were measured on its own data."""
    for _ in range(2):
        home.promoted({"refund": home.member("refund")})
    rate = SuccessRate(success=0.5, low=0.4, high=0.6, n=7, tasks=4)
    told: list[list[str]] = []

    def measure(*_: object) -> dict[str, object]:
        rollback(home.store, home.registry, home.target, to=to)
        told.append([entry["reason"] for entry in home.newest().evidence["history"]])
        return dict.fromkeys(("base", "live", "routed", "noop"), rate)

    monkeypatch.setattr(evaluate_file, "_measure", measure)
    monkeypatch.setattr(evaluate_file, "lineup_of", lambda *_: None)
    monkeypatch.setattr(evaluate_file, "look_at", lambda *_: SimpleNamespace(number=1))
    context = SimpleNamespace(
        incumbent=None, store=home.store, round=SimpleNamespace(target=home.target, data_hash=data),
        settings=SimpleNamespace(evaluation=SimpleNamespace(trials=1), seed=0),
        result=lambda kind: GateResult(promoted=["refund"], release=2),
    )  # fmt: skip
    assert evaluate_file.test._work(context).release == 2  # type: ignore[arg-type]
    assert home.states() == states
    assert [[entry["reason"] for entry in home.newest().evidence["history"]]] == told
    found = home.newest().evidence.get("test")
    assert found == ({"routed": rate.model_dump()} if data == DATA else None)
    home.check()


def test_rollback_to_a_number(home: Home) -> None:
    members = [home.member("refund") for _ in range(3)]
    for member in members:
        home.promoted({"refund": member})
    assert rollback(home.store, home.registry, home.target, to=1).number == 1  # type: ignore[union-attr]
    assert home.states() == {1: "live", 2: "retired", 3: "rolled-back"}
    home.check()
    waiting = home.candidate({"refund": members[1], "exchange": home.member("exchange")})
    for number, message in ((1, "is live already"), (4, "is candidate and was never live"), (9, r"it has 1, 2, 3, 4")):
        with pytest.raises((ConfigurationError, StoreError), match=message):
            rollback(home.store, home.registry, home.target, to=number)
    assert waiting.number == 4
    assert rollback(home.store, home.registry, home.target, to=0) is None
    home.check()


def test_a_rollback_to_a_release_that_was_rolled_back_allows_its_adapters_again(home: Home) -> None:
    one, two = home.member("refund"), home.member("cancel")
    home.promoted({"refund": one})
    home.promoted({"refund": one, "cancel": two})
    rollback(home.store, home.registry, home.target)
    assert set(barred(home.store, home.target)) == {two["sha256"]}
    assert rollback(home.store, home.registry, home.target, to=2).number == 2  # type: ignore[union-attr]
    assert barred(home.store, home.target) == {}
    home.promoted({"refund": one, "cancel": two, "exchange": home.member("exchange")})
    assert home.states() == {1: "rolled-back", 2: "retired", 3: "live"}
    home.check()


def test_a_rollback_leaves_the_release_that_was_expected_and_no_other(home: Home) -> None:
    """Who judges a release for minutes may find another one live then."""
    judged = home.promoted({"refund": home.member("refund")})
    home.promoted({"refund": home.member("refund")})
    with pytest.raises(ConfigurationError, match=r"release 1 of .* was live and no longer is: another"):
        rollback(home.store, home.registry, home.target, expected=judged.id)
    assert home.states() == {1: "retired", 2: "live"}
    assert rollback(home.store, home.registry, home.target, expected=home.newest().id) is not None
    home.check()


def test_a_candidate_that_was_not_compared_with_the_live_release_is_refused(home: Home) -> None:
    early = home.candidate({"refund": home.member("refund")})
    home.promoted({"exchange": home.member("exchange")})
    late = home.candidate({"refund": home.member("refund")})
    home.promoted({"cancel": home.member("cancel")})
    for row, made in ((early, "from the bare base"), (late, "from release 2")):
        with pytest.raises(ConfigurationError, match=f"not compared with the live release 4: it was made {made}"):
            promote(home.store, home.registry, row.id, "better")
    rollback(home.store, home.registry, home.target, to=0)
    with pytest.raises(ConfigurationError, match="cannot follow the bare base"):
        promote(home.store, home.registry, late.id, "better")
    home.check()


def test_another_base_or_other_data_begin_a_new_lineage(home: Home) -> None:
    home.promoted({"refund": home.member("refund")})
    with pytest.raises(ConfigurationError, match=r"cannot be the parent.*data changed from data-1 to data-2"):
        home.candidate({"refund": home.member("refund")}, data_hash="data-2")
    second = home.promoted({"refund": home.member("refund")}, parent=None, data_hash="data-2")
    assert home.states() == {1: "retired", 2: "live"}
    assert second.parent_id is None
    big = home.candidate({"refund": home.member("refund", base="big")}, parent=None, base="big")
    with pytest.raises(ConfigurationError, match=r"release 3 of .* stands on big@abc, the live release 2 on tiny@abc"):
        promote(home.store, home.registry, big.id, "by me", by_hand=True)
    assert promote(home.store, home.registry, big.id, "better").state == ReleaseState.LIVE
    with pytest.raises(ConfigurationError, match=r"release 1 of .* stands on tiny@abc, the live release 3 on big@abc"):
        rollback(home.store, home.registry, home.target, to=1)
    home.check()


def test_an_alias_that_was_moved_by_hand_is_put_back_with_a_warning(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, other = home.member("refund"), home.member("refund"), home.member("exchange")
    home.promoted({"refund": two})
    client = home.registry.client
    client.set_registered_model_alias(one["model"], CHAMPION, one["version"])
    client.set_registered_model_alias(other["model"], CHAMPION, other["version"])
    with caplog.at_level(logging.WARNING, "trace"):
        changes = publish(home.store, home.registry, home.target)
    assert changes == [f"champion of {other['model']}: 1 -> none", f"champion of {two['model']}: 1 -> 2"]
    assert f"champion of {two['model']} was on version 1, not by a release: put back to 2" in caplog.text
    home.check()
    client.delete_registered_model_alias(release_model(home.registry), "live")
    assert publish(home.store, home.registry, home.target) == ["live: none -> release 1"]
    home.check()


def test_a_registry_that_the_store_knows_nothing_of_is_left_alone(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    one = home.member("refund")
    home.registry.client.set_registered_model_alias(one["model"], CHAMPION, one["version"])
    with caplog.at_level(logging.WARNING, "trace"):
        assert publish(home.store, home.registry, home.target) == []
    assert "the store has no release of it" in caplog.text
    assert read_aliases(home.registry).champions == {one["model"]: "1"}


def test_without_mlflow_nothing_goes_live_that_cannot_be_checked_and_what_is_live_can_be_left(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    home.promoted({"refund": home.member("refund")})
    live = home.promoted({"refund": home.member("refund")})
    waiting = home.candidate({"refund": home.member("refund")})
    away = Registry("http://someone:secret@127.0.0.1:1", home.target)
    began = time.monotonic()
    for change, number, way_out in (
        (lambda: promote(home.store, away, waiting.id, "better"), 3, "bring it back, then promote again"),
        (lambda: rollback(home.store, away, home.target), 1, r"leave release 2 now: trace-agent rollback --to 0"),
    ):
        said = rf"files of release {number} of .* cannot be checked.*MLflow at http://127.0.0.1:1 does.*; .*{way_out}"
        with pytest.raises(StoreError, match=said) as caught:
            change()
        assert caught.value.transient, "a round waits for it"
    assert home.states() == {1: "retired", 2: "live", 3: "candidate"}
    home.check()
    caplog.clear()
    # The bare base needs no file: the database says that it answers, and MLflow follows with the next command.
    assert rollback(home.store, away, home.target, to=0) is None
    assert home.states() == {1: "retired", 2: "rolled-back", 3: "candidate"}
    assert "rolled back; MLflow follows with the next command: MLflow at http://127.0.0.1:1 does not" in caplog.text
    assert "secret" not in caplog.text
    assert time.monotonic() - began < 20  # MLflow's own client would try for four minutes, each time
    assert read_aliases(home.registry).live == live.id
    heal(home.store, home.registry, home.target)
    home.check()


@pytest.mark.parametrize(("code", "passes"), [("TEMPORARILY_UNAVAILABLE", True), ("PERMISSION_DENIED", False)])
def test_a_round_waits_for_an_mlflow_that_fails_while_it_promotes_and_not_for_one_that_refuses_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, code: str, passes: bool
) -> None:
    def fails(*given: object) -> NoReturn:
        raise MlflowException("no", error_code=ErrorCode.Value(code))

    candidate = home.candidate({"refund": home.member("refund")})
    # The files are checked before the change, and MLflow is told of it afterwards.
    for step, states in (("registered_version", {1: "candidate"}), ("set_live", {1: "live"})):
        with monkeypatch.context() as patched:
            patched.setattr(publication, step, fails)
            with pytest.raises(StoreError, match="MLflow at sqlite") as caught:
                promote(home.store, home.registry, candidate.id, "better")
        assert caught.value.transient == passes
        assert home.states() == states
    promote(home.store, home.registry, candidate.id, "better")
    home.check()


def test_a_blend_is_a_member_that_no_round_trained(home: Home) -> None:
    one = home.member("refund")
    home.promoted({"refund": one})
    blend = home.member("blend-refund-2") | {"adapter_id": ""}
    row = home.candidate({"refund": one, "blend-refund-2": blend})
    assert promote(home.store, home.registry, row.id, "by me", by_hand=True).state == ReleaseState.LIVE
    assert read_aliases(home.registry).champions == {m["model"]: m["version"] for m in (one, blend)}
    assert rollback(home.store, home.registry, home.target).number == 1  # type: ignore[union-attr]
    assert set(barred(home.store, home.target)) == {blend["sha256"]}
    home.check()


def files_of(home: Home, member: dict[str, str], capability: str) -> Path:
    found = {a.version: a for a in home.registry.versions(capability)}[member["version"]]
    location = home.registry.client.get_logged_model(found.model_id).artifact_location
    return Path(str(location).removeprefix("file://"))


def test_an_adapter_that_is_gone_or_changed_is_never_made_live_and_can_be_left(home: Home) -> None:
    one, two, three = (home.member("refund") for _ in range(3))
    first = home.promoted({"refund": one})
    home.promoted({"refund": two})
    waiting = home.candidate({"refund": three})
    changed = files_of(home, three, "refund") / "adapter_config.json"
    changed.write_text(changed.read_text().replace("tiny", "evil"))
    with pytest.raises(AdapterError, match="its files were changed"):
        promote(home.store, home.registry, waiting.id, "better")
    assert home.states() == {1: "retired", 2: "live", 3: "candidate"}
    home.check()
    # What is live may be damaged: it is left by a rollback, unless what lies behind is damaged too.
    shutil.rmtree(files_of(home, two, "refund"))
    kept = files_of(home, one, "refund")
    kept.rename(kept.with_name("away"))
    with pytest.raises(AdapterError, match="missing"):
        rollback(home.store, home.registry, home.target)
    assert home.states() == {1: "retired", 2: "live", 3: "candidate"}
    kept.with_name("away").rename(kept)
    home.registry.client.delete_model_version(two["model"], two["version"])
    with pytest.raises(AdapterError, match=r"refund has no version 2 .*a release names it: it was deleted there"):
        publish(home.store, home.registry, home.target)
    back = rollback(home.store, home.registry, home.target)
    assert back == replace(first, **{k: getattr(back, k) for k in ("reason", "evidence", "live_at", "ended_at")})
    home.check()


def test_the_router_of_a_release_is_the_one_that_was_released(home: Home, tmp_path: Path) -> None:
    rows, labels = np.eye(6, 8, dtype=np.float32), ["refund", "", "refund", "", "refund", ""]
    router = Router.fit(rows, labels, [f"t{i}" for i in range(6)], neighbours=1)
    router.save(tmp_path / "r1" / "router")
    member = home.member("refund")
    row = home.candidate({"refund": member}, router=router.version, router_path="r1/router")
    assert release_router(tmp_path, row).version == router.version  # type: ignore[union-attr]
    assert release_router(tmp_path, replace(row, router="")).version == router.version  # type: ignore[union-attr]
    assert release_router(tmp_path, replace(row, router="", router_path="")) is None
    Router.fit(rows * 2 + 1, labels, [f"t{i}" for i in range(6)], neighbours=2).save(tmp_path / "r1" / "router")
    with pytest.raises(StoreError, match=f"release 1 of {home.target} has router {router.version}, but .*changed"):
        release_router(tmp_path, row)
    shutil.rmtree(tmp_path / "r1")
    with pytest.raises(StoreError, match="cannot be read"):
        release_router(tmp_path, row)


def test_a_release_never_changes(home: Home) -> None:
    row = home.promoted({"refund": home.member("refund")})
    for change in ({"data_hash": "other"}, {"members": {}}, {"created_at": row.live_at}):
        with pytest.raises(StoreError, match=rf"release {row.id!r}: \['{next(iter(change))}'\] never change"):
            home.store.put([replace(row, **change)], replace=True)
    home.store.put([replace(row, evidence={"points": 12.5})], replace=True)
    assert live_release(home.store, home.target).evidence == {"points": 12.5}  # type: ignore[union-attr]
    with pytest.raises(StoreError, match=r"\['members'\] never change"):
        home.store.set_state(ReleaseRow, row.id, ReleaseState.RETIRED, members={})
    second = replace(row, id="x", number=2)
    with pytest.raises(StoreError, match="breaks a rule of the schema"):
        home.store.put([second])
    home.check()
