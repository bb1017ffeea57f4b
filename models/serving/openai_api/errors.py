"""What a client gets when its request cannot be answered: status codes and bodies as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from errors import ContextOverflow, TraceError

# Status -> type and code, where no more exact code is given.
KINDS: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "insufficient_scope"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    502: ("server_error", "upstream_error"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "deadline_exceeded"),
}


class ApiError(TraceError, ValueError):
    """A request that is answered by an error. The message goes to the client: it never holds a key, a path of this
    machine, or what another client sent."""

    boundary = "gateway"

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after = status, param, retry_after
        self.kind, usual = KINDS[status]
        self.code = code or usual

    @property
    def body(self) -> dict[str, Any]:
        """The error body of OpenAI's API."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        if self.status in (429, 503):
            return {"retry-after": str(self.retry_after)}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def broken() -> ApiError:
    """A defect of the gateway. The client learns nothing of it; the server's log has the traceback."""
    return ApiError(500, "the gateway failed; its log says why")


def too_long(problem: ContextOverflow | str) -> ApiError:
    """A prompt that does not fit the context."""
    return ApiError(400, str(problem), code="context_length_exceeded", param="messages")


def unknown_model(name: str, known: list[str]) -> ApiError:
    """A model that is not served."""
    return ApiError(
        404,
        f"model {name[:200]!r} does not exist; there are: {', '.join(known)}",
        code="model_not_found",
        param="model",
    )
