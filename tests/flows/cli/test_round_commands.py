"""What `trace-agent rounds`, `status`, `show` and `history` say of rounds, and of those whose process was killed."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import text
from typer.testing import CliRunner

from db import (
    AdapterRow,
    AdapterState,
    CapabilityRow,
    Round,
    RoundState,
    SelectionRow,
    Store,
    TrainingStepRow,
    open_store,
    row_id,
)
from errors import ConfigurationError, StoreError
from flows.cli.main import app
from settings import Settings, load_settings
from tasks.reporting.figures import HistoryRow, Rate
from tasks.reporting.history import history_of
from tasks.reporting.lookup import figures_by_key
from tasks.reporting.summary import history_table
from tasks.round.results import ReportResult, SelectResult, TrainResult
from tasks.unattended.alive import as_told
from tests.tasks.reporting.stored_rounds import Shop

OLD = "stopped by the user"
CUT_OFF = re.compile(r"cut off: its process died, last seen \d{4}-\d\d-\d\d \d\d:\d\d UTC")


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    return load_settings(home=settings_folder / "home", target="shop")


def run(settings: Settings, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--home", str(settings.folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    "words",
    ["rounds", "status", "report", "show 1", "history", "rollback", "promote 1", "watch", "environments list",
     "compare release@1 release@0", "db upgrade"],
)  # fmt: skip
def test_a_home_whose_name_is_mistyped_is_not_made(settings: Settings, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"there is no home in {settings.folder}: .* is missing; give another"):
        CliRunner().invoke(app, [*words.split(), "--home", str(settings.folder)], catch_exceptions=False)
    assert not settings.folder.exists()


def again(store: Store, seed: int = 0) -> Round:
    """A round that was stopped once and runs again."""
    store.finish_round(store.start_round("shop", "d", seed, "laptop", {}).id, RoundState.INTERRUPTED, OLD)
    resumed = store.open_round("shop", seed, "laptop", {})
    assert resumed is not None
    return resumed


def told(store: Store) -> list[tuple[str, str]]:
    rounds = sorted(store.rows(Round), key=lambda r: r.number)
    return [(str(row.state), row.reason) for row in as_told(store, rounds)]


def test_a_round_whose_process_was_killed_is_told_as_cut_off(settings: Settings) -> None:
    with open_store(settings.database_url) as store:
        row = again(store)
        assert (row.state, row.reason) == (RoundState.RUNNING, OLD)
        assert told(store) == [("running", "")], "nobody has left a word: nothing is known against it"
        store.presence(row.id, 3600.0).beat()
        assert told(store) == [("running", "")], "this process lives"
        (line,) = run(settings, "rounds").splitlines()
        assert "running" in line
        assert OLD not in line
        with store.transaction() as connection:
            connection.execute(text("UPDATE stages SET lease_until = '2020-01-01 00:00:00.000000'"))
        ((state, reason),) = told(store)
        assert state == "interrupted"
        assert CUT_OFF.match(reason)
        assert reason.endswith("; the same 'trace-agent improve' goes on with it")
        assert store.round(row.id).state == RoundState.RUNNING, "looking changes nothing"
        (line,) = run(settings, "rounds").splitlines()
        assert "interrupted" in line
        assert CUT_OFF.search(line)
        assert len(line) <= 130
        (found,) = json.loads(run(settings, "rounds", "--json"))
        assert (found["state"], found["reason"]) == (state, reason)
        (history,) = history_of(store, "shop")
        assert (history.verdict, CUT_OFF.match(history.reason) is not None) == ("interrupted", True)
        assert CUT_OFF.match(figures_by_key(settings, store).stopped or "")
        store.presence(row.id, 3600.0).beat()  # another process goes on with it
        assert told(store) == [("running", "")]


def test_a_process_of_this_machine_that_has_ended_keeps_no_round_running(settings: Settings) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with open_store(settings.database_url) as store:
        killed, lives, done = again(store), again(store, 1), again(store, 2)
        owner = f"{socket.gethostname()}:{int(ended.stdout)}:ab"
        assert store.stage(killed.id, "train:pay").claim(owner, lease_seconds=3600)
        assert store.stage(lives.id, "train:pay").claim("elsewhere:1:ab", lease_seconds=3600)
        assert store.stage(done.id, "train:pay").claim(owner, lease_seconds=3600)
        store.finish_round(done.id, RoundState.DONE, "promoted 1")
        first, *others = told(store)
        assert first[0] == "interrupted"
        assert CUT_OFF.match(first[1])
        assert others == [("running", ""), ("done", "promoted 1")]


def test_figures_that_a_death_cut_off_count_as_not_written(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(settings.database_url) as store:
        row = again(store)
        expected = figures_by_key(settings, store)
        path = settings.folder / row.id / "figures.json"
        path.parent.mkdir()
        for damage in (b'{"round": "abc", "tar', b"", b"\xff"):
            path.write_bytes(damage)
            assert figures_by_key(settings, store) == expected
        assert f"{path} cannot be read" in caplog.text
    for command in ("status", "report"):
        run(settings, command)


def test_a_page_of_a_round_that_was_running_is_written_again(settings: Settings) -> None:
    with open_store(settings.database_url) as store:
        row = store.start_round("shop", "d", 0, "laptop", {})
        page = Path(run(settings, "report").strip())
        assert "The round is not over" in page.read_text()
        store.finish_round(row.id, RoundState.FAILED, "TrainingError: no group was informative")
        assert Path(run(settings, "report").strip()) == page
        assert "no group was informative" in page.read_text()
        page.write_text("as it was")
        (page.parent / "figures.json").write_text("{}")  # of a round whose report is made
        run(settings, "report")
        assert page.read_text() == "as it was"


def practising(store: Store, config: dict[str, Any]) -> Round:
    """A round on release 1 that is at work: it has selected, and trained an adapter by two steps."""
    shop = Shop(store)
    row = store.start_round("shop", "d", 0, "laptop", config, "0.1.0", shop.release(1, {"cancel_order": "1"}).id)
    identity = row_id(row.id, "refund_payment")
    store.put(
        [
            CapabilityRow(id=identity, round_id=row.id, name="refund_payment", analyst="checks"),
            SelectionRow(round_id=row.id, capability_id=identity, selected=True, rank=0, mean_cov=0.5, mean_delta=0.6),
            AdapterRow(id="a", round_id=row.id, capability_id=identity, base="tiny", state=AdapterState.TRAINED),
            *(TrainingStepRow(adapter_id="a", step=step, reward=0.5, success=0.5) for step in (1, 2)),
        ]
    )
    shop.stage(row, SelectResult(selected=["refund_payment"]))
    made = TrainResult(adapter="a", sha256="", steps=2, run="r", ending="steps", chosen=2)
    shop.stage(row, made, "refund_payment")
    return row


@pytest.mark.parametrize("state", [RoundState.RUNNING, RoundState.INTERRUPTED, RoundState.FAILED])
def test_a_round_that_is_not_done_is_told_by_what_is_stored(settings: Settings, state: RoundState) -> None:
    rule = {"rho": 0.2, "delta": 0.3, "required": 4, "runs": 5}
    with open_store(settings.database_url) as store:
        row = practising(store, {"base_model": "tiny", "selection": rule, "analyst": {"kind": "llm"}})
        if state != RoundState.RUNNING:
            store.finish_round(row.id, state, "cut off")
    told = json.loads(run(settings, "status", "--json"))
    assert [told["selection"][name] for name in ("rho", "delta", "k", "n", "analyst")] == [0.2, 0.3, 4, 5, "llm"]
    assert (told["before"], told["provenance"]["base_model"], told["collected"]) == (1, "tiny", False)
    ((name, verdict, steps),) = ((c["name"], c["verdict"], len(c["steps"])) for c in told["capabilities"])
    assert (name, verdict, steps) == ("refund_payment", "unfinished", 2)
    page = Path(run(settings, "report").strip())
    text = page.read_text()
    assert "Table of 2 steps" in text
    assert f"{'its report' if state == RoundState.RUNNING else 'stopped early: cut off'}. Release 1 goes on." in text
    index = (page.parent / "episodes" / "index.html").read_text()
    assert "refund_payment" in index
    assert "2 GRPO steps" in index
    for denied in ("Nothing was trained", "No capability was selected", "No router was built", "not recorded",
                   "No family was evaluated", "stopped early: the round is not over"):  # fmt: skip
        assert denied not in text + index, denied


def test_a_round_that_has_stored_nothing_denies_nothing(settings: Settings) -> None:
    with open_store(settings.database_url) as store:
        store.start_round("shop", "d", 0, "laptop", {})
    page = Path(run(settings, "report").strip())
    assert "No training is stored. The round is not over" in page.read_text()
    assert "No selected capability is stored" in (page.parent / "episodes" / "index.html").read_text()


def test_what_another_version_stored_of_a_round_is_left_out_and_said(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(settings.database_url) as store:
        row = practising(store, {"selection": {"rho": 0.2}})
        stage = store.stage(row.id, "contrast")
        assert stage.claim()
        stage.finish({"of": "another version"})
        found = figures_by_key(settings, store)
    assert (found.capabilities, found.selection.rho) == ([], 0.2)
    assert "what round 1 has done so far is not shown: stage 'contrast'" in caplog.text


def test_a_done_round_whose_figures_are_gone_keeps_its_pages(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(settings.database_url) as store:
        row = practising(store, {})
        Shop(store).stage(row, ReportResult(page=f"{row.id}/report.html"))
        store.finish_round(row.id, RoundState.DONE, "No capability could be trained.")
    folder = settings.folder / row.id
    (folder / "episodes").mkdir(parents=True)
    pages = [folder / "report.html", folder / "episodes" / "index.html", folder / "episodes" / "test.html"]
    for page in pages:
        page.write_text("as it was")
    said = " ".join(run(settings, "status").split())
    assert "The round's figures (figures.json in its folder) are gone or cannot be read; 'trace-agent history'" in said
    assert "stopped early" not in said
    assert "goes on" not in said
    (folder / "figures.json").write_text("{")
    for _ in range(2):
        assert run(settings, "report").strip().endswith(str(pages[0]))
        assert [page.read_text() for page in pages] == ["as it was"] * 3
        assert "is as it was made, and is not written again" in caplog.text
        (folder / "figures.json").unlink(missing_ok=True)
    pages[0].unlink()
    run(settings, "report")
    assert "are gone or cannot be read" in pages[0].read_text()
    assert [page.read_text() for page in pages[1:]] == ["as it was"] * 2


def test_stages_are_told_in_the_order_in_which_they_began(settings: Settings) -> None:
    names = ["rollout", "contrast", "select", "synthesize:b", "synthesize:a", "gate"]
    with open_store(settings.database_url) as store:
        row = store.start_round("shop", "d", 0, "laptop", {})
        for name in names:
            stage = store.stage(row.id, name)
            assert stage.claim()
            stage.finish({})
        assert list(figures_by_key(settings, store).seconds) == names


def test_what_would_steer_a_terminal_is_written_out(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.releases.lifecycle.heal", lambda *given: None)  # MLflow is not the matter here
    with open_store(settings.database_url) as store:
        row = store.start_round("shop", "d", 0, "laptop", {})
        store.finish_round(row.id, RoundState.FAILED, "ended \x1b]0;title\x07 by\x9b2J itself")
    for command in (["rounds"], ["show", "1"]):
        said = run(settings, *command)
        assert "ended \\x1b]0;title\\x07 by\\x9b2J itself" in said
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)
    for command in (["status"], ["history", "--target", "shop"]):  # also what is set in columns and colours
        said = run(settings, *command)
        assert "\\x1b]0;title\\x07" in said
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


def test_a_number_is_a_rounds_before_it_is_the_beginning_of_an_id(settings: Settings) -> None:
    with open_store(settings.database_url) as store:
        rows = [store.start_round("shop", "d", seed, "laptop", {}) for seed in range(40)]
        # Of so many rounds some ids begin with the number of another.
        number = next(r.number for r in rows for o in rows if o.id.startswith(str(r.number)) and o != r)
        assert figures_by_key(settings, store, str(number)).number == number
        store.put([CapabilityRow(id=f"{number}abc", round_id=rows[0].id, name="n", analyst="checks")])
        assert json.loads(run(settings, "show", str(number), "--json"))["number"] == number
        with pytest.raises(StoreError, match=r"no round '99'.* has rounds 1 to 40; give one of these numbers"):
            figures_by_key(settings, store, "99")
        letter = next(x for x in "abcdef" if sum(r.id.startswith(x) for r in rows) > 1)
        with pytest.raises(StoreError, match=rf"\d+ rounds have ids that begin with '{letter}': \d+ \({letter}"):
            figures_by_key(settings, store, letter)


def test_the_history_fits_a_terminal_of_80_columns() -> None:
    rate = Rate(success=0.625, low=0.55, high=0.7, n=144, tasks=72)
    rows = [
        HistoryRow(
            round=number, candidate=number, after=after, when="2026-11-26T09:00:00", data_hash="d", state="refused",
            new=["ask_for_missing_detail", "refund_payment"], renewed=["check_before_cancel"], test=rate,
            verdict=verdict, seconds=seconds, dollars=12.34,
        )
        for number, after, verdict, seconds in ((1, 0, "promoted", 245.0), (12, 11, "rejected-regression", 7620.0))
    ]  # fmt: skip
    console = Console(width=80)
    with console.capture() as shown:
        console.print(history_table(rows, console.width))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert cells_of(lines[1:3]) == ["round", "live after", "what changed", "success on test", "verdict", "cost"]
    split = next(i for i, line in enumerate(lines) if "│ 12 " in line)
    first, second = (cells_of(part) for part in (lines[4:split], lines[split:-1]))
    assert (first[1], second[1]) == ("base", "11")
    assert (first[3], second[3]) == ("62.5 % (55–70)",) * 2
    assert (first[4], second[4].replace(" ", "")) == ("promoted", "rejected-regression")
    assert (first[5], second[5]) == ("4 min 05 s, 12.34 dollars", "2 h 07 min, 12.34 dollars")


def cells_of(lines: list[str]) -> list[str]:
    """The cells of one row of a table, each with its lines joined."""
    cells = [re.split("[│┃]", line)[1:-1] for line in lines]
    return [" ".join(" ".join(parts).split()) for parts in zip(*cells, strict=True)]
