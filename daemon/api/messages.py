"""The query socket's messages, version 1: msgpack maps with a `type`, in both directions.

A request is one message `[payload]` (DEALER) or `[empty, payload]` (REQ); the reply has the same shape and
the request's `id`. Requests with a key that is not listed here are refused, so that a misspelt option is
never silently ignored; clients should ignore keys they do not know in replies, which is how replies may grow.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from feeds.decoding import Undecodable, decoded
from feeds.messages import Answer

Code = Literal[
    "bad_request",
    "unknown_session",
    "unknown_prompt",
    "finished",
    "abandoned",
    "too_long",
    "timeout",
    "busy",
    "engine",
    "shutting_down",
]
_CODES: dict[str, Code] = {
    "unknown_session": "unknown_session",
    "bad_request": "bad_request",
    "bad_prompt": "bad_request",
    "too_long": "too_long",
    "abandoned": "abandoned",
    "stopping": "shutting_down",
}
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
PromptId = Annotated[str, Meta(min_length=1, max_length=64)]


class Ask(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True):
    """Ask `question` of the session's newest data version.

    With `choices` the answer is one of them; without, greedy text of at most `max_tokens` tokens.
    """

    id: Id
    session: Name
    question: Annotated[str, Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] = 8
    choices: tuple[str, ...] = ()


class Sessions(msgspec.Struct, frozen=True, tag="sessions", forbid_unknown_fields=True):
    """List the sessions and the standing questions each is asked."""

    id: Id


class Answers(msgspec.Struct, frozen=True, tag="answers", forbid_unknown_fields=True):
    """The latest answers of a session's standing questions.

    `question` is a question's name or its text; empty means all of them. With `min_version` the reply waits,
    at most `timeout_s` seconds, until every answer asked for is of that data version or newer.
    """

    id: Id
    session: Name
    question: str = ""
    min_version: Annotated[int, Meta(ge=0)] = 0
    timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class Stats(msgspec.Struct, frozen=True, tag="stats", forbid_unknown_fields=True):
    """Counters and latency quantiles, by metric name."""

    id: Id


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Open a prompt without a session, to be continued by `append` and `update` and answered on `finish`.

    `text` is computed as it comes in. At temperature 0 the answer is the likeliest text or choice; above, it
    is drawn, the same for the same prompt.
    """

    id: Id
    text: str = ""
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    choices: tuple[str, ...] = ()
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0


class Append(msgspec.Struct, frozen=True, tag="append", forbid_unknown_fields=True):
    """Add `text` behind an open prompt. It is encoded on its own, so cut where words or lines end."""

    id: Id
    prompt: PromptId
    text: str


class Update(msgspec.Struct, frozen=True, tag="update", forbid_unknown_fields=True):
    """Replace an open prompt by `text`; what is computed of their common beginning stays."""

    id: Id
    prompt: PromptId
    text: str


