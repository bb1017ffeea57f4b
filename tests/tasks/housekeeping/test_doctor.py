"""Each fault is planted alone in a whole home, and doctor finds exactly that one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from db import RoundState, open_store
from db.schema import HEAD
from db.values.types import utc_now
from flows.cli.main import app
from models.adapters.releases import set_champion, set_live
from settings import Settings
from tasks.housekeeping import machine_checks
from tasks.housekeeping.backup import make_backup
from tasks.housekeeping.doctor import examine, lines
from tasks.housekeeping.findings import Finding
from tasks.housekeeping.restore import restore_backup
from tasks.releases.lifecycle import rollback
from tasks.releases.lookup import release_numbered
from tests.db.postgres_server import running_postgres
from tests.tasks.housekeeping.kept_homes import make_home, opened, registry_of, settings_of

PLENTY = shutil._ntuple_diskusage(10**12, 0, 10**12)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of a home without fault."""
    folder = tmp_path_factory.mktemp("whole")
    make_home(folder / "home")
    make_backup(settings_of(folder / "home"), folder / "home.zip", "1")
    return folder / "home.zip"


@dataclass
class Patient:
    """A home of a test's own, the patches of its machine, and the settings that it is looked at with."""

    folder: Path
    patch: pytest.MonkeyPatch
    given: dict[str, Any]

    def settings(self) -> Settings:
        return settings_of(self.folder, **self.given)

    def change(self, file: str, *statements: str) -> None:
        with closing(sqlite3.connect(self.folder / file)) as opened_file, opened_file:
            for statement in statements:
                opened_file.execute(statement)

    def adapter_of(self, number: int) -> Path:
        """Where MLflow keeps the adapter `refund` of a release."""
        with opened(self.folder) as home:
            member = release_numbered(home.store, "shop", number).members["refund"]
            model = home.registry.client.get_model_version(member["model"], member["version"])
            found = home.registry.client.get_logged_model(str(model.source).removeprefix("models:/"))
            return Path(found.artifact_location.removeprefix("file://"))


