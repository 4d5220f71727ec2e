"""Why a request of the OpenAI or Anthropic API fails; each API writes it in its own shape."""

from __future__ import annotations

from typing import Any, Literal

from daemon.api.messages import QueryError

Reason = Literal[
    "bad_request",
    "forbidden",
    "unknown_model",
    "too_long",
    "too_large",
    "no_json",
    "busy",
    "engine",
    "shutting_down",
    "timeout",
]
STATUS: dict[Reason, int] = {
    "bad_request": 400,
    "forbidden": 403,
    "unknown_model": 404,
    "too_long": 400,
    "too_large": 413,
    "no_json": 415,
    "busy": 429,
    "engine": 500,
    "shutting_down": 503,
    "timeout": 504,
}
_REASONS: dict[str, Reason] = {
    "unknown_session": "unknown_model",
    "too_long": "too_long",
    "busy": "busy",
    "late": "busy",
    "engine": "engine",
    "shutting_down": "shutting_down",
    "timeout": "timeout",
    "abandoned": "timeout",
}


class Problem(Exception):
    """``reason`` for programs, a message for people; ``param``: the member of the request at fault."""

    def __init__(self, reason: Reason, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.param = reason, message, param

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.reason]


def problem_of(error: QueryError) -> Problem:
    """A failure of the daemon as one of an API."""
    return Problem(_REASONS.get(error.code, "bad_request"), error.message)


def refuse(param: str, value: Any, harmless: tuple[Any, ...] = (), why: str = "is not supported") -> None:
    """Raise Problem where ``value`` would change what the request means; None and ``harmless`` do not."""
    if value is not None and value not in harmless:
        raise Problem("bad_request", f"{param} {why}", param)
