"""Records that clients push into a source of the daemon's own: `POST /v1/data`, and the request `push`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from daemon.api.auth_middleware import client_of
from daemon.api.http_errors import NO_SUCH_TYPE, problem, refused, reply
from daemon.api.messages import LineError, Push, Pushed, PushReply, QueryError
from daemon.api.request_body import media_type_of, read_body, read_query
from daemon.tenants import Tenant
from feeds.batch_body import Body, BodyFormat, TooMany, convert, split
from feeds.decoding import Undecodable
from feeds.file_format import FormatError
from feeds.moments import in_order
from feeds.push_source import Closed, Full, PushedSource
from metrics.store import MetricStore

MAX_ERRORS = 20
"""Errors that a reply lists; all are counted."""
JSON, LINES, MSGPACK, CSV = "application/json", "application/x-ndjson", "application/msgpack", "text/csv"
OWN_TYPES = (JSON, LINES, MSGPACK)
_MEDIA = {"msgpack": MSGPACK, "json": JSON, "lines": LINES, "csv": CSV}
"""Content types by the names that the request `push` has for them."""
CONTAINERS = {
    "csv": (CSV,),
    "jsonl": (LINES,),
    "jsonl-capture": (LINES,),
    "json": (JSON,),
    "msgpack": (MSGPACK,),
    "avro": ("application/avro", "avro/binary"),
    "protobuf": ("application/x-protobuf", "application/protobuf"),
}
"""Content types of declared formats."""
_REGISTRY_S = 10.0
"""Longest wait for the schema of a body."""
_IN_LINE_BYTES = 1 << 14
"""Bodies above this are read in a thread, so that no client waits for them."""


class PushOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a body of records is to be read.

    `format`: a declared format; empty is our own wire form. `source`: which source gets the records, where
    there are several for pushes. `date`: the day of times that count from midnight. `replay`: the records
    are of the past, so their ages count from now.
    """

    format: Annotated[str, Meta(max_length=64)] = ""
    source: Annotated[str, Meta(max_length=64)] = ""
    date: date | None = None
    replay: bool = False


Outcome = Literal["accepted", "partly", "refused", "busy"]


