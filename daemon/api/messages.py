"""The query socket's messages, version 1: msgpack maps with a `type`, in both directions.

A request is one message `[payload]` (DEALER) or `[empty, payload]` (REQ); the reply has the same shape and
the request's `id`. A request with an unlisted key is refused, so that a misspelt option is never silently
ignored. Clients should ignore unknown keys in replies: replies may gain keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from daemon.traces.recorded_trace import Trace
from daemon.traces.trace_context import MAX_CHARS
from feeds.decoding import Undecodable, decoded, shortened
from feeds.market_data import Answer, AnswerMetadata, DataUpdated, FlashReady, Signal
from flash.question import AnswerForm, PublishWhen

VERSION = 1
"""Of this protocol."""
EventKind = Literal["answer", "signal", "flash_ready", "data_updated"]
LostReason = Literal["slow", "expired", "restarted", "unknown_id"]
EndReason = Literal["lease", "access", "shutting_down"]
Code = Literal[
    "bad_request",
    "unauthenticated",
    "forbidden",
    "unsupported_version",
    "in_flight",
    "cancelled",
    "unknown_session",
    "unknown_prompt",
    "unknown_version",
    "unknown_trace",
    "not_calibrated",
    "repeated",
    "halted",
    "no_data",
    "finished",
    "abandoned",
    "too_long",
    "timeout",
    "busy",
    "overloaded",
    "moved",
    "rebuilding",
    "engine",
    "shutting_down",
]
_CODES: dict[str, Code] = {code: code for code in get_args(Code)}
_CODES |= {"bad_prompt": "bad_request", "stopping": "shutting_down"}
MAX_REQUEST_BYTES = 1 << 18
"""Longest request of the query socket."""
RETRY_AFTER_S = 1
"""When a request refused as `busy` or `overloaded` may be tried again, unless the refusal says it itself."""
ORDINARY, RETENTION_S = 35, 300.0
"""Priority in the prefix cache of a prompt that asks for none, and how long a higher one holds, seconds."""
RetentionPriority = Annotated[int, Meta(ge=0, le=100)]
RetentionSeconds = Annotated[float, Meta(ge=0, le=86400)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
_MOST = 2**63 - 1
"""Larger numbers do not fit into messages to the engine and to other daemons."""
Count = Annotated[int, Meta(ge=1, le=_MOST)]
Natural = Annotated[int, Meta(ge=0, le=_MOST)]
Id = Natural
Setting = str | Annotated[int, Meta(ge=-_MOST, le=_MOST)] | float | list[str]
"""A value of a configuration key: text is read as the key's type."""
PromptId = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_QUESTION_CHARS, MAX_CHOICES, MAX_CHOICE_CHARS = 1 << 14, 1024, 256
"""What is longer costs the engine more than it is worth before it can be refused."""
QuestionText = Annotated[str, Meta(min_length=1, max_length=MAX_QUESTION_CHARS)]
Choice = Annotated[str, Meta(max_length=MAX_CHOICE_CHARS)]
Choices = Annotated[tuple[Choice, ...], Meta(max_length=MAX_CHOICES)]
DeadlineMs = Count | None
Traceparent = Annotated[str, Meta(max_length=MAX_CHARS)]
"""The caller's span, as in the header of W3C Trace Context; what is none is ignored."""


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Id


class _OfSession(_Request, frozen=True):
    session: Name


class _OfPrompt(_Request, frozen=True):
    prompt: PromptId


class _Reply(msgspec.Struct, frozen=True):
    id: Id


class Ask(_OfSession, frozen=True, omit_defaults=True, tag="ask"):
    """Ask `question` of a session.

    With `choices` the answer is one of them; without, greedy text of at most `max_tokens` tokens. The name or
    text of a standing question, with its choices or none, asks that question as it stands: it gets its newest
    ready answer; with `max_age_s` only while the newest record behind that answer is at most that many
    seconds old (`staleness_ns`), or of the newest data version. Any other ask is computed at the newest data
    version, once: asked again, it gets the same reply. `early_exit` replaces `flash.early_exit`, where that
    is on; 0 turns it off. `deadline_ms`: give up so long after the request's arrival. `traceparent`: the
    caller's span, whose trace goes on.
    """

    question: QuestionText
    max_tokens: Count = 8
    choices: Choices = ()
    early_exit: Annotated[float, Meta(ge=0)] | None = None
    max_age_s: Annotated[float, Meta(ge=0)] | None = None
    deadline_ms: DeadlineMs = None
    traceparent: Traceparent = ""


