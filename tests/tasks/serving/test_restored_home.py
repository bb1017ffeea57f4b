"""A home that was backed up, removed and put back elsewhere: the gateway answers with the same adapters, the next round
goes on from the same release."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import flows.improve as flow
from settings import Settings, load_settings
from tasks.housekeeping.backup import make_backup
from tasks.housekeeping.restore import restore_backup
from tasks.measuring.lineup import lineup_of
from tasks.serving.gateway import Serving, build_gateway, serving_settings
from tasks.serving.releases import Routing
from tests.models.serving.gateway_servers import serving
from tests.tasks.serving.test_serving import GatewaySettings, Home, ask, status


def answers(settings: Settings, capability: str = "refund_payment") -> tuple[Any, str, str]:
    """Members of what the home's gateway serves, who answers a request, and what it says."""
    found, store = serving_settings(settings.folder, None)
    fixed = Serving(routing=Routing("fixed", capability))
    with store, serving(build_gateway(found, store, fixed, GatewaySettings())) as url:
        said = ask(url, "Refund 7 of order 264.").json()
        return status(url)["release"]["members"], said["model"], said["choices"][0]["message"]["content"]


def test_it_answers_and_goes_on(settings_folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking._tracking_service import utils

    home = Home(settings_folder, tiny_tokenizer)
    released = home.promote(home.register("refund_payment", 1), home.register("exchange_item", 2))
    before = answers(home.settings)
    assert before[1].startswith("refund_payment@v1-")
    make_backup(home.settings, settings_folder / "home.zip", "1")
    shutil.rmtree(home.folder)
    # MLflow's client keeps in the process where the files of a model lie; another process does not know.
    utils._artifact_repos_cache.clear()
    moved = load_settings(home=settings_folder / "else" / "where", base_model=home.settings.base_model, dtype="float32")
    restore_backup(settings_folder / "home.zip", moved)
    assert answers(moved) == before
    with flow.opened(moved, fresh=False) as context:
        assert context.round.number == 2
        assert context.round.parent_id == released.id
        assert set(lineup_of(context, context.parent).members) == {"refund_payment", "exchange_item"}
        assert lineup_of(context, context.parent).router is not None
