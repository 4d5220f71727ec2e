"""Clients of a daemon: `QueryClient` blocks, `AsyncQueryClient` awaits many requests at a time.

Both speak over the query socket or over HTTP, as the address says. `Methods` says what they can ask, once:
each method makes a message, and the client's ``call`` sends it.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec

from daemon.api import messages
from daemon.api.blocking import AsyncCalls, BlockingCalls, EventStream
from daemon.api.dealer import CurvePair
from daemon.api.messages import ClientRequest, ErrorReply, EventKind, QueryError, Received, Reply, Sent
from daemon.api.socket_calls import AsyncSocketCalls, SocketCalls
from daemon.api.subscriptions import AsyncEventStream, subscription

if TYPE_CHECKING:
    from daemon.api.http_calls import HttpCalls

Data = bytes | Sequence[Mapping[str, object]]
"""Records to push: as they are, or as maps."""
_HTTP = ("http://", "https://")
P = ParamSpec("P")
R = TypeVar("R", bound=msgspec.Struct)
Keys = CurvePair | str
"""CURVE keys of a query socket, or an API key of HTTP."""


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
    signals = Method(messages.ListSignals, messages.SignalsReply)
    versions = Method(messages.ListVersions, messages.VersionsReply)
    quality = Method(messages.Quality, messages.QualityReply)
    stats = Method(messages.Stats, messages.StatsReply)
    budgets = Method(messages.ListBudgets, messages.BudgetsReply)
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

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = 30.0,
        *,
        keys: Keys | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``endpoint``: of the query socket, or ``http://HOST:PORT``, ``https://HOST:PORT``.

        ``timeout_s`` bounds every request, with the connection. ``keys``: where the daemon asks for them,
        CURVE keys or, over HTTP, an API key. ``tls``: which certificates are trusted; by default those of
        known authorities. Raises QueryError.
        """
        self._calls: BlockingCalls | SocketCalls
        if endpoint.startswith(_HTTP):
            self._calls = BlockingCalls(_http_calls(endpoint, timeout_s, keys, tls))
        else:
            self._calls = SocketCalls(endpoint, timeout_s, _curve(keys, tls))

    def call(self, request: Sent, expected: type[R]) -> R:
        """Return the reply to ``request``. Raises QueryError."""
        return _expected(self._calls.exchange(request), expected)

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
        return self._calls.subscribe(subscription(sessions, questions, events, after))

    def close(self) -> None:
        """Close the connection; unsent requests are dropped."""
        self._calls.close()

    def __enter__(self) -> QueryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        keys: Keys | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """As a `QueryClient`. Raises QueryError.

        ``identity``: the connection's name at the query socket, unique among its clients; by default it gets
        one.
        """
        self._calls: AsyncCalls
        if endpoint.startswith(_HTTP):
            self._calls = _http_calls(endpoint, timeout_s, keys, tls)
        else:
            self._calls = AsyncSocketCalls(endpoint, timeout_s, _curve(keys, tls), identity)

    async def call(self, request: Sent, expected: type[R]) -> R:
        """Return the reply to ``request``. Raises QueryError."""
        return _expected(await self._calls.exchange(request), expected)

    async def request(self, request: ClientRequest) -> Reply:
        """The reply to ``request``, with its id, errors included. Raises QueryError for a timeout."""
        found = await self._calls.exchange(request)
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
        return await self._calls.subscribe(subscription(sessions, questions, events, after))

    async def close(self) -> None:
        """Close the connection; requests that wait fail with QueryError."""
        await self._calls.close()

    async def __aenter__(self) -> AsyncQueryClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _expected(found: Received, kind: type[R]) -> R:
    """Raises QueryError where it is an error, or no such reply."""
    if isinstance(found, ErrorReply):
        raise QueryError.of(found)
    if not isinstance(found, kind):
        raise QueryError("engine", f"the daemon sent a {type(found).__name__}, which was not asked")
    return found


def _curve(keys: Keys | None, tls: ssl.SSLContext | None) -> CurvePair | None:
    """Raises QueryError for what belongs to HTTP."""
    if isinstance(keys, str) or tls is not None:
        raise QueryError(
            "bad_request", "API keys and TLS are for http and https; a query socket has CURVE keys"
        )
    return keys


def _http_calls(endpoint: str, timeout_s: float, keys: Keys | None, tls: ssl.SSLContext | None) -> HttpCalls:
    """Raises QueryError for CURVE keys, and without httpx2."""
    if not isinstance(keys, str | None):
        raise QueryError(
            "bad_request", "CURVE keys are for query sockets; http and https take an API key, a text"
        )
    try:
        from daemon.api.http_calls import HttpCalls
    except ModuleNotFoundError as error:
        if error.name != "httpx2":
            raise
        raise QueryError("bad_request", "http and https need httpx2: pip install 'httpx2>=2.16'") from None
    return HttpCalls(endpoint, timeout_s, keys or "", tls)
