"""A blocking client of the query socket, for the command line and scripts."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import zmq

from daemon.api.messages import (
    AddSession,
    Answers,
    AnswersReply,
    Append,
    Ask,
    AskReply,
    ChangeSession,
    ClientRequest,
    Close,
    ClosedReply,
    Complete,
    ErrorReply,
    Finish,
    FinishReply,
    Label,
    LabelReply,
    ListQuestions,
    ListSessions,
    Open,
    PromptReply,
    QueryError,
    QuestionsReply,
    RemoveQuestion,
    RemoveSession,
    Reply,
    SessionsReply,
    SetQuestion,
    Setting,
    Stats,
    StatsReply,
    Update,
    decode_reply,
    encode,
)
from feeds.decoding import Undecodable

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
)


class QueryClient:
    """One connection, one request at a time. Use it from one thread, and close it (or use `with`)."""

    def __init__(self, endpoint: str, timeout_s: float = 30.0) -> None:
        """`timeout_s` bounds every request, including the connection."""
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._id = 0
        self._context = zmq.Context()
        # DEALER, not REQ: the socket stays usable after a timeout, and the id identifies a late reply.
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise QueryError(
                "bad_request", f"{endpoint} is not an address to connect to: {error.strerror}"
            ) from None

    def ask(
        self,
        session: str,
        question: str,
        max_tokens: int = 8,
        choices: tuple[str, ...] = (),
        early_exit: float | None = None,
        max_age_s: float | None = None,
    ) -> AskReply:
        """Ask a question of a session; QueryError on refusal or timeout.

        A standing question gets its newest ready answer, whose `data_version` and ages the reply has;
        ``max_age_s`` says how old its data may be: 0 is the newest data version.
        """
        ask = Ask(self._next(), session, question, max_tokens, choices, early_exit, max_age_s)
        return self._request(ask, AskReply)

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

    def label(self, session: str, question: str, version: int, choice: str) -> LabelReply:
        """Tell the right choice of a standing answer; QueryError on refusal or timeout."""
        return self._request(Label(self._next(), session, question, version, choice), LabelReply)

    def stats(self) -> StatsReply:
        """Counters and latencies; QueryError on refusal or timeout."""
        return self._request(Stats(self._next()), StatsReply)

    def open_prompt(
        self, text: str = "", max_tokens: int = 64, choices: tuple[str, ...] = (), temperature: float = 0.0
    ) -> PromptReply:
        """Begin a prompt without a session; the reply has its id. QueryError on refusal or timeout."""
        return self._request(Open(self._next(), text, max_tokens, choices, temperature), PromptReply)

    def append(self, prompt: str, text: str) -> PromptReply:
        """Append to an unfinished prompt; QueryError on refusal or timeout."""
        return self._request(Append(self._next(), prompt, text), PromptReply)

    def update(self, prompt: str, text: str) -> PromptReply:
        """Replace an unfinished prompt; QueryError on refusal or timeout."""
        return self._request(Update(self._next(), prompt, text), PromptReply)

    def finish(self, prompt: str) -> FinishReply:
        """Finish a prompt and return its answer; QueryError on refusal or timeout."""
        return self._request(Finish(self._next(), prompt), FinishReply)

    def complete(
        self, text: str, max_tokens: int = 64, choices: tuple[str, ...] = (), temperature: float = 0.0
    ) -> FinishReply:
        """Answer a complete prompt; QueryError on refusal or timeout."""
        return self._request(Complete(self._next(), text, max_tokens, choices, temperature), FinishReply)

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

    def _request(self, request: ClientRequest, expected: type[R]) -> R:
        self._socket.send(encode(request))
        deadline = time.monotonic() + self._timeout_s
        while True:
            reply = self._receive(deadline)
            if isinstance(reply, ErrorReply) and reply.id in (request.id, None):
                raise QueryError(reply.code, reply.message)
            if isinstance(reply, expected) and reply.id == request.id:
                return reply

    def _receive(self, deadline: float) -> Reply:
        left_ms = int((deadline - time.monotonic()) * 1000)
        if left_ms <= 0 or not self._socket.poll(left_ms):
            raise QueryError("timeout", f"no reply from {self._endpoint} within {self._timeout_s:g} s")
        try:
            return decode_reply(self._socket.recv())
        except Undecodable as error:
            raise QueryError(
                "engine", f"{self._endpoint} sent a reply that is not of this protocol: {error}"
            ) from None
