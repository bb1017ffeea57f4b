"""`trace-agent history`, `rollback` and `promote` on a home with releases."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from db import EvaluationRow, ReleaseRow, ReleaseState, RoundState, SpendRow, VerdictRow, open_store
from errors import ConfigurationError
from flows.cli.main import app, main
from models.adapters.registry import Registry
from settings import load_settings
from tasks.round.results import GateResult
from tasks.serving.gateway import NoRound, serving_settings
from tasks.unattended.notices import Notice
from tests.tasks.releases.release_homes import Home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("home")
    settings = load_settings(home=folder, target="shop")
    with open_store(settings.database_url) as store:
        yield Home(store, Registry(settings.tracking_uri, "shop", folder / "mlartifacts"), folder)


def run(home: Home, *words: str, columns: int = 200) -> str:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(
        app, [*words, "--home", str(home.folder), "--target", "shop"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output


def refused(home: Home, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `trace-agent` says in one line; its exit code is 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["trace-agent", *words, "--home", str(home.folder), "--target", "shop"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def test_looking_going_back_and_going_on(
    home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Notice] = []
    monkeypatch.setattr("tasks.unattended.notices.notify", lambda settings, notice: told.append(notice))
    assert run(home, "history") == "no round of shop yet; run 'trace-agent improve --target shop'\n"
    assert "nothing to go back to: the bare base answers" in refused(home, capsys, "rollback")
    assert "has no release 1; it has none yet" in refused(home, capsys, "promote", "1")

    one, two, other = home.member("refund"), home.member("refund"), home.member("exchange")
    home.promoted({"refund": one})
    round_ = home.store.latest_round("shop")
    assert round_ is not None
    home.promoted({"refund": two, "exchange": other}, round_id=round_.id)
    tested = EvaluationRow(
        id="e",
        round_id=round_.id,
        split="test",
        subject="routed",
        n_tasks=72,
        trials=2,
        success=0.625,
        low=0.55,
        high=0.7,
    )
    home.store.put([tested, VerdictRow(round_id=round_.id, subject="release", verdict="promoted")])
    home.store.put([SpendRow(id="s", round_id=round_.id, stage="contrast", model="m", calls=3, dollars=0.25)])
    gated = home.store.stage(round_.id, GateResult.stage)
    assert gated.claim()
    gated.finish(GateResult(promoted=["refund", "exchange"], release=2).model_dump(mode="json"))
    home.store.finish_round(round_.id, RoundState.DONE, "promoted release 2")

    rows = {row["candidate"]: row for row in json.loads(run(home, "history", "--json"))}
    by_hand, newest = rows[1], rows[2]
    assert (by_hand["round"], by_hand["candidate"], by_hand["state"]) == (None, 1, "retired")
    assert (newest["round"], newest["candidate"], newest["state"]) == (round_.number, 2, "live")
    assert (newest["new"], newest["renewed"], newest["gone"]) == (["exchange"], ["refund"], [])
    assert (newest["test"]["success"], newest["test"]["low"], newest["test"]["high"]) == (0.625, 0.55, 0.7)
    assert (newest["verdict"], newest["dollars"]) == ("promoted", 0.25)
    assert newest["members"]["refund"] == f"refund@v2-{two['sha256'][:8]}"
    lines = run(home, "history").splitlines()
    (line,) = [line for line in lines if "renewed: refund" in line]
    for word in ("release 2: new: exchange", "62.5 % (55–70)", "promoted", "0.25 dollars"):
        assert word in line
    assert lines[-1].startswith("release 2 of shop is live: exchange@v1-")
    narrow = run(home, "history", columns=80)
    assert max(map(len, narrow.splitlines()[:-1])) <= 80
    assert {"cost", "dollars", "promoted"} <= set(narrow.split())

    said = run(home, "rollback")
    assert said.splitlines()[0] == "release 1 of shop is live again"
    assert f"barred from automatic promotion: exchange@v1-{other['sha256'][:8]}, refund@v2-" in said
    home.check()
    assert "release 2: exchange, refund barred from automatic promotion" in run(home, "history")
    assert "has no release 9; it has 1, 2" in refused(home, capsys, "rollback", "--to", "9")
    assert run(home, "promote", "2", "--reason", "it was right") == "release 2 of shop is live: exchange, refund\n"
    assert run(home, "promote", "2", "--reason", "again") == "release 2 of shop is live already: nothing has changed\n"
    assert "barred" not in run(home, "history")
    assert "the bare base answers for shop again" in run(home, "rollback", "--to", "0")
    assert "the bare base answers for shop: no release is live" in run(home, "history")
    home.check()
    states = {row["candidate"]: row["state"] for row in json.loads(run(home, "history", "--json"))}
    assert (states[1], states[2]) == ("retired", "rolled-back")
    assert [notice.kind for notice in told] == ["rolled-back", "promoted", "rolled-back"]
    assert told[1].text == "release 2 of shop is live: exchange, refund (by hand: it was right)"


def test_looking_and_leaving_need_no_mlflow(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that the settings name is away; the database knows what is live."""
    live = home.promoted({"cancel": home.member("cancel")})
    monkeypatch.setenv("TRACE_TRACKING", "http://127.0.0.1:1")
    began = time.monotonic()
    assert f"release {live.number} of shop is live: cancel@v1-" in run(home, "history")
    assert f'"candidate": {live.number}' in run(home, "history", "--json")
    assert "the bare base answers for shop again" in run(home, "rollback", "--to", "0")
    assert time.monotonic() - began < 30
    assert home.states()[live.number] == "rolled-back"


