"""Requests of the query socket as exchanges over HTTP, and events as they are streamed: no I/O.

The paths follow from the table of operations that the daemon's routes follow from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args
from urllib.parse import quote

import msgspec

from daemon.api import messages
from daemon.api.messages import Code, EventData, LostMessage, QueryError, Received, Sent
from daemon.api.operations import (
    OPERATIONS,
    FindAnswers,
    FindQuality,
    FindQuestions,
    FoundAnswers,
    FoundQuality,
    FoundQuestions,
)
from daemon.api.subscriptions import StreamItem, SubscriptionUpdate
from daemon.traces.trace_context import TRACEPARENT
from feeds.decoding import Undecodable, decoded
from feeds.market_data import Answer, DataUpdated, FlashReady, Signal

EVENTS = "/v1/events"
_VERSION, _DATA = "/v1/version", "/v1/data"
_JSON = "application/json"
_MEDIA = {
    "msgpack": "application/msgpack",
    "json": _JSON,
    "lines": "application/x-ndjson",
    "csv": "text/csv",
}
_NO_RECORD_USABLE = 422
"""Status of a push whose reply counts what is wrong, like that of any other push."""
_FOUND: dict[type, type] = {
    messages.Answers: FindAnswers,
    messages.ListQuestions: FindQuestions,
    messages.Quality: FindQuality,
}
"""Requests that HTTP asks in another form, of one session or of all."""
_OPERATIONS = {each.request: each for each in sorted(OPERATIONS, key=lambda each: each.perform is not None)}
_OPERATIONS[messages.Describe] = next(each for each in OPERATIONS if each.reply is messages.DescribeReply)
_CODES: dict[int, Code] = {
    401: "unauthenticated",
    403: "forbidden",
    413: "too_long",
    429: "busy",
    504: "timeout",
}
"""What a status means where the reply does not say it."""
_KINDS: dict[str, type[EventData]] = {
    "answer": Answer,
    "flash_ready": FlashReady,
    "data_updated": DataUpdated,
    "signal": Signal,
}
Read = Callable[[Any], Received]


@dataclass(frozen=True)
class Exchange:
    """What is sent, and how the JSON of a reply is ``read``; ``also``: a status that is no refusal.

    ``traceparent``: the caller's span.
    """

    method: str
    path: str
    read: Read
    params: Mapping[str, str]
    content: bytes = b""
    media: str = ""
    also: int = 0
    traceparent: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Beside those of every request."""
        known = {"content-type": self.media, TRACEPARENT: self.traceparent}
        return {name: value for name, value in known.items() if value}

    def reply(self, status: int, headers: Mapping[str, str], body: bytes) -> Received:
        """What came back. Raises QueryError."""
        if status >= 300 and status != self.also:
            raise refusal(status, headers, body)
        try:
            return decoded(self.read, decoded(msgspec.json.decode, body))
        except Undecodable as error:
            why = f"the reply to {self.method} {self.path} is not of this protocol: {error}"
            raise QueryError("engine", why) from None


def exchange_of(request: Sent) -> Exchange:
    """The exchange of a request, checked as the daemon checks one of the query socket. Raises QueryError."""
    try:
        request = messages.decode_request(messages.encode(request))  # type: ignore[assignment]  # the same
    except Undecodable as error:
        raise QueryError("bad_request", str(error)) from None
    match request:
        case messages.Hello():
            return Exchange("GET", _VERSION, partial(_hello, request), {})
        case messages.Push():
            names = ("format", "source", "date", "replay")
            params = _params({name: getattr(request, name) for name in names}, messages.Push)
            kind = _MEDIA[request.content]
            return Exchange(
                "POST", _DATA, partial(_pushed, request.id), params, request.data, kind, _NO_RECORD_USABLE
            )
    operation = _OPERATIONS[_FOUND.get(type(request), type(request))]
    members = {name: getattr(request, name) for name in type(request).__struct_fields__}
    content, media = b"", ""
    if operation.body != "none":
        said = (
            members["settings"]
            if operation.body == "settings"
            else {n: members[n] for n in operation.in_body}
        )
        content, media = msgspec.json.encode(said), _JSON
    return Exchange(
        operation.method,
        operation.path.format(**{name: quote(members[name], safe="") for name in operation.in_path}),
        partial(_read, request, operation.reply),
        _params({name: members[name] for name in operation.query}, type(request)),
        content,
        media,
        traceparent=members.get(TRACEPARENT) or "",
    )


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> QueryError:
    """The error that a reply tells, or that its status does: another server may stand between."""
    try:
        told = decoded(msgspec.json.decode, body)
        code, message = str(told["code"]), str(told["message"])
    except (Undecodable, TypeError, KeyError):
        code, message = "", f"the reply is no reply of a daemon, but status {status}"
    known = next((each for each in get_args(Code) if each == code), None)
    after = headers.get("retry-after", "")
    fallback: Code = "engine" if status >= 500 or not code else "bad_request"
    return QueryError(
        known or _CODES.get(status, fallback), message, float(after) if after.isdecimal() else 0.0
    )


