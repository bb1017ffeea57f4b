"""The house: which room may use which. Every import counts, also those inside functions and for types alone."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each floor may use those after it; `environments` and `db` do not use one another.
FLOORS = (("flows",), ("tasks",), ("models",), ("environments", "db"), ("settings",), ("errors",))
# Every script there stands alone, beside the page of what they measured.
FLAT = {"benchmarks"}
MOST_MODULES = 14


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is deployed."""
    listing = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    floors = {name for floor in FLOORS for name in floor}
    found = {}
    for name in listing.split():
        path = Path(name)
        if path.parts[0].removesuffix(".py") in floors and (ROOT / path).is_file():
            found[".".join(path.with_suffix("").parts).removesuffix(".__init__")] = ROOT / path
    return found


def room_of(module: str, known: dict[str, Path]) -> str:
    """The folder of a module; a package is its own room."""
    return module if known[module].name == "__init__.py" else module.rpartition(".")[0] or module


def imports(known: dict[str, Path]) -> list[tuple[str, str]]:
    """(module, module that it imports), within the project."""
    found = []
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                used = next((n for n in (name, name.rpartition(".")[0]) if n in known), None)
                if used and used != module:
                    found.append((module, used))
    return found


def test_no_import_goes_up() -> None:
    height = {name: -i for i, floor in enumerate(FLOORS) for name in floor}
    wrong = [
        f"{a} imports {b}"
        for a, b in imports(modules())
        if (x := a.split(".")[0]) != (y := b.split(".")[0]) and height[y] >= height[x]
    ]
    assert wrong == []


def test_rooms_do_not_use_one_another_in_a_circle() -> None:
    known = modules()
    uses: dict[str, set[str]] = {}
    for a, b in imports(known):
        first, second = room_of(a, known), room_of(b, known)
        # A room's door, its __init__, opens on its own files and those of the rooms inside.
        if first != second and not (known[a].name == "__init__.py" and second.startswith(first)):
            uses.setdefault(first, set()).add(second)
    try:
        list(TopologicalSorter(uses).static_order())
    except CycleError as circle:
        raise AssertionError(f"rooms in a circle: {circle.args[1]}") from None


def test_no_room_is_crowded() -> None:
    listing = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    paths = [Path(name) for name in listing.split() if (ROOT / name).is_file()]
    counts = Counter(str(p.parent) for p in paths if p.name != "__init__.py" and p.parts[0] not in FLAT)
    assert {room: n for room, n in counts.items() if n > MOST_MODULES} == {}


def test_every_room_says_what_it_is_for() -> None:
    for name, path in modules().items():
        if path.name == "__init__.py":
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
            assert re.fullmatch(r"\S.{20,}[.:].*", first), f"{name}: {first!r} is no sentence"


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "0-map.md").read_text()
    rooms = [str(path.parent.relative_to(ROOT)) for path in modules().values() if path.name == "__init__.py"]
    assert [room for room in rooms if f"- `{room}/`: " not in text] == []


def test_every_file_that_the_pages_name_exists() -> None:
    """A path in backticks that ends in .py and has a folder, and every such name on the map."""
    wrong = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for name in re.findall(r"`([\w./-]+\.py)`", page.read_text()):
            known = "/" in name or page.name == "0-map.md"
            if known and not (ROOT / name).is_file():
                wrong.append(f"{page.name}: {name}")
    assert wrong == []


def test_the_map_is_one_page() -> None:
    lines = (ROOT / "docs" / "0-map.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 140
