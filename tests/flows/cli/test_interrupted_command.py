"""What a person reads who ends a command with Ctrl-C."""

from __future__ import annotations

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
