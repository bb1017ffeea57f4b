"""Commands about the bank: the environments that a language model wrote and that were accepted, in all rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.options import AsJson, Commands, Home, printed, told
from flows.cli.ready import open_home

Key = Annotated[str, typer.Argument(help="How the hash of its code begins, as list shows it.")]
Seed = Annotated[int, typer.Option(help="Another seed gives another scenario.")]
Level = Annotated[int, typer.Option(min=0, help="Level of difficulty; 0 is the easiest.")]

environments = Commands(no_args_is_help=True, help="The bank of accepted environments: list, show, validate, play.")


def add_environments(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.add_typer(environments, name="environments")


def _entry(key: str, home: Path | None) -> Any:
    from tasks.synthesis.bank import entry_of

    _, store = open_home(home)
    with store:
        return entry_of(store, key)


@environments.command("list")
def list_(
    target: Annotated[str | None, typer.Option(help="Whose environments; all targets' by default.")] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """The accepted environments, newest first, with their figures."""
    from tasks.synthesis.bank import bank_of

    _, store = open_home(home)
    with store:
        bank = bank_of(store, target)
    none = "no environment was accepted yet; a round with synthesizer.kind = 'llm' has them written"
    lines = [f"{e.code_hash[:12]}  {e.target}  {e.capability}  round {e.round}: {_told(e)}" for e in bank]
    printed([entry.as_dict() for entry in bank], as_json, "\n".join(lines) or none)


@environments.command()
def show(key: Key, home: Home = None, as_json: AsJson = False) -> None:
    """An environment's figures and its code."""
    entry = _entry(key, home)
    head = f"{entry.capability} of {entry.target}, round {entry.round}: {entry.definition}".rstrip(": ")
    printed(entry.as_dict() | {"code": entry.code}, as_json, f"{head}\n{_told(entry)}\n\n{entry.code}")


@environments.command()
def validate(key: Key, home: Home = None) -> None:
    """Judge an environment again, without a model; exit 1 when it is refused."""
    from environments.synthesized.module_files import validate_module, verdict_lines

    verdict = validate_module(_entry(key, home).code)
    told("\n".join(verdict_lines(verdict)))
    if not verdict.accepted:
        raise typer.Exit(1)


@environments.command()
def play(key: Key, seed: Seed = 0, level: Level = 0, home: Home = None) -> None:
    """Play an environment by hand, in the sandbox."""
    from environments.synthesized.module_files import play_by_hand
    from environments.synthesized.modules import SandboxedModule

    module: Any = SandboxedModule(_entry(key, home).code)
    try:
        play_by_hand(module.environment(), module.scenario(seed, level), input, told)
    finally:
        module.close()


def _told(entry: Any) -> str:
    """An entry's figures in a line."""
    said = ["promoted with"] if entry.promoted else []
    if entry.success is not None:
        where = "" if entry.level is None else f" at level {entry.level}"
        said.append(f"calibrated at {100 * entry.success:.0f} % success{where}")
    if entry.adapter_success is not None:
        base = "" if entry.base_success is None else f"{100 * entry.base_success:.0f} to "
        said.append(f"trained from {base}{100 * entry.adapter_success:.0f} %")
    return ", ".join([*said, *([entry.unusable] if entry.unusable else [])]) or "no figures"
