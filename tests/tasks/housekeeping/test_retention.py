"""What is removed of a home, and that nothing which a release, a report or a label needs goes with it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from db import AdapterRow, AdapterState, ConversationRow, Round, RoundState, row_id
from db.values.types import utc_now
from errors import ConfigurationError, StoreError
from flows.cli.main import app
from models.vllm.policy import VllmPolicy
from tasks.housekeeping import retention
from tasks.housekeeping.retention import removals, remove
from tasks.releases.lifecycle import check_files, refuse, releases_of, rollback
from tasks.releases.lookup import version_name
from tasks.round.traffic import TrafficTarget
from tests.tasks.housekeeping.kept_homes import opened, settings_of
from tests.tasks.releases.release_homes import Home

LONG_AGO = timedelta(days=40)


def trained(home: Home, member: dict[str, str], state: RoundState, days: float) -> Path:
    """The round of an adapter as its training left it, ended (or not) so many days ago; its folder."""
    row = home.store.row(AdapterRow, id=member["adapter_id"])
    assert row is not None
    training = home.folder / row.round_id / "training" / "refund"
    for name in ("checkpoint-2", "weights/step-1", "final"):
        (training / name).mkdir(parents=True)
        (training / name / "adapter_model.safetensors").write_bytes(b"w" * 1000)
    (training.parents[1] / "report.html").write_text("report")
    (training.parents[1] / "router").mkdir()
    (training.parents[1] / "router" / "router.json").write_text("{}")
    home.store.set_state(AdapterRow, row.id, row.state, path=f"{row.round_id}/training/refund/final")
    if state != RoundState.RUNNING:
        home.store.finish_round(row.round_id, state, "")
    moment = (utc_now() - timedelta(days=days)).strftime("%Y-%m-%d %H:%M:%S.%f")
    with home.store.transaction() as connection:
        connection.exec_driver_sql(
            f"UPDATE rounds SET started_at = '{moment}', finished_at = CASE WHEN finished_at IS NULL THEN NULL "
            f"ELSE '{moment}' END WHERE id = '{row.round_id}'"
        )
    return training


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Trainings by what became of their adapter."""
    with opened(tmp_path / "home") as home:
        members = {name: home.member("refund") for name in ("retired", "live", "refused", "none", "stopped", "young")}
        for name in ("retired", "live"):
            home.promoted({"refund": members[name]})
        refuse(home.store, home.candidate({"refund": members["refused"]}).id, "no better")
        states = {"stopped": RoundState.INTERRUPTED}
        folders = {
            name: trained(home, member, states.get(name, RoundState.DONE), 1 if name == "young" else 40 - i)
            for i, (name, member) in enumerate(members.items())
        }
        # An adapter that was never registered: its only copy is the trained one.
        round_ = home.store.start_round("shop", "d", 1, "laptop", {})
        home.store.put([AdapterRow(id=row_id("x"), round_id=round_.id, base="b", state=AdapterState.TRAINED)])
        folders["unregistered"] = trained(home, {"adapter_id": row_id("x")}, RoundState.FAILED, 30)
        yield {"home": home, "folders": folders, "members": members, "settings": settings_of(home.folder)}


def left(training: Path) -> list[str]:
    return sorted(p.name for p in training.iterdir())


def test_only_what_nothing_needs_goes(kept: dict[str, Any]) -> None:
    home, folders = kept["home"], kept["folders"]
    rounds = home.store.rows(Round)
    chosen = removals(kept["settings"], 7)
    assert sum(r.bytes for r in chosen) == remove(kept["settings"], chosen) == 11_000
    assert [r.since for r in chosen] == sorted(r.since for r in chosen)
    whole = ["checkpoint-2", "final", "weights"]
    assert {name: left(folder) for name, folder in folders.items()} == {
        "retired": ["final"],
        "live": ["final"],
        "refused": ["final"],  # a person may still promote it
        "none": [],
        "stopped": whole,  # the next run goes on with it
        "young": whole,
        "unregistered": ["final"],
    }
    for folder in folders.values():
        assert (folder.parents[1] / "report.html").read_text() == "report"
        assert (folder.parents[1] / "router" / "router.json").is_file()
    assert home.store.rows(Round) == rounds
    for release in releases_of(home.store, "shop"):
        check_files(home.registry, release)
    rollback(home.store, home.registry, "shop")
    home.check()
    assert removals(kept["settings"], 7) == []


