"""A home whose adapters are made in milliseconds, for tests of releases."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from db import AdapterRow, AdapterState, ReleaseRow, Round, Store, row_id
from models.adapters.files import AdapterRecord
from models.adapters.registry import Registry
from models.adapters.releases import read_aliases
from tasks.releases.lifecycle import live_release, new_candidate, promote, releases_of
from tasks.releases.lookup import Basis

BASE, REVISION, DATA = "tiny", "abc", "data-1"
_VALUES = count(1)


@dataclass
class Home:
    """A target of its own in two stores, with the adapters that a test asks for."""

    store: Store
    registry: Registry
    folder: Path

    @property
    def target(self) -> str:
        return self.registry.target

    def member(self, capability: str, base: str = BASE) -> dict[str, str]:
        """A new adapter of a capability, registered by a round of its own, as a member of a release."""
        value = float(next(_VALUES))
        place = self.folder / f"{capability}-{value}"
        place.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "tiny"}
        (place / "adapter_config.json").write_text(json.dumps(config))
        save_file({"q.lora_A.weight": np.full((4, 8), value, np.float32)}, place / "adapter_model.safetensors")
        round_ = self.store.start_round(self.target, DATA, 1, "laptop", {})
        record = AdapterRecord(capability, base, REVISION, round_.id)
        found = self.registry.register(record, place, self.registry.start_run(f"{round_.id}/{capability}"))
        row = AdapterRow(
            id=row_id(round_.id, "adapter", capability),
            round_id=round_.id,
            base=base,
            base_revision=REVISION,
            sha256=found.sha256,
            state=AdapterState.REGISTERED,
            registered_model=found.name,
            registered_version=found.version,
        )
        self.store.put([row])
        return {"adapter_id": row.id, "model": found.name, "version": found.version, "sha256": found.sha256}

    def candidate(
        self, members: dict[str, dict[str, str]], base: str = BASE, data_hash: str = DATA, **changes: Any
    ) -> ReleaseRow:
        given: dict[str, Any] = {
            "target": self.target,
            "parent": live_release(self.store, self.target),
            "round_id": None,
            "basis": Basis(base, REVISION, data_hash),
            "members": members,
        }
        return new_candidate(self.store, **given | changes)

    def promoted(self, members: dict[str, dict[str, str]], **changes: Any) -> ReleaseRow:
        return promote(self.store, self.registry, self.candidate(members, **changes).id, "better")

    def newest(self) -> ReleaseRow:
        return releases_of(self.store, self.target)[-1]

    def state(self, member: dict[str, str]) -> AdapterState:
        row = self.store.row(AdapterRow, id=member["adapter_id"])
        assert row is not None
        return row.state

    def states(self) -> dict[int, str]:
        return {row.number: str(row.state) for row in releases_of(self.store, self.target)}

    def check(self) -> None:
        """At most one release is live; its members alone are champions, in the store and in MLflow."""
        live = live_release(self.store, self.target)
        members = {} if live is None else live.members
        said = read_aliases(self.registry)
        assert said.live == (live.id if live else None)
        assert said.champions == {m["model"]: m["version"] for m in members.values()}
        rounds = {r.id for r in self.store.rows(Round, target=self.target)}
        champions = {a.id for a in self.store.rows(AdapterRow, state=AdapterState.CHAMPION) if a.round_id in rounds}
        assert champions == {m["adapter_id"] for m in members.values()}
