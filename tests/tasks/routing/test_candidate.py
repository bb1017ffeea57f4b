"""The candidate that a round assembles, and the router that it is amended with."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from db import ReleaseRow, ReleaseState
from models.router.router import Router
from tasks.measuring.lineup import Lineup
from tasks.routing import candidate, fitting
from tasks.routing.candidate import amend, member_versions, old_blends, routed_members
from tasks.routing.examples import Example


@pytest.mark.parametrize("mode", ["retrieval", "linear"])
@pytest.mark.parametrize("live", ["", "old"])
def test_families_that_fell_are_left_to_what_answers_them_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: str, mode: str
) -> None:
    """Three families of six examples, the second of which fell, and a task that nothing solves."""
    where = np.repeat(np.eye(3, dtype=np.float32), 6, axis=0) + np.linspace(0, 0.1, 18, dtype=np.float32)[:, None]
    labels = ["new"] * 12 + ["old"] * 6
    shown = [dict.fromkeys(("", "new", "old"), 0.0) | {label: 1.0} for label in labels]
    examples = [Example(f"t{i}", Mock(), where[i], labels[i], shown[i]) for i in range(18)]
    examples.append(Example("t18", Mock(), -where[17], None, dict.fromkeys(("", "new", "old"), 0.0)))
    frame = pd.DataFrame(
        {"id": [e.id for e in examples], "family": [*np.repeat(["gained", "fell", "kept"], 6), "fell"]}
    )
    today = Mock(route=lambda policy, renderer, openings: [Mock(capability=live) for _ in openings])
    incumbent = SimpleNamespace(members={"old": {"adapter_id": "o"}})
    context = Mock(folder=tmp_path / "round", settings=Mock(router=mode), model=nullcontext(), incumbent=incumbent)
    context.round.id = "round"
    context.store.trajectory_frame.return_value = frame
    context.store.row.return_value = SimpleNamespace(capability_id="c", definition="Calls what\nis asked for.")
    monkeypatch.setattr(fitting, "kept_out", lambda _: False)
    monkeypatch.setattr(candidate, "examples_of", lambda *_: examples)
    monkeypatch.setattr(candidate, "new_candidate", lambda store, **given: SimpleNamespace(**given))
    monkeypatch.setattr(candidate, "lineup_of", lambda *_: Lineup({}, today if live else None))
    first = ReleaseRow(
        id="r", target="shop", number=1, round_id="round", base="b", base_revision="r", data_hash="d",
        members={"new": {"adapter_id": "n"}, "old": {"adapter_id": "o"}}, router="first", router_path="round/router",
        state=ReleaseState.CANDIDATE, evidence={"new": ["new"]},
    )  # fmt: skip
    amended = amend(context, first, ["fell"])
    assert amended is not None
    assert amended.members == first.members
    assert amended.evidence == {"new": ["new"], "left": ["fell"]}
    context.files.put.assert_called_once_with(amended.router_path)
    saved = Router.load(tmp_path / amended.router_path)
    assert saved.version == amended.router != "first"
    assert list(saved.labels) == ["new"] * 6 + [live] * 6 + ["old"] * 6
    assert [d.capability for d in saved.decide(where)] == list(saved.labels)
    assert saved.mode == mode
    said = {c.capability: c.description for c in saved.candidates}
    assert said == {"new": "Calls what is asked for.", "old": "Calls what is asked for."} | ({} if live else {"": ""})
    another = amend(context, first, ["gained"])  # an attempt that was broken off, whose candidate has its own router
    assert another is not None
    assert [Router.load(tmp_path / made.router_path).version for made in (amended, another)] == [
        saved.version,
        another.router,
    ]
    assert another.router != saved.version
    assert amend(context, first, ["never met"]) is None
    if live:  # what answers the family today is in the candidate no longer: nobody is left whom it could be left to
        incumbent.members["old"] = {"adapter_id": "the version before"}
        assert amend(context, first, ["fell"]) is None


def test_a_candidate_goes_on_from_a_release_with_a_blend() -> None:
    """No round trained a blend, the store has no adapter of it: it stays as the parent has it, and is not routed to;
    one that holds the old weights of a renewed member does not stay."""
    blend = {"adapter_id": "", "model": "trace-shop-blend", "version": "1", "sha256": "b"}
    before = {c: {"adapter_id": c, "model": c, "version": "1", "sha256": c} for c in ("kept", "third", "renewed")}
    old = {"blend-kept-2-renewed-2": blend, "blend-renewed-3": blend}
    parent: Any = SimpleNamespace(members={**before, **old, "blend-kept-2-third-2": blend})
    row = SimpleNamespace(registered_model="renewed", registered_version="2", sha256="s")
    store = Mock(row=lambda kind, id: row if id == "new" else None)
    context: Any = SimpleNamespace(parent=parent, store=store)
    renewed = {"adapter_id": "new", "model": "renewed", "version": "2", "sha256": "s"}
    found = member_versions(context, {"renewed": "new"})
    assert found == {**before, "renewed": renewed, "blend-kept-2-third-2": blend}
    assert old_blends(parent, {"renewed": "new"}) == sorted(old)
    assert old_blends(parent, {"enewed": "new"}) == []
    assert routed_members(context.parent) == {"kept": "kept", "third": "third", "renewed": "renewed"}
    context.parent = None
    assert member_versions(context, {"renewed": "new"}) == {"renewed": renewed}
