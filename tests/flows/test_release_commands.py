"""`trace-agent history`, `rollback` and `promote` on a home with releases."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from db import RoundState, SpendRow, VerdictRow, open_store
from flows.cli.main import app, main
from models.adapters.registry import Registry
from settings import load_settings
from tasks.releases.history import changes
from tasks.releases.lifecycle import releases_of
from tests.tasks.releases.release_homes import Home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("home")
    settings = load_settings(home=folder, target="shop")
    with open_store(settings.database_url) as store:
        yield Home(store, Registry(settings.tracking_uri, "shop", folder / "mlartifacts"), folder)


def run(home: Home, *words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--home", str(home.folder), "--target", "shop"], catch_exceptions=False)
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


def test_looking_going_back_and_going_on(home: Home, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(home, "history") == "no release of shop yet; run 'trace-agent improve --target shop'\n"
    assert "nothing to go back to: the bare base answers" in refused(home, capsys, "rollback")
    assert "has no release 1; it has none yet" in refused(home, capsys, "promote", "1")

    one, two, other = home.member("refund"), home.member("refund"), home.member("exchange")
    home.promoted({"refund": one})
    round_ = home.store.latest_round("shop")
    assert round_ is not None
    rates = {"routed": {"success": 0.625, "low": 0.55, "high": 0.7}, "base": {"success": 0.4, "low": 0.3, "high": 0.5}}
    home.promoted({"refund": two, "exchange": other}, round_id=round_.id, evidence={"validation": rates})
    home.store.put([VerdictRow(round_id=round_.id, subject="release", verdict="promoted")])
    home.store.put([SpendRow(id="s", round_id=round_.id, stage="contrast", model="m", calls=3, dollars=0.25)])
    home.store.finish_round(round_.id, RoundState.DONE, "promoted release 2")

    entries = json.loads(run(home, "history", "--json"))
    assert [(e["release"], e["state"], e["parent"]) for e in entries] == [(1, "retired", None), (2, "live", 1)]
    newest = entries[1]
    assert newest["changed"] == ["+exchange v1", "refund v1->v2"]
    assert newest["success"] == {"split": "validation", "success": 0.625, "low": 0.55, "high": 0.7}
    assert newest["verdicts"] == {"release": "promoted"}
    assert (newest["cost"]["calls"], newest["cost"]["dollars"], newest["round"]) == (3, 0.25, round_.number)
    assert newest["members"]["refund"] == f"refund@v2-{two['sha256'][:8]}"
    lines = run(home, "history").splitlines()
    assert lines[0].split()[:3] == ["release", "state", "live"]
    for word in ("2 ", "live", "+exchange v1, refund v1->v2", "62.5 % (55.0 to 70.0)", "release promoted", "0.25 $"):
        assert word in lines[1], lines[1]

    said = run(home, "rollback")
    assert said.splitlines()[0] == "release 1 of shop is live again"
    assert f"barred from automatic promotion: exchange@v1-{other['sha256'][:8]}, refund@v2-" in said
    home.check()
    assert "release 2: exchange, refund barred from automatic promotion" in run(home, "history")
    assert "has no release 9; it has 1, 2" in refused(home, capsys, "rollback", "--to", "9")
    assert run(home, "promote", "2", "--reason", "it was right") == "release 2 of shop is live: exchange, refund\n"
    assert "barred" not in run(home, "history")
    assert "the bare base answers for shop again" in run(home, "rollback", "--to", "0")
    assert "the bare base answers for shop: no release is live" in run(home, "history")
    home.check()
    states = [e["state"] for e in json.loads(run(home, "history", "--json"))]
    assert states == ["retired", "rolled-back"]


def test_what_changed_is_said_against_the_parent(home: Home) -> None:
    first, second = releases_of(home.store, "shop")
    assert changes(None, first) == ("+refund v1",)
    assert changes(second, first) == ("-exchange", "refund v2->v1")
