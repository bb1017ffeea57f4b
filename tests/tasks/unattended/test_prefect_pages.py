"""A Prefect server that is away takes a table from its pages, and ends no stage."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

from db import CalibrationRow, ReleaseRow, ReleaseState, row_id
from tasks import calibrate as calibrate_file
from tasks import gate as gate_file
from tasks.round.context import Context
from tasks.round.stage import forget
from tasks.synthesis.calibration import FIGURES
from tasks.unattended.prefect_pages import show
from tests.tasks.test_settled_gate import context, gain  # noqa: F401  # fixtures
from tests.tasks.test_train import CAPABILITY, opened

REQUEST = httpx.Request("POST", "http://user:secret@prefect:4200/api/artifacts/")


def answered(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(f"{code} from {REQUEST.url}", request=REQUEST, response=httpx.Response(code))


def failing(problem: Exception) -> Any:
    def create(**given: Any) -> None:
        raise problem

    return create


AWAY = failing(httpx.ConnectError("[Errno 111] Connection refused"))


@pytest.mark.parametrize(
    "problem", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), answered(503), ObjectNotFound(ValueError())]
)
def test_a_server_that_is_away_is_a_warning(problem: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trace"):
        show(failing(problem), key="selection", table=[])
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("'selection' is not shown on Prefect's pages, and the stage goes on (")
    assert "secret" not in said


@pytest.mark.parametrize("problem", [answered(401), TypeError("a defect")])
def test_what_does_not_go_away_raises(problem: Exception) -> None:
    with pytest.raises(type(problem)):
        show(failing(problem), key="selection")


def test_a_stage_does_not_wait_for_all_tries_of_the_client() -> None:
    seen: list[int] = []
    show(lambda **given: seen.append(PREFECT_CLIENT_MAX_RETRIES.value()), key="x")
    assert seen == [3]
    assert PREFECT_CLIENT_MAX_RETRIES.value() > 3


def test_the_gate_tells_of_a_release_that_went_live_while_the_server_is_away(
    context: Context,  # noqa: F811
    gain: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_file, "create_markdown_artifact", AWAY)
    assert gate_file.gate.do(context).release == 1
    release = context.store.row(ReleaseRow, id="candidate")
    assert release is not None
    assert release.state == ReleaseState.LIVE
    assert context.store.stage(context.round.id, "gate").finished
    assert [number for _, number, *_ in gain] == [1]


def test_people_are_told_before_anything_is_shown(
    context: Context,  # noqa: F811
    gain: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_file, "create_markdown_artifact", failing(answered(401)))
    with pytest.raises(httpx.HTTPStatusError):
        gate_file.gate.do(context)
    assert [number for _, number, *_ in gain] == [1]


def test_a_calibration_is_done_while_the_server_is_away(
    settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_file, "create_markdown_artifact", AWAY)
    begun = next(opened(settings_folder / "home", tiny_model, monkeypatch))
    figures = {"accepted": True, "reason": "it tells rollouts apart", **dict.fromkeys(FIGURES, 0.5)}
    made: Any = {"environment_id": "made", "policy_id": "p", "seeds": 2, "samples": 4, **figures}
    begun.store.put([CalibrationRow(id=row_id("made", "calibration"), **made)])
    assert calibrate_file.calibrate.do(begun, CAPABILITY).accepted
    assert begun.store.stage(begun.round.id, f"calibrate:{CAPABILITY}").finished
    forget(begun.round.id)
