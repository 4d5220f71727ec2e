"""The requests of the HTTP API as data: path, members, reply. Routes and OpenAPI follow from it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from daemon.api import messages
from daemon.api.messages import ErrorReply, Id
from daemon.traces.trace_context import TRACEPARENT
from feeds.market_data import Answer

Ask = Callable[[messages.ClientRequest], Awaitable[messages.Reply]]
"""Sends a request of the query socket and awaits its reply."""
Perform = Callable[[Ask, Any], Awaitable[msgspec.Struct]]
"""The reply to a request of the table, or an ErrorReply."""
UNSAID = ("id", "type", TRACEPARENT)
"""Members of messages that HTTP says in other ways."""
Body = Literal["none", "members", "settings"]
"""What a body is: nothing, the request's own members, or its member ``settings``."""


class FindQuestions(msgspec.Struct, frozen=True, tag="find_questions", forbid_unknown_fields=True):
    """Standing questions of one session; of all, if ``session`` is empty."""

    id: Id
    session: Annotated[str, Meta(max_length=128)] = ""


class FindAnswers(msgspec.Struct, frozen=True, tag="find_answers", forbid_unknown_fields=True):
    """The latest answers of standing questions, in one session or, if ``session`` is empty, in all.

    `question` is a question's name or text; empty means all. With `min_version`, which needs a session, the
    reply waits at most `timeout_s` seconds until every requested answer is of that data version or newer.
    """

    id: Id
    session: Annotated[str, Meta(max_length=128)] = ""
    question: Annotated[str, Meta(max_length=1024)] = ""
    min_version: Annotated[int, Meta(ge=0)] = 0
    timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class FindQuality(msgspec.Struct, frozen=True, tag="find_quality", forbid_unknown_fields=True):
    """How good the answers to a question were, in one session or, without one, in all that ask it.

    `question` is the question's name or text.
    """

    id: Id
    question: Annotated[str, Meta(min_length=1, max_length=1024)]
    session: Annotated[str, Meta(max_length=128)] = ""


class QuestionsOf(msgspec.Struct, frozen=True):
    """A session's standing questions, in the order they are asked."""

    session: str
    questions: tuple[messages.QuestionInfo, ...]


class FoundQuestions(msgspec.Struct, frozen=True):
    """Standing questions by session."""

    sessions: tuple[QuestionsOf, ...]


class FoundAnswers(msgspec.Struct, frozen=True):
    """The latest answers, published or not; a question without an answer yet is missing."""

    answers: tuple[Answer, ...]


class FoundQuality(msgspec.Struct, frozen=True):
    """How good answers were, by session."""

    sessions: tuple[messages.QuestionQuality, ...]


@dataclass(frozen=True)
class Operation:
    """One method of one path. ``request``'s members come from the path, the query and the body.

    ``name``: unique, for clients that are made from the document. ``codes``: errors beside those of every
    request.
    """

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    name: str
    summary: str
    request: type[msgspec.Struct]
    reply: type[msgspec.Struct]
    codes: tuple[messages.Code, ...] = ()
    status: int = 200
    body: Body = "members"
    query: tuple[str, ...] = ()
    perform: Perform | None = None

    @property
    def in_path(self) -> tuple[str, ...]:
        """Members that stand in the path."""
        parts = self.path.split("/")
        return tuple(part[1:-1] for part in parts if part.startswith("{"))

    @property
    def in_body(self) -> tuple[str, ...]:
        """Members that the body has."""
        if self.body == "none":
            return ()
        taken = {*UNSAID, *self.in_path, *self.query}
        return tuple(name for name in self.request.__struct_fields__ if name not in taken)


async def _one_session(ask: Ask, request: messages.Describe) -> msgspec.Struct:
    found = await ask(request)
    return found.session if isinstance(found, messages.DescribeReply) else found


async def _find_questions(ask: Ask, request: FindQuestions) -> msgspec.Struct:
    names = await _names(ask, request.session, asked=False)
    found = []
    for name in names if isinstance(names, list) else ():
        reply = await ask(messages.ListQuestions(request.id, name))
        if isinstance(reply, messages.QuestionsReply):
            found.append(QuestionsOf(reply.session, reply.questions))
        elif request.session or not _is_gone(reply):
            return reply
    return FoundQuestions(tuple(found)) if isinstance(names, list) else names


