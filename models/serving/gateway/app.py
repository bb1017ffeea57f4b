"""The gateway over HTTP: paths, keys, limits, and clients that leave.

A request is answered only after its key, its size and its place among the others are checked, in this order. A client
that goes away ends the work that was begun for it. A page of another site cannot use a gateway without keys: requests
with a foreign `Origin` or, on loopback, a foreign `Host` are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlparse

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from models.serving.fleet.lifecycle import Reconciler
from models.serving.gateway.gateway import Gateway, Streamed
from models.serving.gateway.keys import ADMIN, CHAT, FEEDBACK
from models.serving.gateway.page import page
from models.serving.gateway.settings import LOOPBACK
from models.serving.gateway.traffic_log import parse_feedback
from models.serving.openai_api.errors import ApiError, broken, unknown_model
from models.serving.openai_api.requests import ChatRequest, parse_body, parse_chat, parse_completion
from models.telemetry import tracing

logger = logging.getLogger("trace.gateway")
CONVERSATION = "x-trace-conversation"
# What a request's span is told of its answer.
TOLD = ("x-trace-release", "x-trace-adapter", "x-trace-capability", "x-trace-mode", "x-trace-missing")
PAGE_MAY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class GatewayApp:
    """The ASGI application of a gateway. `reconciler` runs as long as the application does."""

    def __init__(self, gateway: Gateway, reconciler: Reconciler | None = None, loopback: bool = True) -> None:
        self.gateway, self.reconciler, self.loopback = gateway, reconciler, loopback
        routes = [
            self._route("POST", "/v1/chat/completions", self.chat, CHAT, counted=True),
            self._route("POST", "/v1/completions", self.completion, CHAT, counted=True),
            self._route("GET", "/v1/models", self.models, CHAT),
            self._route("GET", "/v1/models/{name:path}", self.model, CHAT),
            self._route("POST", "/v1/feedback", self.feedback, FEEDBACK),
            self._route("GET", "/metrics", self.metrics, ADMIN),
            self._route("GET", "/status", self.status, ADMIN),
            self._route("GET", "/health", self.health),
            self._route("GET", "/", self.page),
        ]
        failures: Mapping[Any, Any] = {404: _not_found, 405: _not_allowed, 500: _broken}
        self.app = Starlette(routes=routes, exception_handlers=failures, lifespan=self._lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        if self.reconciler is not None:
            self.reconciler.start()
        yield
        if self.reconciler is not None:
            await asyncio.to_thread(self.reconciler.stop)
        await self.gateway.upstream.close()
        if self.gateway.log is not None:
            await asyncio.to_thread(self.gateway.log.close)

    def _route(self, method: str, path: str, handler: Handler, scope: str = "", counted: bool = False) -> Route:
        """`handler` behind the checks that all paths share; what goes wrong becomes an error body. `scope` is what a
        key needs ("": open to all); a `counted` request uses its quota. Metrics and spans are named by `path` as it
        stands here, with its parameters' names: anybody may ask for anything, without a key."""

        async def guarded(request: Request) -> Response:
            about = {"http.request.method": request.method, "http.route": path, "url.path": request.scope["path"]}
            with tracing.span(f"{request.method} {path}", about, headers=request.headers) as span:
                answer = await answered(request)
                span.set_attribute("http.response.status_code", answer.status_code)
                for name in TOLD:
                    if name in answer.headers:
                        span.set_attribute(name.replace("x-trace-", "trace."), answer.headers[name])
            return answer

        async def answered(request: Request) -> Response:
            status = 499
            try:
                self._check_origin(request)
                if scope:
                    request.state.owner = self._owner(request, scope, counted)
                answer = await handler(request)
                status = answer.status_code
            except ApiError as problem:
                status = problem.status
                answer = JSONResponse(problem.body, status, headers=problem.headers)
            except ClientDisconnect:
                self.gateway.metrics.cancelled.inc()
                answer = Response(status_code=499)
            except Exception:  # a defect: `_broken` answers
                status = 500
                raise
            finally:
                self.gateway.metrics.requests.labels(path, str(status)).inc()
            return answer

        return Route(path, guarded, methods=[method])

    def _check_origin(self, request: Request) -> None:
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        try:
            site, name = urlparse(origin or "").netloc, urlparse(f"//{host}").hostname
        except ValueError:
            raise ApiError(
                400, f"the header Host ({host!r:.60}) or Origin ({origin!r:.60}) is no address; correct it"
            ) from None
        if origin and site != host:
            raise ApiError(400, "requests from pages of other sites are refused", code="foreign_origin")
        if self.loopback and not self.gateway.settings.keys.digests and name not in LOOPBACK:
            raise ApiError(
                400, "this gateway has no keys and answers to 127.0.0.1 and localhost only", code="foreign_host"
            )

    def _owner(self, request: Request, scope: str, counted: bool) -> str:
        """The name of the key that a request comes with, once it may ask this. Raises `ApiError` (401, 403, 429)."""
        keys, metrics = self.gateway.settings.keys, self.gateway.metrics
        key = keys.who(request.headers.get("authorization", ""))
        if key is None:
            raise ApiError(401, "the key is missing or wrong; send Authorization: Bearer KEY")
        outcome = "refused"
        try:
            if scope not in key.scopes:
                raise ApiError(403, f"this key may not do that: it needs the scope {scope}")
            if counted:
                request.state.take_back = keys.admit(key)
            outcome = "admitted"
        finally:
            metrics.keys.labels(key.name or "none", outcome).inc()
        return key.name

    # --- answering --------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._answer(request, parse_chat)

    async def completion(self, request: Request) -> Response:
        """`/v1/completions`."""
        return await self._answer(request, parse_completion)

    async def _answer(self, request: Request, parse: Callable[[dict[str, Any], int], ChatRequest]) -> Response:
        """An answer of a model. A request that has to come again because others are being answered is not counted."""
        try:
            return await self._in_place(request, parse)
        except ApiError as problem:
            if problem.status == 429:
                request.state.take_back()
            raise

    async def _in_place(self, request: Request, parse: Callable[[dict[str, Any], int], ChatRequest]) -> Response:
        gateway = self.gateway
        if gateway.in_flight >= gateway.settings.most_requests:
            raise ApiError(429, f"{gateway.settings.most_requests} requests are being answered; ask again")
        gateway.in_flight += 1
        held, give_back = True, _nothing
        try:
            body = await self._body(request)
            asked = parse(body, request.state.size)
            owner, header = request.state.owner, request.headers.get(CONVERSATION, "")
            give_back = gateway.settings.keys.hold(owner, gateway.most_tokens(asked))
            if asked.stream:
                streamed = await _unless_gone(request, gateway.stream(asked, owner, header))
                held = False  # the response gives place and tokens back
                return _Stream(streamed, gateway, give_back)
            answer, headers = await _unless_gone(request, gateway.answer(asked, owner, header))
            return Response(json.dumps(answer, ensure_ascii=False), 200, dict(headers), "application/json")
        finally:
            if held:
                gateway.in_flight -= 1
                give_back()

    async def feedback(self, request: Request) -> Response:
        """`/v1/feedback`: a client's feedback on a conversation."""
        feedback = parse_feedback(await self._body(request))
        log = self.gateway.log
        if log is None:
            raise ApiError(404, "this gateway stores no conversations; start it with --sample above 0")
        said = await log.say(request.state.owner, feedback)
        judges = feedback.success is not None or feedback.reward is not None
        outcome = "comment" if not judges else "success" if said["success"] else "failure"
        self.gateway.metrics.feedback.labels(outcome).inc()
        return JSONResponse(said)

    async def models(self, request: Request) -> Response:
        """`/v1/models`."""
        return JSONResponse({"object": "list", "data": self.gateway.models()})

    async def model(self, request: Request) -> Response:
        """`/v1/models/NAME`, of those that are listed; a base's name may hold a slash."""
        known, name = {row["id"]: row for row in self.gateway.models()}, request.path_params["name"]
        if name not in known:
            raise unknown_model(name, list(known))
        return JSONResponse(known[name])

    async def metrics(self, request: Request) -> Response:
        """`/metrics`, for Prometheus."""
        metrics = self.gateway.metrics
        metrics.served(self.gateway.fleet.standing(), self.gateway.fleet.adapters())
        metrics.in_flight.set(self.gateway.in_flight)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        """`/health`: 200 while an upstream can answer."""
        replicas = await self.gateway.upstream.replicas()
        alive = any(replica.alive for replica in replicas)
        return JSONResponse({"status": "ok" if alive else "down"}, 200 if alive else 503)

    async def status(self, request: Request) -> Response:
        """What the page shows."""
        gateway, settings = self.gateway, self.gateway.settings
        share, recent = gateway.metrics.share, sorted(gateway.metrics.recent)
        standing = gateway.fleet.standing()
        serving = standing.serving
        adapters = [
            {
                "name": a.name,
                "capability": a.capability,
                "version": a.version,
                "state": str(a.state),
                "reason": a.reason,
                "live_since": a.live_since,
                "replicas": list(a.replicas),
                "in_flight": a.in_flight,
                "answers": share[a.name],
            }
            for a in gateway.fleet.adapters()
        ]
        return JSONResponse(
            {
                "target": settings.target,
                "base": {"name": settings.base, "answers": share[settings.base]},
                "routed": settings.routed,
                "release": {
                    "number": serving.number,
                    "live_at": serving.live_at.isoformat() if serving.live_at else None,
                    "served_since": serving.since,
                    "members": dict(serving.members),
                    "pinned": settings.pinned > 0,
                    "wanted": standing.wanted,
                    "problem": standing.problem,
                },
                "router": {
                    "mode": serving.router.mode if serving.router else "off",
                    "version": serving.router_version,
                    "decisions": len(recent),
                    "confidence": recent[len(recent) // 2] if recent else None,
                    "unsure": sum(c < 0.7 for c in recent) / len(recent) if recent else None,
                },
                "adapters": adapters,
                "replicas": [vars(replica) for replica in await gateway.upstream.replicas()],
                "problem": self.reconciler.problem if self.reconciler else "",
                "answers": sum(share.values()),
                "in_flight": gateway.in_flight,
                "stores": gateway.log is not None,
                "preset": gateway.preset.name if gateway.preset else "",
            }
        )

    async def page(self, request: Request) -> Response:
        """The page for people."""
        headers = {"content-security-policy": PAGE_MAY, "x-frame-options": "DENY", "referrer-policy": "no-referrer"}
        return HTMLResponse(page(), headers=headers)

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body, read up to the limit and no further."""
        most = self.gateway.settings.most_bytes
        too_large = ApiError(413, f"the body is larger than {most} bytes; send less")
        told = request.headers.get("content-length", "0")
        if told.isdecimal() and int(told) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.gateway.settings.deadline):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None
        request.state.size = size
        return parse_body(b"".join(parts))


class _Stream(StreamingResponse):
    """A streamed answer. However it ends, the work behind it is closed and its place among the requests and the tokens
    that were held for it are free."""

    def __init__(self, streamed: Streamed, gateway: Gateway, give_back: Callable[[], None]) -> None:
        headers = {**streamed.headers, "cache-control": "no-cache"}
        super().__init__(self._events(streamed), media_type="text/event-stream", headers=headers)
        self._streamed, self._gateway, self._whole, self._give_back = streamed, gateway, False, give_back

    async def _events(self, streamed: Streamed) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(streamed.events) as events:
            async for part in events:
                yield part
        self._whole = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._gateway.in_flight -= 1
            if not self._whole:
                self._gateway.metrics.cancelled.inc()
            try:
                await self._streamed.close()  # what was used is spent by then
            finally:
                self._give_back()


def _nothing() -> None:
    """What is given back where nothing is held."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled, and `ClientDisconnect` raised, when the client leaves before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _not_found(request: Request, problem: Exception) -> Response:
    return _refused(ApiError(404, f"there is no {request.scope['path'][:100]}"))


async def _not_allowed(request: Request, problem: Exception) -> Response:
    return _refused(ApiError(405, f"{request.method} is not for this path"))


async def _broken(request: Request, problem: Exception) -> Response:
    return _refused(broken())


def _refused(problem: ApiError) -> Response:
    return JSONResponse(problem.body, problem.status, headers=problem.headers)
