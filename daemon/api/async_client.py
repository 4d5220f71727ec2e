"""A client of the query socket for an event loop: many requests at a time over one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from daemon.api import messages
from daemon.api.client import Data, push_of
from daemon.api.dealer import CurvePair, connect
from daemon.api.messages import ClientRequest, ErrorReply, EventKind, QueryError, Reply, decode_reply, encode
from daemon.api.subscriptions import AsyncEventStream, wanted
from feeds.decoding import Undecodable

R = TypeVar("R", bound=msgspec.Struct)
_Waited = Reply | messages.Control


class AsyncQueryClient:
    """One connection. Use it from one event loop, and close it (or use ``async with``).

    A request whose task is cancelled, or whose time is up, is cancelled at the daemon, too. Its methods raise
    QueryError when the daemon refuses, and when there is no reply in time.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = 30.0,
        *,
        identity: bytes = b"",
        keys: CurvePair | None = None,
    ) -> None:
        """``timeout_s`` bounds every request, including the connection. Raises QueryError.

        ``identity``: the connection's name at the daemon, unique among its clients; by default it gets one.
        ``keys``: where the daemon asks for them.
        """
        self._endpoint, self._timeout_s, self._keys = endpoint, timeout_s, keys
        self._waiting: dict[int, asyncio.Future[_Waited]] = {}
        self._number = 0
        self._reading: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        try:
            self._socket = connect(self._context, endpoint, keys, identity)
        except QueryError:
            self._context.term()
            raise

    async def request(self, request: ClientRequest) -> Reply:
        """The reply to ``request``, with its id, errors included. Raises QueryError for a timeout."""
        found = await self._exchange(request)
        assert isinstance(found, Reply)  # the daemon answers a request by its reply
        return msgspec.structs.replace(found, id=request.id)

    async def hello(self) -> messages.HelloReply:
        """The daemon's version and limits."""
        return await self._typed(messages.Hello(0), messages.HelloReply)

    async def ask(
        self,
        session: str,
        question: str,
        max_tokens: int = 8,
        choices: tuple[str, ...] = (),
        early_exit: float | None = None,
        max_age_s: float | None = None,
        deadline_ms: int | None = None,
    ) -> messages.AskReply:
        """Ask a question of a session; members as in `Ask`."""
        ask = messages.Ask(0, session, question, max_tokens, choices, early_exit, max_age_s, deadline_ms)
        return await self._typed(ask, messages.AskReply)

    async def subscribe(
        self,
        sessions: Sequence[str] = (),
        questions: Sequence[str] = (),
        events: Sequence[EventKind] = (),
        after: str = "",
    ) -> AsyncEventStream:
        """Events from now on, or behind the one with the id ``after``; empty is all.

        An asynchronous iterator with a connection of its own: of `Update`, and of `LostMessage` where some
        are missing.
        """
        stream = AsyncEventStream(self._endpoint, wanted(sessions, questions, events, after), self._keys)
        await stream.begin(self._timeout_s)
        return stream

    async def push(self, data: Data, content: str = "msgpack", **options: Any) -> messages.PushReply:
        """Push records: maps, or bytes of this ``content``. ``options``: further members of `Push`."""
        return await self._typed(push_of(0, data, content, options), messages.PushReply)

    async def sessions(self) -> messages.SessionsReply:
        """List the sessions."""
        return await self._typed(messages.ListSessions(0), messages.SessionsReply)

    async def describe(self, session: str) -> messages.DescribeReply:
        """A session, its standing questions and their latest answers."""
        return await self._typed(messages.Describe(0, session), messages.DescribeReply)

    async def add_session(
        self, name: str, symbol: str, **settings: messages.Setting
    ) -> messages.SessionsReply:
        """Open a session; ``settings``: further keys of its table."""
        request = messages.AddSession(0, {"name": name, "symbol": symbol, **settings})
        return await self._typed(request, messages.SessionsReply)

    async def change_session(self, name: str, **settings: messages.Setting) -> messages.SessionsReply:
        """Give a session other settings."""
        return await self._typed(messages.ChangeSession(0, name, settings), messages.SessionsReply)

    async def remove_session(self, name: str) -> messages.SessionsReply:
        """Close a session."""
        return await self._typed(messages.RemoveSession(0, name), messages.SessionsReply)

    async def answers(
        self, session: str, question: str = "", min_version: int = 0, timeout_s: float = 10.0
    ) -> messages.AnswersReply:
        """Latest standing answers, waiting for `min_version`."""
        request = messages.Answers(0, session, question, min_version, timeout_s)
        return await self._typed(request, messages.AnswersReply)

    async def questions(self, session: str) -> messages.QuestionsReply:
        """A session's standing questions."""
        return await self._typed(messages.ListQuestions(0, session), messages.QuestionsReply)

    async def set_question(
        self,
        session: str,
        name: str,
        text: str,
        choices: tuple[str, ...] = (),
        max_tokens: int = 8,
        **options: Any,
    ) -> messages.QuestionsReply:
        """Add a standing question, or change the one with its name; ``options`` as in `SetQuestion`."""
        request = messages.SetQuestion(0, session, name, text, choices, max_tokens, **options)
        return await self._typed(request, messages.QuestionsReply)

    async def remove_question(self, session: str, name: str) -> messages.QuestionsReply:
        """Remove a standing question."""
        return await self._typed(messages.RemoveQuestion(0, session, name), messages.QuestionsReply)

    async def pause(self, session: str, question: str = "", paused: bool = True) -> messages.QuestionsReply:
        """Ask a standing question, or all, no more, or again."""
        return await self._typed(messages.Pause(0, session, question, paused), messages.QuestionsReply)

    async def label(self, session: str, question: str, version: int, choice: str) -> messages.LabelReply:
        """Tell the right choice of a standing answer."""
        return await self._typed(messages.Label(0, session, question, version, choice), messages.LabelReply)

    async def stats(self) -> messages.StatsReply:
        """Counters and latencies."""
        return await self._typed(messages.Stats(0), messages.StatsReply)

    async def open_prompt(
        self,
        text: str = "",
        max_tokens: int = 64,
        choices: tuple[str, ...] = (),
        temperature: float = 0.0,
        retention_priority: int = messages.ORDINARY,
        retention_seconds: float = messages.RETENTION_S,
    ) -> messages.PromptReply:
        """Begin a prompt without a session; the reply has its id."""
        kept = retention_priority, retention_seconds
        request = messages.Open(0, text, max_tokens, choices, temperature, *kept)
        return await self._typed(request, messages.PromptReply)

    async def append(self, prompt: str, text: str) -> messages.PromptReply:
        """Append to an unfinished prompt."""
        return await self._typed(messages.Append(0, prompt, text), messages.PromptReply)

    async def update(self, prompt: str, text: str) -> messages.PromptReply:
        """Replace an unfinished prompt."""
        return await self._typed(messages.Update(0, prompt, text), messages.PromptReply)

    async def finish(self, prompt: str, deadline_ms: int | None = None) -> messages.FinishReply:
        """Finish a prompt and return its answer."""
        return await self._typed(messages.Finish(0, prompt, deadline_ms), messages.FinishReply)

    async def complete(
        self,
        text: str,
        max_tokens: int = 64,
        choices: tuple[str, ...] = (),
        temperature: float = 0.0,
        retention_priority: int = messages.ORDINARY,
        retention_seconds: float = messages.RETENTION_S,
        deadline_ms: int | None = None,
    ) -> messages.FinishReply:
        """Answer a complete prompt."""
        more = retention_priority, retention_seconds, deadline_ms
        request = messages.Complete(0, text, max_tokens, choices, temperature, *more)
        return await self._typed(request, messages.FinishReply)

    async def close_prompt(self, prompt: str) -> messages.ClosedReply:
        """Close a prompt without an answer."""
        return await self._typed(messages.Close(0, prompt), messages.ClosedReply)

    async def close(self) -> None:
        """Close the connection; requests that wait fail with QueryError."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._fail(QueryError("shutting_down", f"the connection to {self._endpoint} was closed"))
        self._socket.close()
        self._context.term()

    async def __aenter__(self) -> AsyncQueryClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _typed(self, request: ClientRequest | messages.Hello, expected: type[R]) -> R:
        found = await self._exchange(request)
        if isinstance(found, ErrorReply):
            raise QueryError.of(found)
        if not isinstance(found, expected):
            raise QueryError("engine", f"{self._endpoint} sent a {type(found).__name__}, which was not asked")
        return found

    async def _exchange(self, request: ClientRequest | messages.Hello) -> _Waited:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        self._number += 1
        number = self._number
        sent = encode(msgspec.structs.replace(request, id=number))
        if len(sent) > messages.MAX_REQUEST_BYTES:
            # the daemon could not tell which one it refuses, and all that wait would fail
            why = f"a request has at most {messages.MAX_REQUEST_BYTES} bytes, not {len(sent)}"
            raise QueryError("too_long", why)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send(sent)
                found: _Waited = await reply
                return found
        except TimeoutError:
            self._cancel(number)
            why = f"no reply from {self._endpoint} within {self._timeout_s:g} s"
            raise QueryError("timeout", why) from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            del self._waiting[number]

    def _cancel(self, request: int) -> None:
        """Tell the daemon to give a request up, if the message can be sent now."""
        self._number += 1
        with contextlib.suppress(zmq.ZMQError):
            sent = self._socket.send(encode(messages.Cancel(self._number, request)), zmq.NOBLOCK)
            assert isinstance(sent, asyncio.Future)
            sent.exception() if sent.done() else sent.cancel()

    async def _read(self) -> None:
        while True:
            try:
                reply = decode_reply(await self._socket.recv())
            except Undecodable as error:
                why = f"{self._endpoint} sent a reply that is not of this protocol: {error}"
                self._fail(QueryError("engine", why))
                continue
            if isinstance(reply, messages.EventMessage | messages.LostMessage | messages.Ended):
                continue
            if isinstance(reply, ErrorReply) and reply.id is None:
                # it was too malformed for the daemon to tell which it was
                self._fail(QueryError.of(reply))
                continue
            waiting = self._waiting.get(reply.id) if reply.id is not None else None
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)

    def _fail(self, error: QueryError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
