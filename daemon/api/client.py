"""A blocking client of the query socket, for scripts, notebooks and the command line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from daemon.api.dealer import CurvePair, connect
from daemon.api.messages import (
    ORDINARY,
    RETENTION_S,
    AddSession,
    Answers,
    AnswersReply,
    Append,
    Ask,
    AskReply,
    Cancel,
    ChangeSession,
    ClientRequest,
    Close,
    ClosedReply,
    Complete,
    Describe,
    DescribeReply,
    ErrorReply,
    EventKind,
    Finish,
    FinishReply,
    Hello,
    HelloReply,
    Label,
    LabelReply,
    ListQuestions,
    ListSessions,
    Open,
    Pause,
    PromptReply,
    Push,
    PushReply,
    QueryError,
    QuestionsReply,
    RemoveQuestion,
    RemoveSession,
    SessionsReply,
    SetQuestion,
    Setting,
    SocketMessage,
    SocketRequest,
    Stats,
    StatsReply,
    Update,
    decode_reply,
    encode,
)
from daemon.api.subscriptions import EventStream, wanted
from feeds.decoding import Undecodable

Data = bytes | Sequence[Mapping[str, object]]
"""Records to push: as they are, or as maps."""
R = TypeVar(
    "R",
    AskReply,
    SessionsReply,
    AnswersReply,
    QuestionsReply,
    LabelReply,
    StatsReply,
    PromptReply,
    FinishReply,
    ClosedReply,
    HelloReply,
    DescribeReply,
    PushReply,
)


class QueryClient:
    """One connection, one request at a time. Use it from one thread, and close it (or use `with`).

    A request that is given up, because its time is up or by Ctrl-C, is cancelled at the daemon, too.
    """

    def __init__(self, endpoint: str, timeout_s: float = 30.0, *, keys: CurvePair | None = None) -> None:
        """`timeout_s` bounds every request, with the connection. `keys`: where the daemon asks for them.

        Raises QueryError.
        """
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._keys = keys
        self._id = 0
        self._context = zmq.Context()
        try:
            self._socket = connect(self._context, endpoint, keys)
        except QueryError:
            self._context.term()
            raise

    def hello(self) -> HelloReply:
        """The daemon's version and limits; QueryError on timeout, or if it speaks another version."""
        return self._request(Hello(self._next()), HelloReply)

    def ask(
        self,
        session: str,
        question: str,
        max_tokens: int = 8,
        choices: tuple[str, ...] = (),
        early_exit: float | None = None,
        max_age_s: float | None = None,
        deadline_ms: int | None = None,
    ) -> AskReply:
        """Ask a question of a session; QueryError on refusal or timeout.

        A standing question gets its newest ready answer, whose `data_version` and ages the reply has;
        ``max_age_s`` says how old its data may be: 0 is the newest data version. The daemon gives up after
        ``deadline_ms``.
        """
        ask = Ask(self._next(), session, question, max_tokens, choices, early_exit, max_age_s, deadline_ms)
        return self._request(ask, AskReply)

    def subscribe(
        self,
        sessions: Sequence[str] = (),
        questions: Sequence[str] = (),
        events: Sequence[EventKind] = (),
        after: str = "",
    ) -> EventStream:
        """Events from now on, or behind the one with the id ``after``; empty is all. QueryError on refusal.

        An iterator with a connection of its own: of `Update`, and of `LostMessage` where some are missing.
        """
        chosen = wanted(sessions, questions, events, after)
        return EventStream(self._endpoint, chosen, self._timeout_s, self._keys)

    def push(self, data: Data, content: str = "msgpack", **options: Any) -> PushReply:
        """Push records into the source for pushes; QueryError on refusal or timeout.

        ``data``: records as maps, or bytes of this ``content``. ``options``: further members of `Push`.
        """
        return self._request(push_of(self._next(), data, content, options), PushReply)

    def describe(self, session: str) -> DescribeReply:
        """A session, its standing questions and their latest answers; QueryError on refusal or timeout."""
        return self._request(Describe(self._next(), session), DescribeReply)

    def sessions(self) -> SessionsReply:
        """List the sessions; QueryError on refusal or timeout."""
        return self._request(ListSessions(self._next()), SessionsReply)

    def add_session(self, name: str, symbol: str, **settings: Setting) -> SessionsReply:
        """Open a session; ``settings``: further keys of its table. QueryError on refusal or timeout."""
        request = AddSession(self._next(), {"name": name, "symbol": symbol, **settings})
        return self._request(request, SessionsReply)

    def change_session(self, name: str, **settings: Setting) -> SessionsReply:
        """Give a session other settings; QueryError on refusal or timeout."""
        return self._request(ChangeSession(self._next(), name, settings), SessionsReply)

    def remove_session(self, name: str) -> SessionsReply:
        """Close a session; QueryError on refusal or timeout."""
        return self._request(RemoveSession(self._next(), name), SessionsReply)

    def answers(
        self, session: str, question: str = "", min_version: int = 0, timeout_s: float = 10.0
    ) -> AnswersReply:
        """Latest standing answers, waiting for `min_version`; QueryError on refusal or timeout."""
        return self._request(Answers(self._next(), session, question, min_version, timeout_s), AnswersReply)

    def questions(self, session: str) -> QuestionsReply:
        """A session's standing questions; QueryError on refusal or timeout."""
        return self._request(ListQuestions(self._next(), session), QuestionsReply)

    def set_question(
        self,
        session: str,
        name: str,
        text: str,
        choices: tuple[str, ...] = (),
        max_tokens: int = 8,
        **options: Any,
    ) -> QuestionsReply:
        """Add a standing question, or change the one with its name; QueryError on refusal or timeout.

        ``options``: further members of `SetQuestion`.
        """
        return self._request(
            SetQuestion(self._next(), session, name, text, choices, max_tokens, **options), QuestionsReply
        )

    def remove_question(self, session: str, name: str) -> QuestionsReply:
        """Remove a standing question; QueryError on refusal or timeout."""
        return self._request(RemoveQuestion(self._next(), session, name), QuestionsReply)

    def pause(self, session: str, question: str = "", paused: bool = True) -> QuestionsReply:
        """Ask a standing question, or all, no more, or again; QueryError on refusal or timeout."""
        return self._request(Pause(self._next(), session, question, paused), QuestionsReply)

    def label(self, session: str, question: str, version: int, choice: str) -> LabelReply:
        """Tell the right choice of a standing answer; QueryError on refusal or timeout."""
        return self._request(Label(self._next(), session, question, version, choice), LabelReply)

    def stats(self) -> StatsReply:
        """Counters and latencies; QueryError on refusal or timeout."""
        return self._request(Stats(self._next()), StatsReply)

    def open_prompt(
        self,
        text: str = "",
        max_tokens: int = 64,
        choices: tuple[str, ...] = (),
        temperature: float = 0.0,
        retention_priority: int = ORDINARY,
        retention_seconds: float = RETENTION_S,
    ) -> PromptReply:
        """Begin a prompt without a session; the reply has its id. QueryError on refusal or timeout."""
        kept = retention_priority, retention_seconds
        return self._request(Open(self._next(), text, max_tokens, choices, temperature, *kept), PromptReply)

    def append(self, prompt: str, text: str) -> PromptReply:
        """Append to an unfinished prompt; QueryError on refusal or timeout."""
        return self._request(Append(self._next(), prompt, text), PromptReply)

    def update(self, prompt: str, text: str) -> PromptReply:
        """Replace an unfinished prompt; QueryError on refusal or timeout."""
        return self._request(Update(self._next(), prompt, text), PromptReply)

    def finish(self, prompt: str, deadline_ms: int | None = None) -> FinishReply:
        """Finish a prompt and return its answer; QueryError on refusal or timeout."""
        return self._request(Finish(self._next(), prompt, deadline_ms), FinishReply)

    def complete(
        self,
        text: str,
        max_tokens: int = 64,
        choices: tuple[str, ...] = (),
        temperature: float = 0.0,
        retention_priority: int = ORDINARY,
        retention_seconds: float = RETENTION_S,
        deadline_ms: int | None = None,
    ) -> FinishReply:
        """Answer a complete prompt; QueryError on refusal or timeout."""
        more = retention_priority, retention_seconds, deadline_ms
        request = Complete(self._next(), text, max_tokens, choices, temperature, *more)
        return self._request(request, FinishReply)

    def close_prompt(self, prompt: str) -> ClosedReply:
        """Close a prompt without an answer; QueryError on refusal or timeout."""
        return self._request(Close(self._next(), prompt), ClosedReply)

    def close(self) -> None:
        """Close the connection; unsent requests are dropped."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> QueryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> int:
        self._id += 1
        return self._id

    def _request(self, request: ClientRequest | Hello, expected: type[R]) -> R:
        self._send(request)
        deadline = time.monotonic() + self._timeout_s
        try:
            while True:
                reply = self._receive(deadline)
                if isinstance(reply, expected) and reply.id == request.id:
                    return reply
                if isinstance(reply, ErrorReply) and reply.id in (request.id, None):
                    break
        except BaseException:
            with contextlib.suppress(QueryError):
                self._send(Cancel(self._next(), request.id))
            raise
        raise QueryError.of(reply)

    def _send(self, request: SocketRequest) -> None:
        try:
            self._socket.send(encode(request), zmq.NOBLOCK)
        except zmq.Again:
            raise QueryError("timeout", f"{self._endpoint} takes no more requests") from None

    def _receive(self, deadline: float) -> SocketMessage:
        left_ms = int((deadline - time.monotonic()) * 1000)
        if left_ms <= 0 or not self._socket.poll(left_ms):
            raise QueryError("timeout", f"no reply from {self._endpoint} within {self._timeout_s:g} s")
        try:
            return decode_reply(self._socket.recv())
        except Undecodable as error:
            raise QueryError(
                "engine", f"{self._endpoint} sent a reply that is not of this protocol: {error}"
            ) from None


def push_of(number: int, data: Data, content: str, options: Mapping[str, Any]) -> Push:
    """A push of records. Raises QueryError for a member that is not right."""
    body = data if isinstance(data, bytes) else msgspec.msgpack.encode(list(data))
    members = {"id": number, "data": body, "content": content, **options}
    try:
        return msgspec.convert(members, Push)
    except msgspec.ValidationError as error:
        raise QueryError("bad_request", str(error)) from None
