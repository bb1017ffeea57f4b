"""The whole round on the embedded default, for several seeds, against what it must reach.

    python -m benchmarks.round --seeds 0 1 2            # three rounds, about 15 minutes each on two cores
    python -m benchmarks.round --seeds 0 --twice        # the same seed twice: same capabilities, same trajectory ids

Each round runs in a process and a folder of its own, as a newcomer's would. Prints one line per requirement, and how
much of the processors other machines took meanwhile (steal): above a few percent, seconds mean little, and the
processor time that the round used says more (on two cores it is nearly twice the minutes of an undisturbed round).

Work is what the stages' clocks say of model and environment, and the loading of the model's libraries (torch and
transformers, timed in a process of their own). Orchestration is the rest of the command's wall time.

A table tells where the wall time went, by stage (`benchmarks/clocks.py`): *floor*, what the fp32 matrix products of the
tokens that the stage computed take on this machine (`benchmarks/floor.py`, measured after the round), the rest of the
model's time, environment, store, MLflow, and what is left (Prefect, tables and text). Its rows add up to the command's
wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.floor import Floor, measure
from db import CapabilityRow, SelectionRow, open_store
from models.work import Work

LIBRARIES = "import torch, transformers; from transformers import AttentionInterface, AutoModelForCausalLM"


def seconds_of(code: str) -> float:
    """Wall time of a Python process that runs `code`."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.monotonic() - began


