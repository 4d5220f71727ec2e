"""Generations of the compatible APIs by whichever daemon of the group serves their session."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from msgspec.structs import replace

from daemon.api import messages
from daemon.api.generation import Event, Finished, Generate, Generator, ModelCatalog
from daemon.gateway.generations import events_of
from daemon.gateway.queries import Queries
from daemon.tenants import Client
from feeds.decoding import Undecodable, decoded

_encode = msgspec.msgpack.Encoder().encode
_decode_asked = msgspec.msgpack.Decoder(list[Generate]).decode
_decode_done = msgspec.msgpack.Decoder(list[Finished]).decode
_decode_count = msgspec.msgpack.Decoder(int).decode


class GroupGenerator:
    """Implements `daemon.api.generation.Generator`: ``here``, or for other sessions their owners.

    ``owner(session)``: None for this daemon. What another daemon generates comes in one piece.
    """

    def __init__(self, here: Generator, queries: Queries, owner: Callable[[str], str | None]) -> None:
        self._here, self._queries, self._owner = here, queries, owner

    def served(self, client: Client) -> ModelCatalog:
        """See `Generator.served`."""
        return self._here.served(client)

    async def count(self, request: Generate, client: Client) -> int:
        """See `Generator.count`."""
        if not self._elsewhere([request]):
            return await self._here.count(request, client)
        return _decode_count(await self._asked([request], client, count=True))

    def run(self, requests: Sequence[Generate], client: Client) -> AsyncGenerator[tuple[int, Event], None]:
        """See `Generator.run`."""
        return (self._run if self._elsewhere(requests) else self._here.run)(requests, client)

    async def _run(
        self, requests: Sequence[Generate], client: Client
    ) -> AsyncGenerator[tuple[int, Event], None]:
        done = _decode_done(await self._asked([replace(each, stream=False) for each in requests], client))
        for index, (request, finished) in enumerate(zip(requests, done, strict=True)):
            for event in events_of(finished, stream=request.stream):
                yield index, event

    def _elsewhere(self, requests: Sequence[Generate]) -> bool:
        """Whether another daemon serves the session; requests that come together have one, or none."""
        session = requests[0].session if requests else ""
        return bool(session) and self._owner(session) is not None

    async def _asked(self, requests: Sequence[Generate], client: Client, *, count: bool = False) -> bytes:
        """What the owner sent. Raises QueryError."""
        try:
            asked = messages.GenerateElsewhere(0, requests[0].session, _encode(requests), count)
        except (OverflowError, RecursionError):  # of a schema, whose members are not checked before
            why = "a number of the request has more than 64 bits, or its schema is nested too deeply"
            raise messages.QueryError("bad_request", why) from None
        reply = await self._queries.forward(asked, client, time.monotonic_ns())
        if isinstance(reply, messages.ErrorReply):
            raise messages.QueryError.of(reply)
        assert isinstance(reply, messages.GeneratedElsewhere)  # to that request
        return reply.data


async def generated_here(
    generator: Generator, request: messages.GenerateElsewhere, client: Client
) -> messages.GeneratedElsewhere:
    """The reply to another daemon. Raises QueryError."""
    try:
        asked = decoded(_decode_asked, request.data)
    except Undecodable as error:
        raise messages.QueryError("bad_request", str(error)) from None
    if not asked or any(each.session != request.session for each in asked):
        raise messages.QueryError("bad_request", "the generations must be of the session")
    if request.count:
        return messages.GeneratedElsewhere(request.id, _encode(await generator.count(asked[0], client)))
    async with contextlib.aclosing(generator.run(asked, client)) as events:
        done = {index: event async for index, event in events if isinstance(event, Finished)}
    return messages.GeneratedElsewhere(request.id, _encode([done[index] for index in range(len(asked))]))
