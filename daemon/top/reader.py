"""Reads a daemon over HTTP: one request at a time, over one connection where that lasts."""

import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import httpx2
import msgspec

from daemon.api.messages import SessionInfo
from daemon.api.operations import FoundAnswers
from daemon.top.scrape import Scrape, parse
from daemon.top.snapshot import FAMILIES, Reading
from daemon.traces.recorded_trace import Span, Trace
from daemon.traces.trace_context import trace_id_of
from feeds.market_data import Answer

T = TypeVar("T")


class Unavailable(Exception):
    """The daemon does not say what it was asked; the text says why."""


class Forbidden(Unavailable):
    """The key does not suffice."""


class Reader(Protocol):
    """What a screen reads. All raise Unavailable."""

    async def poll(self) -> Reading:
        """The sessions, and the metrics that are shown."""

    async def answers(self, session: str) -> Sequence[Answer]:
        """The newest answer of each standing question of a session; none where it is gone."""

    async def spans(self, answer: Answer) -> Sequence[Span]:
        """Where the time of an answer went; none where that is not kept."""


class _Sessions(msgspec.Struct):
    sessions: tuple[SessionInfo, ...]


class _Traces(msgspec.Struct):
    traces: tuple[Trace, ...]


class _Ready(msgspec.Struct):
    reasons: tuple[str, ...]


class _Problem(msgspec.Struct):
    message: str


class HttpReader:
    """A `Reader` of the daemon whose address the client has."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def poll(self) -> Reading:
        """See `Reader`."""
        sessions = _decode(await self._get("/v1/sessions"), _Sessions).sessions
        ready = _decode(await self._get("/readyz", (200, 503)), _Ready)
        scrape, notice = Scrape(), ""
        try:
            text = (await self._get("/metrics", params={"name[]": FAMILIES})).text
            scrape = parse(text, FAMILIES)
        except Forbidden as error:
            notice = f"no metrics: {error}"
        except ValueError as error:
            raise Unavailable(f"/metrics cannot be read: {error}") from None
        return Reading(time.monotonic(), sessions, scrape, ready.reasons, notice)

    async def answers(self, session: str) -> Sequence[Answer]:
        """See `Reader`."""
        reply = await self._get("/v1/answers", (200, 404), params={"session": session})
        return _decode(reply, FoundAnswers).answers if reply.status_code == 200 else ()

    async def spans(self, answer: Answer) -> Sequence[Span]:
        """See `Reader`."""
        reply = await self._get(f"/v1/traces/{trace_id_of(answer.answer_id)}", (200, 404))
        return _decode(reply, _Traces).traces[0].spans if reply.status_code == 200 else ()

    async def _get(self, path: str, statuses: Sequence[int] = (200,), **options: Any) -> httpx2.Response:
        try:
            reply = await self._client.get(path, **options)
        except httpx2.HTTPError as error:
            raise Unavailable(f"no reply: {error or type(error).__name__}") from None
        if reply.status_code in statuses:
            return reply
        try:
            why = msgspec.json.decode(reply.content, type=_Problem).message
        except (msgspec.MsgspecError, UnicodeDecodeError):
            why = reply.reason_phrase
        kind = Forbidden if reply.status_code == 403 else Unavailable
        raise kind(f"{path}: {reply.status_code}, {why}")


def _decode(reply: httpx2.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"{reply.url.path} is not a daemon's: {error}") from None
