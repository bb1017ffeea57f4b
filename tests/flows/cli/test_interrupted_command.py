"""What a person reads who ends a command with Ctrl-C, and whose terminal does not know every letter."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flows.cli import main as command_line


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


def test_no_bound_on_a_rank_is_below_zero() -> None:
    done = CliRunner().invoke(command_line.app, ["blend", "refund=0.5", "--most-rank", "-1"])
    assert done.exit_code == 2
    assert "greater than or equal to 0" in " ".join(done.output.replace("│", " ").split())
