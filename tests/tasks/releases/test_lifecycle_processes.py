"""Promotions at the same moment, on both databases: one wins, the other is told."""

from __future__ import annotations

import threading
from pathlib import Path

from db import ReleaseState, open_store
from errors import ConfigurationError
from models.adapters.registry import Registry
from tasks.releases.lifecycle import promote, releases_of, rollback
from tests.tasks.releases.release_homes import Home


def test_of_two_promotions_at_once_one_wins(database_url: str, tmp_path: Path) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", "shop", tmp_path / "artifacts")
    with open_store(database_url) as store:
        home = Home(store, registry, tmp_path / "made")
        home.promoted({"refund": home.member("refund")})
        members = [{"refund": home.member("refund")} for _ in range(2)]
        rows = [home.candidate(m) for m in members]
        at_once, said = threading.Barrier(2), []

        def go(release: str) -> None:
            with open_store(database_url) as own:
                at_once.wait()
                try:
                    said.append(promote(own, registry, release, "better").number)
                except ConfigurationError as problem:
                    said.append(str(problem))

        threads = [threading.Thread(target=go, args=(row.id,)) for row in rows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [text for text in said if isinstance(text, int)]
        lost = [text for text in said if isinstance(text, str)]
        assert len(won) == len(lost) == 1, said
        assert f"was not compared with the live release {won[0]}: it was made from release 1" in lost[0]
        states = {row.number: row.state for row in releases_of(store, "shop")}
        other = 5 - won[0]
        assert states == {1: ReleaseState.RETIRED, won[0]: ReleaseState.LIVE, other: ReleaseState.CANDIDATE}
        home.check()
        assert rollback(store, registry, "shop").number == 1  # type: ignore[union-attr]
        home.check()
