"""What both lack: the episodes of whichever a router would let answer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from tasks.routing import lacking

TASKS = [f"{family}-{i}" for family in ("swap", "refund", "cancel") for i in range(16)]
PLACES = {"swap": np.eye(4)[0], "refund": np.eye(4)[1], "cancel": np.eye(4)[2]}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Base and generalist by the families that they solve: what is mined of them."""

    def mined(base: set[str], generalist: set[str], lost: str = "", odd: str = "") -> list[str]:
        rows = []
        for task in TASKS:
            family = task.partition("-")[0]
            rows.append((f"b-{task}", task, (family in base) != (task == odd)))
            if task != lost:
                rows.append((f"g-{task}", task, family in generalist))
        frame = pd.DataFrame(rows, columns=["id", "task", "success"])
        rng = np.random.default_rng(0)
        vectors = {t: PLACES[t.partition("-")[0]] + 0.1 * rng.normal(size=4) for t in TASKS}
        monkeypatch.setattr(lacking, "outcomes", lambda store, ids: frame[frame["id"].isin(ids)])
        monkeypatch.setattr(lacking, "stored_openings", lambda context, ids: {i: i for i in ids})
        monkeypatch.setattr(
            lacking, "embed_openings", lambda policy, given: np.stack([vectors[i.removeprefix("g-")] for i in given])
        )
        ids = [str(i) for i in frame["id"]]
        context = Mock(model=nullcontext())
        return lacking.best_played(context, [i for i in ids if i[0] == "b"], [i for i in ids if i[0] == "g"])

    return mined


def families(ids: list[str], who: str) -> set[str]:
    return {i.split("-")[1] for i in ids if i.startswith(who)}


def test_what_was_unlearnt_is_the_bases_and_no_lack(play: Any) -> None:
    mined = play({"swap"}, {"cancel"})
    assert len(mined) == len(TASKS)
    assert families(mined, "b") == {"swap"}
    assert families(mined, "g") == {"refund", "cancel"}, "what neither solves is the generalist's"


def test_no_episode_speaks_for_itself(play: Any) -> None:
    """The base solved one task of a family once, by chance: it would not be asked for that."""
    assert play(set(), {"cancel"}, odd="refund-3") == [f"g-{task}" for task in TASKS]


def test_a_task_that_one_has_lost_is_left_out(play: Any) -> None:
    mined = play({"swap"}, {"cancel"}, lost="cancel-2")
    assert len(mined) == len(TASKS) - 1
    assert not [i for i in mined if i.endswith("cancel-2")]
