"""What the OpenAI and Anthropic APIs share: an endpoint's parts, errors, the extension `foretick`, refusals.

Each API writes errors and replies in its own shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta
from starlette.responses import Response

from daemon.api.generation import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    Event,
    Finished,
    Generate,
    ModelCatalog,
    SamplingDefaults,
)
from daemon.api.http_errors import BodyTooLong, UnsupportedCoding, headers_of
from daemon.api.messages import (
    ORDINARY,
    RETENTION_S,
    Choices,
    QueryError,
    RetentionPriority,
    RetentionSeconds,
)
from feeds.decoding import shortened

encode = msgspec.json.Encoder().encode

Reason = Literal[
    "bad_request",
    "invalid",
    "unauthenticated",
    "forbidden",
    "unknown_model",
    "unknown_url",
    "wrong_method",
    "too_long",
    "too_large",
    "unsupported_media_type",
    "halted",
    "no_data",
    "busy",
    "engine",
    "rebuilding",
    "shutting_down",
    "timeout",
]
STATUS: dict[Reason, int] = {
    "bad_request": 400,
    "invalid": 422,
    "unauthenticated": 401,
    "forbidden": 403,
    "unknown_model": 404,
    "unknown_url": 404,
    "wrong_method": 405,
    "too_long": 400,
    "too_large": 413,
    "halted": 409,
    "no_data": 409,
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


ErrorBody = Callable[[ApiError], msgspec.Struct]
"""The body of a failed request, and of a stream that fails, in the shape of an API."""


def error_response(problem: ApiError, body: ErrorBody, headers: Mapping[str, str] = {}) -> Response:
    """The reply to a request that failed, in the shape of an API."""
    more = headers_of(problem.status, problem.retry_after_s)
    return Response(encode(body(problem)), problem.status, {**headers, **more}, media_type="application/json")


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


class Extension(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer is one of ``choices``.

    Without a session, prompt and answer stay in the prefix cache with ``retention_priority``, above 35 for
    ``retention_seconds``. With a ``salt`` it shares caches only with its tenant's requests of the same one.
    """

    choices: Choices = ()
    retention_priority: RetentionPriority = ORDINARY
    retention_seconds: RetentionSeconds = RETENTION_S
    salt: Annotated[str, Meta(max_length=256)] = ""


def extended(extension: Extension | None, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The members of a `Generate`. Raises ApiError for choices where there is a schema, too."""
    given = extension or Extension()
    if given.choices and schema is not None:
        raise ApiError("bad_request", "foretick.choices and a JSON schema exclude each other", "foretick")
    return msgspec.structs.asdict(given)


@dataclass(frozen=True)
class ReplyIdentity:
    """What a reply says of itself: ``key`` is random and makes its ids, ``created`` Unix time in seconds.

    ``sampling``: how the model samples where a request does not say.
    """

    key: str
    created: int
    model: str
    fingerprint: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


class Writer(Protocol):
    """Writes a stream as bytes."""

    def write(self, index: int, event: Event) -> Iterator[bytes]:
        """An answer begins, goes on, or is whole. ``index``: of the answer."""

    def end(self) -> Iterator[bytes]:
        """All are."""

    def failed(self, problem: ApiError) -> Iterator[bytes]:
        """The stream has ended."""

    def ping(self) -> bytes:
        """Keeps a connection open."""


Asked = TypeVar("Asked", contravariant=True)


class Api(Protocol[Asked]):
    """One endpoint that generates: pure translation from its ``request`` and to its ``reply``.

    A request has the members ``model`` and ``stream``. ``harmless``: members that are not supported, and the
    values of each that are served beside null, because they change nothing.
    """

    name: str
    path: str
    summary: str
    request: type[Any]
    reply: type[Any]
    harmless: dict[str, tuple[Any, ...]]

    def parse(self, asked: Asked, served: ModelCatalog) -> list[Generate]:
        """What to generate. Raises ApiError."""

    def build_response(self, asked: Asked, made: ReplyIdentity, done: Sequence[Finished]) -> msgspec.Struct:
        """The reply at once."""

    def writer(self, asked: Asked, made: ReplyIdentity) -> Writer:
        """The reply as a stream."""

    def error(self, problem: ApiError) -> msgspec.Struct:
        """The body of an error."""


def sse(data: msgspec.Struct | dict[str, Any], event: str = "") -> bytes:
    """A server-sent event."""
    named = f"event: {event}\n".encode() if event else b""
    return named + b"data: " + encode(data) + b"\n\n"