class Pushes:
    """Takes bodies of records for the sources among ``sources``, by name.

    ``max_record_bytes``: of one record; longer ones are refused by the source's reader. ``closed_until``: of
    a tenant's sessions, by symbol, the event time before which records are late now. ``signed()``: symbols
    whose prices may be zero and below. ``symbol_of``: what a record of a name and an event time is of.
    """

    def __init__(
        self,
        sources: Mapping[str, PushedSource],
        store: MetricStore,
        max_record_bytes: int,
        closed_until: Callable[[Tenant, Collection[str]], Mapping[str, int]] = lambda tenant, symbols: {},
        signed: Callable[[], Collection[str]] = frozenset,
        symbol_of: Callable[[str, int], str] = lambda name, moment: name,
    ) -> None:
        self._closed_until, self._signed, self._symbol_of = closed_until, signed, symbol_of
        self._sources, self._store, self._max_record_bytes = sources, store, max_record_bytes

    async def serve(self, request: Request) -> Response:
        """The reply to `POST /v1/data`."""
        try:
            options = read_query(request, PushOptions)
            tenant = client_of(request).tenant
            source = self._source(options.source, tenant)
            allowed = _types(source, options.format)
            media = media_type_of(request)
            if media not in allowed:
                why = f"the content type must be {' or '.join(allowed)}"
                return problem(NO_SUCH_TYPE, "bad_request", why)
            body = await read_body(request, source.limits.body_bytes)
            told = await self._take(body, media, source, options, tenant)
        except Undecodable as error:
            return problem(400, "bad_request", str(error))
        except QueryError as error:
            return refused(error)
        return reply(told, 202 if told.accepted or not told.refused else 422)

    async def push(self, request: Push, tenant: Tenant) -> PushReply:
        """The reply to the request `push`. Raises QueryError."""
        source = self._source(request.source, tenant)
        media, allowed = _MEDIA[request.content], _types(source, request.format)
        if media not in allowed:
            names = " or ".join(name for name, each in _MEDIA.items() if each in allowed)
            why = f"content: must be {names}" if names else f"format: {request.format} is pushed by HTTP only"
            raise QueryError("bad_request", why)
        options = PushOptions(request.format, request.source, request.date, request.replay)
        return PushReply(request.id, await self._take(request.data, media, source, options, tenant))

    async def _take(
        self, body: bytes, media: str, source: PushedSource, options: PushOptions, tenant: Tenant
    ) -> Pushed:
        """Hand the records of a body to a source. Raises QueryError."""
        if options.format:
            await self._prepare(source.limits.formats[options.format], body)
        try:
            read = partial(self._read, body, media, source, options)
            found = read() if len(body) <= _IN_LINE_BYTES else await asyncio.to_thread(read)
            encoding = "msgpack" if media == MSGPACK and not options.format else "json"
            source.push(found.payloads, encoding, replay=options.replay, faults=found.faults)
        except TooMany as error:
            raise QueryError("too_long", str(error)) from None
        except FormatError as error:
            raise QueryError("bad_request", str(error)) from None
        except Full as error:
            self._count("busy")
            raise QueryError("busy", str(error)) from None
        except Closed as error:
            raise QueryError("engine", str(error)) from None
        self._count("accepted" if not found.errors else "partly" if found.usable else "refused")
        errors = tuple(LineError(n, e.reason, e.message) for n, e in found.errors[:MAX_ERRORS])
        moments = [(self._symbol_of(key, moment), moment) for key, moment in found.moments]
        closed = self._closed_until(tenant, {key for key, _ in moments})
        late = sum(moment < closed.get(key, 0) for key, moment in moments)
        return Pushed(found.usable, len(found.errors), found.passed_over, errors, late)

    async def _prepare(self, form: BodyFormat, body: bytes) -> None:
        """Get what a registry knows of the body. Raises QueryError where it does not answer."""
        try:
            async with asyncio.timeout(_REGISTRY_S):
                await form.prepare(body)
        except TimeoutError:
            self._count("busy")
            raise QueryError("busy", "the schema registry does not answer: send the records again") from None

    def _read(self, body: bytes, media: str, source: PushedSource, options: PushOptions) -> Body:
        most = source.limits.waiting
        encoding = "msgpack" if media == MSGPACK else "json"
        if options.format:
            form, own = source.limits.formats[options.format], frozenset(self._signed())
            found = convert(body, form, options.date, most=most, now_ns=time.time_ns(), signed=own)
            encoding = "json"
        else:
            limit = self._max_record_bytes
            is_lines, signed = media == LINES, frozenset(self._signed())
            found = split(body, encoding, lines=is_lines, most=most, max_bytes=limit, signed=signed)
        return replace(found, payloads=in_order(found.payloads, encoding))

    def _source(self, name: str, tenant: Tenant) -> PushedSource:
        """The source of this name, or the only one, as far as the tenant may push. Raises QueryError."""
        if not self._sources:
            raise QueryError("bad_request", "no source takes pushes: set source.kind = 'http'")
        known = [each for each in self._sources if tenant.feeds(each)]
        if not known:
            raise QueryError("forbidden", "this tenant may push into no source")
        if not name and len(known) == 1:
            return self._sources[known[0]]
        if name not in known:
            raise QueryError("bad_request", f"source: must be one of {', '.join(known)}")
        return self._sources[name]

    def _count(self, outcome: Outcome) -> None:
        self._store.inc("foretick_pushes_total", outcome=outcome)


def _types(source: PushedSource, form: str) -> tuple[str, ...]:
    """The content types of a format. Raises QueryError when it is not known."""
    if not form:
        return OWN_TYPES
    if form not in source.limits.formats:
        raise QueryError("bad_request", f"format: must be one of {', '.join(source.limits.formats)}")
    container = source.limits.formats[form].form.container
    if container not in CONTAINERS:
        raise QueryError("bad_request", f"format: {form} is of {container} files, which are not pushed")
    return CONTAINERS[container]