class ListSessions(_Request, frozen=True, tag="sessions"):
    """List the sessions and their standing questions."""


class Describe(_OfSession, frozen=True, tag="describe"):
    """Describe one session: its window, its standing questions, and their latest answers."""


class ShowPrompt(_OfSession, frozen=True, tag="show_prompt"):
    """Show what the model reads of a session's newest data version, region by region.

    With a `question`, or the name of a standing one, also how it is asked; `max_tokens` as in `Ask`. Nothing
    is computed.
    """

    question: Annotated[str, Meta(max_length=MAX_QUESTION_CHARS)] = ""
    max_tokens: Count = 8


class Answers(_OfSession, frozen=True, tag="answers"):
    """The latest answers of a session's standing questions.

    `question` is a question's name or text; empty means all. With `min_version` the reply waits at most
    `timeout_s` seconds until every requested answer is of that data version or newer.
    """

    question: Annotated[str, Meta(max_length=MAX_QUESTION_CHARS)] = ""
    min_version: Natural = 0
    timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class ListQuestions(_OfSession, frozen=True, tag="questions"):
    """List a session's standing questions."""


class SetQuestion(_OfSession, frozen=True, tag="set_question"):
    """Give a session a standing question, in place of the one with this name, if there is one.

    It is answered from the session's next data version on, until the daemon ends or reads its configuration
    again.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
    text: QuestionText
    choices: Choices = ()
    max_tokens: Count = 8
    answer: AnswerForm = "text"
    publish_when: PublishWhen = "always"
    min_probability: Annotated[float, Meta(ge=0, le=1)] = 0.8
    min_logit_gap: Annotated[float, Meta(ge=0)] = 2.0
    level: str = "0"
    publish_every: Count = 1
    ask_every_bars: Count = 1
    ask_every_ns: Natural = 0
    answer_within_ns: Natural = 0
    provisional: bool = False
    max_error: Annotated[float, Meta(gt=0, lt=0.5)] | None = None
    engine_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    pack: Annotated[str, Meta(max_length=4096)] = ""


class RemoveQuestion(_OfSession, frozen=True, tag="remove_question"):
    """Remove a session's standing question; later data versions are not asked."""

    name: Name


class Pause(_OfSession, frozen=True, tag="pause"):
    """Pause a standing question, or all of a session's, or resume them (`paused` false).

    The session goes on reading its data, so that it is up to date whenever it is asked. It lasts as long as
    other changes of standing questions.
    """

    question: Annotated[str, Meta(max_length=128)] = ""
    paused: bool = True


class AddSession(_Request, frozen=True, tag="add_session"):
    """Open a session. `settings` are the keys of a `[[sessions]]` table, its name and symbol among them.

    It lasts until the daemon ends or reads its configuration again, as do the changes below. It has the
    standing questions that the configuration asks of all sessions.
    """

    settings: dict[str, Setting]


class ChangeSession(_OfSession, frozen=True, tag="change_session"):
    """Give a session other settings; keys that are left out stay.

    Its window begins again, empty, if it depends on one of them; see the operations page.
    """

    settings: dict[str, Setting]


class RemoveSession(_OfSession, frozen=True, tag="remove_session"):
    """Close a session. What is being asked of it fails with `unknown_session`."""


class Label(_OfSession, frozen=True, tag="label"):
    """Tell the right choice of a standing question's answer at a past data version, once.

    `question` is the question's name or text.
    """

    question: QuestionText
    data_version: Count
    choice: Annotated[str, Meta(min_length=1, max_length=MAX_CHOICE_CHARS)]


class ListSignals(_Request, frozen=True, tag="signals"):
    """Conditions on a session's answers, or on all, as they stand, and the newest signals that they fired."""

    session: Annotated[str, Meta(max_length=128)] = ""


class ListVersions(_OfSession, frozen=True, tag="versions"):
    """The newest data versions of a session, with their prices and answers, as far as they are kept.

    `since`: the `revision` of an earlier reply, for what has changed behind it.
    """

    since: Natural = 0


class Quality(_OfSession, frozen=True, tag="quality"):
    """How good the answers to a standing question were, by their labels: of the versions that are kept.

    `question` is the question's name or text.
    """

    question: QuestionText


