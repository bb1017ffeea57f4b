"""MLflow's own pages in a real browser: two versions side by side, a round's runs, a sampled episode.

`TRACE_SCREENSHOTS=docs pytest tests/integration/test_mlflow_pages.py` takes the picture of the documentation anew.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from db import open_store
from models.adapters.registry import Registry
from models.adapters.runs import RunLog
from tasks.episodes.traces import log_traces
from tasks.measuring.decisions import CapabilityDecision, GateVerdict
from tasks.measuring.statistics import PairedDifference
from tasks.round.registry import run_name
from tasks.tracking.parts import log_parts
from tasks.tracking.rounds import log_round
from tasks.tracking.versions import describe_versions, log_decision
from tasks.tracking.wrong_routes import WrongRoute, log_wrong_route
from tests.integration.servers import BROWSER, clean_environment, free_port, running, status
from tests.tasks.episodes.practised_rounds import CAPABILITY, Practised

pytestmark = pytest.mark.integration
MODEL = f"trace-shop-{CAPABILITY}"


def night(registry: Registry, folder: Path, number: int, points: float) -> str:
    """A made-up night whose adapter gained so many points; the run of its training."""
    with open_store(f"sqlite:///{folder}/night-{number}.db") as store:
        run = registry.start_run(f"night-{number}", {}, run_name("shop", number, CAPABILITY))
        made = Practised(store, run=run, seed=number)
        figures = made.figures().model_copy(update={"number": number})
        whole = log_round(registry, figures, "<p>report</p>")
        registry.client.set_tag(run, "mlflow.parentRunId", whole)
        RunLog(registry, run).params({"steps": 4 * number, "learning_rate": 0.0015})
        registry.log_steps(run, {s: {"train/own_success": points * s / 400} for s in range(1, 5)})
        place = folder / f"night-{number}"
        place.mkdir()
        adapter = made.judged(registry, place, float(number))
        d = PairedDifference(points, points - 9, points + 9, 0.001, 40, 20, 0, 0.0001)
        other = PairedDifference(-points / 4, -20, 1, 0.2, 16, 4, 0, 0.01)
        decision = CapabilityDecision(CAPABILITY, GateVerdict.BETTER, (), d, 0.002, 12.0, 0.05, 1, 1)
        log_decision(registry, CAPABILITY, adapter.version, decision)
        log_wrong_route(registry, CAPABILITY, adapter.version, WrongRoute(other, {"set_address": other}, "", 0.5))
        log_parts(registry, made.stored, whole)
        describe_versions(registry, made.stored, figures)
        log_traces(registry, made.stored, figures, str, 1)
    return run


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """MLflow's server on the folder's registry."""
    port = free_port()
    command = [
        sys.executable, "-m", "mlflow", "server", f"--backend-store-uri=sqlite:///{folder}/mlflow.db",
        "--host=127.0.0.1", f"--port={port}", "--workers=1",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running(command, clean_environment(), folder / "log", lambda: status(f"{url}/health") == 200):
        yield url


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Registry, dict[str, str]]]:
    if BROWSER is None:
        pytest.skip("no browser is installed; tests/ensure_chromium.sh brings one")
    folder = tmp_path_factory.mktemp("mlflow")
    registry = Registry(f"sqlite:///{folder}/mlflow.db", "shop", folder / "artifacts")
    runs = {str(n): night(registry, folder, n, points) for n, points in ((1, 18.75), (2, 37.5))}
    with served(folder) as url:
        yield url, registry, runs


@pytest.fixture
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield opened.new_page(viewport={"width": 1280, "height": 1150})
        opened.close()


def test_two_versions_side_by_side_tell_the_story(
    nights: tuple[str, Registry, dict[str, str]], page: Any, tmp_path: Path
) -> None:
    url, _, runs = nights
    page.goto(f"{url}/#/compare-model-versions?name={quote(json.dumps(MODEL))}&runs={quote(json.dumps(runs))}")
    page.get_by_text("Comparing 2 Versions").wait_for(timeout=60_000)
    for words in ("shop night 1: refund_payment", "shop night 2: refund_payment", "gate/points", "37.5", "18.75"):
        page.get_by_text(words, exact=True).first.wait_for()
    figures = page.get_by_role("row", name="gate/points").first.inner_text().split()
    assert figures[-2:] == ["18.75", "37.5"], "the first version stands before the second"
    place = Path(os.environ.get("TRACE_SCREENSHOTS", tmp_path))
    page.get_by_role("button", name="Close").first.click()
    page.screenshot(path=str(place / "mlflow-compare.png"), clip={"x": 0, "y": 0, "width": 1280, "height": 880})
    assert (place / "mlflow-compare.png").stat().st_size > 20_000


def test_a_version_and_the_runs_of_a_night_are_read_by_people(
    nights: tuple[str, Registry, dict[str, str]], page: Any
) -> None:
    url, registry, runs = nights
    page.goto(f"{url}/#/models/{MODEL}/versions/2")
    page.get_by_text("release 2, alone: better.").wait_for(timeout=60_000)
    whole = registry.client.get_run(runs["2"]).data.tags["mlflow.parentRunId"]
    page.goto(f"{url}/#/experiments/{registry.experiment_id}/runs/{whole}")
    page.get_by_text("shop night 2", exact=True).first.wait_for(timeout=60_000)
    page.get_by_text("Release 3 is live").first.wait_for()


def test_a_sampled_episode_is_read_turn_by_turn(nights: tuple[str, Registry, dict[str, str]], page: Any) -> None:
    url, registry, runs = nights
    found = registry.client.search_traces(locations=[registry.experiment_id], run_id=runs["2"])
    assert found, "episodes were logged"
    page.goto(f"{url}/#/experiments/{registry.experiment_id}/traces?selectedEvaluationId={found[0].info.trace_id}")
    page.get_by_text("turn", exact=True).first.wait_for(timeout=60_000)
    page.get_by_text("tool", exact=True).first.wait_for()