def processors() -> tuple[float, float]:
    """Processor time since the machine started, in ticks: what other machines took of ours, and all (Linux)."""
    ticks = [float(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


def run(seed: int, home: Path, profile: str) -> dict[str, Any]:
    """One round; the figures of `trace-agent status --json`, and `wall`: the command's own seconds, start included;
    `libraries`: seconds to load torch and transformers; `steal`: share of the processors that others took; `cpu`:
    processor seconds of the round."""
    command = [sys.executable, "-m", "flows.cli.main"]
    libraries = seconds_of(LIBRARIES) - seconds_of("")
    clocks = home.parent / f"{home.name}-clocks.json"
    round_ = [sys.executable, "-m", "benchmarks.clocks", str(clocks), "improve"]
    used, (stolen, ticks) = resource.getrusage(resource.RUSAGE_CHILDREN), processors()
    began = time.monotonic()
    subprocess.run([*round_, "--seed", str(seed), "--home", str(home), "--profile", profile], check=True)
    wall = time.monotonic() - began
    now_used, (now_stolen, now) = resource.getrusage(resource.RUSAGE_CHILDREN), processors()
    cpu = now_used.ru_utime + now_used.ru_stime - used.ru_utime - used.ru_stime
    shown = subprocess.run(
        [*command, "status", "--json", "--home", str(home)], check=True, capture_output=True, text=True
    )
    figures: dict[str, Any] = json.loads(shown.stdout)
    steal = (now_stolen - stolen) / (now - ticks)
    times = json.loads(clocks.read_text())
    return figures | {"wall": wall, "libraries": libraries, "steal": steal, "cpu": cpu, "clocks": times}


def fp32_floor() -> Floor:
    """The floor of the embedded model on this machine, with its rows in flight (some seconds)."""
    import torch
    from transformers import AutoConfig

    from models.local.base import embedded_folder

    return measure(AutoConfig.from_pretrained(embedded_folder()), torch.float32)


def where(wall: float, clocks: Mapping[str, Any], floor: Floor) -> tuple[list[str], float]:
    """The table stage x part as lines, in seconds, and the wall time as a multiple of the floor of all work."""
    parts = ("floor", "other model", "environment", "store", "MLflow", "rest")
    rows: dict[str, list[float]] = {}
    for stage in clocks["stages"]:
        least = floor.seconds(Work(**stage["work"]))
        known = [least, stage["model"] - least, stage["environment"], stage["store"], stage["mlflow"]]
        row = rows.setdefault(stage["name"].split(":")[0], [0.0] * len(parts))
        rows[stage["name"].split(":")[0]] = [
            a + b for a, b in zip(row, [*known, stage["seconds"] - sum(known)], strict=True)
        ]
    first, last = clocks["stages"][0], clocks["stages"][-1]
    ended = last["began"] + last["seconds"]
    inside = sum(map(sum, rows.values()))
    outside = {"start": first["began"], "between stages": ended - first["began"] - inside, "end": wall - ended}
    lines = [f"  {'seconds':<15}" + "".join(f"{part:>13}" for part in (*parts, "sum"))]
    lines += [f"  {name:<15}" + "".join(f"{x:13.1f}" for x in (*row, sum(row))) for name, row in rows.items()]
    lines += [f"  {name:<15}{'':65}{x:13.1f}{x:13.1f}" for name, x in outside.items()]
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    total[-1] += sum(outside.values())
    lines.append(f"  {'sum':<15}" + "".join(f"{x:13.1f}" for x in (*total, sum(total))))
    return lines, wall / total[0]


def stored(home: Path) -> tuple[list[str], set[str]]:
    """Selected capabilities and trajectory ids of a home's store."""
    store = open_store(f"sqlite:///{home / 'trace.db'}")
    names = {r.id: r.name for r in store.rows(CapabilityRow)}
    ranked = sorted(store.rows(SelectionRow, selected=True), key=lambda r: r.rank or 0)
    chosen = [names[r.capability_id] for r in ranked]
    return chosen, set(store.query("SELECT id FROM trajectories")["id"])


def requirements(f: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """What the round must reach: name, whether it did, the figure."""
    trained = [c for c in f["capabilities"] if c["adapter_success"] is not None]
    gains = [100 * (c["adapter_success"] - c["base_success"]) for c in trained]
    strong = {n: 100 * (v["routed"] - v["base"]) for n, v in f["families"].items() if v["base"] > 0.8}
    worked = f["work"]["model"] + f["work"]["environment"] + f["libraries"]
    d = f["difference"] or {"points": 0.0, "p": 1.0}
    return [
        ("at most 15 minutes", f["wall"] <= 900, f"{f['wall'] / 60:.1f} min"),
        ("at most 6 GiB", f["peak_gib"] <= 6, f"{f['peak_gib']:.1f} GiB"),
        (
            "orchestration at most 5 % of wall time",
            worked >= 0.95 * f["wall"],
            f"{100 * (1 - worked / f['wall']):.1f} % ({f['work']}, libraries {f['libraries']:.1f})",
        ),
        ("at least two capabilities trained", len(trained) >= 2, ", ".join(c["name"] for c in trained)),
        ("each adapter at least +30 points", bool(gains) and min(gains) >= 30, ", ".join(f"{g:+.0f}" for g in gains)),
        ("routed at least +15 points on test", d["points"] >= 15, f"{d['points']:+.1f}"),
        ("p < 0.05", d["p"] < 0.05, f"{d['p']:.4f}"),
        (
            "no strong family falls by more than 5",
            not strong or min(strong.values()) >= -5,
            str({k: round(v, 1) for k, v in strong.items()}),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--homes", type=Path, help="keep each seed's round in a folder of its own here")
    options = parser.parse_args()
    good = True
    for seed in options.seeds:
        kept = options.homes and options.homes / f"seed-{seed}"
        with contextlib.nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
            figures = run(seed, Path(folder) / "a", options.profile)
            base, routed = figures["base"]["success"], figures["routed"]["success"]
            right = (figures["router"] or {}).get("right")
            router = "" if right is None else f", router right on {100 * right:.0f} % of what was kept out of its fit"
            print(f"seed {seed}: base {100 * base:.1f} %, routed {100 * routed:.1f} %{router}")
            for c in figures["capabilities"]:
                if c["verdict"] not in ("not-selected", "postponed"):
                    print(f"  {c['name']:<20} {c['base_success']} -> {c['adapter_success']}  {c['verdict']}")
            lines, multiple = where(figures["wall"], figures["clocks"], fp32_floor())
            print("\n".join(lines))
            print(f"  {multiple:.2f} times the fp32 floor of its work")
            stolen, cpu = 100 * figures["steal"], figures["cpu"] / 60
            print(f"  stolen by other machines: {stolen:.0f} % of the processors; used: {cpu:.1f} processor minutes")
            for name, reached, figure in requirements(figures):
                good &= reached
                print(f"  {'reached' if reached else 'MISSED ':<8} {name}: {figure}", flush=True)
            if options.twice:
                run(seed, Path(folder) / "b", options.profile)
                a, b = stored(Path(folder) / "a"), stored(Path(folder) / "b")
                same = a == b
                good &= same
                print(f"  {'reached' if same else 'MISSED '} the same seed twice: {a[0]} / {b[0]}")
                print(f"           {len(a[1] ^ b[1])} trajectory ids differ")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
