"""The query socket's messages, version 1: msgpack maps with a `type`, in both directions.

A request is one message `[payload]` (DEALER) or `[empty, payload]` (REQ); the reply has the same shape and
the request's `id`. A request with an unlisted key is refused, so that a misspelt option is never silently
ignored. Clients should ignore unknown keys in replies: replies may gain keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from feeds.decoding import Undecodable, decoded
from feeds.messages import Answer
from flash.questions import AnswerForm, PublishWhen

Code = Literal[
    "bad_request",
    "unknown_session",
    "unknown_prompt",
    "unknown_version",
    "not_calibrated",
    "repeated",
    "finished",
    "abandoned",
    "too_long",
    "timeout",
    "busy",
    "late",
    "moved",
    "rebuilding",
    "engine",
    "shutting_down",
]
_CODES: dict[str, Code] = {
    "unknown_session": "unknown_session",
    "unknown_version": "unknown_version",
    "not_calibrated": "not_calibrated",
    "repeated": "repeated",
    "rebuilding": "rebuilding",
    "bad_request": "bad_request",
    "bad_prompt": "bad_request",
    "too_long": "too_long",
    "abandoned": "abandoned",
    "stopping": "shutting_down",
}
RETRY_AFTER_S = 1
"""When a request refused as `busy` or `late` may be tried again."""
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Setting = str | int | float | list[str]
"""A value of a configuration key: text is read as the key's type."""
PromptId = Annotated[str, Meta(min_length=1, max_length=64)]


class Ask(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True):
    """Ask `question` of a session.

    With `choices` the answer is one of them; without, greedy text of at most `max_tokens` tokens. A standing
    question gets its newest ready answer; with `max_age_s` only while the newest record behind that answer is
    at most so many seconds old (`staleness_ns`), or of the newest data version. Any other ask is computed at
    the newest data version. `early_exit` replaces `flash.early_exit`, where that is on; 0 turns it off.
    """

    id: Id
    session: Name
    question: Annotated[str, Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] = 8
    choices: tuple[str, ...] = ()
    early_exit: Annotated[float, Meta(ge=0)] | None = None
    max_age_s: Annotated[float, Meta(ge=0)] | None = None


class ListSessions(msgspec.Struct, frozen=True, tag="sessions", forbid_unknown_fields=True):
    """List the sessions and their standing questions."""

    id: Id


class Answers(msgspec.Struct, frozen=True, tag="answers", forbid_unknown_fields=True):
    """The latest answers of a session's standing questions.

    `question` is a question's name or text; empty means all. With `min_version` the reply waits at most
    `timeout_s` seconds until every requested answer is of that data version or newer.
    """

    id: Id
    session: Name
    question: str = ""
    min_version: Annotated[int, Meta(ge=0)] = 0
    timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class ListQuestions(msgspec.Struct, frozen=True, tag="questions", forbid_unknown_fields=True):
    """List a session's standing questions."""

    id: Id
    session: Name


class SetQuestion(msgspec.Struct, frozen=True, tag="set_question", forbid_unknown_fields=True):
    """Give a session a standing question, in place of the one with this name, if there is one.

    It is answered from the session's next data version on, until the daemon ends or reads its configuration
    again.
    """

    id: Id
    session: Name
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
    text: Annotated[str, Meta(min_length=1)]
    choices: tuple[str, ...] = ()
    max_tokens: Annotated[int, Meta(ge=1)] = 8
    answer: AnswerForm = "text"
    publish_when: PublishWhen = "always"
    min_probability: Annotated[float, Meta(ge=0, le=1)] = 0.8
    min_logit_gap: Annotated[float, Meta(ge=0)] = 2.0
    level: str = "0"
    publish_every: Annotated[int, Meta(ge=1)] = 1
    ask_every_bars: Annotated[int, Meta(ge=1)] = 1
    ask_every_ns: Annotated[int, Meta(ge=0)] = 0
    answer_within_ns: Annotated[int, Meta(ge=0)] = 0
    provisional: bool = False


class RemoveQuestion(msgspec.Struct, frozen=True, tag="remove_question", forbid_unknown_fields=True):
    """Remove a session's standing question; later data versions are not asked."""

    id: Id
    session: Name
    name: Name


