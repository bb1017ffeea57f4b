"""What a person reads who ends a command with Ctrl-C, and whose terminal does not know every letter."""

from __future__ import annotations

import io
import sys

import pytest
import typer

from flows.cli import main as command_line


def test_ctrl_c_is_answered_by_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def work() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "app", app)
    monkeypatch.setattr(command_line, "_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", ["trace-agent"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert end.value.code == 130
    assert capsys.readouterr().err.strip() == "stopped; the same command goes on from here"


def test_what_a_terminal_cannot_show_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    app, shown = typer.Typer(), io.BytesIO()

    @app.command()
    def work() -> None:
        print("42 % (35\u201348), ü")

    monkeypatch.setattr(command_line, "app", app)
    monkeypatch.setattr(command_line, "_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", ["trace-agent"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    with pytest.raises(SystemExit) as end:
        command_line.main()
    sys.stdout.flush()
    assert (end.value.code, shown.getvalue()) == (0, "42 % (35?48), ü\n".encode("latin-1"))
