"""Log lines for people, or as JSON for machines; both say which round, stage and capability they speak of.

Standard library only: the command line sets its logging up before anything else is imported.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from models.telemetry.place import Place, here

# What a command was told of the form, for the processes that it starts.
VARIABLE, YES = "TRACE_LOG_JSON", ("1", "true", "yes", "on")


def note_places() -> None:
    """From now on every record has `round`, `stage` and `capability`: where the process was when it was made, as text.
    Prefect's JSON lines (`PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER=json`) carry them, too."""
    before = logging.getLogRecordFactory()
    if getattr(before, "notes_places", False):
        return

    def made(*given: Any, **more: Any) -> logging.LogRecord:
        record = before(*given, **more)
        for name, value in asdict(here()).items():
            setattr(record, name, value)
        return record

    made.notes_places = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(made)


def place_of(record: logging.LogRecord) -> Place:
    """Where the process was when the record was made."""
    return Place(*(str(getattr(record, f.name, "")) for f in fields(Place)))


class Lines(logging.Formatter):
    """`11:02:07 [round 3 train refund_payment] message`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        place = str(place_of(record))
        return f"{record.asctime} {f'[{place}] ' if place else ''}{record.message}"


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, where known round, stage and capability, message."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **place_of(record).fields(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def configure() -> None:
    """Log to stderr: warnings of all that readers can act on, and what the project itself tells; as JSON where
    `TRACE_LOG_JSON` says so. Called again it changes the form alone; where somebody else (Prefect, a test) has set
    logging up already, that stays."""
    note_places()
    form = JsonLines() if os.environ.get(VARIABLE, "").lower() in YES else Lines()
    ours = [h for h in logging.getLogger().handlers if isinstance(h.formatter, Lines | JsonLines)]
    for handler in ours:
        handler.setFormatter(form)
    if not ours:
        new = logging.StreamHandler(sys.stderr)
        new.setFormatter(form)
        logging.basicConfig(level=logging.WARNING, handlers=[new])
    logging.getLogger("trace").setLevel(logging.INFO)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # that it makes its tables
    # Renamed arguments inside transformers and TRL: for their authors, not for readers of a round's progress.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
    # A model of a dependency gives a field an alias where pydantic ignores it: pydantic says so at the import, in the
    # middle of a round's progress, and nobody here can mend it. By its text, for pydantic is not imported yet.
    warnings.filterwarnings("ignore", message="The 'alias' attribute with value 'id' was provided to the `Field")
