"""A bare Starlette application behind uvicorn: what the daemon's HTTP server is compared with."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route


class _Server(uvicorn.Server):
    """Leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def bare_server(*routes: BaseRoute) -> AsyncIterator[int]:
    """Serve them in this loop; the port."""
    application = Starlette(routes=routes)
    settings = uvicorn.Config(
        application,
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server, listener = _Server(settings), socket.create_server(("127.0.0.1", 0), backlog=1024)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def returning(path: str) -> Route:
    """A route that returns what is posted to it."""
    return Route(path, _returned, methods=["POST"])


async def _returned(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")
