"""A server goes away at the end of an evaluation: the stage is tried again, and needs no second candidate any more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from db import ReleaseRow, ReleaseState
from errors import ProviderError
from models.scripted import NoopPolicy, OraclePolicy
from tasks import evaluate as evaluate_file
from tasks import gate as gate_file
from tasks.evaluate import evaluate
from tasks.measuring.lineup import Lineup, Trials
from tasks.releases import lifecycle
from tasks.releases.lookup import release_of_round
from tasks.reporting.before_after import release_figures
from tasks.reporting.history import history_of
from tasks.round.context import Context
from tasks.round.results import EvaluateResult
from tests.tasks.test_settled_gate import CANDIDATE, OTHER, OWN, SECOND, context  # noqa: F401  # a fixture


def test_the_candidate_that_was_judged_is_the_rounds(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first attempt the candidate loses eight tasks, so a second one is assembled; the server of that goes away.
    In the next attempt the candidate loses none."""
    attempts: list[str] = []

    def amended(context: Context, candidate: ReleaseRow, families: Collection[str]) -> ReleaseRow:
        second = replace(candidate, id="second", number=2, router="second")
        context.store.put([second])
        return second

    def play(context: Context, lineup: Lineup, owed: Trials, what: str) -> Any:
        if lineup is SECOND:
            raise ProviderError("the server does not answer", transient=True)
        bad = OWN if lineup is not CANDIDATE else OTHER if not attempts else ""
        ids: list[str] = []
        for policy, failed in ((OraclePolicy(), False), (NoopPolicy(), True)):
            some = [t for t in owed.tasks if (t.family == bad) == failed]
            episodes = replace(owed, tasks=some).episodes()
            ids += context.engine_of(policy).play(context.ground(owed.purpose), episodes, what)
        return SimpleNamespace(ids=ids)

    for name in ("heal", "_check_reachable_files", "publish"):
        monkeypatch.setattr(lifecycle, name, lambda *_: None)
    for name in ("create_markdown_artifact", "tell_verdict"):
        monkeypatch.setattr(gate_file, name, lambda *_, **__: None)
    monkeypatch.setattr(evaluate_file, "amend", amended)
    monkeypatch.setattr(evaluate_file, "play_lineup", play)
    with pytest.raises(ProviderError):
        evaluate.do(context)
    attempts.append("first")
    found = evaluate.do(context)
    assert found.candidate == ""
    context.__dict__["results"][EvaluateResult] = found
    assert gate_file.gate.do(context).release == 1

    made, second = release_of_round(context.store, context.round.id), context.store.row(ReleaseRow, id="second")
    assert made is not None
    assert second is not None
    assert (made.number, made.state) == (1, ReleaseState.LIVE)
    assert (second.state, second.reason) == (
        ReleaseState.REFUSED,
        "it was not evaluated to the end: release 1 has the verdict",
    )
    figures = release_figures(context.stored)
    assert figures is not None
    assert figures.number == 1
    (row,) = history_of(context.store, context.round.target)
    assert row.candidate == 1
