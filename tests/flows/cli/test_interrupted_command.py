"""What a person reads who ends a command with Ctrl-C, and whose terminal does not know every letter."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from errors import ConfigurationError, EnvironmentFault
from flows.cli import main as command_line
from settings import load_settings


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """What `trace-agent` runs in the place of its own commands."""
    made = typer.Typer()
    monkeypatch.setattr(command_line, "app", made)
    monkeypatch.setattr(command_line, "configure", lambda: None)
    monkeypatch.setattr(sys, "argv", ["trace-agent"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return made


def test_ctrl_c_is_answered_by_what_to_do_next(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    @app.command()
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert end.value.code == 130
    assert capsys.readouterr().err.strip() == "stopped; the same command goes on from here"


def test_what_a_terminal_cannot_show_ends_no_command(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()

    @app.command()
    def work() -> None:
        print("42 % (35\u201348), ü")

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    with pytest.raises(SystemExit) as end:
        command_line.main()
    sys.stdout.flush()
    assert (end.value.code, shown.getvalue()) == (0, "42 % (35?48), ü\n".encode("latin-1"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("lost", [True, False])
def test_an_output_that_takes_nothing_is_one_line_and_any_other_defect_is_not(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: bool
) -> None:
    @app.command()
    def work() -> None:
        if not lost:
            raise OSError(errno.ENOSPC, "No space left on device")  # some other file's
        typer.echo("rounds")

    with open("/dev/full" if lost else os.devnull, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit if lost else OSError) as end:
            command_line.main()
    if isinstance(end.value, SystemExit):
        assert end.value.code == 2
    said = "error (output): standard output cannot be written (No space left on device); free space there\n"
    assert capsys.readouterr().err == (said if lost else "")


def test_a_path_that_may_not_be_used_is_one_line(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    @app.command()
    def work() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/data/home/trace.db")

    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert end.value.code == 2
    what = "let this user read and write it, or give another path"
    assert capsys.readouterr().err == f"error (files): /data/home/trace.db: Permission denied; {what}\n"


def test_a_working_folder_that_was_removed_is_one_line(
    app: typer.Typer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error (files): the working folder was removed; change into one that is there\n"


@pytest.mark.parametrize("name", ["TRACE_HOME", "--home"])
def test_a_home_whose_name_is_no_utf_8_is_one_line(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An address of a database is a text."""
    home = os.fsdecode(b"q\xff")
    if name == "TRACE_HOME":
        monkeypatch.setenv(name, home)
    settings = load_settings(**({} if name == "TRACE_HOME" else {"home": home}))
    for url in ("database_url", "tracking_uri"):
        with pytest.raises(ConfigurationError, match="is no UTF-8, so no database can lie there; give another folder"):
            getattr(settings, url)
    assert not (settings_folder / home).exists()


def test_what_generated_code_says_steers_no_terminal(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "\x1b]0;owned\x07\x1b[2Jaccepted"
    module = SimpleNamespace(environment=lambda: None, scenario=lambda *given: None, close=lambda: None)
    verdict = SimpleNamespace(accepted=True)
    room = "environments.synthesized.module_files"
    monkeypatch.setattr(f"{room}.load_module", lambda path: module)
    monkeypatch.setattr(f"{room}.validate_file", lambda path: verdict)
    monkeypatch.setattr(f"{room}.validate_module", lambda code: verdict)
    monkeypatch.setattr(f"{room}.verdict_lines", lambda given: [said])
    monkeypatch.setattr(f"{room}.play_by_hand", lambda environment, task, read, write: write(said))
    monkeypatch.setattr("environments.synthesized.modules.SandboxedModule", lambda code: module)
    monkeypatch.setattr("flows.cli.environments._entry", lambda key, home: SimpleNamespace(code=""))
    for command in (
        ["play", "x.py"],
        ["validate", "x.py"],
        ["environments", "play", "x"],
        ["environments", "validate", "x"],
    ):
        monkeypatch.setattr(sys, "argv", ["trace-agent", *command])
        with pytest.raises(SystemExit) as end:
            command_line.main()
        assert (command, end.value.code) == (command, 0)
        assert capsys.readouterr().out == "\\x1b]0;owned\\x07\\x1b[2Jaccepted\n"

    def failed(path: Path) -> None:
        raise EnvironmentFault(said)

    monkeypatch.setattr(f"{room}.load_module", failed)
    monkeypatch.setattr(sys, "argv", ["trace-agent", "play", "x.py"])
    with pytest.raises(SystemExit):
        command_line.main()
    assert capsys.readouterr().err.endswith("): \\x1b]0;owned\\x07\\x1b[2Jaccepted\n")


def test_no_bound_on_a_rank_is_below_zero() -> None:
    done = CliRunner().invoke(command_line.app, ["blend", "refund=0.5", "--most-rank", "-1"])
    assert done.exit_code == 2
    assert "greater than or equal to 0" in " ".join(done.output.replace("│", " ").split())
