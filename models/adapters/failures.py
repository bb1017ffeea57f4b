"""What MLflow raises when it is away, damaged or refuses, told from the errors of others."""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Iterator

from sqlalchemy.exc import SQLAlchemyError

from db.engine import may_pass as database_may_pass

# Where its errors come from. To open its database it asks SQLAlchemy and Alembic, and a server requests: theirs, which
# quote the address, reach us as they are.
LIBRARIES = ("mlflow", "sqlalchemy", "alembic", "requests")
# What MLflow answers to a user whom it does not know, or who may not do this (401 and 403).
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
# In its own words, which have no code: the database is another MLflow's.
_OTHER_SCHEMA = "out-of-date database schema"


def of_mlflow(problem: BaseException) -> bool:
    """Whether it is MLflow's, where nothing but MLflow was asked."""
    return _library(type(problem).__module__) in LIBRARIES


def came_through_mlflow(problem: BaseException) -> bool:
    """Whether it is MLflow's, where others may have been asked as well: what it lets through came through its code."""
    if not of_mlflow(problem):
        return False
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(problem.__traceback__))
    return "mlflow" in {_library(type(problem).__module__), *map(_library, frames)}


def refused(problem: BaseException) -> bool:
    """Whether MLflow is there and knows the user not, or does not let this one do it."""
    return getattr(problem, "error_code", "") in REFUSED


def may_pass(problem: BaseException) -> bool:
    """Whether the same may go well later. No wait gives a user a password, another schema or a damaged file."""
    if isinstance(problem, SQLAlchemyError):
        return database_may_pass(problem)
    if refused(problem) or _OTHER_SCHEMA in str(problem) or _library(type(problem).__module__) == "alembic":
        return False
    return not any(type(cause) is sqlite3.DatabaseError for cause in causes(problem))  # its subclasses are milder


def causes(problem: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from, the first cause last."""
    cause: BaseException | None = problem
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _library(module: str) -> str:
    return module.partition(".")[0]