@pytest.fixture
def two_targets(settings_folder: Path) -> Path:
    """A home with a round of the shop and a later one of the airline."""
    with open_store(load_settings(home=settings_folder).database_url) as store:
        for target in ("shop", "tau2:airline", "traffic"):
            store.finish_round(store.start_round(target, "d", 0, "laptop", {}).id, RoundState.DONE, f"of {target}")
    return settings_folder


def test_without_a_target_the_newest_rounds_is_looked_at(two_targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*words: str) -> str:
        done = CliRunner().invoke(app, ["history", "--home", str(two_targets), *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert "the bare base answers for tau2:airline" in looked()
    assert "the bare base answers for shop" in looked("--target", "shop")
    monkeypatch.setenv("TRACE_TARGET", "shop")
    assert "the bare base answers for shop" in looked()


def test_a_dry_round_of_another_target_takes_no_command_over(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries a configuration out. What is about what is live asks which, where several targets have a release."""
    about: list[str] = []
    monkeypatch.setattr("tasks.releases.lifecycle.rollback", lambda store, registry, name, to: about.append(name))
    monkeypatch.setattr("tasks.releases.lifecycle.heal", lambda store, registry, name: about.append(name))
    monkeypatch.setattr("tasks.round.preflight.preflight", lambda settings: about.append(settings.target))
    monkeypatch.setattr("tasks.operations.watch.watch_release", lambda settings: SimpleNamespace(falls=[], losses=[]))
    monkeypatch.setattr("tasks.operations.watch.watch_text", lambda watched: "")

    def looked_at(*words: str) -> str:
        CliRunner().invoke(app, [*words, "--home", str(settings_folder)], catch_exceptions=False)
        return about[-1]

    def begun(target: str, profile: str, releases: int = 0) -> None:
        with open_store(load_settings(home=settings_folder).database_url) as store:
            made = store.start_round(target, "d", 0, profile, {"profile": "laptop", "target": target})
            live = ReleaseRow(
                id=target, target=target, number=1, round_id=made.id, base="b", data_hash="d", state=ReleaseState.LIVE
            )
            store.put([live] * releases)

    begun("bfcl:single", "laptop")
    begun("shop", "laptop", releases=1)
    begun("bfcl:single", "dry")
    assert {looked_at(command) for command in ("history", "rollback", "watch")} == {"shop"}
    settings, store = serving_settings(settings_folder, None)
    store.close()
    assert settings.target == "shop"
    begun("tau2:airline", "laptop")
    assert looked_at("history") == "tau2:airline"
    assert {looked_at(command) for command in ("rollback", "watch")} == {"shop"}, "the other has no release"
    begun("tau2:retail", "laptop", releases=1)
    for command in ("rollback", "watch"):
        with pytest.raises(ConfigurationError, match=r"releases of shop, tau2:retail are live in .*say with --target"):
            looked_at(command)
        assert looked_at(command, "--target", "shop") == "shop"
    monkeypatch.setenv("TRACE_TARGET", "bfcl:single")
    assert looked_at("history") == "bfcl:single"
    settings, store = serving_settings(settings_folder, None)
    store.close()
    assert settings.target == "bfcl:single", "the gateway serves what the other commands speak of"
    with pytest.raises(NoRound, match="no round on 'agentdojo'"):
        serving_settings(settings_folder, "agentdojo")


def test_a_watch_by_hand_sends_what_waits_in_the_outbox(two_targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def watched(settings: Any) -> Any:
        done.append("watched")
        return SimpleNamespace(falls=["by 30 points"], losses=[])

    monkeypatch.setattr("tasks.round.preflight.preflight", lambda settings: done.append("checked"))
    monkeypatch.setattr("tasks.operations.watch.watch_release", watched)
    monkeypatch.setattr("tasks.operations.watch.watch_text", lambda watched: "it fell")
    monkeypatch.setattr("tasks.unattended.notices.deliver", lambda settings: done.append(settings.target))
    words = ["watch", "--home", str(two_targets), "--target", "shop"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 1
    assert done == ["checked", "watched", "shop"]


@pytest.mark.parametrize("command", ["history", "watch", "rollback"])
def test_a_target_without_a_round_is_told_with_those_that_have_one(two_targets: Path, command: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no round of 'shpo', but of shop, tau2:airline, traffic; give one"):
        CliRunner().invoke(app, [command, "--home", str(two_targets), "--target", "shpo"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("option", "price"), [("--price", "nan,1"), ("--price", "1,inf"), ("--price", "-1,1"), ("--user-price", "-1,1")]
)
def test_a_price_that_is_none_is_refused(option: str, price: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"{option} '{price}' is not a price; write dollars per million tokens"
    ):
        CliRunner().invoke(app, ["evaluate", "--target", "shop", option, price], catch_exceptions=False)


def test_an_age_beyond_all_dates_is_refused(two_targets: Path) -> None:
    words = ["clean", "--older-than", "999999999999", "--home", str(two_targets)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 2
    assert "36500" in done.output


def test_a_comparison_of_another_base_has_homes_of_its_own_and_is_not_refused(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, used = settings_folder / "home", settings_folder / "used.toml"
    used.write_text('[[used]]\nseeds = [3]\nfor = "x"\n')
    with open_store(load_settings(home=home).database_url) as store:
        store.put([ReleaseRow(id="r", target="shop", number=3, base="large", data_hash="d", state=ReleaseState.LIVE)])
    monkeypatch.setattr("tasks.round.preflight.check_base_files", lambda base, cache: None)

    def start() -> None:
        raise ConfigurationError("all light checks are passed")

    monkeypatch.setattr("flows.cli.early_server.start_early", start)
    words = ["--home", str(home), "--profile", "smoke"]
    compare = ["compare-methods", "--seed", "4", "--budget", "900", "--used-seeds", str(used)]
    with pytest.raises(ConfigurationError, match="all light checks are passed"):
        CliRunner().invoke(app, [*compare, *words], catch_exceptions=False)
    for of_a_round in (["improve"], ["improve", "--dry-run"], ["stage", "select"]):
        with pytest.raises(ConfigurationError, match="release 3 of shop is live and stands on large"):
            CliRunner().invoke(app, [*of_a_round, *words], catch_exceptions=False)


@pytest.mark.parametrize(("option", "value", "most"), [("--seed", 2**63, 2**31 - 1), ("--trials", 10**9, 1000)])
def test_a_number_that_cannot_be_played_is_refused_before_an_episode_is(
    tmp_path: Path, option: str, value: int, most: int
) -> None:
    """A seed that the database cannot hold, and more episodes than memory holds."""
    from flows.cli.evaluate import LARGEST
    from settings import LARGEST as OF_ROUNDS

    assert LARGEST == OF_ROUNDS
    home = tmp_path / "home"
    given = ["evaluate", "--target", "shop", option, str(value), "--limit", "1", "--home", str(home)]
    done = CliRunner().invoke(app, given)
    assert (done.exit_code, home.exists()) == (2, False)
    assert f"less than or equal to {most}" in " ".join(done.output.split())