class Finish(msgspec.Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    """The prompt is all there; the reply is its answer."""

    id: Id
    prompt: PromptId


class Close(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """Give a prompt up, finished or not."""

    id: Id
    prompt: PromptId


class Complete(msgspec.Struct, frozen=True, tag="complete", forbid_unknown_fields=True):
    """A prompt all at once: `open` and `finish` in one; the reply is its answer."""

    id: Id
    text: Annotated[str, Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    choices: tuple[str, ...] = ()
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0


PromptRequest = Open | Append | Update | Finish | Close | Complete
Request = Ask | Sessions | Answers | Stats | PromptRequest


class AskReply(msgspec.Struct, frozen=True, tag="ask_reply"):
    """The answer, read from exactly `data_version`.

    `logit_gap` is the top logit minus the second one at the first answer token, over the choices if there are
    any. `cached`: a standing question's answer that was ready before it was asked. `latency_ns` runs from the
    request's arrival to its reply, on the daemon's clock. `as_of` is the event time (ns since 1970) of the
    newest record in the version, `staleness_ns` the time since this daemon received it.
    """

    id: Id
    session: str
    data_version: int
    text: str
    choice: str | None
    logit_gap: float
    cached: bool
    untrained: bool
    flags: tuple[str, ...] = ()
    as_of: int = 0
    staleness_ns: int = 0
    latency_ns: int = 0


class SessionInfo(msgspec.Struct, frozen=True):
    """One session: what it reads, how far it is, and how much of its tape is live."""

    name: str
    symbol: str
    data_version: int
    live_tokens: int
    live_records: int
    as_of: int
    staleness_ns: int
    questions: tuple[str, ...]


class SessionsReply(msgspec.Struct, frozen=True, tag="sessions_reply"):
    """All sessions, in the configuration's order."""

    id: Id
    sessions: tuple[SessionInfo, ...]


class AnswersReply(msgspec.Struct, frozen=True, tag="answers_reply"):
    """The answers, as they were published; a question that has no answer yet is not in the list."""

    id: Id
    session: str
    answers: tuple[Answer, ...]


class Quantiles(msgspec.Struct, frozen=True):
    """One stage's latency: how often it was measured, and p50, p90, p99 in seconds."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float


class StatsReply(msgspec.Struct, frozen=True, tag="stats_reply"):
    """`values`: counters and gauges by series, like foretick_bars_total{session="a"}."""

    id: Id
    values: dict[str, float]
    stages: dict[str, Quantiles]


class PromptReply(msgspec.Struct, frozen=True, tag="prompt_reply"):
    """An open prompt's id, which continues it, and its length in tokens so far."""

    id: Id
    prompt: PromptId
    prompt_tokens: int


class ClosedReply(msgspec.Struct, frozen=True, tag="closed_reply"):
    """The prompt is given up."""

    id: Id
    prompt: PromptId


class FinishReply(msgspec.Struct, frozen=True, tag="finish_reply"):
    """The answer to a prompt, and what its KV went through.

    `logit_gap` as in an answer. `reused_tokens` were not computed for it: they were in the prefix cache, or
    another prompt began alike. Preemption dropped `recomputed_tokens` and moved `swapped_tokens` to the host
    and back; updates made `invalidated_tokens` useless. `ttft_ns` runs from the finish to the first token,
    `latency_ns` from the request's arrival to its reply; `waits` is the time (ns) spent waiting, by reason.
    """

    id: Id
    prompt: PromptId
    text: str
    choice: str | None
    logit_gap: float
    untrained: bool
    prompt_tokens: int
    answer_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    swapped_tokens: int
    invalidated_tokens: int
    ttft_ns: int
    waits: dict[str, int]
    latency_ns: int = 0


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """Why there is no answer; `id` is None when the request could not be read far enough to tell."""

    id: int | None
    code: Code
    message: str


Reply = (
    AskReply
    | SessionsReply
    | AnswersReply
    | StatsReply
    | PromptReply
    | ClosedReply
    | FinishReply
    | ErrorReply
)


class QueryError(Exception):
    """A request that gets an ErrorReply; raised by backends, and by the client that received one."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code: Code = code
        self.message = message


encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def code_of(failure: str) -> Code:
    """What a client is told for the code of an engine's failure."""
    return _CODES.get(failure, "engine")


def decode_request(payload: bytes) -> Request:
    """Raises Undecodable; its text says what is wrong and where."""
    request: Request = decoded(_requests.decode, payload)
    return request


def decode_reply(payload: bytes) -> Reply:
    """Raises Undecodable."""
    reply: Reply = decoded(_replies.decode, payload)
    return reply


def request_id(payload: bytes) -> int | None:
    """The id of a request that is otherwise unreadable; None when even that cannot be read."""
    try:
        found = decoded(msgspec.msgpack.decode, payload)
    except Undecodable:
        return None
    number = found.get("id") if isinstance(found, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None
