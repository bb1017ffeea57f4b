"""What `benchmarks.beside` makes of several folders of seeds' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.beside import gathered, of_families
from errors import ConfigurationError
from tasks.comparison.results import path_of, write_result
from tasks.comparison.table import table_of
from tests.tasks.comparison.seed_files import figures, seed_result


def folder(home: Path, *seeds: int, solved: int) -> Path:
    home.mkdir()
    for seed in seeds:
        write_result(path_of(home, "shop", seed), seed_result(seed, {"trace": figures(solved), "base": figures(2)}))
    return home


def test_folders_with_other_seeds_are_one_series(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a", 1, 2, solved=20), folder(tmp_path / "b", 3, solved=10)
    found = gathered([f"{first},{second}:trace", f"{first},{second}:base"], "shop")
    assert [r.seed for r in found] == [1, 2, 3]
    assert all(set(r.methods) == {"trace", "a+b:base"} for r in found)


def test_a_seed_of_two_folders_is_no_series(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a", 1, 2, solved=20), folder(tmp_path / "b", 2, solved=10)
    with pytest.raises(ConfigurationError, match="seed 2 is in two of the folders"):
        gathered([f"{first},{second}:trace"], "shop")


@pytest.mark.parametrize("seeds", [(1, 2), (3, 4)])
@pytest.mark.parametrize(
    ("changed", "what"), [({"base": "other"}, "base"), ({"revision": "r9"}, "version of the base")]
)
def test_two_base_models_stand_in_no_table(
    tmp_path: Path, seeds: tuple[int, ...], changed: dict[str, str], what: str
) -> None:
    first, second = folder(tmp_path / "a", 1, 2, solved=20), tmp_path / "b"
    second.mkdir()
    for seed in seeds:
        write_result(path_of(second, "shop", seed), seed_result(seed, {"trace": figures(10)}, **changed))
    with pytest.raises(ConfigurationError, match=f"b:trace has another {what} than .*a:trace: "):
        gathered([f"{first}:trace", f"{second}:trace"], "shop")


def test_a_difference_is_shown_where_it_lies(tmp_path: Path) -> None:
    """The first twelve tasks of each method succeed, every third of them a refund."""
    place = folder(tmp_path / "a", 1, 2, solved=12)
    results = gathered([f"{place}:trace", f"{place}:base"], "shop")
    alone, others = of_families(results, ["refund"], []), of_families(results, [], ["refund"])
    assert [set(r.families.values()) for r in (*alone, *others)] == [{"refund"}] * 2 + [{"cancel", "move"}] * 2
    assert [len(r.methods["trace"].outcomes) for r in (*alone, *others)] == [8, 8, 16, 16]
    assert [row.success for row in table_of(alone).rows] == [0.5, 1 / 8], "of two tasks the base solves one such"
    with pytest.raises(ConfigurationError, match=r"no result has the family 'sell'; name some of cancel, move, refund"):
        of_families(results, ["sell"], [])
    with pytest.raises(ConfigurationError, match="no task is left"):
        of_families(results, ["refund"], ["refund"])


def test_two_folders_of_one_name_are_not_taken_for_one(tmp_path: Path) -> None:
    """Of both the table would have had the second alone."""
    (tmp_path / "old").mkdir()
    first, now = folder(tmp_path / "a", 1, solved=20), folder(tmp_path / "shop", 1, solved=10)
    before = folder(tmp_path / "old" / "shop", 1, solved=5)
    with pytest.raises(ConfigurationError, match=r"two arguments are called shop:trace, the second of them .*old/"):
        gathered([f"{first}:trace", f"{now}:trace", f"{before}:trace"], "shop")