class AddSession(msgspec.Struct, frozen=True, tag="add_session", forbid_unknown_fields=True):
    """Open a session. `settings` are the keys of a `[[sessions]]` table, its name and symbol among them.

    It lasts until the daemon ends or reads its configuration again, as do the changes below. It has the
    standing questions that the configuration asks of all sessions.
    """

    id: Id
    settings: dict[str, Setting]


class ChangeSession(msgspec.Struct, frozen=True, tag="change_session", forbid_unknown_fields=True):
    """Give a session other settings; keys that are left out stay.

    Its window begins again, empty, if it depends on one of them; see the operations page.
    """

    id: Id
    session: Name
    settings: dict[str, Setting]


class RemoveSession(msgspec.Struct, frozen=True, tag="remove_session", forbid_unknown_fields=True):
    """Close a session. What is being asked of it fails with `unknown_session`."""

    id: Id
    session: Name


class Label(msgspec.Struct, frozen=True, tag="label", forbid_unknown_fields=True):
    """Tell the right choice of a standing question's answer at a past data version, once.

    `question` is the question's name or text.
    """

    id: Id
    session: Name
    question: Annotated[str, Meta(min_length=1)]
    data_version: Annotated[int, Meta(ge=1)]
    choice: Annotated[str, Meta(min_length=1)]


class Stats(msgspec.Struct, frozen=True, tag="stats", forbid_unknown_fields=True):
    """Counters and latency quantiles, by metric name."""

    id: Id


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Open a prompt without a session; `append` and `update` extend it, `finish` answers it.

    `text` is prefilled as it arrives. At temperature 0 the answer is the most likely text or choice; above 0
    it is sampled, and the same prompt gives the same sample.
    """

    id: Id
    text: str = ""
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    choices: tuple[str, ...] = ()
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0


class Append(msgspec.Struct, frozen=True, tag="append", forbid_unknown_fields=True):
    """Append `text` to an open prompt. Each piece is encoded separately, so cut between words or lines."""

    id: Id
    prompt: PromptId
    text: str


class Update(msgspec.Struct, frozen=True, tag="update", forbid_unknown_fields=True):
    """Replace the text of an open prompt; the KV of the common prefix is kept."""

    id: Id
    prompt: PromptId
    text: str


class Finish(msgspec.Struct, frozen=True, tag="finish", forbid_unknown_fields=True):
    """Mark the prompt complete; the reply is its answer."""

    id: Id
    prompt: PromptId


class Close(msgspec.Struct, frozen=True, tag="close", forbid_unknown_fields=True):
    """Close a prompt, finished or not."""

    id: Id
    prompt: PromptId


class Complete(msgspec.Struct, frozen=True, tag="complete", forbid_unknown_fields=True):
    """A complete prompt: `open` and `finish` in one; the reply is its answer."""

    id: Id
    text: Annotated[str, Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    choices: tuple[str, ...] = ()
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0


READY_EXIT = "ready_exit"
"""Flag of an ask's reply from the ready position."""

PromptRequest = Open | Append | Update | Finish | Close | Complete
QuestionRequest = ListQuestions | SetQuestion | RemoveQuestion
SessionRequest = AddSession | ChangeSession | RemoveSession
ClientRequest = (
    Ask | ListSessions | SessionRequest | Answers | QuestionRequest | Label | Stats | PromptRequest
)


class AskReply(msgspec.Struct, frozen=True, tag="ask_reply"):
    """The answer, read from exactly `data_version`.

    `logit_gap` is the top logit minus the second at the first answer token (over the choices, if any).
    `probability` and `choice_set` are those of an `Answer`; None where the question has no calibration.
    `cached`: a standing question's answer, ready before the request. The flag `ready_exit` says that this is
    the model's answer before it read any question, so not an answer to this one. `latency_ns` runs from the
    request's arrival to its reply, on the daemon's clock. `as_of` is the event time (ns since 1970) of the
    newest record in the version; `staleness_ns`, `source_age_ns` and `daemon_age_ns` are its ages at the
    reply, as an `Answer`'s.
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
    source_age_ns: int = 0
    daemon_age_ns: int = 0
    probability: float | None = None
    choice_set: tuple[str, ...] | None = None


class SessionInfo(msgspec.Struct, frozen=True):
    """One session: its symbols, its newest version, and the tokens and bars in its window."""

    name: str
    symbol: str
    data_version: int
    live_tokens: int
    live_records: int
    as_of: int
    staleness_ns: int
    questions: tuple[str, ...]
    source_age_ns: int = 0
    daemon_age_ns: int = 0
    promise_ns: int = 0
    promises_missed: int = 0
    bars_skipped: int = 0
    bars_waiting: int = 0
    heard_age_ns: int = 0
    silent: bool = False
    more_symbols: tuple[str, ...] = ()


class SessionsReply(msgspec.Struct, frozen=True, tag="sessions_reply"):
    """All sessions, in the configuration's order."""

    id: Id
    sessions: tuple[SessionInfo, ...]