async def _find_answers(ask: Ask, request: FindAnswers) -> msgspec.Struct:
    if request.min_version and not request.session:
        return ErrorReply(request.id, "bad_request", "min_version: needs a session, whose versions it counts")
    names = await _names(ask, request.session, asked=True)
    found: list[Answer] = []
    for name in names if isinstance(names, list) else ():
        reply = await ask(
            messages.Answers(request.id, name, request.question, request.min_version, request.timeout_s)
        )
        if isinstance(reply, messages.AnswersReply):
            found += reply.answers
        elif request.session or not (_is_gone(reply) or request.question):
            return reply
    return FoundAnswers(tuple(found)) if isinstance(names, list) else names


async def _find_quality(ask: Ask, request: FindQuality) -> msgspec.Struct:
    names = await _names(ask, request.session, asked=True)
    found: list[messages.QuestionQuality] = []
    for name in names if isinstance(names, list) else ():
        reply = await ask(messages.Quality(request.id, name, request.question))
        if isinstance(reply, messages.QualityReply):
            found.append(reply.quality)
        elif request.session or not (_is_gone(reply) or _is_unasked(reply)):
            return reply
    return FoundQuality(tuple(found)) if isinstance(names, list) else names


async def _names(ask: Ask, session: str, *, asked: bool) -> list[str] | messages.Reply:
    """The session, or all; with ``asked`` those that have standing questions."""
    if session:
        return [session]
    listed = await ask(messages.ListSessions(0))
    if not isinstance(listed, messages.SessionsReply):
        return listed
    return [each.name for each in listed.sessions if each.questions or not asked]


def _is_gone(reply: messages.Reply) -> bool:
    """Whether a session was removed while all are listed."""
    return isinstance(reply, ErrorReply) and reply.code == "unknown_session"


def _is_unasked(reply: messages.Reply) -> bool:
    """Whether a session does not have the question."""
    return isinstance(reply, ErrorReply) and reply.code == "bad_request"


