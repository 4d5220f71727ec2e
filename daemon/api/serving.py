"""Routes of the OpenAI and Anthropic APIs, and the one place that runs a generation for them.

A request is read, translated, generated and translated back. Its first token decides the status: what fails
before is an HTTP error, what fails later an event of the stream. A stream that waits longer for it than for a
ping begins without it, so that nothing between takes the connection for dead. A client that goes away ends
its generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from daemon.api import anthropic
from daemon.api.api_errors import ApiError, api_error_of
from daemon.api.auth_middleware import client_of
from daemon.api.content_codings import CorruptBody, UnknownCoding
from daemon.api.disconnect import GONE, ClientDisconnected, gone, unless_gone
from daemon.api.generation import Begun, Delta, Event, Finished, Generator, ModelCatalog
from daemon.api.http_errors import headers_of
from daemon.api.messages import QueryError
from daemon.api.openai import chat, common, completions, responses
from daemon.api.reply_writer import Api, ReplyIdentity, Writer, encode
from daemon.api.request_body import media_type_of, read_body, read_json
from daemon.tenants import Client
from feeds.decoding import Undecodable

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
JSON = "application/json"
PING_S = 10.0
"""A stream without an event for so long gets a ping."""
_OPENAI = (
    *("assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings"),
    *("evals", "files", "fine_tuning", "images", "models", "moderations", "organization", "realtime"),
    *("responses", "threads", "uploads", "vector_stores", "videos"),
)
_ANTHROPIC = ("messages", "organizations", "skills")
"""First parts of each API's paths behind `/v1/`: what is not served there is refused in its own shape.

