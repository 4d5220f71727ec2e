"""The gateway's side of every request: ready answers, limits, what is charged, and cached responses.

Which standing question a request means is found before its other members are looked at; these decide only
whether the newest ready answer may serve, whatever was said before the question in the chat. A response that
would come out the same again is kept and given again.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

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
    Failed,
    Finished,
    Generate,
    GenerateAll,
    ModelCatalog,
    PromptViewed,
    TokensCounted,
    Turn,
    ViewPrompt,
)
from daemon.gateway.answer_cache import ReadyAnswer, Sessions, SessionState, check_computed
from daemon.gateway.early_exits import EarlyExits
from daemon.gateway.frequent_asks import FrequentAsks
from daemon.gateway.pending import OnReply, PendingCommands, resolve
from daemon.gateway.prompt_quota import PromptQuota
from daemon.gateway.request_trace import RequestTrace, ready_trace
from daemon.lru import Lru
from daemon.tenants import Client, Tenant
from daemon.traces.recent_traces import RecentTraces
from daemon.traces.trace_context import TraceContext, current
from feeds.market_data import Answer
from flash.frequent import is_frequent
from flash.lookup import Known
from flash.question import Question

Inbox = asyncio.Queue[tuple[int, protocol.ReplyEvent]]


class Generations:
    """All requests that take tokens, on the event loop; implements `daemon.api.generation.Generator`.

    As far as there is ``room``. ``admit`` raises QueryError when no new prompt is admitted now.
    ``access`` is charged the tokens that they take. ``counted(outcome)`` hears of look-ups of kept responses.
    A generation without a new token for ``max_wait_s`` seconds fails.
    """

    def __init__(
        self,
        sessions: Sessions,
        pending: PendingCommands,
        room: PromptQuota,
        access: Access,
        *,
        admit: Callable[[], None] = lambda: None,
        max_wait_s: float = 30.0,
        counted: Callable[[str], None] = lambda outcome: None,
        model: Callable[[], protocol.EngineReady | None] = lambda: None,
        limits: tuple[int, int] = (0, 0),
        since: int = 0,
        traces: RecentTraces | None = None,
        frequent: FrequentAsks | None = None,
        kept: int = 1024,
        early_exit: float = 0.0,
    ) -> None:
        """``limits``: longest prompt and answer in tokens. ``since``: Unix time of the start, seconds.
        ``model()``: of the newest engine. ``frequent`` hears of asks. ``kept``: responses to keep.
        ``early_exit``: see `EarlyExits`.
        """
        self._sessions, self._pending = sessions, pending
        self._room, self._access, self._admit = room, access, admit
        self._max_wait_s, self._limits, self._since = max_wait_s, limits, since
        self._model, self._traces, self.frequent = model, traces or RecentTraces(), frequent
        self.exits = EarlyExits(sessions, early_exit)
        self._running = 0
        self._responses: Lru[bytes, Finished] = Lru(kept, counted)

    def __len__(self) -> int:
        """Number of running generations of the compatible APIs."""
        return self._running

    # The engine's work for a client.

    def start(self, requests: Sequence[tuple[Generate, OnReply]], client: Client) -> list[int]:
        """Have the engine answer ``requests`` together; returns their numbers, for `cancel`.

        Each comes with what gets its events.

        The client is charged for tokens as they are computed, also after it has left: events come until the
        engine has ended each request, by `Finished` or `Failed`. Raises QueryError for a session that is not
        open.
        """
        for each, _ in requests:
            self._check_open(each)
        tenant = client.tenant
        charge = partial(self._access.charge, client)
        context = self._context()
        trace = RequestTrace.of(self._traces, context, [each for each, _ in requests], tenant.name)
        callbacks = [partial(trace.hear, index, on_event) for index, (_, on_event) in enumerate(requests)]
        numbers = [self._pending.open(on_event, charge) for on_event in callbacks]
        ours = {"tenant": tenant.name, "weight": tenant.weight, "trace_id": context.trace_id}
        sent = tuple(
            msgspec.structs.replace(each, id=number, **ours)
            for (each, _), number in zip(requests, numbers, strict=True)
        )
        try:
            self._pending.send(GenerateAll(sent))
        except BaseException:
            for number in numbers:
                self._pending.close(number)
            raise
        return numbers

    def _context(self) -> TraceContext:
        return current.get() or self._traces.tracer.begin()

    def _was_ready(self, answer: Answer | None, session: str, client: Client, version: int = 0) -> None:
        """Answered at once: a standing ``answer``, a kept response or the ready position."""
        context, tracer = self._context(), self._traces.tracer
        asked = context, answer, session, client.tenant.name, time.time_ns(), tracer, version
        self._traces.requested(context, partial(ready_trace, *asked))

    def _check_open(self, request: Generate) -> None:
        if request.session:
            self._sessions.check_open(request.session)

    def cancel(self, number: int) -> None:
        """Its client no longer waits for a request."""
        self._pending.send(CancelGeneration(number))

    # Asks. What clients call raises QueryError.

    def ask(
        self, request: messages.Ask, client: Client
    ) -> messages.AskReply | Callable[[], Awaitable[messages.AskReply]]:
        """A standing question's ready answer that is young enough, or the ready position's; else what to
        await for the engine's.
        """
        session = self._sessions.asked(request.session, request.question, request.choices, client.tenant)
        state = self._sessions.state(session)
        self._sessions.check_trading(session)
        known = state.lookup.find(request.question, request.choices)
        if self.frequent is not None and (known is None or is_frequent(known.question)):
            self.frequent.asked(session, _question(state, request, known, request.choices))
        if known is not None:
            if (ready := state.ready(known.hash, request.max_age_s)) is not None:
                self._was_ready(ready.answer, request.session, client)
                return messages.AskReply(id=request.id, text=ready.answer.text, **state.metadata(ready))
            check_computed(known.question)
        try:
            exited = self.exits.reply(request, session, known)
        except ValueError as error:
            raise messages.QueryError("bad_request", str(error)) from None
        if exited is not None:
            self._was_ready(None, request.session, client, exited.data_version)
            return exited
        asked = _asked(state, session, request, known, request.choices)
        key = self._key(asked)
        if key is not None and (kept := self._kept(key, session, client.tenant)) is not None:
            self._was_ready(None, session, client, state.version)
            return _reply(request.id, kept)
        return partial(self._computed, request.id, asked, key, client)

    def budgets(self, request: messages.ListBudgets, client: Client) -> messages.BudgetsReply:
        """What its tenant is charged for, and may be; see `Access.budgets`."""
        access = self._access
        return messages.BudgetsReply(request.id, access.window_s, access.budgets(client))

    async def shown(self, request: messages.ShowPrompt) -> messages.PromptShown:
        """What the model reads of a session."""
        session, asked = request.session, None
        state = self._sessions.state(session)
        self._sessions.check_open(session)
        if request.question:
            asked = _asked(state, session, request, state.lookup.find(request.question, ()))
        seen = await self._pending.reply(lambda number: ViewPrompt(number, session, asked))
        assert isinstance(seen, PromptViewed)
        return messages.PromptShown(
            request.id, session, seen.data_version, seen.frozen, seen.sliding, seen.question
        )

    async def _computed(
        self, number: int, asked: Generate, key: bytes | None, client: Client
    ) -> messages.AskReply:
        """The engine's reply to ask ``number``, kept under ``key``."""
        self._access.tokens(client)
        future: asyncio.Future[protocol.ReplyEvent] = asyncio.get_running_loop().create_future()
        (sent,) = self.start([(asked, partial(resolve, future))], client)
        try:
            done = await future
        except asyncio.CancelledError:
            self.cancel(sent)
            raise
        assert isinstance(done, Finished)
        self._keep(key, done, client.tenant)
        return _reply(number, self._dated(done))

    # The compatible APIs.

    def served(self, client: Client) -> ModelCatalog:
        """What there is now, as far as the client sees it."""
        model = self._model()
        if model is None:
            raise messages.QueryError("engine", "the engine is not up")
        names = tuple(client.tenant.seen(self._sessions.states))
        return ModelCatalog(
            model.models,
            self._since,
            names,
            *self._limits,
            {name: self._sessions.states[name].model.name for name in names if len(model.models) > 1},
        )

    async def count(self, request: Generate, client: Client) -> int:
        """See `Generator.count`."""
        request = self._for_model(request, client.tenant)
        self._check_open(request)
        known = self._meant(request.session, request.turns, ())
        question = None if known is None else known.question
        request = msgspec.structs.replace(request, question=question, tenant=client.tenant.name)
        self._take(1, client, pool=not request.session)
        try:
            async with asyncio.timeout(self._max_wait_s):
                counted = await self._pending.reply(lambda number: CountTokens(number, request))
        except TimeoutError:
            raise self._late() from None
        finally:
            self._leave(1, client)
        assert isinstance(counted, TokensCounted)
        return counted.tokens

    async def run(
        self, requests: Sequence[Generate], client: Client
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """See `Generator.run`."""
        found = [self._looked_up(self._for_model(each, client.tenant)) for each in requests]
        self._take(len(requests), client, pool=any(not each.session for each in requests))
        inbox: Inbox = asyncio.Queue()
        numbers: list[int] = []
        ended: set[int] = set()
        keys: dict[int, bytes] = {}
        asked: list[tuple[Generate, OnReply]] = []

        def put(index: int, event: protocol.ReplyEvent) -> None:
            inbox.put_nowait((index, event))

        try:
            for index, (request, done) in enumerate(found):
                if done is None and (key := self._key(request)) is not None:
                    keys[index] = key
                    done = self._kept(key, request.session, client.tenant)
                if done is None:
                    asked.append((_seeded(request), partial(put, index)))
                    continue
                keys.pop(index, None)
                for each in events_of(done, stream=request.stream):
                    put(index, each)
            if asked:
                numbers = self.start(asked, client)
            else:
                self._was_ready(None, requests[0].session, client)
            left = len(requests)
            while left:
                index, event = await self._next(inbox)
                if isinstance(event, Failed):
                    raise messages.QueryError(event.code, event.message)
                assert isinstance(event, Event)
                if isinstance(event, Finished):
                    left -= 1
                    ended.add(event.id)
                    self._keep(keys.get(index), event, client.tenant)
                    event = self._dated(event)
                if not isinstance(event, Delta) or event.text or event.logprobs:
                    yield index, event
        except (OverflowError, RecursionError):  # of a schema, whose members are not checked before
            why = "a number of the request has more than 64 bits, or its schema is nested too deeply"
            raise messages.QueryError("bad_request", why) from None
        finally:
            self._leave(len(requests), client)
            for number in numbers:
                if number not in ended:
                    self.cancel(number)

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

    async def _next(self, inbox: Inbox) -> tuple[int, protocol.ReplyEvent]:
        try:
            async with asyncio.timeout(self._max_wait_s):
                return await inbox.get()
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> messages.QueryError:
        return messages.QueryError("timeout", f"no token within {self._max_wait_s:g} s")

    def _looked_up(self, request: Generate) -> tuple[Generate, Finished | None]:
        """The request with the standing question that it means, and its ready answer if that serves.

        Raises QueryError.
        """
        if not request.session:
            return request, None
        state = self._sessions.state(request.session)
        self._sessions.check_trading(request.session)
        if request.scored:
            known = state.lookup.find(request.meant, request.choices)
        else:
            known = self._meant(request.session, request.turns, request.choices)
        known = self._heard(request, state, known)
        if known is not None:
            question, ready = known.question, state.ready(known.hash)
            choices = () if request.schema is not None else question.choices or ()
            request = msgspec.structs.replace(request, question=question, choices=choices)
            if ready is not None and _serves(ready, question, request):
                return request, _finished(ready, state)
            check_computed(question)
        elif request.turns and not request.scored:
            # its name, with other choices
            text = state.lookup.text_of(request.turns[-1].text)
            last = msgspec.structs.replace(request.turns[-1], text=text)
            request = msgspec.structs.replace(request, turns=(*request.turns[:-1], last))
        return request, None

    def _heard(self, request: Generate, state: SessionState, known: Known | None) -> Known | None:
        """What the request means, whose question is counted unless it stands for other reasons than that.

        One that stands because it comes often is meant only where a request asks nothing beside it, and as
        long an answer: no operator has made it mean more.
        """
        if self.frequent is None or (known is not None and not is_frequent(known.question)):
            return known
        asked = _ad_hoc(request, state, self._limits[1])
        if asked is None:
            return None
        self.frequent.asked(request.session, asked if known is None else known.question)
        if known is not None and (asked.choices or asked.max_tokens == known.question.max_tokens):
            return known
        return None

    def _for_model(self, request: Generate, tenant: Tenant) -> Generate:
        """The request to the session whose model can answer it. Raises QueryError where there is none."""
        if not request.session or not request.turns or request.turns[-1].role != "user":
            return request
        text = request.meant or request.turns[-1].text
        session = self._sessions.asked(request.session, text, request.choices, tenant)
        return msgspec.structs.replace(request, session=session)

    def _meant(self, session: str, turns: Sequence[Turn], choices: tuple[str, ...]) -> Known | None:
        """The standing question whose text or name the user's last message is. Raises QueryError."""
        if not session:
            return None
        state = self._sessions.state(session)
        if not turns or turns[-1].role != "user":
            return None
        return state.lookup.find(turns[-1].text, choices)

    def _key(self, request: Generate) -> bytes | None:
        """What a response depends on, but for a session's version; None for one that may come out otherwise
        next time, is large, or answers a standing question, which has its ready answer.
        """
        model = self._model()
        if request.question or (request.temperature and request.seed is None) or model is None:
            return None
        if request.top_logprobs is not None:
            return None
        state = self._sessions.states.get(request.session)
        same = msgspec.structs.replace(request, stream=False, retention_priority=0, retention_seconds=0.0)
        revisions = [each.revision for each in model.models]
        epoch = b"" if state is None else state.cache_epoch
        return hashlib.sha256(msgspec.msgpack.encode((*revisions, epoch, same))).digest()

    def _keep(self, key: bytes | None, done: Finished, tenant: Tenant) -> None:
        if key is not None and not done.metadata.cached and "warm_up" not in done.metadata.flags:
            self._responses.put(key, done, tenant.name)

    def _kept(self, key: bytes, session: str, tenant: Tenant) -> Finished | None:
        """A kept response, of a session its newest version's, with the ages of now."""
        state = self._sessions.states.get(session)
        if state is not None and not self._sessions.is_open(session):
            return None

        def is_newest(done: Finished) -> bool:
            # times tell a version from one of another engine that has its number
            return state is None or (done.metadata.data_version, done.times) == (state.version, state.times)

        kept = self._responses.get(key, tenant.name, is_valid=is_newest)
        if kept is None:
            return None
        metadata = self._dated(kept).metadata
        flags = (*metadata.flags, messages.KEPT_REPLY)
        metadata = msgspec.structs.replace(metadata, cached=True, flags=flags)
        return msgspec.structs.replace(kept, id=0, metadata=metadata, reused_tokens=kept.prompt_tokens)

    def _dated(self, event: Finished) -> Finished:
        """With the ages of what it was read from; this process knows them when an engine just restarted."""
        metadata = event.metadata
        if not metadata.session or metadata.cached:
            return event
        state = self._sessions.states.get(metadata.session) or SessionState("")
        dated = state.with_ages(event.times or state.times)
        flags = (*metadata.flags, *state.flags_now(dated["staleness_ns"]))
        return msgspec.structs.replace(
            event, metadata=msgspec.structs.replace(metadata, flags=flags, **dated)
        )


def _reply(number: int, done: Finished) -> messages.AskReply:
    return messages.AskReply(id=number, text=done.text, **msgspec.structs.asdict(done.metadata))


def _asked(
    state: SessionState,
    session: str,
    request: messages.Ask | messages.ShowPrompt,
    known: Known | None,
    choices: tuple[str, ...] = (),
) -> Generate:
    """The request of a question: as it stands where it is ``known``, or with these ``choices``.

    Raises QueryError for one that cannot be asked.
    """
    question = None if known is None else known.question
    text = _question(state, request, known, choices).text
    return Generate(
        session=session,
        turns=(Turn("user", text),),
        choices=choices if question is None else question.choices or (),
        max_tokens=request.max_tokens,
        question=question,
        exact=True,
    )


def _question(
    state: SessionState,
    request: messages.Ask | messages.ShowPrompt,
    known: Known | None,
    choices: tuple[str, ...],
) -> Question:
    """What an ask asks. Raises QueryError for one that cannot be asked."""
    if known is not None:
        return known.question
    text = state.lookup.text_of(request.question)
    try:
        return Question("ask", text, choices or None, request.max_tokens)
    except ValueError as error:
        raise messages.QueryError("bad_request", str(error)) from None


def _ad_hoc(request: Generate, state: SessionState, most: int) -> Question | None:
    """What a request asks beside nothing else, and wants the likeliest answer to; None where it does not.

    ``most``: tokens of an answer.
    """
    text = request.meant
    if not request.scored:
        beside = request.temperature or request.schema is not None or request.top_logprobs is not None
        if beside or request.index or [turn.role for turn in request.turns] != ["user"]:
            return None
        if request.penalty and not request.choices:
            return None
        text = request.turns[0].text
    if len(text) > messages.MAX_QUESTION_CHARS:
        return None
    try:
        text = state.lookup.text_of(text)
        return Question("ask", text, request.choices or None, request.max_tokens or max(1, most))
    except ValueError:  # an empty one is said by who makes it
        return None


def _seeded(request: Generate) -> Generate:
    """The request for the engine: any sampling has a seed."""
    if request.seed is None and request.temperature:
        return msgspec.structs.replace(request, seed=secrets.randbits(63))
    return request


def _serves(ready: ReadyAnswer, question: Question, request: Generate) -> bool:
    """Whether a ready answer is all that the request asks for: the likeliest, as long, and nothing beside."""
    if request.scored:
        return bool(ready.logits)
    if request.temperature or request.schema is not None or request.top_logprobs is not None:
        return False
    if question.choices:
        return True  # it is never cut, and one token has no penalty
    if request.penalty:
        return False
    if question.answer == "number":
        return True
    if any(stop in ready.answer.text for stop in request.stop):
        return False
    return request.max_tokens is None or request.max_tokens >= question.max_tokens


def _finished(ready: ReadyAnswer, state: SessionState) -> Finished:
    """A ready answer, which costs nothing."""
    return Finished(
        id=0,
        text=ready.answer.text,
        finish="stop",
        stop=None,
        prompt_tokens=0,
        reused_tokens=0,
        answer_tokens=0,
        metadata=messages.ReplyMetadata(**state.metadata(ready)),
        scores=ready.logits,
    )


def events_of(done: Finished, *, stream: bool) -> list[Event]:
    """The events of an answer that is there."""
    begun = Begun(0, done.prompt_tokens, done.reused_tokens)
    if stream and (done.text or done.logprobs):
        return [begun, Delta(0, done.text, done.logprobs), done]
    return [begun, done]
