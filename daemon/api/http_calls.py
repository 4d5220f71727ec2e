"""Calls and subscriptions over HTTP(S), by httpx2, which only those need that use them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator

import httpx2

from daemon.api.http_exchange import EVENTS, Exchange, StreamFeed, exchange_of, refusal
from daemon.api.messages import LostMessage, QueryError, Received, Sent, Subscribe
from daemon.api.subscriptions import AsyncEventStream, StreamItem

_AGAIN_S = 0.25
"""Pause before it is tried again to connect."""
_SILENT_S = 45.0
"""A stream on which nothing came for so long is broken: the daemon pings every 15 s."""
_AHEAD = 64
"""Events that are read before they are asked for; the daemon keeps the others, and says what was too much."""


class HttpCalls:
    """Requests of one client. ``key``: sent as a bearer token; ``tls``: which certificates it trusts."""

    def __init__(self, url: str, timeout_s: float, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """Raises QueryError."""
        self._url, self._timeout_s, self._key, self._tls = url, timeout_s, key, tls
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            if not httpx2.URL(url).host:
                raise ValueError("it names no host")
            self._client = httpx2.AsyncClient(
                base_url=url, headers=headers, verify=tls or True, timeout=timeout_s
            )
        except (httpx2.InvalidURL, ValueError) as error:
            raise QueryError("bad_request", f"{url} is not an address to connect to: {error}") from None

    async def exchange(self, request: Sent) -> Received:
        """The reply, errors included; a daemon that is not there yet is waited for.

        Raises QueryError where there is none.
        """
        try:
            exchange = exchange_of(request)
        except QueryError as error:
            return error.reply(request.id)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._sent(exchange)
                while found is None:  # nothing listens there yet
                    await asyncio.sleep(_AGAIN_S)
                    found = await self._sent(exchange)
        except TimeoutError:
            raise self.no_reply() from None
        try:
            return exchange.reply(found.status_code, found.headers, found.content)
        except QueryError as error:
            return error.reply(request.id)

    async def subscribe(self, chosen: Subscribe) -> HttpEventStream:
        """A subscription on connections of its own. Raises QueryError."""
        stream = HttpEventStream(HttpCalls(self._url, self._timeout_s, self._key, self._tls), chosen)
        await stream.begin(self._timeout_s)
        return stream

    def no_reply(self) -> QueryError:
        """What is wrong when nothing came in time."""
        return QueryError("timeout", f"no reply from {self._url} within {self._timeout_s:g} s")

    async def events(self, feed: StreamFeed, began: asyncio.Event) -> AsyncGenerator[StreamItem, None]:
        """What comes, also over new connections; ``began`` is set at the first one. Raises QueryError."""
        while True:
            try:
                timeout = httpx2.Timeout(self._timeout_s, read=_SILENT_S)
                stream = self._client.stream(
                    "GET", EVENTS, params=tuple(feed.params), headers=feed.headers, timeout=timeout
                )
                async with stream as response:
                    if response.status_code != httpx2.codes.OK:
                        raise refusal(response.status_code, response.headers, await response.aread())
                    async for event in httpx2.EventSource(response):
                        told = feed.take(event.event, event.data, event.id)
                        began.set()
                        if told is not None:
                            yield told
            except httpx2.HTTPError as error:
                _check_trust(self._url, error)
            except QueryError as error:
                if not (began.is_set() and error.code in ("busy", "shutting_down")):
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _sent(self, exchange: Exchange) -> httpx2.Response | None:
        """None where there is no connection yet, so that nothing was sent."""
        try:
            return await self._client.request(
                exchange.method,
                exchange.path,
                params=dict(exchange.params),
                content=exchange.content,
                headers=exchange.headers,
            )
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            _check_trust(self._url, error)
            return None
        except httpx2.TimeoutException:
            raise self.no_reply() from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = f"the connection to {self._url} failed: {error or type(error).__name__}"
            raise QueryError("engine", why) from None


class HttpEventStream(AsyncEventStream):
    """A subscription over HTTP: it goes on by itself behind the last event over a new connection."""

    def __init__(self, calls: HttpCalls, chosen: Subscribe) -> None:
        """Takes ``calls`` over; `begin` waits for the daemon."""
        self._calls, self._feed, self._last = calls, StreamFeed(chosen), chosen.after
        self._told: asyncio.Queue[StreamItem | QueryError] = asyncio.Queue(_AHEAD)
        self._began = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @property
    def last(self) -> str:
        """See `AsyncEventStream`."""
        return self._last

    @property
    def newest(self) -> str:
        """See `AsyncEventStream`; empty where ``after`` was given."""
        return self._feed.newest

    async def begin(self, timeout_s: float) -> None:
        """Wait until the stream has begun. Raises QueryError, after closing."""
        self._reading = asyncio.create_task(self._read())
        began = asyncio.create_task(self._began.wait())
        done, _ = await asyncio.wait(
            (began, self._reading), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        began.cancel()
        if self._reading in done or not done:
            error = self._told.get_nowait() if self._reading in done else self._calls.no_reply()
            await self.aclose()
            assert isinstance(error, QueryError)
            raise error
        self._last = self._last or self._feed.newest

    async def get(self) -> StreamItem:
        """See `AsyncEventStream`."""
        told = await self._told.get()
        if isinstance(told, QueryError):
            self._told.put_nowait(told)  # there will be no others
            raise told
        self._last = (told.after if isinstance(told, LostMessage) else told.id) or self._last
        return told

    async def aclose(self) -> None:
        """End the subscription."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._calls.close()

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self._calls.events(self._feed, self._began)) as events:
                async for told in events:
                    await self._told.put(told)
        except QueryError as error:
            await self._told.put(error)


def _check_trust(url: str, error: BaseException) -> None:
    """Raises QueryError where no other try will do better: the certificate is not trusted."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = f"the certificate of {url} is not trusted: {cause.verify_message}"
            raise QueryError("unauthenticated", why) from None
        cause = cause.__cause__ or cause.__context__
