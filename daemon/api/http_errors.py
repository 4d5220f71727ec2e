"""Errors over HTTP: `{"code": ..., "message": ...}`, with the status of the code."""

from math import ceil

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from daemon.api.content_codings import ACCEPTED
from daemon.api.messages import RETRY_AFTER_S, Code, QueryError

STATUS: dict[Code, int] = {
    "bad_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "unsupported_version": 400,
    "in_flight": 409,
    "cancelled": 409,
    "unknown_session": 404,
    "unknown_prompt": 404,
    "unknown_version": 404,
    "unknown_trace": 404,
    "not_calibrated": 409,
    "repeated": 409,
    "halted": 409,
    "no_data": 409,
    "finished": 409,
    "abandoned": 410,
    "moved": 421,
    "too_long": 413,
    "busy": 429,
    "overloaded": 429,
    "engine": 503,
    "rebuilding": 503,
    "shutting_down": 503,
    "timeout": 504,
}
ZEROMQ_ONLY = frozenset[Code](("unsupported_version", "in_flight", "cancelled"))
"""Codes that no request over HTTP gets."""
TOO_MANY, NO_SUCH_TYPE = 429, 415
_CODES = {404: "not_found", 405: "method_not_allowed"}


class UnsupportedCoding(QueryError):
    """A request whose body is packed in a way that is not read here."""


class BodyTooLong(QueryError):
    """A request whose body is longer than its route reads."""


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed: a code of the query socket, or one of HTTP alone, and a text for people."""

    code: str
    message: str


def problem(status: int, code: str, message: str, retry_after_s: float = 0.0) -> Response:
    """The reply to a request that failed."""
    response = reply(Problem(code, message), status)
    response.headers.update(headers_of(status, retry_after_s))
    return response


def headers_of(status: int, retry_after_s: float = 0.0) -> dict[str, str]:
    """What a refusal of this status has in its headers. ``retry_after_s``: 0 is not known."""
    if status == TOO_MANY:
        return {"retry-after": str(ceil(retry_after_s) or RETRY_AFTER_S)}
    return {"www-authenticate": 'Bearer realm="foretick"'} if status == STATUS["unauthenticated"] else {}


def refused(error: QueryError) -> Response:
    """The reply to a request that was refused."""
    if isinstance(error, UnsupportedCoding):
        response = problem(NO_SUCH_TYPE, error.code, error.message)
        response.headers["accept-encoding"] = ACCEPTED
        return response
    return problem(STATUS[error.code], error.code, error.message, error.retry_after_s)


def reply(members: object, status: int = 200) -> Response:
    """A JSON reply, which nothing may keep: it is old at once."""
    return Response(
        msgspec.json.encode(members),
        status,
        {"cache-control": "no-store"},
        media_type="application/json",
    )


async def framework_error(_: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "bad_request")
    response = problem(error.status_code, code, str(error.detail))
    response.headers.update(error.headers or {})
    return response