Not `complete` of Anthropic: that path is ours.
"""
Asked = TypeVar("Asked", bound=msgspec.Struct)
_PATH = re.compile(r"`\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
Events = AsyncGenerator[tuple[int, Event], None]
Pinged = AsyncGenerator[tuple[int, Event] | None, None]
ErrorBody = Callable[[ApiError], dict[str, Any]]


@dataclass(frozen=True)
class Meter:
    """``ended(api, outcome)`` per request."""

    ended: Callable[[str, str], None] = lambda api, outcome: None


def generation_routes(generator: Generator, meter: Meter, *, ping_s: float = PING_S) -> list[Route]:
    """Routes for a Starlette application."""
    endpoints = Endpoints(generator, meter, ping_s)
    messages = anthropic.Messages()
    generate = endpoints.generate
    of_openai, of_anthropic = common.error_body, anthropic.error_body
    return [
        *_route("POST", "/v1/chat/completions", partial(generate, chat.Chat(), chat.ChatRequest), of_openai),
        *_route("POST", "/v1/completions",
                partial(generate, completions.Completions(), completions.CompletionRequest), of_openai),
        *_route("POST", "/v1/responses",
                partial(generate, responses.Responses(), responses.ResponseRequest), of_openai),
        *_route("POST", "/v1/messages", partial(generate, messages, anthropic.MessageRequest), of_anthropic),
        *_route("POST", "/v1/messages/count_tokens", partial(endpoints.count, messages), of_anthropic),
        *_route("GET", "/v1/models", endpoints.models, of_openai),
        *_route("GET", "/v1/models/{model:path}", endpoints.models, of_openai),
        *_unserved(_OPENAI, of_openai),
        *_unserved(_ANTHROPIC, of_anthropic),
    ]  # fmt: skip


class Endpoints:
    """Answers requests by ``generator``."""

    def __init__(self, generator: Generator, meter: Meter, ping_s: float) -> None:
        self._generator, self._meter, self._ping_s = generator, meter, ping_s

    async def generate(self, api: Api[Any], kind: type[Any], request: Request) -> Response:
        """Answer one request of ``api``, read as ``kind``."""
        key = secrets.token_hex(12)

        async def answer() -> Response:
            client, asked = await _read(request, kind)
            served, salt = self._served(client), client.tenant.salt
            wanted = [
                msgspec.structs.replace(each, salt=salt(each.salt)) for each in api.wanted(asked, served)
            ]
            made = ReplyIdentity(key, int(time.time()), asked.model, f"fp_{served.revision}")
            events = self._generator.run(wanted, client)
            if not asked.stream:
                done = await unless_gone(request, _all(events, len(wanted)))
                return _json(api.whole(asked, made, done), key)
            pinged = _pinged(events, self._ping_s)
            first = await unless_gone(request, anext(pinged))
            ended = partial(self._meter.ended, api.name)
            return StreamedReply(api.writer(asked, made), first, pinged, ended, _headers(key))

        return await self._answered(api.name, api.error, key, answer)

    async def count(self, api: anthropic.Messages, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""
        key = secrets.token_hex(12)

        async def answer() -> Response:
            client, asked = await _read(request, anthropic.CountRequest)
            counted = api.counted(asked, self._served(client))
            sender = {"salt": client.tenant.salt(), "tenant": client.tenant.name}
            counting = self._generator.count(msgspec.structs.replace(counted, **sender), client)
            tokens = await unless_gone(request, counting)
            return _json(anthropic.Counted(tokens), key)

        return await self._answered("count_tokens", api.error, key, answer)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`, and one of them, in the shape of the API that the client speaks."""
        anthropics = "anthropic-version" in request.headers
        key, wanted = secrets.token_hex(12), request.path_params.get("model")

        async def answer() -> Response:
            served = self._served(client_of(request))
            listed: Any = anthropic.models(served) if anthropics else common.models(served)
            if wanted is None:
                return _json(listed, key)
            found = next((each for each in listed.data if each.id == wanted), None)
            if found is None:
                known = ", ".join(served.names)
                raise ApiError("unknown_model", f"there is no model {wanted!r}; there are: {known}", "model")
            return _json(found, key)

        error = anthropic.error_body if anthropics else common.error_body
        return await self._answered("models", error, key, answer)

    def _served(self, client: Client) -> ModelCatalog:
        try:
            return self._generator.served(client)
        except QueryError as error:
            raise api_error_of(error) from None

    async def _answered(
        self, name: str, error: ErrorBody, key: str, answer: Callable[[], Awaitable[Response]]
    ) -> Response:
        """The response, or the error that says why there is none; counted, unless it is a stream."""
        try:
            try:
                response = await answer()
            except QueryError as failed:
                raise api_error_of(failed) from None
        except ClientDisconnected:
            self._meter.ended(name, "client_closed")
            return Response(status_code=GONE)
        except ApiError as problem:
            self._meter.ended(name, problem.reason)
            return _error(problem, error, key)
        except Exception:
            log.exception("a request of %s failed", name)
            self._meter.ended(name, "engine")
            return _error(ApiError("engine", "the daemon failed to answer; see its log"), error, key)
        if not isinstance(response, StreamedReply):
            self._meter.ended(name, "done")
        return response


