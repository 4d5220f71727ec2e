"""`GET /v1/events`: server-sent events, which browsers resume by themselves."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from daemon.api.events import Events, Lost, Subscription, sse

PING_S = 15.0
"""A stream on which nothing was sent for so long gets a comment, so that both ends see that it lives."""
RETRY_MS = 1000
_CHUNK = 64
"""Most events in one write."""

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventsReply(Response):
    """The reply that never ends by itself."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, client: Subscription, ping_s: float = PING_S) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._client, self._ping_s = events, client, ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client is gone or the daemon stops."""
        client, gone = self._client, asyncio.ensure_future(_gone(receive, self._client))
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
            await _write(send, f": foretick\nretry: {RETRY_MS}\n\n".encode())
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
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            timer.cancel()
            self._events.unsubscribe(client)
            gone.cancel()


def _told(lost: Lost) -> bytes:
    """What was lost, with the id from which the stream goes on: a browser that comes back sends that one."""
    return sse("lost", msgspec.json.encode(lost), lost.after)


async def _gone(receive: Receive, client: Subscription) -> None:
    """Close the subscription when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    client.close()


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def stream_head() -> Response:
    """The headers of a stream alone, for HEAD."""
    head = Response(headers=_HEADERS, media_type=EventsReply.media_type)
    del head.headers["content-length"]
    return head


def last_id(request: Request) -> str:
    """The id of the last event that the client knows: a header of browsers that come back, or `after`."""
    return request.headers.get("last-event-id") or request.query_params.get("after", "")
