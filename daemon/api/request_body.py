"""Bodies of HTTP requests, bounded in length; the connection bounds the time that they take."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from daemon.api.content_codings import CorruptBody, UnknownCoding, coding_of, unpacked
from daemon.api.http_errors import UnsupportedCoding
from daemon.api.messages import QueryError
from feeds.decoding import Undecodable, decoded

T = TypeVar("T")
_SLACK = 1 << 16
"""What packing adds to a body that it cannot make shorter."""
_IN_LINE_BYTES = 1 << 12
"""Packed bodies above this are unpacked in a thread, so that no client waits for them."""
_CUT = "Input data was truncated"
"""What msgspec says of a text that is cut short, and of half a surrogate pair near its end."""


async def read_body(request: Request, max_bytes: int) -> bytes | None:
    """The whole body, unpacked; None when it is too long, and is then not read on.

    Raises ClientDisconnect, UnknownCoding before anything is read, and Corrupt.
    """
    coding = coding_of(value for name, value in request.scope["headers"] if name == b"content-encoding")
    body = await _received(request, max_bytes + _SLACK if coding else max_bytes)
    if body is None or not coding:
        return body
    if len(body) <= _IN_LINE_BYTES:
        return unpacked(body, coding, max_bytes)
    return await asyncio.to_thread(unpacked, body, coding, max_bytes)


async def _received(request: Request, max_bytes: int) -> bytes | None:
    pieces, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            return None
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def body_of(request: Request, max_bytes: int) -> bytes:
    """The whole body, unpacked. Raises QueryError when it is too long, or packed as nothing here reads."""
    try:
        body = await read_body(request, max_bytes)
    except UnknownCoding as error:
        raise UnsupportedCoding("bad_request", str(error)) from None
    except CorruptBody as error:
        raise QueryError("bad_request", str(error)) from None
    except ClientDisconnect:
        raise QueryError("bad_request", "the client is gone") from None
    if body is None:
        raise QueryError("too_long", f"the body has at most {max_bytes} bytes")
    return body


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


async def members_of(request: Request, max_bytes: int) -> dict[str, Any]:
    """Members of the JSON object that the body is. Raises QueryError."""
    body = await body_of(request, max_bytes)
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