class StreamedReply(Response):
    """A reply that is written while it comes. ``ended(outcome)`` is called once.

    None among the events stands for a ping.
    """

    def __init__(
        self,
        writer: Writer,
        first: tuple[int, Event] | None,
        events: Pinged,
        ended: Callable[[str], None],
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-store"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._writer, self._first, self._events = writer, first, events
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until it ends or the client goes."""
        outcome = "client_closed"
        try:
            async with contextlib.aclosing(self._events):
                sending = asyncio.ensure_future(self._send(send))
                going = asyncio.ensure_future(gone(receive))
                try:
                    await asyncio.wait({sending, going}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (sending, going):
                        task.cancel()
                    await asyncio.gather(sending, going, return_exceptions=True)
            if not sending.cancelled() and sending.exception() is None:
                outcome = sending.result()
        finally:
            self._ended(outcome)

    async def _send(self, send: Send) -> str:
        """Send the whole stream; returns the outcome."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def body(pieces: Iterable[bytes], more: bool = True) -> None:
            data = b"".join(pieces)
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        outcome = "done"
        try:
            await body(_written(self._writer, self._first))
            async for found in self._events:
                await body(_written(self._writer, found))
        except QueryError as error:
            problem = api_error_of(error)
            outcome = problem.reason
            await body(self._writer.failed(problem), more=False)
        except Exception:
            log.exception("a stream failed")
            outcome = "engine"
            problem = ApiError("engine", "the daemon failed to answer; see its log")
            await body(self._writer.failed(problem), more=False)
        else:
            await body(self._writer.end(), more=False)
        return outcome


def _written(writer: Writer, found: tuple[int, Event] | None) -> Iterable[bytes]:
    if found is None:
        return [writer.ping()]
    index, event = found
    match event:
        case Begun():
            return writer.begun(index, event)
        case Delta():
            return writer.delta(index, event)
        case Finished():
            return writer.finished(index, event)


async def _all(events: Events, count: int) -> list[Finished]:
    """The answers, in order."""
    async with contextlib.aclosing(events):
        done = {index: event async for index, event in events if isinstance(event, Finished)}
    return [done[index] for index in range(count)]


async def _pinged(events: Events, ping_s: float) -> Pinged:
    """``events``, and None whenever none came for so long."""
    async with contextlib.aclosing(events):
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait({coming}, timeout=ping_s))[0]:
                    yield None
                found = coming.result()
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
            if found is None:
                return
            yield found


async def _read(request: Request, kind: type[Asked]) -> tuple[Client, Asked]:
    """The client and its request. Raises ApiError."""
    if media_type_of(request) != JSON:
        raise ApiError("unsupported_media_type", f"the content type must be {JSON}")
    try:
        body = await read_body(request, MAX_BYTES)
    except ClientDisconnect:
        raise ClientDisconnected from None
    except UnknownCoding as error:
        raise ApiError("unsupported_media_type", str(error)) from None
    except CorruptBody as error:
        raise ApiError("bad_request", str(error)) from None
    if body is None:
        raise ApiError("too_large", f"a request has at most {MAX_BYTES} bytes")
    try:
        return client_of(request), read_json(body, kind)
    except Undecodable as error:
        raise ApiError("bad_request", str(error), _param(str(error))) from None


def _param(why: str) -> str | None:
    """The member that a decoder's error is about."""
    where, missing = _PATH.search(why), _MISSING.search(why)
    names = [found[1] for found in (where, missing) if found is not None]
    return ".".join(filter(None, names)) or None


@dataclass(frozen=True)
class Unserved:
    """Refuses requests by any method; an application, since a function is called for those it names only."""

    error: ErrorBody
    allowed: str = ""
    """The method that is served here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse one."""
        speaks_anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
        error = anthropic.error_body if speaks_anthropic else self.error
        why = f"{scope['method']} {scope['path']} is not served"
        problem = ApiError("wrong_method" if self.allowed else "unknown_url", why)
        response = _error(problem, error, secrets.token_hex(12))
        if self.allowed:
            response.headers["allow"] = self.allowed
        await response(scope, receive, send)


def _route(method: str, path: str, endpoint: Callable[..., Any], error: ErrorBody) -> Iterator[Route]:
    yield Route(path, endpoint, methods=[method])
    yield Route(path, Unserved(error, method))


def _unserved(parts: Sequence[str], error: ErrorBody) -> Iterator[Route]:
    for part in parts:
        for path in (f"/v1/{part}", f"/v1/{part}/{{rest:path}}"):
            yield Route(path, Unserved(error))


def _headers(key: str) -> dict[str, str]:
    """The id of a request under both APIs' names."""
    return {"x-request-id": f"req_{key}", "request-id": f"req_{key}"}


def _json(body: msgspec.Struct | dict[str, Any], key: str, status: int = 200) -> Response:
    return Response(encode(body), status, _headers(key), media_type=JSON)


def _error(problem: ApiError, body: ErrorBody, key: str) -> Response:
    response = _json(body(problem), key, problem.status)
    response.headers.update(headers_of(problem.status, problem.retry_after_s))
    return response
