"""Clients of the query socket: `QueryClient` blocks, `AsyncQueryClient` awaits many requests at a time.

`Methods` says what both can ask, once: each method makes a message, and the client's ``call`` sends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec
import zmq
import zmq.asyncio

from daemon.api import messages
from daemon.api.dealer import CurvePair, connect
from daemon.api.messages import ClientRequest, ErrorReply, EventKind, QueryError, Reply, decode_reply, encode
from daemon.api.subscriptions import AsyncEventStream, EventStream, subscription
from feeds.decoding import Undecodable

Data = bytes | Sequence[Mapping[str, object]]
"""Records to push: as they are, or as maps."""
Sent = ClientRequest | messages.Hello
P = ParamSpec("P")
R = TypeVar("R", bound=msgspec.Struct)
_Received = Reply | messages.Control


class Method(Generic[P, R]):
    """A method of both clients: it returns the reply, or in an `AsyncQueryClient` an awaitable one.

    ``make``: of an id, which the client replaces, and the method's arguments.
    """

    def __init__(self, make: Callable[Concatenate[int, P], Sent], reply: type[R]) -> None:
        self._make, self._reply = make, reply
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, client: QueryClient, owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: AsyncQueryClient, owner: type) -> Callable[P, Awaitable[R]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> Method[P, R]: ...
    def __get__(self, client: QueryClient | AsyncQueryClient | None, owner: type) -> Any:
        """Bind the method to ``client``."""
        if client is None:
            return self

        def bound(*given: P.args, **named: P.kwargs) -> Any:
            return client.call(self._make(0, *given, **named), self._reply)

        update_wrapper(bound, self._make, ("__doc__",), ())
        return update_wrapper(bound, partial(self._make, 0), (), ())  # its signature has no id


def _push(number: int, /, data: Data, content: str = "msgpack", **options: Any) -> Sent:
    """Push records into the source for pushes.

    ``data``: records as maps, or bytes of this ``content``. ``options``: further members of `Push`.
    """
    body = data if isinstance(data, bytes) else msgspec.msgpack.encode(list(data))
    try:
        return msgspec.convert({"id": number, "data": body, "content": content, **options}, messages.Push)
    except msgspec.ValidationError as error:
        raise QueryError("bad_request", str(error)) from None


def _add_session(number: int, /, name: str, symbol: str, **settings: messages.Setting) -> Sent:
    """Open a session; ``settings``: further keys of its table."""
    return messages.AddSession(number, {"name": name, "symbol": symbol, **settings})


def _change_session(number: int, /, name: str, **settings: messages.Setting) -> Sent:
    """Give a session other settings."""
    return messages.ChangeSession(number, name, settings)


class Methods:
    """What clients ask: the requests of the protocol, whose members are the arguments.

    All raise QueryError when the daemon refuses, and when there is no reply in time.
    """

    hello = Method(messages.Hello, messages.HelloReply)
    ask = Method(messages.Ask, messages.AskReply)
    push = Method(_push, messages.PushReply)
    describe = Method(messages.Describe, messages.DescribeReply)
    show_prompt = Method(messages.ShowPrompt, messages.PromptShown)
    sessions = Method(messages.ListSessions, messages.SessionsReply)
    add_session = Method(_add_session, messages.SessionsReply)
    change_session = Method(_change_session, messages.SessionsReply)
    remove_session = Method(messages.RemoveSession, messages.SessionsReply)
    answers = Method(messages.Answers, messages.AnswersReply)
    questions = Method(messages.ListQuestions, messages.QuestionsReply)
    set_question = Method(messages.SetQuestion, messages.QuestionsReply)
    remove_question = Method(messages.RemoveQuestion, messages.QuestionsReply)
    pause = Method(messages.Pause, messages.QuestionsReply)
    label = Method(messages.Label, messages.LabelReply)
    stats = Method(messages.Stats, messages.StatsReply)
    trace = Method(messages.GetTrace, messages.TraceReply)
    open_prompt = Method(messages.Open, messages.PromptReply)
    append = Method(messages.Append, messages.PromptReply)
    update = Method(messages.Update, messages.PromptReply)
    finish = Method(messages.Finish, messages.FinishReply)
    complete = Method(messages.Complete, messages.FinishReply)
    close_prompt = Method(messages.Close, messages.ClosedReply)


class QueryClient(Methods):
    """One connection, one request at a time. Use it from one thread, and close it (or use `with`).

    A request that is given up, because its time is up or by Ctrl-C, is cancelled at the daemon, too.
    """

    def __init__(self, endpoint: str, timeout_s: float = 30.0, *, keys: CurvePair | None = None) -> None:
        """`timeout_s` bounds every request, with the connection. `keys`: where the daemon asks for them.

        Raises QueryError.
        """
        self._endpoint, self._timeout_s, self._keys = endpoint, timeout_s, keys
        self._number = 0
        self._context = zmq.Context()
        self._socket, self._handshakes = connect(self._context, endpoint, keys)
        self._poller = zmq.Poller()
        for each in (self._socket, self._handshakes.events):
            self._poller.register(each, zmq.POLLIN)

    def call(self, request: Sent, expected: type[R]) -> R:
        """Return the reply to ``request``. Raises QueryError."""
        deadline = time.monotonic() + self._timeout_s
        self._number = number = self._number + 1
        self._send(_encoded(request, number))
        try:
            while True:
                reply = self._receive(deadline)
                if isinstance(reply, expected) and reply.id == number:  # type: ignore[attr-defined]  # all have
                    return reply
                if isinstance(reply, ErrorReply) and reply.id in (number, None):
                    break
        except BaseException:
            with contextlib.suppress(QueryError):
                self._number += 1
                self._send(encode(messages.Cancel(self._number, number)))
            raise
        raise QueryError.of(reply)

    def subscribe(
        self,
        sessions: Sequence[str] = (),
        questions: Sequence[str] = (),
        events: Sequence[EventKind] = (),
        after: str = "",
    ) -> EventStream:
        """Subscribe to events from now on, or behind the one with the id ``after``; empty is all.

        Returns an iterator with its own connection: of `SubscriptionUpdate`, and of `LostMessage` where some
        are missing. Raises QueryError.
        """
        chosen = subscription(sessions, questions, events, after)
        return EventStream(self._endpoint, chosen, self._timeout_s, self._keys)

    def close(self) -> None:
        """Close the connection; unsent requests are dropped."""
        self._handshakes.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> QueryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            # so is a connection that was refused
            self._watch()
            raise QueryError("timeout", f"{self._endpoint} accepts no further requests") from None

    def _watch(self) -> None:
        while self._handshakes.events.poll(0):
            self._handshakes.note(self._handshakes.events.recv_multipart())
        self._handshakes.check()

    def _receive(self, deadline: float) -> object:
        while not self._socket.poll(0):
            self._watch()
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0 or not self._poller.poll(left_ms):
                raise self._handshakes.no_reply(self._timeout_s)
        try:
            return decode_reply(self._socket.recv())
        except Undecodable as error:
            raise _unreadable(self._endpoint, error) from None


class AsyncQueryClient(Methods):
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
        self._waiting: dict[int, asyncio.Future[_Received]] = {}
        self._number = 0
        self._reading: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket, self._handshakes = connect(self._context, endpoint, keys, identity)

    async def call(self, request: Sent, expected: type[R]) -> R:
        """Return the reply to ``request``. Raises QueryError."""
        found = await self._exchange(request)
        if isinstance(found, ErrorReply):
            raise QueryError.of(found)
        if not isinstance(found, expected):
            raise QueryError("engine", f"{self._endpoint} sent a {type(found).__name__}, which was not asked")
        return found

    async def request(self, request: ClientRequest) -> Reply:
        """The reply to ``request``, with its id, errors included. Raises QueryError for a timeout."""
        found = await self._exchange(request)
        assert isinstance(found, Reply)  # the daemon answers a request by its reply
        return msgspec.structs.replace(found, id=request.id)

    async def subscribe(
        self,
        sessions: Sequence[str] = (),
        questions: Sequence[str] = (),
        events: Sequence[EventKind] = (),
        after: str = "",
    ) -> AsyncEventStream:
        """Subscribe to events, as `QueryClient.subscribe` does; returns an asynchronous iterator."""
        stream = AsyncEventStream(
            self._endpoint, subscription(sessions, questions, events, after), self._keys
        )
        await stream.begin(self._timeout_s)
        return stream

    async def close(self) -> None:
        """Close the connection; requests that wait fail with QueryError."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._fail(QueryError("shutting_down", f"the connection to {self._endpoint} was closed"))
        self._handshakes.close()
        self._socket.close()
        self._context.term()

    async def __aenter__(self) -> AsyncQueryClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _exchange(self, request: Sent) -> _Received:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_all())
        self._handshakes.check()
        self._number += 1
        number = self._number
        sent = _encoded(request, number)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        sending = self._socket.send(sent)
        try:
            async with asyncio.timeout(self._timeout_s):
                # a connection that was refused never takes it: then the reply fails
                await asyncio.wait((sending, reply), return_when=asyncio.FIRST_COMPLETED)
                found: _Received = await reply
                return found
        except TimeoutError:
            self._cancel(number)
            raise self._handshakes.no_reply(self._timeout_s) from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            sending.cancel()
            del self._waiting[number]

    def _cancel(self, request: int) -> None:
        """Tell the daemon to give a request up, if the message can be sent now."""
        self._number += 1
        with contextlib.suppress(zmq.ZMQError):
            sent = self._socket.send(encode(messages.Cancel(self._number, request)), zmq.NOBLOCK)
            assert isinstance(sent, asyncio.Future)
            sent.exception() if sent.done() else sent.cancel()

    async def _read_all(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._watch())
            both.create_task(self._read())

    async def _watch(self) -> None:
        while True:
            self._handshakes.note(await self._handshakes.events.recv_multipart())
            if self._handshakes.refused:
                self._fail(QueryError("unauthenticated", self._handshakes.refused))

    async def _read(self) -> None:
        while True:
            try:
                reply = decode_reply(await self._socket.recv())
            except Undecodable as error:
                self._fail(_unreadable(self._endpoint, error))
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


def _encoded(request: Sent, number: int) -> bytes:
    """Return the request's message, with ``number`` as its id. Raises QueryError."""
    sent = encode(msgspec.structs.replace(request, id=number))
    if len(sent) > messages.MAX_REQUEST_BYTES:
        # the daemon could not say which one it refuses, and all that wait would fail
        why = f"a request has at most {messages.MAX_REQUEST_BYTES} bytes, not {len(sent)}"
        raise QueryError("too_long", why)
    return sent


def _unreadable(endpoint: str, error: Undecodable) -> QueryError:
    return QueryError("engine", f"{endpoint} sent a reply that is not of this protocol: {error}")
