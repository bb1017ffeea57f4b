"""Methods that were compared with other settings, or by another version, in one table: what each came to on the seeds
that it was run on, and its paired difference to the first.

    python -m benchmarks.beside results/night-shown:trace results/night-cloned:demonstrations results/night-28:trace

An argument is a folder of seeds' files (under `benchmarks/`, or any) and a method of them; the table calls it
FOLDER:METHOD. Several folders, with commas between them, are one series: each has other seeds. The files must be of the
same target, data, test tasks and base model; budget and settings may differ, and it is for the reader to say by what.
Intervals and p-values are those of `trace-agent compare-methods`. `--only` and `--without` leave the tasks of some
families: where a difference lies.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from errors import ConfigurationError
from tasks.comparison.page import lines
from tasks.comparison.results import SeedResult, read_results
from tasks.comparison.table import REFERENCE, table_of

HERE = Path(__file__).parent


def with_method(folder: str, target: str, method: str) -> list[SeedResult]:
    """A folder's results that have `method`; raises `ConfigurationError` where none has."""
    where = HERE / folder if (HERE / folder).is_dir() else Path(folder)
    if results := [r for r in read_results(where, target) if method in r.methods]:
        return results
    raise ConfigurationError(f"{where} has no file of {target} with the method {method!r}; name one that it has")


def gathered(asked: Sequence[str], target: str) -> list[SeedResult]:
    """Results by seed with the methods `asked` for (FOLDER:METHOD) under those names, the first as the reference.

    Raises `ConfigurationError` for a method that no file of its folder has, and for files of other data, tasks or
    base."""
    found: dict[int, SeedResult] = {}
    bases: dict[str, str] = {}
    for place, name in enumerate(asked):
        folders, _, method = name.rpartition(":")
        series = [r for folder in folders.split(",") for r in with_method(folder, target, method)]
        seeds = [r.seed for r in series]
        if twice := sorted({s for s in seeds if seeds.count(s) > 1}):
            raise ConfigurationError(f"{folders}: seed {twice[0]} is in two of the folders; name one of them")
        for result in series:
            # A file of an earlier version says no revision.
            for what, said in (("base", result.base), ("version of the base", result.revision)):
                if said and bases.setdefault(what, said) != said:
                    raise ConfigurationError(f"{name} has another {what} than {asked[0]}: {said} and {bases[what]}")
            known = found.setdefault(result.seed, result.model_copy(update={"methods": {}}))
            if (result.data_hash, result.families, result.shift) != (known.data_hash, known.families, known.shift):
                raise ConfigurationError(f"seed {result.seed} in {name} is of other data or tasks than in {asked[0]}")
            called = REFERENCE if place == 0 else f"{'+'.join(Path(f).name for f in folders.split(','))}:{method}"
            if called in known.methods:
                raise ConfigurationError(
                    f"two arguments are called {called}, the second of them {name}; rename a folder"
                )
            found[result.seed] = known.with_method(called, result.methods[method])
    first = next(iter(found.values()))
    same: dict[str, object] = {n: getattr(first, n) for n in ("budget", "settings", "profile", "trials")}
    if not asked[0].endswith(f":{REFERENCE}"):  # what it trained for says nothing of TRACE's untouched families
        same["needs"] = {}
    return [found[seed].model_copy(update=same) for seed in sorted(found)]


def of_families(results: Sequence[SeedResult], only: Collection[str], without: Collection[str]) -> list[SeedResult]:
    """The results on test tasks of the families `only` (none named: of all), without those of others.

    Raises `ConfigurationError` for a family that no result has, and where no task is left."""
    known = {family for result in results for family in result.families.values()}
    if unknown := {*only, *without} - known:
        raise ConfigurationError(f"no result has the family {min(unknown)!r}; name some of {', '.join(sorted(known))}")
    kept = [
        {t: f for t, f in result.families.items() if (not only or f in only) and f not in without} for result in results
    ]
    if not all(kept):
        raise ConfigurationError("no task is left; name fewer families")
    found = []
    for result, families in zip(results, kept, strict=True):
        methods = {
            name: m.model_copy(
                update={
                    "outcomes": {t: o for t, o in m.outcomes.items() if t in families},
                    "capabilities": (),
                    "rollouts": (),
                }
            )
            for name, m in result.methods.items()
        }
        found.append(result.model_copy(update={"families": families, "methods": methods}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="FOLDER:METHOD", help="the first is what others are held against")
    parser.add_argument("--target", default="shop")
    parser.add_argument("--only", default="", help="families whose tasks count, with commas between them")
    parser.add_argument("--without", default="", help="families whose tasks do not count")
    given = parser.parse_args()
    try:
        families = [[f for f in said.split(",") if f] for said in (given.only, given.without)]
        results = gathered(given.methods, given.target)
        results = of_families(results, *families) if any(families) else results
        table = table_of(results)
    except ConfigurationError as problem:
        parser.error(f"{problem}; --target is {given.target}")
    print(f"{REFERENCE} is {given.methods[0]}")
    for result in results:
        rows = table_of([result]).rows
        print(f"seed {result.seed}: {', '.join(f'{row.name} {100 * row.success:.1f} %' for row in rows)}")
    print("\n".join(lines(table)))


if __name__ == "__main__":
    main()
