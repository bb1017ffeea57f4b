"""The bank of environments: every module of a target that was accepted in some round, with what it came to.

It is a view of the store, so nothing is kept twice: the module's code and verdicts, its calibration, the adapters that
were trained in it and the releases that hold them. Before a new module is asked for, the nearest of the bank are
validated and calibrated again (`tasks.synthesis.llm_synthesizer`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from db import (
    AdapterRow,
    AdapterState,
    CalibrationRow,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    ReleaseRow,
    ReleaseState,
    Round,
    Store,
    row_id,
)
from environments.synthesized.module_contract import VERSION
from errors import TargetError

# Modules of the bank that are tried for a capability, and how near its name and definition must be: the share of all
# words of both that they have in common.
TRIED, NEAR = 3, 0.3
# In the configuration of an adapter that could not be trained or measured: its module was at fault.
MODULE_AT_FAULT = "module-at-fault"
# What stands in place of the request's hash where none was made: a module of the bank, by the id of its row.
BANK = "bank:"


@dataclass(frozen=True)
class BankEntry:
    """An accepted module: where it was accepted, for what, and its figures. `level`, `success` and `informative` are of
    the last calibration, `base_success` and `adapter_success` of the last training in it, on fresh scenarios; None
    where there was none. `promoted`: a release that went live had an adapter of it. `contract` is the version of the
    module contract that it was written for."""

    id: str
    target: str
    capability: str
    definition: str
    round: int
    code_hash: str
    code: str
    contract: int
    level: int | None = None
    success: float | None = None
    informative: float | None = None
    base_success: float | None = None
    adapter_success: float | None = None
    promoted: bool = False

    @property
    def unusable(self) -> str:
        """Why it is not tried; "" where it is."""
        if self.contract == VERSION:
            return ""
        return (
            f"it was written for version {self.contract} of the module contract, this is version {VERSION}; it still "
            "plays, and is not trained in again"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything but the code, JSON-able."""
        return {name: value for name, value in asdict(self).items() if name != "code"} | {"unusable": self.unusable}


def bank_of(store: Store, target: str | None = None) -> list[BankEntry]:
    """The accepted modules of a target (None: of all), each once as it was last accepted, newest first. What was taken
    back last is not among them, and nor is what then broke down under an adapter: it would do so every night."""
    rounds = {r.id: r for r in store.rows(Round, **({} if target is None else {"target": target}))}
    promoted = _promoted(store, target)
    latest: dict[tuple[str, str], EnvironmentRow] = {}
    judged = (EnvironmentState.ACCEPTED, EnvironmentState.WITHDRAWN)
    for row in sorted(store.rows(EnvironmentRow, kind="llm"), key=lambda r: (r.created_at, r.id)):
        if row.round_id in rounds and row.state in judged:
            latest[rounds[row.round_id].target, row.code_hash] = row
    failed = store.rows(AdapterRow, state=AdapterState.FAILED)
    broken = {adapter.environment_id for adapter in failed if adapter.config.get(MODULE_AT_FAULT)}
    kept = [row for row in latest.values() if row.state == EnvironmentState.ACCEPTED and row.id not in broken]
    return [_entry(store, row, rounds[row.round_id], promoted) for row in reversed(kept)]


def nearest(bank: Sequence[BankEntry], capability: str, definition: str) -> list[BankEntry]:
    """The entries to try for a capability, at most `TRIED`: those that were promoted with before the others, then the
    nearest, then the newest. Unusable ones among them are told and do not count."""
    near = [(likeness(entry, capability, definition), entry) for entry in bank]
    order = sorted((pair for pair in near if pair[0] >= NEAR), key=lambda p: (not p[1].promoted, -p[0], -p[1].round))
    found: list[BankEntry] = []
    for _, entry in order:
        if sum(not other.unusable for other in found) == TRIED:
            break
        found.append(entry)
    return found


def likeness(entry: BankEntry, capability: str, definition: str) -> float:
    """In [0, 1]: 1 for the same name, else the share of words that the two names and definitions have in common."""
    if entry.capability == capability:
        return 1.0
    ours, theirs = _words(f"{capability} {definition}"), _words(f"{entry.capability} {entry.definition}")
    return len(ours & theirs) / len(ours | theirs) if ours | theirs else 0.0


def entry_of(store: Store, key: str) -> BankEntry:
    """The entry whose code's hash or id begins with `key`. Raises `TargetError` when there is none, or several."""
    bank = bank_of(store)
    found = [entry for entry in bank if key and (entry.code_hash.startswith(key) or entry.id.startswith(key))]
    if len(found) == 1:
        return found[0]
    known = ", ".join(entry.code_hash[:12] for entry in bank) or "none"
    what = "several environments begin" if found else "no environment of the bank begins"
    raise TargetError(f"{what} with {key!r}; there are: {known} ('trace-agent environments list')")


def _entry(store: Store, row: EnvironmentRow, at: Round, promoted: set[str]) -> BankEntry:
    about = store.row(CapabilityRow, id=row.capability_id)
    measured = store.row(CalibrationRow, id=row_id(row.id, "calibration"))
    trained = [a for a in store.rows(AdapterRow, environment_id=row.id) if a.adapter_success is not None]
    last = max(trained, key=lambda a: (a.created_at, a.id), default=None)
    return BankEntry(
        id=row.id,
        target=at.target,
        capability=about.name if about else "",
        definition=about.definition if about else "",
        round=at.number,
        code_hash=row.code_hash,
        code=row.code or "",
        contract=int(row.spec.get("contract", 1)),
        level=measured.detail.get("level") if measured else None,
        success=measured.success_rate if measured else None,
        informative=measured.informative if measured else None,
        base_success=last.base_success if last else None,
        adapter_success=last.adapter_success if last else None,
        promoted=row.code_hash in promoted,
    )


def _promoted(store: Store, target: str | None) -> set[str]:
    """Hashes of the modules that an adapter of a release was trained in that is or was live and not taken back."""
    releases = store.rows(ReleaseRow, **({} if target is None else {"target": target}))
    live = (ReleaseState.LIVE, ReleaseState.RETIRED)
    adapters = {str(m["adapter_id"]) for r in releases if r.state in live for m in r.members.values()}
    trained = [store.row(AdapterRow, id=adapter) for adapter in sorted(adapters)]
    ids = {row.environment_id for row in trained if row is not None and row.environment_id}
    return {row.code_hash for row in store.rows(EnvironmentRow, kind="llm") if row.id in ids}


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}