class Stats(_Request, frozen=True, tag="stats"):
    """Counters and latency quantiles, by metric name."""


class ListBudgets(_Request, frozen=True, tag="budgets"):
    """What the client's tenant may take of the engine's time, and has taken; for an operator, of all."""


class GetTrace(_Request, frozen=True, tag="trace"):
    """Where the time of a recent answer went, by its `answer_id`, or of a request, by its trace id."""

    trace: Annotated[str, Meta(min_length=1, max_length=1024)]


class Open(_Request, frozen=True, omit_defaults=True, tag="open"):
    """Open a prompt without a session; `append` and `update` extend it, `finish` answers it.

    `text` is prefilled as it arrives. At temperature 0 the answer is the most likely text or choice; above 0
    it is sampled, and the same prompt gives the same sample. Prompt and answer stay in the prefix cache with
    `retention_priority`, above 35 for `retention_seconds`. `traceparent`: as in `Ask`.
    """

    text: str = ""
    max_tokens: Count = 64
    choices: Choices = ()
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    retention_priority: RetentionPriority = ORDINARY
    retention_seconds: RetentionSeconds = RETENTION_S
    traceparent: Traceparent = ""


class Append(_OfPrompt, frozen=True, tag="append"):
    """Append `text` to an open prompt. Each piece is encoded separately, so cut between words or lines."""

    text: str


class Update(_OfPrompt, frozen=True, tag="update"):
    """Replace the text of an open prompt; the KV of the common prefix is kept."""

    text: str


class Finish(_OfPrompt, frozen=True, tag="finish"):
    """Mark the prompt complete; the reply is its answer. `deadline_ms`: as in `Ask`."""

    deadline_ms: DeadlineMs = None


class Close(_OfPrompt, frozen=True, tag="close"):
    """Close a prompt, finished or not."""


class Complete(_Request, frozen=True, omit_defaults=True, tag="complete"):
    """A complete prompt: `open` and `finish` in one; the reply is its answer.

    `deadline_ms`, `traceparent`: as in `Ask`.
    """

    text: Annotated[str, Meta(min_length=1)]
    max_tokens: Count = 64
    choices: Choices = ()
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    retention_priority: RetentionPriority = ORDINARY
    retention_seconds: RetentionSeconds = RETENTION_S
    deadline_ms: DeadlineMs = None
    traceparent: Traceparent = ""


class Hello(_Request, frozen=True, tag="hello"):
    """Say which version of this protocol the client speaks; any other than the daemon's is refused."""

    version: Natural = VERSION


class Heartbeat(_Request, frozen=True, tag="heartbeat"):
    """Keep the connection's subscriptions; the reply lists them."""


class Cancel(_Request, frozen=True, tag="cancel"):
    """Give up the request ``request`` of the same connection, which then fails with `cancelled`."""

    request: Id


class Subscribe(_Request, frozen=True, tag="subscribe"):
    """Get events from now on, or from the one after the event ``after``; empty filters are all.

    With an ``after`` that is no event's id they come from now on, behind a `LostMessage` that says so.
    """

    sessions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    questions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    events: tuple[EventKind, ...] = ()
    after: str = ""


class Unsubscribe(_Request, frozen=True, tag="unsubscribe"):
    """End the subscription that request ``subscription`` made."""

    subscription: Id


class Push(_Request, frozen=True, tag="push"):
    """Records for a source of pushes: ``data`` in our own form, or in a declared ``format``.

    `content`: what the data is; of a `format`, what its container says. `source`: which source gets the
    records, where there are several for pushes. `date`: the day of times that count from midnight. `replay`:
    the records are of the past, so their ages count from now.
    """

    data: bytes
    content: Literal["msgpack", "json", "lines", "csv"] = "msgpack"
    format: Annotated[str, Meta(max_length=64)] = ""
    source: Annotated[str, Meta(max_length=64)] = ""
    date: date | None = None
    replay: bool = False


class GenerateElsewhere(_OfSession, frozen=True, omit_defaults=True, tag="generate_elsewhere"):
    """Generations of a compatible API about a session, from one daemon of a group to its owner.

    ``data``: `daemon.api.generation.Generate`s in msgpack. ``count``: only the length of the first prompt.
    ``traceparent``: as in `Ask`.
    """

    data: bytes
    count: bool = False
    traceparent: Traceparent = ""


class KeptAnswers(_OfSession, frozen=True, tag="kept_answers"):
    """The answers that a daemon of a group gave last of a session, asked by the one that answers it now."""


