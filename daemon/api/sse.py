"""`GET /v1/events`: server-sent events, which browsers resume by themselves."""

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from daemon.api.disconnect import gone
from daemon.api.events import EventFilter, Events, Lost, Subscription, sse
from daemon.api.messages import EventKind

PING_S = 15.0
"""A stream on which nothing was sent for so long gets a comment, so that both ends see that it lives."""
RETRY_MS = 1000
_CHUNK = 64
"""Most events in one write."""

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventsReply(Response):
    """The reply that never ends by itself."""

    media_type = "text/event-stream"

    def __init__(
        self, events: Events, client: Subscription, ping_s: float = PING_S, newest: str = ""
    ) -> None:
        """``newest``: the id behind which the stream begins, for a client that names none."""
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._client, self._ping_s = events, client, ping_s
        # an id without data is no event, but what a browser comes back with before the first one
        self._head = f": foretick\nretry: {RETRY_MS}\n" + (f"id: {newest}\n\n" if newest else "\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client is gone or the daemon stops."""
        client = self._client
        leaving = asyncio.ensure_future(_close_when_gone(receive, client))
        loop = asyncio.get_running_loop()
        written, timer = loop.time(), loop.call_later(self._ping_s, lambda: wake())

        def wake() -> None:
            """Let a quiet stream write a ping. A time limit for each wait would cost every event a timer."""
            nonlocal timer
            due = written + self._ping_s
            if loop.time() >= due:
                client.news.set()
                due = loop.time() + self._ping_s
            timer = loop.call_at(due, wake)

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _write(send, self._head.encode())
            while not client.closed:
                await client.news.wait()
                lost, waiting = client.take()
                if not lost and not waiting and not client.closed:
                    await _write(send, b": ping\n\n")
                if lost:
                    await _write(send, b"".join(map(_told, lost)))
                for start in range(0, len(waiting), _CHUNK):
                    chunk = waiting[start : start + _CHUNK]
                    await _write(send, b"".join(event.sse for event in chunk))
                written = loop.time()
            if not leaving.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            timer.cancel()
            self._events.unsubscribe(client)
            leaving.cancel()


def _told(lost: Lost) -> bytes:
    """What was lost, with the id from which the stream goes on: a browser that comes back sends that one."""
    return sse("lost", msgspec.json.encode(lost), lost.after)


async def _close_when_gone(receive: Receive, client: Subscription) -> None:
    await gone(receive)
    client.close()


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which events a stream has; empty is all."""

    session: Annotated[list[str], Meta(description="Only of this session; any number of times.")] = []
    question: Annotated[
        list[str], Meta(description="Answers of this question only; any number of times.")
    ] = []
    event: Annotated[list[EventKind], Meta(description="Only this kind; any number of times.")] = []
    after: Annotated[
        str, Meta(description="Begin after the event of this id, EPOCH.NUMBER; after another text, now.")
    ] = ""

    @property
    def filter(self) -> EventFilter:
        """The same for `Events`."""
        return EventFilter(frozenset(self.session), frozenset(self.question), frozenset(self.event))


def stream_head() -> Response:
    """The headers of a stream alone, for HEAD."""
    head = Response(headers=_HEADERS, media_type=EventsReply.media_type)
    del head.headers["content-length"]
    return head
