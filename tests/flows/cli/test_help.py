"""`--help` says of every command, option and argument what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from flows.cli.main import app


def commands(command: Any, name: str = "trace-agent") -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{name} {below}")


def test_every_command_and_parameter_is_explained() -> None:
    found = dict(commands(get_command(app)))
    assert len(found) > 30
    unsaid = [name for name, command in found.items() if not command.help]
    unsaid += [f"{name}: {p.name}" for name, command in found.items() for p in command.params if not p.help]
    assert unsaid == []