def test_copies_that_are_fetched_again(kept: dict[str, Any]) -> None:
    home, members = kept["home"], kept["members"]
    names = {name: version_name("refund", member) for name, member in members.items()}
    old = (utc_now() - LONG_AGO).timestamp()
    for place in ("served", "adapters"):
        for name, age in (("retired", old), ("none", old), ("stopped", utc_now().timestamp())):
            copy = home.folder / place / names[name]
            copy.mkdir(parents=True)
            os.utime(copy, (age, age))
    remove(kept["settings"], [r for r in removals(kept["settings"], 7) if r.what.startswith("fetched")])
    for place in ("served", "adapters"):
        assert left(home.folder / place) == sorted([names["retired"], names["stopped"]])


def test_what_another_process_removes_or_renames_meanwhile_is_no_error(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is being fetched has another name once it is whole."""
    fetched = kept["home"].folder / "served" / ".part-refund"
    fetched.mkdir(parents=True)
    entries = retention._entries

    def renamed(folder: Path) -> list[Path]:
        found = entries(folder)
        if fetched in found:
            fetched.rename(fetched.with_name("refund-v9"))
        return found

    monkeypatch.setattr(retention, "_entries", renamed)
    chosen = removals(kept["settings"], 7)
    assert not any("fetched" in r.what for r in chosen)
    shutil.rmtree(chosen[0].place)
    remove(kept["settings"], chosen)
    assert not any(Path(r.place).exists() for r in chosen)


def test_what_servers_read_of_a_release_stays_under_either_name(kept: dict[str, Any]) -> None:
    """A gateway and a round that samples on servers have a copy each, of every member of the live release."""
    home, live, stranger = kept["home"], kept["members"]["live"], kept["members"]["none"]
    old = (utc_now() - LONG_AGO).timestamp()
    names = {}
    for member in (live, stranger):
        row = home.store.row(AdapterRow, id=member["adapter_id"])
        of_round = VllmPolicy.adapter_name(None, "refund", row.round_id, member["sha256"])  # type: ignore[arg-type]
        names[member["adapter_id"]] = {version_name("refund", member), of_round}
    for name in set().union(*names.values()):
        copy = kept["settings"].lora_folder / name
        copy.mkdir(parents=True)
        os.utime(copy, (old, old))
    chosen = [Path(r.place).name for r in removals(kept["settings"], 30) if r.what.startswith("fetched")]
    assert sorted(chosen) == sorted(names[stranger["adapter_id"]])


def test_so_much_that_the_home_takes_what_it_may(kept: dict[str, Any]) -> None:
    home = kept["home"]
    size = sum(p.lstat().st_size for p in home.folder.rglob("*") if p.is_file())
    every = removals(kept["settings"], 7)
    assert removals(kept["settings"], 7, keep_gb=(size + 10) / 1e9) == []
    assert removals(kept["settings"], 7, keep_gb=(size - 1_500) / 1e9) == every[:2]
    assert removals(kept["settings"], 7, keep_gb=0) == every
    assert removals(kept["settings"], 365, keep_gb=0) == []


def test_a_link_is_not_followed(kept: dict[str, Any], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(kept["folders"]["none"], outside)
    remove(kept["settings"], removals(kept["settings"], 7))
    kept["folders"]["none"].rmdir()
    kept["folders"]["none"].symlink_to(outside)
    (kept["folders"]["live"] / "checkpoint-3").symlink_to(outside)
    assert removals(kept["settings"], 7) == []
    assert left(outside) == ["checkpoint-2", "final", "weights"]


def test_what_cannot_be_removed_or_is_no_home(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", locked)
    with pytest.raises(StoreError, match=r"cannot be removed \(Permission denied\), after 0.00 GB"):
        remove(kept["settings"], removals(kept["settings"], 7))
    nowhere = kept["home"].folder / "nowhere"
    with pytest.raises(ConfigurationError, match="there is no home in"):
        removals(settings_of(nowhere), 7)
    assert not nowhere.exists()


def test_users_conversations_go_only_when_asked_and_what_was_said_of_them_stays(kept: dict[str, Any]) -> None:
    store, folder = kept["home"].store, kept["home"].folder
    old, word = utc_now() - LONG_AGO, "a-word-of-a-user"

    def conversation(key: str, **given: Any) -> ConversationRow:
        row = ConversationRow(
            id=key, conversation=key, target="shop", base="b", policy_id="p", capability="refund", adapter="",
            mode="label", router_version="", messages=[{"role": "user", "content": word}, {"role": "assistant"}],
            created_at=old, updated_at=old,
        )  # fmt: skip
        return replace(row, **given)

    def run(*words: str) -> str:
        given = ["clean", "--older-than", "365", "--home", str(folder), *words]
        return str(CliRunner().invoke(app, given, catch_exceptions=False).output.splitlines()[-1])

    said = {"reward": 1.0, "success": True, "feedback_at": old, "comment": word}
    rows = [
        conversation("silent"), conversation("comment", comment=word, feedback_at=old), conversation("said", **said),
        conversation("goes on", updated_at=utc_now()), conversation("said now", **said | {"feedback_at": utc_now()}),
    ]  # fmt: skip
    store.put(rows)
    before = {row.id: row for row in store.rows(ConversationRow)}
    assert "nothing to remove" in run()
    told = "conversations of more than 30 days ago: 2 {}; 1 {} success and reward alone"
    option = "--conversations-older-than=30"
    assert run(option, "--dry-run") == told.format("would be removed", "would keep")
    assert {row.id: row for row in store.rows(ConversationRow)} == before
    assert run(option) == told.format("removed", "kept")
    figures = replace(before["said"], conversation="", messages=[], tools=[], comment="")
    left = {"goes on": before["goes on"], "said": figures, "said now": before["said now"]}
    assert {row.id: row for row in store.rows(ConversationRow)} == left
    assert [row.id for row in TrafficTarget(store).conversations] == ["said now"], "nothing is learnt from a figure"
    assert run(option) == "conversations of more than 30 days ago: 0 removed; 0 kept success and reward alone"


def test_conversations_go_by_themselves_and_no_file_with_them(kept: dict[str, Any]) -> None:
    def run(folder: Path, *words: str) -> Any:
        return CliRunner().invoke(app, ["clean", "--home", str(folder), *words])

    before, home = {name: left(folder) for name, folder in kept["folders"].items()}, kept["home"].folder
    option = ("--conversations-older-than", "1")
    done = run(home, *option)
    assert (done.exit_code, done.output.count("\n")) == (0, 1), done.output
    assert "0 removed; 0 kept success and reward alone" in done.output
    assert json.loads(run(home, *option, "--json").output)["entries"] == []
    assert {name: left(folder) for name, folder in kept["folders"].items()} == before
    for words in ((), ("--keep", "1"), (*option, "--keep", "1")):
        with pytest.raises(ConfigurationError, match="give --older-than DAYS, or --conversations-older-than DAYS"):
            CliRunner().invoke(app, ["clean", "--home", str(home), *words], catch_exceptions=False)
    assert isinstance(run(home / "nowhere", *option).exception, ConfigurationError)
    assert not (home / "nowhere").exists()


def test_the_command_says_first_and_does_then(kept: dict[str, Any]) -> None:
    def run(*words: str) -> str:
        given = ["clean", "--older-than", "7", "--home", str(kept["home"].folder), *words]
        done = CliRunner().invoke(app, given, catch_exceptions=False)
        assert done.exit_code == 0
        return str(done.output)

    before = {name: left(folder) for name, folder in kept["folders"].items()}
    said = run("--dry-run").splitlines()
    assert {name: left(folder) for name, folder in kept["folders"].items()} == before
    takes = re.escape(str(kept["home"].folder)) + r" takes \d\.\d{3} GB"
    command = "the same command without --dry-run removes them"
    assert re.fullmatch(f"11 entries, 0.000 GB would be freed; {takes}; {command}", said[-1])
    assert any(f"{kept['folders']['none']}/final  (round 4: trained copy" in line for line in said)
    *removed, last = run().splitlines()
    assert said[0].endswith("round 6 has ended since: it would be given up"), "it was stopped, and later ones went on"
    assert removed == [said[0].replace("would be", "is"), *said[1:-1]]
    assert re.fullmatch(f"11 entries removed, 0.000 GB freed; {takes} now", last)
    nothing = f"nothing to remove: {takes}, and all of it is needed, younger than --older-than, or within --keep"
    assert re.match(nothing, run())
    assert CliRunner().invoke(app, ["clean", "--older-than", "0"]).exit_code == 2


def test_a_program_reads_what_goes(kept: dict[str, Any]) -> None:
    given = ["clean", "--older-than", "7", "--home", str(kept["home"].folder), "--json"]

    def run(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(CliRunner().invoke(app, [*given, *words], catch_exceptions=False).output)
        return found

    would = run("--dry-run", "--conversations-older-than", "30")
    assert (would["dry_run"], would["bytes"], would["conversations"]) == (True, 11_000, {"removed": 0, "kept": 0})
    assert [e["place"] for e in would["entries"]] == [r.place for r in removals(kept["settings"], 7)]
    assert len(would.pop("given_up")) == len((done := run()).pop("given_up")) == 1
    assert done == {"dry_run": False, "bytes": 11_000, "entries": would["entries"]}
    assert run() == {"dry_run": False, "bytes": 0, "entries": [], "given_up": []}
