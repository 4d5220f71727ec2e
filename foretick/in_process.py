"""A daemon on the event loop of another program."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from daemon.api.client import AsyncQueryClient
from daemon.config.schema import Config
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.source import Source


class Daemon:
    """Serves ``config`` between `start` and `stop`, or as ``async with Daemon(config) as daemon``.

    ``source`` (one, or several) and ``routes`` take the place of the configured ones, so that a program can
    feed records and take answers itself. With ``process.mode = "two"`` the model runs in another process. The
    daemon sets no signal handlers and configures no logging.
    """

    def __init__(
        self,
        config: Config,
        *,
        source: Source | Sequence[Source] | None = None,
        routes: Sequence[SinkRoute] | None = None,
    ) -> None:
        self.config = config
        self._source, self._routes = source, routes
        self._gateway: Gateway | None = None

    async def start(self) -> None:
        """Start, and return when the daemon is ready.

        Raises SettingError for a setting that cannot be used, OSError for an address that cannot be bound.
        """
        gateway = make_gateway(self.config, source=self._source, routes=self._routes)
        try:
            await gateway.start()
        except BaseException:
            await gateway.stop()
            raise
        self._gateway = gateway

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set. Raises the first fatal error of the daemon."""
        await self._running.run(stop)

    async def stop(self) -> bool:
        """Drain and close; returns whether nothing was left behind, as exit status 0 of `foretick run`."""
        gateway, self._gateway = self._running, None
        return await gateway.stop()

    def client(self) -> AsyncQueryClient:
        """A client of this daemon's query socket; close it before you stop the daemon."""
        query = self._running.query
        if query is None:
            raise RuntimeError('the query socket is off: query.endpoint is ""')
        return AsyncQueryClient(query.endpoint)

    @property
    def http_port(self) -> int:
        """The port that HTTP is served at."""
        return self._running.http.port

    @property
    def not_ready(self) -> list[str]:
        """Why the daemon is not ready, as `/readyz` says; empty if it is."""
        return list(self._running.status.not_ready())

    @property
    def _running(self) -> Gateway:
        if self._gateway is None:
            raise RuntimeError("the daemon is not running: start it first")
        return self._gateway

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gateway is not None:
            await self.stop()
