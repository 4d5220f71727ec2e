"""The gateway's side of generation for the OpenAI and Anthropic APIs: limits, ready answers, cached
responses.

Which standing question a request means is found before its other members are looked at; these decide only
whether the newest ready answer may serve, whatever was said before the question in the chat. A response that
would come out the same again is kept and given again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count

import msgspec

from daemon import protocol
from daemon.api import messages
from daemon.api.auth import Access
from daemon.api.generation import (
    Begun,
    CancelGeneration,
    CountTokens,
    Delta,
    Event,
    Finished,
    Generate,
    GenerateAll,
    GenerationEvent,
    GenerationFailed,
    ModelCatalog,
    TokensCounted,
    Turn,
)
from daemon.api.messages import ReplyMetadata
from daemon.gateway.answer_cache import Sessions, check_computed
from daemon.gateway.forwarding import moved
from daemon.gateway.prompt_quota import PromptQuota
from daemon.lru import Lru
from daemon.tenants import Client, Tenant
from flash.question import Question

Inbox = asyncio.Queue[tuple[int, GenerationEvent]]
RESPONSES = 1024
"""Responses to keep."""


class Generations:
    """All generations of all clients, on the event loop; implements `daemon.api.generation.Generator`.

    As far as there is ``room``. ``admit`` raises QueryError when no new prompt is admitted now.
    ``access`` is told the tokens that they take. ``counted(outcome)`` hears of look-ups of kept responses.
    A generation without a new token for ``max_wait_s`` seconds fails.
    """

    def __init__(
        self,
        sessions: Sessions,
        send: Callable[[protocol.Command], None],
        room: PromptQuota,
        access: Access,
        *,
        admit: Callable[[], None] = lambda: None,
        max_wait_s: float = 30.0,
        counted: Callable[[str], None] = lambda outcome: None,
        owner: Callable[[str], str | None] = lambda session: None,
        limits: tuple[int, int] = (0, 0),
        since: int = 0,
        aliases: tuple[str, ...] = (),
    ) -> None:
        """``limits``: longest prompt and answer in tokens. ``since``: Unix time of the start, seconds.

        ``owner(session)``: the query address of another daemon that serves it, None for this one.
        ``aliases``: further names of the model.
        """
        self._owner = owner
        self._sessions, self._send = sessions, send
        self._room, self._access, self._admit = room, access, admit
        self._max_wait_s, self._limits, self._since = max_wait_s, limits, since
        self._aliases = aliases
        self._model: protocol.EngineReady | None = None
        self._numbers = count(1)
        self._open: dict[int, Callable[[GenerationEvent], None]] = {}
        self._running = 0
        self._responses: Lru[bytes, Finished] = Lru(RESPONSES, counted)

    def __len__(self) -> int:
        """Number of running generations."""
        return self._running

    # Called by the gateway.

    def ready(self, event: protocol.EngineReady) -> None:
        """The engine is up with this model."""
        self._model = event

    def on_event(self, event: GenerationEvent) -> None:
        """An event of the engine; one that nobody waits for any more is dropped."""
        if (hear := self._open.get(event.id)) is not None:
            hear(event)

    def engine_gone(self, message: str) -> None:
        """Fail everything: the engine is gone."""
        for number, hear in list(self._open.items()):
            hear(GenerationFailed(number, "engine", message))

    # Called for clients; each raises QueryError.

    def served(self, client: Client) -> ModelCatalog:
        """What there is now, as far as the client sees it."""
        if self._model is None:
            raise messages.QueryError("engine", "the engine is not up")
        model = self._model
        names = tuple(client.tenant.seen(self._sessions.states))
        return ModelCatalog(
            model.model, model.revision, model.untrained, self._since, names, *self._limits, self._aliases
        )

    async def count(self, request: CountTokens, client: Client) -> int:
        """Tokens of a prompt."""
        question = self._meant(request.session, request.turns, ())
        self._take(1, client, pool=not request.session)
        inbox: asyncio.Queue[GenerationEvent] = asyncio.Queue()
        number = next(self._numbers)
        self._open[number] = inbox.put_nowait
        try:
            self._send(msgspec.structs.replace(request, id=number, question=question))
            async with asyncio.timeout(self._max_wait_s):
                event = await inbox.get()
        except TimeoutError:
            raise self._late() from None
        finally:
            del self._open[number]
            self._leave(1, client)
        if isinstance(event, GenerationFailed):
            raise messages.QueryError(messages.code_of(event.code), event.message)
        assert isinstance(event, TokensCounted)
        return event.tokens

    async def run(
        self, requests: Sequence[Generate], client: Client
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """See `Generator.run`."""
        for session in {each.session for each in requests if each.session}:
            if (address := self._owner(session)) is not None:
                raise moved(session, address)
        requests = [self._worded(each) for each in requests]
        self._take(len(requests), client, pool=any(not each.session for each in requests))
        inbox: Inbox = asyncio.Queue()
        mine: set[int] = set()
        keys: dict[int, bytes] = {}
        sent = False
        asked: list[Generate] = []
        try:
            for index, request in enumerate(requests):
                events = self._known(request)
                if events is None and (key := self._key(request)) is not None:
                    keys[index] = key
                    events = self._kept(key, request, client.tenant)
                if events is not None:
                    for event in events:
                        inbox.put_nowait((index, event))
                    keys.pop(index, None)
                    continue
                number = next(self._numbers)
                mine.add(number)
                self._open[number] = self._hearing(client, inbox, index)
                asked.append(_engines(request, number, client.tenant))
            if asked:
                self._send(GenerateAll(tuple(asked)))
                sent = True
            left = len(requests)
            while left:
                index, event = await self._next(inbox)
                if isinstance(event, GenerationFailed):
                    raise messages.QueryError(messages.code_of(event.code), event.message)
                assert not isinstance(event, TokensCounted)
                if isinstance(event, Finished):
                    left -= 1
                    mine.discard(event.id)
                    event = self._dated(event)
                    if index in keys:
                        self._responses.put(keys[index], event, client.tenant.name)
                if not isinstance(event, Delta) or event.text or event.logprobs:
                    yield index, event
        except (OverflowError, RecursionError):  # of a schema, whose members are not checked before
            why = "a number of the request has more than 64 bits, or its schema is nested too deeply"
            raise messages.QueryError("bad_request", why) from None
        finally:
            self._leave(len(requests), client)
            for number in mine:
                if sent:  # it is heard until its end
                    self._send(CancelGeneration(number))
                else:
                    del self._open[number]

    def _hearing(self, client: Client, inbox: Inbox, index: int) -> Callable[[GenerationEvent], None]:
        """Takes the engine's events, and charges for the tokens as they are computed.

        It goes on until the engine has ended the generation, even if the client leaves.
        """
        said = 0

        def hear(event: GenerationEvent) -> None:
            nonlocal said
            match event:
                case Begun():
                    self._access.charge(client, max(0, event.prompt_tokens - event.reused_tokens))
                case Delta():
                    said += event.tokens
                    self._access.charge(client, event.tokens)
                case Finished():
                    del self._open[event.id]
                    self._access.charge(client, max(0, event.answer_tokens - said))
                case GenerationFailed():
                    del self._open[event.id]
                    self._access.charge(client, event.tokens)
            inbox.put_nowait((index, event))

        return hear

    def _take(self, n: int, client: Client, *, pool: bool) -> None:
        self._room.check(client, n)
        self._access.tokens(client)
        if pool:
            self._admit()
        self._running += n
        self._room.take(client, n)

    def _leave(self, n: int, client: Client) -> None:
        self._running -= n
        self._room.leave(client, n)

    async def _next(self, inbox: Inbox) -> tuple[int, GenerationEvent]:
        try:
            async with asyncio.timeout(self._max_wait_s):
                return await inbox.get()
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> messages.QueryError:
        return messages.QueryError("timeout", f"no token within {self._max_wait_s:g} s")

    def _worded(self, request: Generate) -> Generate:
        """The request with the standing question that it means, if it means one. Raises QueryError."""
        question = self._meant(request.session, request.turns, request.choices)
        if question is not None:
            choices = () if request.schema is not None else question.choices or ()
            request = msgspec.structs.replace(request, question=question, choices=choices)
        elif request.session and request.turns:
            # its name, with other choices
            text = self._sessions.state(request.session).lookup.text_of(request.turns[-1].text)
            last = msgspec.structs.replace(request.turns[-1], text=text)
            request = msgspec.structs.replace(request, turns=(*request.turns[:-1], last))
        return request

    def _meant(self, session: str, turns: Sequence[Turn], choices: tuple[str, ...]) -> Question | None:
        """The standing question whose text or name the user's last message is. Raises QueryError."""
        if not session:
            return None
        state = self._sessions.state(session)
        if not turns or turns[-1].role != "user":
            return None
        found = state.lookup.find(turns[-1].text, choices)
        return None if found is None else found.question

    def _known(self, request: Generate) -> list[GenerationEvent] | None:
        """A standing question's ready answer, as events, where the request asks for nothing else."""
        question = request.question
        if question is None:
            return None
        reply = self._sessions.ready(request.session, question)
        if reply is None or not _serves(reply, question, request):
            check_computed(question)
            return None
        facts = ReplyMetadata(
            session=reply.session,
            data_version=reply.data_version,
            as_of=reply.as_of,
            staleness_ns=reply.staleness_ns,
            source_age_ns=reply.source_age_ns,
            daemon_age_ns=reply.daemon_age_ns,
            choice=reply.choice,
            probability=reply.probability,
            choice_set=reply.choice_set,
            logit_gap=reply.logit_gap,
            cached=True,
            untrained=reply.untrained,
            flags=reply.flags,
        )
        return _at_once(
            Finished(
                id=0,
                text=reply.text,
                finish="stop",
                stop=None,
                prompt_tokens=0,
                reused_tokens=0,
                answer_tokens=0,
                metadata=facts,
            ),
            stream=request.stream,
        )

    def _key(self, request: Generate) -> bytes | None:
        """What a response depends on; None for one that may come out otherwise next time, or is large."""
        if request.session or (request.temperature and request.seed is None) or self._model is None:
            return None
        if request.top_logprobs is not None:
            return None
        same = msgspec.structs.replace(
            request, id=0, stream=False, retention_priority=0, retention_seconds=0.0
        )
        return hashlib.sha256(msgspec.msgpack.encode((self._model.revision, same))).digest()

    def _kept(self, key: bytes, request: Generate, tenant: Tenant) -> list[GenerationEvent] | None:
        """A kept response, as events."""
        kept = self._responses.get(key, tenant.name)
        if kept is None:
            return None
        facts = msgspec.structs.replace(kept.metadata, cached=True)
        again = msgspec.structs.replace(kept, id=0, metadata=facts, reused_tokens=kept.prompt_tokens)
        return _at_once(again, stream=request.stream)

    def _dated(self, event: Finished) -> Finished:
        """With the ages of what it was read from; this process knows them when an engine just restarted."""
        state = self._sessions.states.get(event.metadata.session or "")
        if state is None or event.metadata.cached:
            return event
        dated = state.dated(event.times or state.times)
        flags = (*event.metadata.flags, *state.flags_now(dated["staleness_ns"]))
        facts = msgspec.structs.replace(event.metadata, flags=flags, **dated)
        return msgspec.structs.replace(event, metadata=facts)


def _engines(request: Generate, number: int, tenant: Tenant) -> Generate:
    """The request for the engine: any sampling has a seed."""
    seed = request.seed
    if seed is None and request.temperature:
        seed = secrets.randbits(63)
    return msgspec.structs.replace(request, id=number, seed=seed, tenant=tenant.name, weight=tenant.weight)


def _serves(reply: messages.AskReply, question: Question, request: Generate) -> bool:
    """Whether a ready answer is all that the request asks for: the likeliest, as long, and nothing beside."""
    if request.temperature or request.schema is not None or request.top_logprobs is not None:
        return False
    if question.choices:
        return True  # it is never cut, and one token has no penalty
    if request.penalty:
        return False
    if question.answer == "number":
        return True
    if any(stop in reply.text for stop in request.stop):
        return False
    return request.max_tokens is None or request.max_tokens >= question.max_tokens


def _at_once(done: Finished, *, stream: bool) -> list[GenerationEvent]:
    """The events of an answer that is there."""
    begun = Begun(0, done.prompt_tokens, done.reused_tokens)
    if stream and (done.text or done.logprobs):
        return [begun, Delta(0, done.text, done.logprobs), done]
    return [begun, done]
