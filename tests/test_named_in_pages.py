"""What the pages name exists: links with anchors, commands with options, settings, make's targets, modules."""

from __future__ import annotations

import configparser
import functools
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from flows.cli.main import app
from flows.services import SECONDS_TO_END, SECONDS_TO_STOP
from settings import setting_names

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "benchmarks" / "findings").glob("*.md")),
]
# What else tells a person which command to call.
OTHERS = ["prefect.yaml", "docker/.env.example", "docker/compose.yaml", "docker/keys/README"]
COMMAND = re.compile(r"trace-agent (?:--log-json )?([a-z][a-z-]*)([^`\n]*)")
# A command in an error message or a docstring stands in quotes.
QUOTED = re.compile(r"'trace-agent ([a-z][a-z-]*)([^'\n]*)'")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    # The second heading of the same words ends in -1.
    return {name if found[:i].count(name) == 0 else f"{name}-{found[:i].count(name)}" for i, name in enumerate(found)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        there = (page.parent / file).resolve() if file else page
        if re.match(r"https?:", link):
            continue
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            wrong.append(link)
    assert wrong == []


@functools.cache
def commands() -> Mapping[str, Any]:
    """The command line's, with their options."""
    return get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def unknown(name: str, rest: str) -> list[str]:
    """What the command line does not have of a command with what stands behind it."""
    if name not in commands():
        return [name]
    command, (first, *_) = commands()[name], [*rest.split(), ""]
    command = getattr(command, "commands", {}).get(first, command)
    known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
    # A comment, or a second command, is not of this one.
    mine = re.split(r"#|\|| && |; ", rest)[0]
    return [f"{name} {option}" for option in OPTION.findall(mine) if option not in known]


def test_an_unknown_command_or_option_is_found() -> None:
    assert unknown("improv", "") == ["improv"]
    assert unknown("improve", " --rounds 5 --cron x # --no-option") == ["improve --cron"]
    assert unknown("environments", " show HASH --json --level 1") == ["environments --level"]


def test_every_command_that_a_page_names_has_its_options() -> None:
    pages = [*PAGES, *(ROOT / name for name in OTHERS)]
    found = [(p.name, c, rest) for p in pages for c, rest in COMMAND.findall(p.read_text(encoding="utf-8"))]
    assert len(found) > 150
    assert [(page, wrong) for page, name, rest in found if (wrong := unknown(name, rest))] == []


def test_every_command_that_a_message_names_has_its_options() -> None:
    command = ["git", "ls-files", "-z", "*.py", ":!tests", ":!benchmarks"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    files = [path for name in names if name and (path := ROOT / name).is_file()]
    found = [(p.name, c, rest) for p in files for c, rest in QUOTED.findall(p.read_text(encoding="utf-8"))]
    assert len(found) > 50
    assert [(file, wrong) for file, name, rest in found if (wrong := unknown(name, rest))] == []


def options(name: str, command: Any) -> list[tuple[str, list[str]]]:
    """The options of a command and of those below it, each with all its names. What is hidden is nobody's to use."""
    if command.hidden:
        return []
    given = [[o for o in (*p.opts, *p.secondary_opts) if o.startswith("--")] for p in command.params]
    below = [found for n, c in getattr(command, "commands", {}).items() for found in options(f"{name} {n}", c)]
    return [*((name, names) for names in given if names), *below]


def test_every_option_of_every_command_stands_in_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    written = {option for page in pages for option in OPTION.findall(page.read_text(encoding="utf-8"))}
    found = options("trace-agent", get_command(app))
    assert ("trace-agent environments play", ["--level"]) in found
    assert len(found) > 100
    assert [(command, names) for command, names in found if written.isdisjoint(names)] == []


def test_systemd_waits_until_up_has_stopped_its_services() -> None:
    page = (ROOT / "docs" / "9-unattended.md").read_text(encoding="utf-8")
    (unit,) = re.findall(r"^```ini\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    read = configparser.ConfigParser(interpolation=None)
    read.read_string(unit)
    assert int(read["Service"]["TimeoutStopSec"]) > SECONDS_TO_STOP + SECONDS_TO_END


def test_every_setting_that_a_page_names_exists() -> None:
    """A name of two parts in backticks, whose first is a part of the settings."""
    known = set(setting_names())
    parts = {name.split(".")[0] for name in known if "." in name}
    wrong = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", page.read_text(encoding="utf-8"))
        if name.split(".")[0] in parts and name not in known
    ]
    assert wrong == []


def test_every_target_of_make_and_every_module_that_a_page_starts_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wrong += [f"{page.name}: make {t}" for t in re.findall(r"(?:^    |`)make ([a-z-]+)", text) if t not in targets]
        for module in re.findall(r"python -m ((?:benchmarks|db|flows|models)\.[a-z_.]+[a-z_])", text):
            if not (ROOT / (module.replace(".", "/") + ".py")).is_file():
                wrong.append(f"{page.name}: python -m {module}")
    assert wrong == []


def test_the_page_of_gpus_has_the_plans_of_the_profiles() -> None:
    """A profile's comment is held against its plan by the tests of plans."""
    page = (ROOT / "docs" / "3-platform.md").read_text(encoding="utf-8")
    for profile in ("gpu-small", "gpu", "cluster"):
        (row,) = re.findall(rf"^\| `{profile}` \|.* \| ([\d,]+) \|$", page, re.MULTILINE)
        said = (ROOT / "profiles" / f"{profile}.toml").read_text(encoding="utf-8").replace("\n# ", " ")
        assert f"at most {row} rollouts" in said
