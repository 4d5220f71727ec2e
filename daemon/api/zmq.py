"""The query socket: a ZeroMQ ROUTER that answers each request as its own task, so none waits for another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from daemon.api.messages import (
    Answers,
    AnswersReply,
    Append,
    Ask,
    AskReply,
    Close,
    ClosedReply,
    Code,
    Complete,
    ErrorReply,
    Finish,
    FinishReply,
    Open,
    PromptReply,
    QueryError,
    Reply,
    Request,
    Sessions,
    SessionsReply,
    Stats,
    StatsReply,
    Update,
    decode_request,
    encode,
    request_id,
)
from daemon.supervision import Tasks
from feeds.decoding import Undecodable

log = logging.getLogger(__name__)

NAME = "query socket"

# A frame so much longer than the limit closes the connection (libzmq refuses it before it is read into
# memory); in between, the sender gets an error that says why.
_HARD_LIMIT_FACTOR = 4
_CLOSE_LINGER_MS = 500


class QueryBackend(Protocol):
    """What answers the requests. Each may raise QueryError; anything else is logged and becomes `engine`."""

    async def ask(self, request: Ask) -> AskReply:
        """Answer from the cache or the engine; the server fills in `latency_ns`."""

    async def sessions(self, request: Sessions) -> SessionsReply:
        """Describe all sessions."""

    async def answers(self, request: Answers) -> AnswersReply:
        """Latest standing answers; waits for `min_version` at most `timeout_s`."""

    async def stats(self, request: Stats) -> StatsReply:
        """Read the metrics."""


class PromptBackend(Protocol):
    """What takes prompts without a session; as `QueryBackend`. ``client``: who counts as one."""

    async def open(self, request: Open, client: str) -> PromptReply:
        """Begin a prompt."""

    async def append(self, request: Append) -> PromptReply:
        """Add to an unfinished prompt."""

    async def update(self, request: Update) -> PromptReply:
        """Replace an unfinished prompt."""

    async def finish(self, request: Finish) -> FinishReply:
        """Generate, and wait for the answer; the server fills in `latency_ns`."""

    async def complete(self, request: Complete, client: str) -> FinishReply:
        """A prompt all at once, and its answer; the server fills in `latency_ns`."""

    async def close(self, request: Close) -> ClosedReply:
        """Give a prompt up."""


class QueryServer:
    """Serves its backends on one endpoint, inside the running event loop."""

    def __init__(
        self,
        backend: QueryBackend,
        prompts: PromptBackend,
        endpoint: str,
        *,
        max_wait_s: float = 30.0,
        max_in_flight: int = 256,
        max_request_bytes: int = 1 << 18,
        observe: Callable[[Request, str, int], None] = lambda request, outcome, latency_ns: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`observe(request, outcome, latency_ns)`: each readable request; outcome is ok or an error code."""
        self._backend = backend
        self._prompts = prompts
        self._asked_endpoint = endpoint
        self._max_wait_s = max_wait_s
        self._max_in_flight = max_in_flight
        self._max_request_bytes = max_request_bytes
        self._observe = observe
        self._clock = clock
        self._in_flight: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks = Tasks()
        self.endpoint = ""

    async def start(self, tasks: Tasks) -> None:
        """Bind, and serve as one of ``tasks``; sets `endpoint`, with the real port for 0 or *.

        Raises OSError for an address that cannot be bound.
        """
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _CLOSE_LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_request_bytes * _HARD_LIMIT_FACTOR)
        self._socket.setsockopt(zmq.IPV6, int("[" in self._asked_endpoint))
        try:
            self._socket.bind(self._asked_endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise OSError(
                error.errno, f"cannot bind the query socket to {self._asked_endpoint}: {error.strerror}"
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks = tasks
        tasks.start(NAME, partial(self._receive, self._socket), restarts=True)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse what comes, give what is running `drain_s` to finish, refuse the rest, and close."""
        if self._socket is None:
            return
        self._stopping = True
        if self._in_flight:
            _, late = await asyncio.wait(self._in_flight, timeout=drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late)
        await self._tasks.stop(NAME)
        self._close()

    def _close(self) -> None:
        if self._socket is not None and self._context is not None:
            self._socket.close()
            self._context.term()
        self._socket = self._context = None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            arrived: list[bytes] = await socket.recv_multipart()
            since = self._clock()
            # Peer identity, then REQ's empty delimiter if there is one; the reply goes back the same way.
            route, payload = arrived[:-1], arrived[-1]
            request = self._admit(payload, len(arrived), since)
            if isinstance(request, ErrorReply):
                await socket.send_multipart([*route, encode(request)])
                continue
            task = asyncio.create_task(self._serve(socket, route, request, since))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)

    def _admit(self, payload: bytes, frames: int, since: int) -> Request | ErrorReply:
        """The request, or the reply that refuses it without work."""
        if len(payload) > self._max_request_bytes:
            limit = self._max_request_bytes
            return ErrorReply(None, "too_long", f"a request has at most {limit} bytes, not {len(payload)}")
        if frames > 3:
            return ErrorReply(None, "bad_request", f"a request is one frame, not {frames - 1}")
        try:
            request = decode_request(payload)
        except Undecodable as error:
            return ErrorReply(request_id(payload), "bad_request", str(error))
        refusal: ErrorReply | None = None
        if self._stopping:
            refusal = ErrorReply(request.id, "shutting_down", "the daemon is stopping")
        elif len(self._in_flight) >= self._max_in_flight:
            refusal = ErrorReply(
                request.id, "busy", f"{self._max_in_flight} requests are already being answered"
            )
        if refusal is None:
            return request
        self._observe(request, refusal.code, self._clock() - since)
        return refusal

    async def _serve(
        self, socket: zmq.asyncio.Socket, route: list[bytes], request: Request, since: int
    ) -> None:
        reply = await self._reply(request, route[0].hex())
        latency_ns = self._clock() - since
        if isinstance(reply, AskReply | FinishReply):
            reply = msgspec.structs.replace(reply, latency_ns=latency_ns)
        self._observe(request, _outcome(reply), latency_ns)
        try:
            payload = encode(reply)
        except Exception:
            log.exception("the reply to %s cannot be encoded", request)
            payload = encode(ErrorReply(request.id, "engine", "the reply cannot be encoded"))
        await socket.send_multipart([*route, payload])

    async def _reply(self, request: Request, client: str) -> Reply:
        def refuse(code: Code, message: str) -> ErrorReply:
            return ErrorReply(request.id, code, message)

        try:
            async with asyncio.timeout(self._max_wait_s):
                return await self._dispatch(request, client)
        except QueryError as error:
            return refuse(error.code, error.message)
        except TimeoutError:
            return refuse("timeout", f"no answer within {self._max_wait_s:g} s")
        except asyncio.CancelledError:
            # Only `stop` cancels a request; its client is told instead of left waiting.
            return refuse("shutting_down", "the daemon stopped before the answer was ready")
        except Exception:
            log.exception("request %s failed", request)
            return refuse("engine", "the daemon failed to answer; its log says why")

    async def _dispatch(self, request: Request, client: str) -> Reply:
        match request:
            case Ask():
                return await self._backend.ask(request)
            case Sessions():
                return await self._backend.sessions(request)
            case Answers():
                return await self._backend.answers(request)
            case Stats():
                return await self._backend.stats(request)
            case Open():
                return await self._prompts.open(request, client)
            case Append():
                return await self._prompts.append(request)
            case Update():
                return await self._prompts.update(request)
            case Finish():
                return await self._prompts.finish(request)
            case Complete():
                return await self._prompts.complete(request, client)
            case Close():
                return await self._prompts.close(request)


def _outcome(reply: Reply) -> str:
    return reply.code if isinstance(reply, ErrorReply) else "ok"
