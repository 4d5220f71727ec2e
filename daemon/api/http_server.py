"""The HTTP server: Starlette and uvicorn inside the daemon's own event loop."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from daemon.api.auth import Access
from daemon.api.auth_middleware import HEADERS, Guard, client_of
from daemon.api.connections import Timeouts, allow_connections, connection_class
from daemon.api.disconnect import ClientDisconnected, client_gone
from daemon.api.health import state_of
from daemon.api.http_errors import framework_error, refused
from daemon.api.limits import Connections
from daemon.api.messages import QueryError
from daemon.api.trace_headers import Traced
from daemon.api.websocket import MESSAGE_BYTES
from daemon.supervision import Tasks
from daemon.traces.trace_context import TRACEPARENT, Tracer
from support.inherited_sockets import inherited_socket

NAME = "http server"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GRACE_S = 2
_BACKLOG = 128
_HEALTH = 64
"""Connections beside all these, which get a refusal, or their health."""
SEND_BYTES = 1 << 18
"""Send buffer of a connection in the kernel. By default it grows to 4 MB: a client that reads too slowly
would be minutes behind before it learns that it has lost events."""


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that does not handle signals: the daemon stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def exit(self) -> None:
        """End `serve`, once the running requests have ended."""
        self.should_exit = True


@dataclass(frozen=True)
class Tls:
    """Files in PEM: the certificate, with those between it and its root, and its key."""

    certificate_file: str
    key_file: str


class HttpServer:
    """`/metrics`, `/healthz` (503: only a restart helps) and `/readyz` (503 with reasons while not ready)."""

    def __init__(
        self,
        metrics: Callable[[Collection[str]], bytes],
        not_ready: Callable[[], Sequence[str]],
        host: str = "127.0.0.1",
        port: int | None = 0,
        more: Sequence[BaseRoute] = (),
        *,
        closing: Callable[[], None] = lambda: None,
        max_listeners: int = 4096,
        max_others: int = 256,
        timeouts: Timeouts | None = None,
        access: Access | None = None,
        tracer: Tracer | None = None,
        tls: Tls | None = None,
        is_stuck: Callable[[], bool] = lambda: False,
        allowed_origins: Collection[str] = (),
    ) -> None:
        """`metrics(names)` renders the exposition text of these families, without names of all.

        `not_ready()` lists what is missing (empty: ready). `is_stuck()`: the daemon can do nothing until it
        is restarted. ``more``: additional routes. ``closing()``: ends replies that do not end by themselves.
        ``max_listeners``, ``max_others``: connections that listen to events, and others. ``allowed_origins``:
        of web pages. Without a ``port`` nothing is served; 0 is any.
        """
        self._allowed_origins = frozenset(allowed_origins)
        self._metrics = metrics
        self._not_ready = not_ready
        self._host = host
        self._asked_port = port
        self._more = more
        self._closing = closing
        self._is_stuck = is_stuck
        self._timeouts, self._access, self._tls = timeouts or Timeouts(), access or Access(), tls
        self._tracer = tracer or Tracer()
        self._connections = Connections(max_listeners + max_others)
        self._max_connections = max_listeners + max_others + _HEALTH
        self._server: _EmbeddedServer | None = None
        self._listener: socket.socket
        self._tasks = Tasks()
        self.port = 0

    async def start(self, tasks: Tasks) -> None:
        """Bind, serve as one of ``tasks``, and set `port`. Raises OSError when the bind fails.

        Where the service manager passes a socket by the name `http`, that is it, whatever host and port say.
        """
        if self._asked_port is None:
            return
        # Bind here: uvicorn would exit the process on failure.
        passed = inherited_socket("http", keyed=self._access.required)
        self._listener = passed or _bind(self._host, self._asked_port)
        allow_connections(self._max_connections)
        self.port = self._listener.getsockname()[1]
        # the kernel cuts a connection whose client reads nothing
        write_ms = int(self._timeouts.write * 1000)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, write_ms)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # its connections' too
        config = uvicorn.Config(
            self._application(),
            http=connection_class(self._timeouts, self._connections),
            ws="wsproto",
            ws_max_size=MESSAGE_BYTES,
            ws_per_message_deflate=False,  # it costs each connection more memory than all else
            limit_concurrency=self._max_connections,
            proxy_headers=False,  # only the connection says who the client is
            lifespan="off",
            log_config=None,
            access_log=False,
            headers=HEADERS,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=self._tls.certificate_file if self._tls else None,
            ssl_keyfile=self._tls.key_file if self._tls else None,
        )
        self._server = _EmbeddedServer(config)
        self._tasks = tasks
        tasks.start(NAME, partial(self._server.serve, sockets=[self._listener]))
        while not self._server.started:
            if NAME not in tasks.names():
                raise OSError(f"the HTTP server on {self._host}:{self.port} ended before it started")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Finish running requests, at most two seconds, and close."""
        server, self._server = self._server, None
        task = self._tasks.expect_end(NAME)
        if server is None:
            return
        self._closing()
        if task is not None:
            server.exit()
            await task
        elif server.started:  # the task was killed before uvicorn closed listeners and connections
            await server.shutdown()
        self._listener.close()

    def _application(self) -> Starlette:
        origins = self._allowed_origins
        guard = Middleware(Guard, access=self._access, connections=self._connections, allowed_origins=origins)
        traced = Middleware(Traced, tracer=self._tracer)
        # outside the guard: browsers send no key with a preflight, and let pages read refusals
        sharing = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            allow_credentials=True,
            expose_headers=["retry-after", "x-request-id", "request-id", TRACEPARENT],
        )
        return Starlette(
            routes=[
                *self._more,
                Route("/metrics", self._serve_metrics),
                Route("/healthz", self._serve_health),
                Route("/readyz", self._serve_ready),
            ],
            middleware=[*([sharing] if origins else []), traced, guard],
            exception_handlers={HTTPException: framework_error, ClientDisconnected: client_gone},
        )

    async def _serve_metrics(self, request: Request) -> Response:
        # they name all sessions
        if self._access.required:
            try:
                self._access.operate(client_of(request), "metrics")
            except QueryError as error:
                return refused(error)
        return Response(self._metrics(request.query_params.getlist("name[]")), media_type=METRICS_TYPE)

    async def _serve_health(self, _: Request) -> Response:
        if self._is_stuck():
            return JSONResponse({"status": "stuck"}, 503)
        return JSONResponse({"status": "alive"})

    async def _serve_ready(self, _: Request) -> Response:
        # which feeds and brokers there are is not for everyone who can connect
        reasons = list(self._not_ready())
        status = state_of(reasons) if reasons else "ready"
        told = [] if self._access.required else reasons
        return JSONResponse({"status": status, "reasons": told}, 503 if reasons else 200)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise OSError(error.errno, f"cannot bind HTTP to {host}:{port}: {why}") from None