class StreamFeed:
    """What a stream of server-sent events tells, over all its connections."""

    def __init__(self, chosen: messages.Subscribe) -> None:
        self.last = chosen.after
        """Id behind which the stream goes on."""
        self.newest = ""
        """Id of the daemon's newest event when the stream began; empty where ``after`` was given."""
        filters = (("session", chosen.sessions), ("question", chosen.questions), ("event", chosen.events))
        self.params = [(name, value) for name, values in filters for value in values]

    @property
    def headers(self) -> dict[str, str]:
        """Of the next connection."""
        return {"accept": "text/event-stream"} | ({"last-event-id": self.last} if self.last else {})

    def take(self, kind: str, data: str, id_: str) -> StreamItem | None:
        """What an event tells; None for an id alone, and for a kind that is not known here.

        Raises QueryError.
        """
        self.newest = self.newest or ("" if data else id_)
        self.last = id_ or self.last
        try:
            if kind == "lost":
                return decoded(_lost, data)
            if kind in _KINDS:
                return SubscriptionUpdate(id_, decoded(partial(msgspec.json.decode, type=_KINDS[kind]), data))
        except Undecodable as error:
            why = f"the stream has an event that is not of this protocol: {error}"
            raise QueryError("engine", why) from None
        return None


def _lost(data: str) -> LostMessage:
    return msgspec.convert({"type": "lost", "subscription": 0, **msgspec.json.decode(data)}, LostMessage)


def _read(request: Any, reply: type[msgspec.Struct], members: Any) -> Received:
    """The reply of the query socket to ``request``."""
    if reply is FoundAnswers:
        answers = msgspec.convert(members, FoundAnswers).answers
        return messages.AnswersReply(request.id, request.session, answers)
    if reply is FoundQuestions:
        (of_session,) = msgspec.convert(members, FoundQuestions).sessions
        return messages.QuestionsReply(request.id, of_session.session, of_session.questions)
    if reply is FoundQuality:
        (quality,) = msgspec.convert(members, FoundQuality).sessions
        return messages.QualityReply(request.id, quality)
    whole = {"type": reply.__struct_config__.tag, "id": request.id, **members}
    return cast(Received, msgspec.convert(whole, reply))


def _hello(request: messages.Hello, members: Any) -> Received:
    """Over HTTP there is no lease, and no bound on what one connection asks at a time."""
    if members["api"] != request.version:
        why = f"the daemon speaks version {members['api']} of the protocol, not {request.version}"
        return messages.ErrorReply(request.id, "unsupported_version", why)
    return messages.HelloReply(
        request.id, members["api"], members["version"], 0.0, 0, messages.MAX_REQUEST_BYTES
    )


def _pushed(number: int, members: Any) -> messages.PushReply:
    return messages.PushReply(number, msgspec.convert(members, messages.Pushed))


def _params(members: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, str]:
    """Members of a query that differ from their defaults, as text."""
    defaults = {each.name: each.default for each in msgspec.structs.fields(kind)}
    given = {name: value for name, value in members.items() if value != defaults[name]}
    return {name: "true" if value is True else str(value) for name, value in given.items()}
