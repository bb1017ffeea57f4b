"""The one rule by which all tasks of a round are tried again."""

from __future__ import annotations

from typing import Any

from errors import TraceError


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Retry condition of all tasks: only what may go away by itself is tried again."""
    try:
        state.result()
    except TraceError as problem:
        return problem.transient
    except (ConnectionError, TimeoutError):
        return True
    except Exception:  # a defect does not go away by itself
        return False
    return False


RETRIES: dict[str, Any] = {"retries": 2, "retry_delay_seconds": [2, 10], "retry_condition_fn": is_transient}
