"""Log lines say where the process was, for people and as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from models.telemetry.logs import JsonLines, Lines, note_places
from models.telemetry.place import Place, at, here


@pytest.fixture
def made() -> Iterator[list[logging.LogRecord]]:
    """Records of a logger, as they are made."""
    before = logging.getLogRecordFactory()
    note_places()
    found: list[logging.LogRecord] = []
    logger = logging.getLogger("trace.models.for-tests")
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logging.setLogRecordFactory(before)


def test_a_line_has_its_place_from_when_it_was_made(made: list[logging.LogRecord]) -> None:
    logger = logging.getLogger("trace.models.for-tests")
    with at(Place("3", "train", "refund_payment")):
        logger.warning("step %d", 2)
        with at(Place("3", "rollout")):
            logger.warning("inside")
        assert here().stage == "train"
    with at(Place("1", "route", seed="28", of_method="trace")):
        logger.warning("of a comparison")
    logger.warning("outside")
    assert [Lines().format(r).partition(" ")[2] for r in made] == [
        "[round 3 train refund_payment] step 2", "[round 3 rollout] inside",
        "[seed 28 trace round 1 route] of a comparison", "outside",
    ]  # fmt: skip


def test_json_lines_are_one_object_each_whatever_is_said(made: list[logging.LogRecord]) -> None:
    logger = logging.getLogger("trace.models.for-tests")
    with at(Place("3", "train", "refund_payment")):
        try:
            raise ValueError("no\nway")
        except ValueError:
            logger.exception('said "%s"\n', "Grüße")
    logger.warning("plain")
    lines = [JsonLines().format(r) for r in made]
    assert all("\n" not in line for line in lines)
    first, second = map(json.loads, lines)
    assert (first["round"], first["stage"], first["capability"]) == ("3", "train", "refund_payment")
    assert (first["message"], first["level"], first["logger"]) == (
        'said "Grüße"\n', "error", "trace.models.for-tests",
    )  # fmt: skip
    assert "ValueError: no\nway" in first["exception"]
    assert not {"round", "stage", "capability", "exception"} & set(second)
    assert second["time"].endswith("+00:00")


def test_the_place_is_noted_once_however_often_it_is_asked_for(made: list[logging.LogRecord]) -> None:
    factory = logging.getLogRecordFactory()
    note_places()
    assert logging.getLogRecordFactory() is factory


@pytest.mark.parametrize("given", [["--log-json"], []])
def test_the_command_line_takes_it_before_any_command(given: list[str]) -> None:
    code = (
        "import logging, sys, flows.cli.main as m\n"
        "m.app.command('say')(lambda: logging.getLogger('trace').info('hello'))\n"
        "m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *given, "say"], capture_output=True, text=True, check=True)
    if given:
        assert json.loads(done.stderr)["message"] == "hello"
    else:
        assert done.stderr.endswith(" hello\n")
