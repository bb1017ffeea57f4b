"""What ends the playing of shards is what comes out, whatever the database says by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from db import Shards
from errors import StoreError
from tasks.round.engine import Engine, PlayRun
from tasks.round.stage import forget
from tasks.shards.sharing import SharedPlay
from tests.models.vllm_backend.vllm_stub import vllm_stub
from tests.tasks.shards.shared_rounds import opened, ordered, saved_base


def test_a_database_that_is_away_in_the_end_does_not_hide_what_ended_the_work(
    settings_folder: Path,
    tiny_model: Any,
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stop(self: Engine, *_: Any) -> PlayRun:
        raise KeyboardInterrupt

    def away(self: Shards, which: str) -> None:
        raise StoreError(f"no database for {which}")

    base = saved_base(settings_folder / "base", tiny_model, tiny_tokenizer)
    with vllm_stub() as stub:
        context = opened(settings_folder / "home", base, stub)
        monkeypatch.setattr(Engine, "play_given", stop)
        monkeypatch.setattr(Shards, "give_back", away)
        monkeypatch.setattr(Shards, "withdraw", away)
        try:
            with pytest.raises(KeyboardInterrupt):
                SharedPlay(context).play(context.engine.engine, *ordered(context), "it")
        finally:
            forget(context.round.id)
    assert caplog.text.count("no database for") == 2