READY_EXIT, KEPT_REPLY = "ready_exit", "kept_reply"
"""Flags of a reply: from the ready position; that of the same request, of the same version."""

PromptRequest = Open | Append | Update | Finish | Close | Complete
QuestionRequest = ListQuestions | SetQuestion | RemoveQuestion | Pause
SessionRequest = AddSession | ChangeSession | RemoveSession
ClientRequest = (
    Ask
    | ListSessions
    | Describe
    | ShowPrompt
    | SessionRequest
    | Answers
    | QuestionRequest
    | Label
    | ListSignals
    | ListVersions
    | Quality
    | Stats
    | ListBudgets
    | GetTrace
    | PromptRequest
    | Push
    | GenerateElsewhere
    | KeptAnswers
)
"""What the daemon answers, whatever way it comes."""
SocketRequest = ClientRequest | Hello | Heartbeat | Cancel | Subscribe | Unsubscribe
"""All that the query socket takes."""


class ReplyMetadata(AnswerMetadata, frozen=True, kw_only=True):
    """The metadata of an answer in reply to a request; ``cached``: it was there before the request.

    ``model``: the one that answered. Of several models, ``session`` may be another than the one that was
    asked: of the same symbols, with a model that can answer.
    """

    cached: bool = False
    model: str = ""


class AskReply(ReplyMetadata, frozen=True, kw_only=True, tag="ask_reply"):
    """The answer, read from exactly `data_version`.

    `logit_gap` is the top logit minus the second at the first answer token (over the choices, if any).
    `probability`, `choice_set` and `act` are those of an `Answer`; None where `uncalibrated` says why, and
    `act` where the question has no `max_error`.
    `cached`: a standing question's answer, or, with the flag `kept_reply`, the reply to the same ask of the
    same version. The flag `ready_exit` says that this is the model's answer before it read any question, so
    not an answer to this one. `latency_ns` runs from the request's arrival to its reply, on the daemon's
    clock. `as_of` is the event time (ns since 1970) of the newest record in the version; `staleness_ns`,
    `source_age_ns` and `daemon_age_ns` are its ages at the reply, as an `Answer`'s. `trace_id`: for `trace`.
    """

    id: Id
    session: str
    data_version: int
    text: str
    as_of: int = 0
    staleness_ns: int = 0
    source_age_ns: int = 0
    daemon_age_ns: int = 0
    latency_ns: int = 0
    trace_id: str = ""


class SessionInfo(msgspec.Struct, frozen=True):
    """One session: its symbols, its newest version, and the tokens and bars in its window.

    ``model``: what the configuration calls the model that reads it, empty where it has no name. ``owner``:
    query address of the daemon that serves it, empty where that has none. ``owner_failure``: why
    it did not say this itself; then it is what the asked daemon knows.
    """

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
    freshness_objective_ns: int = 0
    freshness_misses: int = 0
    bars_skipped: int = 0
    bars_waiting: int = 0
    last_seen_age_ns: int = 0
    silent: bool = False
    halted: bool = False
    more_symbols: tuple[str, ...] = ()
    model: str = ""
    owner: str = ""
    owner_failure: Code | Literal[""] = ""


class SessionsReply(_Reply, frozen=True, tag="sessions_reply"):
    """All sessions, in the configuration's order."""

    sessions: tuple[SessionInfo, ...]


class AnswersReply(_Reply, frozen=True, tag="answers_reply"):
    """The latest answers, published or not; a question without an answer yet is missing from the list."""

    session: str
    answers: tuple[Answer, ...]


class QuestionInfo(msgspec.Struct, frozen=True):
    """A standing question; without choices its answer is text of at most ``max_tokens`` tokens.

    ``engine_used``: of what `engine_share` lets it take at once, at its newest answer; above 1 it is not
    asked. ``paused``: it is not asked now.
    """

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
    max_error: float | None = None
    engine_share: float = 0.0
    engine_used: float = 0.0
    pack: str = ""
    paused: bool = False


class QuestionsReply(_Reply, frozen=True, tag="questions_reply"):
    """A session's standing questions after the change: in the order they are asked, then the paused ones."""

    session: str
    questions: tuple[QuestionInfo, ...]