@pytest.fixture
def patient(whole: Path, settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Patient:
    """A whole home on a machine that lacks nothing."""
    base = settings_folder / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    save_file({}, base / "model.safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: PLENTY)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(machine_checks, "CONSTRAINTS", settings_folder / "no constraints")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    folder = settings_folder / "home"
    restore_backup(whole, settings_of(folder))
    return Patient(folder, monkeypatch, {"base_model": str(base)})


def wrong(patient: Patient) -> list[Finding]:
    return [f for f in examine(patient.settings()) if f.level != "ok"]


def nobody() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def old_package(p: Patient) -> None:
    version = importlib.metadata.version
    p.patch.setattr(importlib.metadata, "version", lambda name: "0.2" if name == "safetensors" else version(name))


def missing_package(p: Patient) -> None:
    version = importlib.metadata.version

    def found(name: str) -> str:
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    p.patch.setattr(importlib.metadata, "version", found)


def untested_package(p: Patient) -> None:
    file = p.folder.parent / "constraints.txt"
    file.write_text("# made\nsafetensors==0.8.999\nno-such-package==1.0\n")
    p.patch.setattr(machine_checks, "CONSTRAINTS", file)


def full_disk(p: Patient) -> None:
    p.patch.setattr(shutil, "disk_usage", lambda _: PLENTY._replace(free=500_000_000))


def no_gpu(p: Patient) -> None:
    p.given["profile"] = "gpu"
    p.given["policy"] = {"backend": "local"}


def base_without_weights(p: Patient) -> None:
    (Path(p.given["base_model"]) / "model.safetensors").unlink()


def no_target(p: Patient) -> None:
    (p.folder.parent / "mine.py").write_text("raise ValueError('half written')")
    p.patch.syspath_prepend(p.folder.parent)
    p.given["target"] = "mine:target"


def no_webhook(p: Patient) -> None:
    p.given["unattended"] = {"webhook_variable": "NO_SUCH_HOOK"}


def notices_that_nobody_got(p: Patient) -> None:
    outbox = p.folder / "outbox"
    outbox.mkdir()
    for name, days in (("a.refused", 0), ("b.json", 2), ("c.json", 0)):
        (outbox / name).write_text("{}")
        moment = (utc_now() - timedelta(days=days)).timestamp()
        os.utime(outbox / name, (moment, moment))


def nobody_to_ask(p: Patient) -> None:
    no_server = SimpleNamespace(api=SimpleNamespace(url=None))
    p.patch.setattr("prefect.settings.get_current_settings", lambda: no_server)
    p.given["unattended"] = {"approve": True}


def no_key(p: Patient) -> None:
    p.given["analyst"] = {"kind": "llm", "model": "openai/x", "api_key_variable": "NO_SUCH_KEY"}


def no_model(p: Patient) -> None:
    p.given["analyst"] = {"kind": "llm"}


def trainings_in_turn(p: Patient) -> None:
    p.given["devices"] = {"trainings": 2}


def prefect_down(p: Patient) -> None:
    p.patch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{nobody()}/api")


def mlflow_down(p: Patient) -> None:
    p.given["tracking"] = f"http://user:secret@127.0.0.1:{nobody()}"


def vllm_down(p: Patient) -> None:
    p.given["policy"] = {"backend": "vllm", "url": f"http://127.0.0.1:{nobody()}"}


def newer_mlflow(p: Patient) -> None:
    p.change("mlflow.db", "UPDATE alembic_version SET version_num = 'ffff00000000'")


def registry_gone(p: Patient) -> None:
    (p.folder / "mlflow.db").unlink()


def newer_schema(p: Patient) -> None:
    p.change("trace.db", "UPDATE trace_alembic_version SET version_num = '9999'")


def older_schema(p: Patient) -> None:
    p.change("trace.db", "UPDATE trace_alembic_version SET version_num = '0002'")


def damaged_store(p: Patient) -> None:
    content = bytearray((p.folder / "trace.db").read_bytes())
    content[4096 * 3 : 4096 * 40] = b"\xff" * (4096 * 37)
    (p.folder / "trace.db").write_bytes(bytes(content))


def slow_clock(p: Patient) -> None:
    later = (utc_now() + timedelta(hours=2)).strftime("%Y-%m-%d %H:%M:%S.%f")
    p.change("trace.db", f"UPDATE rounds SET started_at = '{later}' WHERE number = 1")


def stale_lease(p: Patient) -> None:
    with opened(p.folder) as home:
        round_ = home.store.start_round("shop", "d", 1, "laptop", {})
        assert home.store.stage(round_.id, "train:refund").claim("a-machine:1", lease_seconds=1e-6)


def dead_between_stages(p: Patient) -> None:
    with opened(p.folder) as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr("db.store.owner_name", lambda: "a-machine:1")
        for target in ("shop", "other"):  # the second came to its end all the same, and is owed nothing
            round_ = home.store.start_round(target, "d", 1, "laptop", {})
            home.store.presence(round_.id, 1e-6).beat()
        home.store.finish_round(round_.id, RoundState.DONE)
        round_ = home.store.start_round("third", "d", 1, "laptop", {})  # and this one goes on in another process
        home.store.presence(round_.id, 1e-6, {"flow_run": ""}).beat()
        patch.setattr("db.store.owner_name", lambda: "a-machine:2")
        home.store.presence(round_.id, 3600.0).beat()


def moved_by_hand(p: Patient) -> None:
    p.folder = p.folder.rename(p.folder.with_name("elsewhere"))


def champion_moved(p: Patient) -> None:
    with opened(p.folder) as home:
        first = release_numbered(home.store, "shop", 1).members["refund"]
        set_champion(home.registry, first["model"], first["version"])


def live_taken(p: Patient) -> None:
    set_live(registry_of(p.folder), None)


def live_adapter_changed(p: Patient) -> None:
    with (p.adapter_of(2) / "adapter_model.safetensors").open("ab") as file:
        file.write(b"\0")


def earlier_adapter_gone(p: Patient) -> None:
    shutil.rmtree(p.adapter_of(1))


def version_deleted(p: Patient) -> None:
    with opened(p.folder) as home:
        first = release_numbered(home.store, "shop", 1).members["refund"]
        home.registry.client.delete_model_version(first["model"], first["version"])


def trained_copy_gone(p: Patient) -> None:
    with opened(p.folder) as home:
        adapter = release_numbered(home.store, "shop", 2).members["refund"]["adapter_id"]
    p.change("trace.db", f"UPDATE adapters SET path = 'a/training/refund/final' WHERE id = '{adapter}'")


def trained_copy_gone_after_a_rollback(p: Patient) -> None:
    trained_copy_gone(p)
    with opened(p.folder) as home:
        home.promoted({"refund": home.newest().members["refund"]})
        assert rollback(home.store, home.registry, "shop") is not None


def router_gone(p: Patient) -> None:
    p.change("trace.db", "UPDATE releases SET router_path = 'gone/router', router = 'r' WHERE number = 2")


FAULTS: list[tuple[Callable[[Patient], None], str, str, str]] = [
    (old_package, "versions", "fault", "safetensors is 0.2, needed is"),
    (missing_package, "versions", "fault", "peft is not installed"),
    (untested_package, "versions", "warning", "tested: ==0.8.999"),
    (full_disk, "disk", "fault", "0.5 GB free"),
    (no_gpu, "gpu", "fault", "profile gpu needs one"),
    (base_without_weights, "model", "fault", "holds no *.safetensors"),
    (no_target, "target", "fault", "'mine:target' does not load (ValueError: half written)"),
    (no_webhook, "webhook", "fault", "'NO_SUCH_HOOK', which holds no http(s) address"),
    (notices_that_nobody_got, "notices", "warning", "1 refused, 1 waiting for more than a day"),
    (nobody_to_ask, "approval", "fault", "no Prefect server is named"),
    (no_key, "analyst", "fault", "'NO_SUCH_KEY', which is empty"),
    (no_model, "analyst", "fault", "no model is configured"),
    (trainings_in_turn, "trainings", "fault", "train.carry"),
    (prefect_down, "prefect", "fault", "/api/health does not answer"),
    (mlflow_down, "mlflow", "fault", "/health does not answer"),
    (vllm_down, "vllm", "fault", "no vLLM server answers"),
    (newer_mlflow, "mlflow", "fault", "schema 'ffff00000000', which the installed MLflow does not know"),
    (registry_gone, "mlflow", "fault", "is gone, and releases need it"),
    (newer_schema, "database", "fault", f"schema '9999', this program knows up to '{HEAD}'"),
    (older_schema, "database", "warning", f"has schema 0002, this program's is {HEAD}"),
    (damaged_store, "database", "fault", "trace.db is damaged"),
    (slow_clock, "clock", "fault", "s from now"),
    (stale_lease, "leases", "warning", "stage train:refund of round 4 was left by a-machine:1"),
    (dead_between_stages, "leases", "warning", "round 4 was left by a-machine:1"),
    (moved_by_hand, "artifacts", "fault", "the home was moved by hand"),
    (champion_moved, "aliases", "warning", "champion of trace-shop-refund is 1, not 2"),
    (live_taken, "aliases", "warning", "live is none, not"),
    (live_adapter_changed, "adapters", "fault", "refund v2 (release 2 (live))"),
    (earlier_adapter_gone, "adapters", "fault", "refund v1 (release 1)"),
    (version_deleted, "adapters", "fault", "has no version 1"),
    (trained_copy_gone, "adapters", "fault", "which the next round trains on from, is gone"),
    (trained_copy_gone_after_a_rollback, "adapters", "fault", "refund v2 (release 2 (live), release 3): "),
    (router_gone, "router", "fault", "release 2 (live): router in"),
]


@pytest.mark.parametrize(("plant", "check", "level", "said"), FAULTS, ids=[plant.__name__ for plant, *_ in FAULTS])
def test_a_planted_fault_is_found_and_nothing_else(
    patient: Patient, plant: Any, check: str, level: str, said: str
) -> None:
    plant(patient)
    (found,) = wrong(patient)
    assert (found.check, found.level) == (check, level)
    assert said in found.said
    assert found.do
    assert "secret" not in found.said + found.do
    # A list of all that was tested is none of what this user asked for.
    assert "-r constraints.txt" not in found.do


def test_a_whole_home_is_well_and_stays_as_it_is(patient: Patient) -> None:
    def content() -> dict[str, bytes]:
        found = [p for p in sorted(patient.folder.rglob("*")) if p.is_file() and not p.name.endswith(("-shm", "-wal"))]
        return {str(p): p.read_bytes() for p in found}

    with opened(patient.folder):  # a restored file is in WAL mode from its first opening on
        pass
    before = content()
    findings = examine(patient.settings())
    assert [f.said for f in findings if f.level != "ok"] == []
    assert {f.check for f in findings} == {
        "versions", "disk", "gpu", "model", "target", "prefect", "mlflow", "database", "clock", "leases", "aliases",
        "adapters",
    }  # fmt: skip
    (files,) = [f.said for f in findings if f.check == "adapters"]
    assert files == "shop: 3 adapters and 0 routers of release 1, release 2 (live) are whole"
    assert all(f.do == "" for f in findings)
    assert content() == before


def test_a_new_machine_without_a_home(patient: Patient) -> None:
    patient.folder = patient.folder.with_name("new")
    assert wrong(patient) == []
    assert not patient.folder.exists()


def test_the_command_and_its_exit_code(patient: Patient) -> None:
    def run(*words: str) -> Any:
        given = ["doctor", "--home", str(patient.folder), *words]
        patient.patch.setenv("TRACE_BASE_MODEL", patient.given["base_model"])
        return CliRunner().invoke(app, given, catch_exceptions=False)

    assert run().exit_code == 0
    stale_lease(patient)
    assert run().exit_code == 0, "a warning alone is no fault"
    patient.patch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{nobody()}/api")
    done = run()
    assert done.exit_code == 1
    assert "-> start it ('python -m flows.prefect_server')" in done.output
    told = json.loads(run("--json").output)
    assert [f["check"] for f in told if f["level"] == "fault"] == ["prefect"]
    assert set(told[0]) == {"check", "level", "said", "do"}


@pytest.mark.integration
def test_a_store_in_postgresql(patient: Patient) -> None:
    with running_postgres() as url:
        patient.folder = patient.folder.with_name("new")
        patient.given["database"] = f"{url}/postgres"
        (found,) = wrong(patient)
        assert (found.check, found.level) == ("database", "warning")
        with open_store(patient.given["database"]) as store:
            assert wrong(patient) == []
            store.start_round("shop", "d", 1, "laptop", {})
            with store.transaction() as connection:
                connection.exec_driver_sql("UPDATE rounds SET started_at = clock_timestamp() + interval '2 hours'")
            (found,) = wrong(patient)
            assert found.check == "clock"
    (found,) = wrong(patient)
    assert (found.check, found.level) == ("database", "fault")
    assert "s3cret" not in found.said + found.do


def test_lines_are_under_one_another() -> None:
    from tasks.housekeeping.findings import fault, well

    assert lines([well("disk", "much"), fault("database", "none", "make one")]) == [
        "ok       disk     much",
        "fault    database none",
        "                  -> make one",
    ]