class AnswersReply(msgspec.Struct, frozen=True, tag="answers_reply"):
    """The latest answers, published or not; a question without an answer yet is missing from the list."""

    id: Id
    session: str
    answers: tuple[Answer, ...]


class QuestionInfo(msgspec.Struct, frozen=True):
    """A standing question; without choices its answer is text of at most ``max_tokens`` tokens."""

    name: str
    text: str
    choices: tuple[str, ...]
    max_tokens: int
    answer: AnswerForm
    publish_when: PublishWhen
    min_probability: float
    min_logit_gap: float
    level: str
    publish_every: int
    ask_every_bars: int
    ask_every_ns: int
    answer_within_ns: int
    provisional: bool = False


class QuestionsReply(msgspec.Struct, frozen=True, tag="questions_reply"):
    """A session's standing questions, in the order they are asked, after the change."""

    id: Id
    session: str
    questions: tuple[QuestionInfo, ...]


class LabelReply(msgspec.Struct, frozen=True, tag="label_reply"):
    """What the label says of the answer: it was `right`, its choice set had the right choice (`covered`).

    `coverage` is asked for in the question's later choice sets.
    """

    id: Id
    session: str
    question: str
    data_version: int
    right: bool
    covered: bool
    coverage: float


class Quantiles(msgspec.Struct, frozen=True):
    """Latency of one stage: number of samples, and p50, p90, p99 in seconds."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float


class StatsReply(msgspec.Struct, frozen=True, tag="stats_reply"):
    """`values`: counters and gauges by series, for example foretick_bars_total{session="a"}."""

    id: Id
    values: dict[str, float]
    stages: dict[str, Quantiles]


class PromptReply(msgspec.Struct, frozen=True, tag="prompt_reply"):
    """An open prompt's id, to continue it, and its length so far in tokens."""

    id: Id
    prompt: PromptId
    prompt_tokens: int


class ClosedReply(msgspec.Struct, frozen=True, tag="closed_reply"):
    """The prompt is closed."""

    id: Id
    prompt: PromptId


class FinishReply(msgspec.Struct, frozen=True, tag="finish_reply"):
    """The answer to a prompt, and what happened to its KV.

    `logit_gap` as in `AskReply`. `reused_tokens` came from the prefix cache or from another prompt with the
    same prefix. Preemption dropped `recomputed_tokens` and moved `swapped_tokens` to the host and back;
    updates invalidated `invalidated_tokens`. `ttft_ns` runs from the finish to the first token, `latency_ns`
    from the request's arrival to its reply; `waits` is the time (ns) spent waiting, by reason.
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
    """Why a request failed; `id` is None when the request was too malformed to read it.

    `address`: query address of the daemon that serves the session, where it is another one.
    """

    id: int | None
    code: Code
    message: str
    address: str = ""


Reply = (
    AskReply
    | SessionsReply
    | AnswersReply
    | QuestionsReply
    | LabelReply
    | StatsReply
    | PromptReply
    | ClosedReply
    | FinishReply
    | ErrorReply
)


class QueryError(Exception):
    """A request that failed: raised by backends, sent as an ErrorReply, and raised again by the client."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code: Code = code
        self.message = message


encode = msgspec.msgpack.Encoder().encode
decode_request: Callable[[bytes], ClientRequest] = partial(
    decoded, msgspec.msgpack.Decoder(ClientRequest).decode
)
"""Raises Undecodable; its text says what is wrong and where."""
decode_reply: Callable[[bytes], Reply] = partial(decoded, msgspec.msgpack.Decoder(Reply).decode)
"""Raises Undecodable."""


def code_of(failure: str) -> Code:
    """The error code sent to clients for an engine failure."""
    return _CODES.get(failure, "engine")


def request_id(payload: bytes) -> int | None:
    """The id of an otherwise unreadable request; None if that is unreadable too."""
    try:
        found = decoded(msgspec.msgpack.decode, payload)
    except Undecodable:
        return None
    number = found.get("id") if isinstance(found, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None