class LabelReply(_Reply, frozen=True, tag="label_reply"):
    """What the label says of the answer: it was `right`, its choice set had the right choice (`covered`;
    None where it had no choice set).

    `coverage` is asked for in the question's later choice sets.
    """

    session: str
    question: str
    data_version: int
    right: bool
    covered: bool | None
    coverage: float


class ClauseInfo(msgspec.Struct, frozen=True):
    """A clause of a condition. ``met``: it holds; ``defined``: the newest answer, ``text``, counts.

    ``run``: answers in a row that meet it, at most `for_bars`. ``since``: id of the answer with which it
    began to hold, empty where it has held from its first answer on.
    """

    session: str
    question: str
    met: bool
    defined: bool
    run: int
    for_bars: int
    since: str = ""
    text: str = ""


class ConditionInfo(msgspec.Struct, frozen=True):
    """A condition of one session, and its newest signal: id, empty before the first, and event time, ns."""

    name: str
    owner: str
    clauses: tuple[ClauseInfo, ...]
    signal_id: str = ""
    as_of: int = -1


class SignalsReply(_Reply, frozen=True, tag="signals_reply"):
    """The conditions, and the newest signals of this daemon since its start, the newest last."""

    conditions: tuple[ConditionInfo, ...]
    signals: tuple[Signal, ...]


