"""The two tables of the README have the figures of the stored files, as `python -m benchmarks.beside` draws them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.beside import gathered
from tasks.comparison.table import REFERENCE, Table, table_of

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SHOP, BFCL = "results/shop-practised,results/shop-drawn,results/shop-settled", "results/bfcl-held"
NUMBER = re.compile(r"(< )?([+-]?\d[\d,]*(?:\.\d+)?)")
# Each table's heading, target, and the folder of each method, TRACE's first.
TABLES = {
    "### In the built-in shop": (
        "shop",
        dict.fromkeys(("trace", "base", "demonstrations", "demonstrations-grpo", "generalist", "single"), SHOP),
    ),
    "### On a public benchmark": (
        "bfcl:single",
        dict.fromkeys(("trace", "base", "examples", "constant", "single", "demonstrations"), BFCL)
        | {"grpo-target": f"{BFCL}-grpo", "gepa": f"{BFCL}-gepa", "mixed": f"{BFCL}-mixed"},
    ),
}


def rows_under(heading: str) -> tuple[list[str], dict[str, list[str]]]:
    """The columns of the first table under a heading, and each method's cells, without marks of bold."""
    table = re.findall(r"^\|(.*)\|$", README.partition(heading)[2].partition("\n- ")[0], re.MULTILINE)
    head, _, *body = [[cell.strip().strip("*") for cell in line.split("|")] for line in table]
    named = {(re.findall(r"`([a-z-]+)`", cells[0]) or ["base"])[0]: cells for cells in body}
    return head, named


def numbers(cell: str) -> list[tuple[float, float]]:
    """The numbers of a cell, each with half of its last digit. What is below one lies between it and 0."""
    said = [(less, text.replace(",", "")) for less, text in NUMBER.findall(cell.replace(", ", " ; "))]
    halves = [float(text) / 2 if less else 0.5 * 10 ** -len(text.partition(".")[2]) for less, text in said]
    return [(half if less else float(text), half) for (less, text), half in zip(said, halves, strict=True)]


def figures_of(table: Table, by_seed: list[Table], method: str) -> dict[str, list[float]]:
    """What the stored files say of a method, by the beginning of the column that has it."""
    (row,) = [r for r in table.rows if r.name.rpartition(":")[2] == method]
    (other,) = [o for o in table.others if o.name == row.name]
    assert other.shift is not None
    each = [r.success for one in by_seed for r in one.rows if r.name == row.name]
    d = row.difference
    return {
        "test split": [100 * row.success, 100 * row.low, 100 * row.high],
        "seed": [100 * success for success in each],
        "minus": [d.points, d.low, d.high, d.p] if d else [],
        "shift test": [100 * other.shift.value, 100 * other.shift.low, 100 * other.shift.high],
        "episodes": [row.episodes],
        "seconds": [row.seconds],
    }


@pytest.mark.parametrize("heading", TABLES)
def test_the_tables_have_what_is_stored(heading: str) -> None:
    target, folders = TABLES[heading]
    head, said = rows_under(heading)
    assert said.keys() == folders.keys()
    results = gathered([f"{folder}:{name}" for name, folder in folders.items()], target)
    table, by_seed = table_of(results), [table_of([result]) for result in results]
    assert next(iter(folders)) == REFERENCE
    wrong = []
    for method, cells in said.items():
        stored = figures_of(table, by_seed, method)
        for column, cell in zip(head[1:], cells[1:], strict=True):
            (name,) = [key for key in stored if column.startswith(key)]
            shown, found = numbers(cell), stored[name]
            # Episodes are told to the nearest ten there.
            loose = 5.0 if name == "episodes" else 1e-9
            near = len(shown) == len(found) and all(
                abs(value - number) <= half + loose for value, (number, half) in zip(found, shown, strict=True)
            )
            if not near:
                wrong.append(f"{method}, {column}: {cell}, stored {[round(value, 4) for value in found]}")
    assert wrong == []
