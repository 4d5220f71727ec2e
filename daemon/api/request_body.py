"""Bodies of HTTP requests, bounded in length; the connection bounds the time that they take."""

import asyncio
import json
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from daemon.api.content_codings import CorruptBody, UnknownCoding, coding_of, unpacked
from daemon.api.disconnect import ClientDisconnected
from daemon.api.http_errors import BodyTooLong, UnsupportedCoding
from daemon.api.messages import QueryError
from feeds.decoding import Undecodable, decoded

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
_SLACK = 1 << 16
"""What packing adds to a body that it cannot make shorter."""
_IN_LINE_BYTES = 1 << 12
"""Packed bodies above this are unpacked in a thread, so that no client waits for them."""
_CUT = "Input data was truncated"
"""What msgspec says of a text that is cut short, and of half a surrogate pair near its end."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, unpacked; one that is too long is not read on.

    Raises ClientDisconnected, and QueryError for a body that is too long, or packed as nothing here reads.
    """
    try:
        coding = coding_of(value for name, value in request.scope["headers"] if name == b"content-encoding")
    except UnknownCoding as error:
        raise UnsupportedCoding("bad_request", str(error)) from None
    body = await _received(request, max_bytes + _SLACK if coding else max_bytes)
    if body is not None and coding:
        try:
            if len(body) <= _IN_LINE_BYTES:
                body = unpacked(body, coding, max_bytes)
            else:
                body = await asyncio.to_thread(unpacked, body, coding, max_bytes)
        except CorruptBody as error:
            raise QueryError("bad_request", str(error)) from None
    if body is None:
        raise BodyTooLong("too_long", f"the body has at most {max_bytes} bytes")
    return body


async def _received(request: Request, max_bytes: int) -> bytes | None:
    pieces, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            return None
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def read_json(body: bytes, kind: type[T]) -> T:
    """``body`` as ``kind``. Raises Undecodable."""
    try:
        found: T = decoded(partial(msgspec.json.decode, type=kind), body)
    except Undecodable as error:
        if str(error) == _CUT and _is_whole(body):
            why = "a text has half of a surrogate pair (such as \\ud800), which is no character"
            raise Undecodable(why, readable=False) from None
        raise
    return found


def _is_whole(body: bytes) -> bool:
    """Whether Python's own decoder, which takes half a surrogate pair, finds an end."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def read_query(request: Request, kind: type[S]) -> S:
    """The query as ``kind``, whose lists may be given any number of times. Raises QueryError, Undecodable."""
    lists = {field.name for field in msgspec.structs.fields(kind) if field.default_factory is list}
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in lists:
            given.setdefault(name, []).append(value)
        elif given.setdefault(name, value) is not value:
            raise QueryError("bad_request", f"{name[:64]}: is given twice")
    found: S = decoded(partial(msgspec.convert, type=kind, strict=False), given)
    return found


async def members_of(request: Request, max_bytes: int) -> dict[str, Any]:
    """Members of the JSON object that the body is. Raises QueryError."""
    body = await read_body(request, max_bytes)
    try:
        members = read_json(body, Any)
    except Undecodable as error:
        raise QueryError("bad_request", f"the body is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise QueryError("bad_request", "the body must be a JSON object of the request's own members")
    return members


def media_type_of(request: Request) -> str:
    """The declared content type without its parameters, in lower case."""
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            return str(value, "latin-1").partition(";")[0].strip().lower()
    return ""
