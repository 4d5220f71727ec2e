"""Why a request of the OpenAI or Anthropic API fails; each API writes it in its own shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from daemon.api.generation import MAX_STOP_CHARS, MAX_STOPS, ModelCatalog
from daemon.api.http_errors import BodyTooLong, UnsupportedCoding
from daemon.api.messages import QueryError
from feeds.decoding import shortened

Reason = Literal[
    "bad_request",
    "unauthenticated",
    "forbidden",
    "unknown_model",
    "unknown_url",
    "wrong_method",
    "too_long",
    "too_large",
    "unsupported_media_type",
    "busy",
    "engine",
    "rebuilding",
    "shutting_down",
    "timeout",
]
STATUS: dict[Reason, int] = {
    "bad_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "unknown_model": 404,
    "unknown_url": 404,
    "wrong_method": 405,
    "too_long": 400,
    "too_large": 413,
    "unsupported_media_type": 415,
    "busy": 429,
    "engine": 500,
    "rebuilding": 503,
    "shutting_down": 503,
    "timeout": 504,
}
_REASONS: dict[str, Reason] = {
    **{reason: reason for reason in STATUS},
    "unknown_session": "unknown_model",
    "moved": "unknown_model",
    "overloaded": "busy",
    "abandoned": "timeout",
}
"""By the codes of the daemon; any other one is a bad request."""
Object = dict[str, Any]


class ApiError(Exception):
    """``reason`` for programs, a message for people; ``param``: the member of the request at fault.

    ``retry_after_s``: when it may be tried again; 0 is not known.
    """

    def __init__(
        self, reason: Reason, message: str, param: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        self.reason, self.message, self.param = reason, shortened(message), param
        super().__init__(self.message)
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.reason]


ErrorBody = Callable[[ApiError], Object]
"""The body of a failed request, and of a stream that fails, in the shape of an API."""


def api_error_of(error: QueryError) -> ApiError:
    """A failure of the daemon as one of an API."""
    reason = _REASONS.get(error.code, "bad_request")
    if isinstance(error, BodyTooLong):
        reason = "too_large"
    elif isinstance(error, UnsupportedCoding):
        reason = "unsupported_media_type"
    return ApiError(reason, error.message, retry_after_s=error.retry_after_s)


def session_of(model: str, served: ModelCatalog) -> str:
    """The session that a model's name means, "" for the daemon's own. Raises ApiError for an unknown name."""
    session = served.session_of(model)
    if session is None:
        known = ", ".join(served.names)
        raise ApiError("unknown_model", f"there is no model {model!r}; there are: {known}", "model")
    return session


def stops_of(stop: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Stop sequences. Raises ApiError for too many, and for one that is empty or too long."""
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(found) > MAX_STOPS or not all(0 < len(each) <= MAX_STOP_CHARS for each in found):
        why = f"{param}: give at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters"
        raise ApiError("bad_request", why, param)
    return found


def refuse_all(asked: msgspec.Struct, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError for a member of ``harmless`` that has another value than those listed there."""
    for name, values in harmless.items():
        refuse(name, getattr(asked, name), values)


def refuse_tools(param: str, tools: Any, choice: Any, none: Any) -> None:
    """Raise ApiError for tools, unless there are none or ``choice`` is ``none``: then none may be called."""
    if choice != none:
        refuse(param, tools, ([],), f"is not supported, unless none may be called: {none!r}")
    elif tools is not None and not isinstance(tools, list):
        raise ApiError("bad_request", f"{param} must be a list", param)


def refuse(param: str, value: Any, harmless: tuple[Any, ...] = (), why: str = "is not supported") -> None:
    """Raise ApiError where ``value`` would change what the request means; None and ``harmless`` do not."""
    # for Python, but not in JSON, 0 is false
    alike = [each for each in harmless if isinstance(each, bool) == isinstance(value, bool)]
    if value is not None and value not in alike:
        raise ApiError("bad_request", f"{param} {why}", param)