class PastAnswer(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a standing question was answered at a past version; members as in an `Answer`.

    ``label``: the right choice, where it is known.
    """

    question: str
    text: str
    logit_gap: float
    probability: float | None = None
    choice_set: tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    label: str | None = None


class PastVersion(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A data version, in the order of its answers' arrival.

    ``close``: of the newest bar of the session's first symbol, as decimal text; None where the version has
    none.
    """

    data_version: int
    as_of: int
    close: str | None = None
    answers: tuple[PastAnswer, ...] = ()


class VersionsReply(_Reply, frozen=True, tag="versions_reply"):
    """Versions that are new or have changed, the oldest first.

    ``revision``: for `since`. ``oldest``, ``newest``: of the versions that are kept; 0 where none is.
    """

    session: str
    revision: int
    oldest: int
    newest: int
    versions: tuple[PastVersion, ...]


RegimeName = Literal["calm", "usual", "volatile", "rising", "falling"]


class Tally(msgspec.Struct, frozen=True, gc=False):
    """Answers, and those with a label and a probability: ``labels``, of which ``right`` were right.

    ``probability``: their mean; None without labels. ``sets``: of them, those with a choice set, of which
    ``covered`` have the right choice.
    """

    answers: int
    labels: int
    right: int
    probability: float | None
    covered: int
    sets: int


class ProbabilityBin(msgspec.Struct, frozen=True):
    """Labelled answers whose probability is from ``least`` to a tenth more."""

    least: float
    tally: Tally


class Regime(msgspec.Struct, frozen=True):
    """Answers while the market was so: its volatility has a name, and its direction."""

    name: RegimeName
    tally: Tally


class AgeBlock(msgspec.Struct, frozen=True):
    """Answers of a block of versions. ``versions_ago``: of its newest version; ``as_of``: of an answer."""

    versions_ago: int
    as_of: int
    mean_gap: float
    tally: Tally


class QuestionQuality(msgspec.Struct, frozen=True):
    """How good the answers to one question in one session were, over ``versions`` versions.

    ``gap_ratio``: mean logit gap of the session's latest answers over that at calibration; None without one.
    """

    session: str
    question: str
    versions: int
    tally: Tally
    reliability: tuple[ProbabilityBin, ...]
    regimes: tuple[Regime, ...]
    ages: tuple[AgeBlock, ...]
    gap_ratio: float | None = None


class QualityReply(_Reply, frozen=True, tag="quality_reply"):
    """How good answers were."""

    quality: QuestionQuality


class Quantiles(msgspec.Struct, frozen=True):
    """Latency of one stage: number of samples, and p50, p90, p99 in seconds."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float


class StatsReply(_Reply, frozen=True, tag="stats_reply"):
    """`values`: counters and gauges by series, for example foretick_bars_total{session="a"}."""

    values: dict[str, float]
    stages: dict[str, Quantiles]


class TenantBudget(msgspec.Struct, frozen=True):
    """What a tenant's asks and prompts may take of the engine, by its `engine_share`; 0: any.

    `engine_used`: of what it may take at once; from 1 on they are refused, now for another `wait_s` seconds.
    `engine_s`: what they have taken since the daemon's start, whatever the share.
    """

    tenant: str
    engine_share: float
    engine_used: float
    wait_s: float
    engine_s: float


class BudgetsReply(_Reply, frozen=True, tag="budgets_reply"):
    """`window_s`: a tenant may take its share of that time, in seconds, at once."""

    window_s: float
    budgets: tuple[TenantBudget, ...]


class TraceReply(_Reply, frozen=True, tag="trace_reply"):
    """What there is of this id, oldest first: several where a client gave requests one trace."""

    traces: tuple[Trace, ...]


class PromptReply(_Reply, frozen=True, tag="prompt_reply"):
    """An open prompt's id, to continue it, and its length so far in tokens."""

    prompt: PromptId
    prompt_tokens: int


class ClosedReply(_Reply, frozen=True, tag="closed_reply"):
    """The prompt is closed."""

    prompt: PromptId


class FinishReply(_Reply, frozen=True, tag="finish_reply"):
    """The answer to a prompt, and what happened to its KV.

    `logit_gap` as in `AskReply`. `reused_tokens` came from the prefix cache or from another prompt with the
    same prefix. Preemption dropped `recomputed_tokens` and moved `swapped_tokens` to the host and back;
    updates invalidated `invalidated_tokens`. `ttft_ns` runs from the finish to the first token, `latency_ns`
    from the request's arrival to its reply; `waits` is the time (ns) spent waiting, by reason. `trace_id`: of
    the request that opened the prompt.
    """

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
    trace_id: str = ""


class HelloReply(_Reply, frozen=True, tag="hello_reply"):
    """The daemon, and its limits.

    Subscriptions end `lease_s` seconds after the client's last message. At most `max_in_flight` requests of a
    connection, of at most `max_request_bytes` each, are answered at a time.
    """

    version: int
    daemon: str
    lease_s: float
    max_in_flight: int
    max_request_bytes: int


class HeartbeatReply(_Reply, frozen=True, tag="heartbeat_reply"):
    """The connection's subscriptions, by the ids of their requests."""

    subscriptions: tuple[Id, ...]


class CancelReply(_Reply, frozen=True, tag="cancel_reply"):
    """Whether the request was still being answered."""

    request: Id
    cancelled: bool


class Subscribed(_Reply, frozen=True, tag="subscribed"):
    """The subscription begins; ``newest``: the id of the newest event."""

    newest: str


class Unsubscribed(_Reply, frozen=True, tag="unsubscribed"):
    """The subscription has ended."""


class EventMessage(msgspec.Struct, frozen=True, tag="event"):
    """One event of a subscription, by the id of its request; ``data`` is the message that sinks get."""

    subscription: Id
    event: str
    data: msgspec.Raw


class LostMessage(msgspec.Struct, frozen=True, tag="lost", omit_defaults=True):
    """The number of events that the subscription has missed. ``exact``: of its filter; otherwise of all, so
    at most.

    ``reason``: slow, the client read too slowly; expired, it came back too late; restarted, the daemon has
    begun again, so nothing is known of the events between; unknown_id, the client came back with an id that
    no event has, so nothing is known of what it has. ``after``: the id of the last event that it need not
    wait for, empty where the reason is slow.
    """

    subscription: Id
    events: int | Literal["unknown"]
    exact: bool
    reason: LostReason
    after: str = ""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The daemon ends a subscription. ``reason``: lease, the client was silent; access, its tenant
    has changed or its key was removed; shutting_down.
    """

    subscription: Id
    reason: EndReason


class DescribeReply(_Reply, frozen=True, tag="describe_reply"):
    """One session, its standing questions, and their latest answers."""

    session: SessionInfo
    questions: tuple[QuestionInfo, ...]
    answers: tuple[Answer, ...]


class LineError(msgspec.Struct, frozen=True):
    """What is wrong with a record: by its number or its line, from 1; 0 is the body as a whole."""

    line: int
    reason: str
    message: str


class Region(msgspec.Struct, frozen=True):
    """A region as the model reads it: its text, special tokens among it, and its length in tokens."""

    text: str
    tokens: int


class PromptShown(_Reply, frozen=True, tag="prompt_shown"):
    """What the model reads of `data_version`, in this order; there is an answer behind `question`.

    `frozen` has the rollup, too. A question with a number in the frozen region is asked by that. `question`
    is None where none was given. A provisional question also reads the open bars, which are not shown.
    """

    session: str
    data_version: int
    frozen: Region
    sliding: Region
    question: Region | None = None


class Pushed(msgspec.Struct, frozen=True):
    """What became of a body: ``accepted`` records wait to be read, ``refused`` ones went to the DLQ.

    Lines of a declared format that cannot be read are refused and only counted. ``errors``: the first of
    what was refused. ``passed_over``: lines that the format knows to hold no record. ``late``: accepted
    records that a session will find late, because it has read their bar already; later ones may be, too.
    """

    accepted: int
    refused: int
    passed_over: int
    errors: tuple[LineError, ...]
    late: int = 0


class PushReply(_Reply, frozen=True, tag="push_reply"):
    """What became of the records."""

    pushed: Pushed


class GeneratedElsewhere(_Reply, frozen=True, tag="generated_elsewhere"):
    """``data``: the `daemon.api.generation.Finished`s in msgpack, or the prompt's length in tokens."""

    data: bytes


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """Why a request failed; `id` is None when the request was too malformed to read it.

    `address`: query address of the daemon that serves the session, where it is another one.
    `retry_after_s`: of a `busy` that is over by then; 0 is not known. `trace_id`: of an ask or a prompt.
    """

    id: int | None
    code: Code
    message: str
    address: str = ""
    retry_after_s: float = 0.0
    trace_id: str = ""


Reply = (
    AskReply
    | SessionsReply
    | AnswersReply
    | QuestionsReply
    | LabelReply
    | SignalsReply
    | VersionsReply
    | QualityReply
    | StatsReply
    | BudgetsReply
    | TraceReply
    | PromptReply
    | ClosedReply
    | FinishReply
    | DescribeReply
    | PromptShown
    | PushReply
    | GeneratedElsewhere
    | ErrorReply
)
"""To what the daemon answers."""
Control = HelloReply | HeartbeatReply | CancelReply | Subscribed | Unsubscribed
Sent = ClientRequest | Hello
Received = Reply | Control
"""What a client's calls send, and get."""
SocketMessage = Reply | Control | EventMessage | LostMessage | Ended
"""All that the query socket sends."""
EventData = Answer | Signal | DataUpdated | FlashReady


class QueryError(Exception):
    """A request that failed: raised by backends, sent as an ErrorReply, and raised again by the client."""

    def __init__(self, code: Code, message: str, retry_after_s: float = 0.0, address: str = "") -> None:
        """``retry_after_s``: when it may be tried again; 0 is not known. ``address``: as in an ErrorReply."""
        self.code: Code = code
        self.address = address
        self.message, self.retry_after_s = shortened(message), retry_after_s
        super().__init__(f"{self.message} ({code})")

    def reply(self, number: int | None) -> ErrorReply:
        """As the reply to request ``number``."""
        return ErrorReply(number, self.code, self.message, self.address, self.retry_after_s)

    @classmethod
    def of(cls, reply: ErrorReply) -> QueryError:
        """What a reply says."""
        return cls(reply.code, reply.message, reply.retry_after_s, reply.address)


encode = msgspec.msgpack.Encoder().encode
decode_request: Callable[[bytes], SocketRequest] = partial(
    decoded, msgspec.msgpack.Decoder(SocketRequest).decode
)
"""Raises Undecodable; its text says what is wrong and where."""
decode_reply: Callable[[bytes], SocketMessage] = partial(
    decoded, msgspec.msgpack.Decoder(SocketMessage).decode
)
"""Raises Undecodable."""
decode_event: Callable[[msgspec.Raw], EventData] = partial(decoded, msgspec.msgpack.Decoder(EventData).decode)
"""The data of an `EventMessage`. Raises Undecodable."""


def unknown_session(name: str, known: Iterable[str]) -> QueryError:
    """There is no such session, or the client's tenant does not see it: ``known`` are those that it sees."""
    return QueryError(
        "unknown_session", f"there is no session {name!r}; there are: {', '.join(known) or 'none'}"
    )


def code_of(failure: str) -> Code:
    """The error code sent to clients for an engine failure."""
    return _CODES.get(failure, "engine")


def request_id(payload: bytes, decode: Callable[[bytes], object] = msgspec.msgpack.decode) -> int | None:
    """The id of an otherwise unreadable request; None if that is unreadable too."""
    try:
        found = decoded(decode, payload)
    except Undecodable:
        return None
    number = found.get("id") if isinstance(found, dict) else None
    is_id = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    return number if is_id else None