_SESSION, _PROMPT = "/v1/sessions/{session}", "/v1/prompts/{prompt}"
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "GET", "/v1/sessions", "listSessions", "All sessions, with their newest versions and ages",
        messages.ListSessions, messages.SessionsReply, body="none",
    ),
    Operation(
        "POST", "/v1/sessions", "addSession", "Open a session; the body is a `[[sessions]]` table",
        messages.AddSession, messages.SessionsReply, status=201, body="settings",
    ),
    Operation(
        "GET", _SESSION, "getSession", "One session",
        messages.Describe, messages.SessionInfo, ("unknown_session",), body="none", perform=_one_session,
    ),
    Operation(
        "GET", f"{_SESSION}/prompt", "showPrompt", "What the model reads of a session, region by region",
        messages.ShowPrompt, messages.PromptShown, ("unknown_session", "too_long"), body="none",
        query=("question", "max_tokens"),
    ),
    Operation(
        "GET", f"{_SESSION}/description", "describeSession",
        "One session, its standing questions and their latest answers",
        messages.Describe, messages.DescribeReply, ("unknown_session",), body="none",
    ),
    Operation(
        "PATCH", _SESSION, "changeSession", "Give a session other settings; keys that are left out stay",
        messages.ChangeSession, messages.SessionsReply, ("unknown_session",), body="settings",
    ),
    Operation(
        "DELETE", _SESSION, "removeSession", "Close a session",
        messages.RemoveSession, messages.SessionsReply, ("unknown_session",), body="none",
    ),
    Operation(
        "POST", f"{_SESSION}/pause", "pause", "Pause standing questions, or resume them",
        messages.Pause, messages.QuestionsReply, ("unknown_session",),
    ),
    Operation(
        "GET", "/v1/questions", "listQuestions", "Standing questions of one session, or of all",
        FindQuestions, FoundQuestions, ("unknown_session",), body="none", query=("session",),
        perform=_find_questions,
    ),
    Operation(
        "POST", "/v1/questions", "setQuestion", "Add a standing question, or replace the one with its name",
        messages.SetQuestion, messages.QuestionsReply, ("unknown_session",),
    ),
    Operation(
        "DELETE", "/v1/questions/{session}/{name}", "removeQuestion", "Remove a standing question",
        messages.RemoveQuestion, messages.QuestionsReply, ("unknown_session",), body="none",
    ),
    Operation(
        "GET", "/v1/answers", "listAnswers", "Latest answers of one session, or of all",
        FindAnswers, FoundAnswers, ("unknown_session",), body="none",
        query=("session", "question", "min_version", "timeout_s"), perform=_find_answers,
    ),
    Operation(
        "POST", "/v1/ask", "ask", "Ask a question of a session",
        messages.Ask, messages.AskReply, ("unknown_session", "halted", "no_data", "too_long"),
    ),
    Operation(
        "POST", "/v1/labels", "label", "Tell the right choice of a past answer",
        messages.Label, messages.LabelReply,
        ("unknown_session", "unknown_version", "not_calibrated", "repeated"),
    ),
    Operation(
        "GET", "/v1/signals", "listSignals", "Conditions as they stand, and the newest signals",
        messages.ListSignals, messages.SignalsReply, ("unknown_session",), body="none", query=("session",),
    ),
    Operation(
        "GET", f"{_SESSION}/versions", "listVersions", "The newest versions of a session, with their answers",
        messages.ListVersions, messages.VersionsReply, ("unknown_session",), body="none", query=("since",),
    ),
    Operation(
        "GET", "/v1/quality/{question}", "getQuality",
        "How good the answers to a question were, by their labels",
        FindQuality, FoundQuality, ("unknown_session",), body="none", query=("session",),
        perform=_find_quality,
    ),
    Operation(
        "GET", "/v1/stats", "stats", "Counters, gauges and latency quantiles",
        messages.Stats, messages.StatsReply, body="none",
    ),
    Operation(
        "GET", "/v1/budgets", "listBudgets", "What tenants may take of the engine's time, and have taken",
        messages.ListBudgets, messages.BudgetsReply, body="none",
    ),
    Operation(
        "GET", "/v1/traces/{trace}", "getTrace", "Where the time of a recent answer or request went",
        messages.GetTrace, messages.TraceReply, ("unknown_trace",), body="none",
    ),
    Operation(
        "POST", "/v1/prompts", "openPrompt", "Open a prompt without a session",
        messages.Open, messages.PromptReply, ("overloaded", "too_long"), status=201,
    ),
    Operation(
        "POST", f"{_PROMPT}/append", "appendPrompt", "Append text to an open prompt",
        messages.Append, messages.PromptReply, ("unknown_prompt", "finished", "abandoned", "too_long"),
    ),
    Operation(
        "POST", f"{_PROMPT}/update", "updatePrompt", "Replace the text of an open prompt",
        messages.Update, messages.PromptReply, ("unknown_prompt", "finished", "abandoned", "too_long"),
    ),
    Operation(
        "POST", f"{_PROMPT}/finish", "finishPrompt", "Mark a prompt complete; the reply is its answer",
        messages.Finish, messages.FinishReply, ("unknown_prompt", "finished", "abandoned", "too_long"),
        body="none", query=("deadline_ms",),
    ),
    Operation(
        "DELETE", _PROMPT, "closePrompt", "Close a prompt, finished or not",
        messages.Close, messages.ClosedReply, ("unknown_prompt", "abandoned"), body="none",
    ),
    Operation(
        "POST", "/v1/complete", "complete", "A complete prompt: open and finish in one",
        messages.Complete, messages.FinishReply, ("overloaded", "too_long"),
    ),
)  # fmt: skip
EVERY: tuple[messages.Code, ...] = (
    "bad_request",
    "unauthenticated",
    "forbidden",
    "busy",
    "moved",
    "rebuilding",
    "engine",
    "shutting_down",
    "timeout",
)
"""Errors that every operation may have."""
