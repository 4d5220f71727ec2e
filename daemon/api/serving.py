"""Routes of the OpenAI and Anthropic APIs, and the one place that runs a generation for them.

A request is read, translated, generated and translated back. Its first token decides the status: what fails
before is an HTTP error, what fails later an event of the stream. A stream that waits longer for it than for a
ping begins without it, so that nothing between takes the connection for dead. A client that goes away ends
its generation.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from daemon.api import anthropic, systemone
from daemon.api.auth_middleware import client_of
from daemon.api.compatible import (
    Api,
    ApiError,
    ErrorBody,
    ReplyIdentity,
    Writer,
    api_error_of,
    encode,
    error_response,
)
from daemon.api.disconnect import GONE, ClientDisconnected, gone, unless_gone
from daemon.api.generation import Event, Finished, Generator
from daemon.api.messages import QueryError
from daemon.api.openai import chat, common, completions, decisions, responses
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
    *("decisions", "responses", "threads", "uploads", "vector_stores", "videos"),
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
Ended = Callable[[str], None]
"""``ended(outcome)``, once per request."""

OPENAI: tuple[Api[Any], ...] = (
    *(chat.Chat(), completions.Completions(), responses.Responses(), decisions.Decisions()),
)
MESSAGES = anthropic.Messages()


def generation_routes(generator: Generator, ended: Ended, *, ping_s: float = PING_S) -> list[Route]:
    """Routes for a Starlette application."""
    endpoints = Endpoints(generator, ended, ping_s)
    of_openai, of_anthropic = common.error_body, anthropic.error_body
    return [
        *(
            route
            for api in (*OPENAI, MESSAGES)
            for route in _route("POST", api.path, partial(endpoints.generate, api), api.error)
        ),
        *_route("POST", "/v1/messages/count_tokens", endpoints.count, of_anthropic),
        *_route("POST", systemone.PATH, endpoints.decide, systemone.error_body),
        *_route("GET", "/v1/models", endpoints.models, of_openai),
        *_route("GET", "/v1/models/{model:path}", endpoints.models, of_openai),
        *_unserved(_OPENAI, of_openai),
        *_unserved(_ANTHROPIC, of_anthropic),
    ]


class Endpoints:
    """Answers requests by ``generator``."""

    def __init__(self, generator: Generator, ended: Ended, ping_s: float) -> None:
        self._generator, self._ended, self._ping_s = generator, ended, ping_s

    async def generate(self, api: Api[Any], request: Request) -> Response:
        """Answer one request of ``api``."""
        key = secrets.token_hex(12)

        async def answer() -> Response:
            client, asked = await _read(request, api.request)
            served, salt = self._generator.served(client), client.tenant.salt
            wanted = [
                msgspec.structs.replace(each, salt=salt(each.salt), model=served.model_of(asked.model))
                for each in api.parse(asked, served)
            ]
            entry = served.entry_of(asked.model)
            made = ReplyIdentity(key, int(time.time()), asked.model, f"fp_{entry.revision}", entry.sampling)
            events = self._generator.run(wanted, client)
            if not asked.stream:
                done = await unless_gone(request, _all(events, len(wanted)))
                return _json(api.build_response(asked, made, done), key)
            pinged = _pinged(events, self._ping_s)
            first = await unless_gone(request, anext(pinged))
            return StreamedReply(api.writer(asked, made), first, pinged, self._ended, _headers(key))

        return await self._answered(api.name, api.error, key, answer)

    async def count(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""
        key = secrets.token_hex(12)

        async def answer() -> Response:
            client, asked = await _read(request, anthropic.CountRequest)
            served = self._generator.served(client)
            counted, model = MESSAGES.counted(asked, served), served.model_of(asked.model)
            counted = msgspec.structs.replace(counted, salt=client.tenant.salt(), model=model)
            tokens = await unless_gone(request, self._generator.count(counted, client))
            return _json(anthropic.Counted(tokens), key)

        return await self._answered("count_tokens", anthropic.error_body, key, answer)

    async def decide(self, request: Request) -> Response:
        """`POST /v1/systemone`."""
        key = secrets.token_hex(12)

        async def answer() -> Response:
            try:
                client, asked = await _read(request, systemone.DecisionRequest)
                served, salt = self._generator.served(client), client.tenant.salt()
                model = served.model_of(asked.model)
                wanted = [
                    msgspec.structs.replace(each, salt=salt, model=model)
                    for each in systemone.parse(asked, served)
                ]
                done = await unless_gone(request, _all(self._generator.run(wanted, client), len(wanted)))
                return _json(systemone.build_response(asked, wanted, served, done), key)
            except QueryError as failed:
                raise systemone.refusal(api_error_of(failed)) from None
            except ApiError as failed:
                raise systemone.refusal(failed) from None

        return await self._answered("systemone", systemone.error_body, key, answer)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`, and one of them, in the shape of the API that the client speaks."""
        anthropics = "anthropic-version" in request.headers
        key, wanted = secrets.token_hex(12), request.path_params.get("model")

        async def answer() -> Response:
            served = self._generator.served(client_of(request))
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
            self._ended("client_closed")
            return Response(status_code=GONE)
        except ApiError as problem:
            self._ended(problem.reason)
            return error_response(problem, error, _headers(key))
        except Exception:
            log.exception("a request of %s failed", name)
            self._ended("engine")
            return error_response(_broken(), error, _headers(key))
        if not isinstance(response, StreamedReply):
            self._ended("done")
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
        ended: Ended,
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

        async def write(data: bytes, more: bool = True) -> None:
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async def write_event(found: tuple[int, Event] | None) -> None:
            await write(self._writer.ping() if found is None else b"".join(self._writer.write(*found)))

        outcome: str = "done"
        try:
            await write_event(self._first)
            async for found in self._events:
                await write_event(found)
            last = self._writer.end()
        except QueryError as error:
            problem = api_error_of(error)
            outcome, last = problem.reason, self._writer.failed(problem)
        except Exception:
            log.exception("a stream failed")
            outcome, last = "engine", self._writer.failed(_broken())
        await write(b"".join(last), more=False)
        return outcome


def _broken() -> ApiError:
    return ApiError("engine", "the daemon failed to answer; see its log")


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
    """The client and its request. Raises ApiError, QueryError, ClientDisconnected."""
    if media_type_of(request) != JSON:
        raise ApiError("unsupported_media_type", f"the content type must be {JSON}")
    body = await read_body(request, MAX_BYTES)
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
        response = error_response(problem, error, _headers(secrets.token_hex(12)))
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


def _json(body: msgspec.Struct, key: str) -> Response:
    return Response(encode(body), headers=_headers(key), media_type=JSON)
