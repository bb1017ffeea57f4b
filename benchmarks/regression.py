"""Whether something became slower: ratios measured now against those in `benchmarks/baseline.json`.

    make bench                                           # measure and compare; 1 when a figure is worse
    make bench ARGS="--update"                           # take what was measured as the new baseline
    python -m benchmarks.regression store selection      # these alone

A benchmark takes part when it has a function `figures() -> dict[str, float]`: name -> ratio of two times of the same
run, so that a slower machine changes both (lower is better). Times of the processor, where nothing waits, are little
moved by other work. `--update` gives a new figure its first baseline; then look at its tolerance, the share that the
ratio may grow by before it counts as worse: repeated runs on a busy machine show what is noise.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
BASELINE = FOLDER / "baseline.json"
TOLERANCE = 0.35
LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Compared:
    """One figure: what was measured (None when it was not), what is stored, and whether it is worse."""

    name: str
    measured: float | None
    stored: float | None
    tolerance: float
    worse: bool

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "NOT MEASURED"
        if self.stored is None:
            return "new: store it with --update"
        if self.worse:
            return f"WORSE by {self.measured / self.stored - 1:.0%}"
        if self.measured < self.stored / (1 + self.tolerance):
            return "better: store it with --update"
        return "as before"


def compare(
    measured: Mapping[str, float], stored: Mapping[str, Mapping[str, float]], expected: Sequence[str] = ()
) -> list[Compared]:
    """Each figure against the baseline, in the order of names. A figure of `expected` benchmarks (the beginning of its
    name, up to the colon) that is stored and was not measured is worse, and so is one that is no finite positive
    number; a new one is not."""
    names = {name for name in stored if name.partition(":")[0] in expected} | set(measured)
    found = []
    for name in sorted(names):
        now, entry = measured.get(name), stored.get(name)
        tolerance = entry["tolerance"] if entry else TOLERANCE
        broken = now is None or not math.isfinite(now) or now <= 0
        worse = broken or (entry is not None and now is not None and now > entry["ratio"] * (1 + tolerance))
        found.append(Compared(name, now, entry["ratio"] if entry else None, tolerance, worse))
    return found


def updated(measured: Mapping[str, float], stored: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The baseline with what was measured; tolerances that are stored stay."""
    entries = {name: dict(entry) for name, entry in stored.items()}
    for name, ratio in measured.items():
        tolerance = entries.get(name, {}).get("tolerance", TOLERANCE)
        entries[name] = {"ratio": float(f"{ratio:.3g}"), "tolerance": tolerance}
    return dict(sorted(entries.items()))


def table(compared: Sequence[Compared]) -> str:
    """What `make bench` prints."""
    width = max((len(c.name) for c in compared), default=0)
    lines = [f"{'figure':<{width}} {'stored':>8} {'now':>8} {'may grow':>9}  verdict"]
    for c in compared:
        stored, now = (f"{v:8.3g}" if v is not None else f"{'-':>8}" for v in (c.stored, c.measured))
        lines.append(f"{c.name:<{width}} {stored} {now} {c.tolerance:9.0%}  {c.verdict}")
    return "\n".join(lines)


def suite() -> list[str]:
    """Names of the benchmarks with a function `figures`; found without importing them."""
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(node, ast.FunctionDef) and node.name == "figures" for node in body):
            found.append(path.stem)
    return found


def measure(name: str, limit: float) -> dict[str, float]:
    """The figures of one benchmark, from a process of its own; empty, with the reason printed, when it fails."""
    code = f"import json, benchmarks.{name} as b; print(json.dumps(b.figures()))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=limit, check=True
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {limit:.0f} s", file=sys.stderr)
        return {}
    except subprocess.CalledProcessError as problem:
        print(f"{name}: ended with {problem.returncode}", file=sys.stderr)
        return {}
    return {f"{name}: {figure}": float(ratio) for figure, ratio in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    known = suite()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="benchmark", help=f"of {', '.join(known)}; all when none is given")
    parser.add_argument("--update", action="store_true", help="write what was measured to baseline.json")
    options = parser.parse_args()
    unknown = set(options.names) - set(known)
    if unknown:
        parser.error(f"no benchmark {sorted(unknown)}; choose from {', '.join(known)}")
    chosen, measured, until = options.names or known, dict[str, float](), time.monotonic() + LIMIT_SECONDS
    for name in chosen:
        began = time.monotonic()
        measured |= measure(name, until - began)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    stored = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.is_file() else {}
    compared = compare(measured, stored, chosen)
    print(table(compared))
    if options.update:
        BASELINE.write_text(json.dumps(updated(measured, stored), indent=1) + "\n", encoding="utf-8")
        print(f"{BASELINE.name} holds {len(measured)} figures of this run")
        raise SystemExit(0)
    raise SystemExit(1 if any(c.worse for c in compared) else 0)


if __name__ == "__main__":
    main()
