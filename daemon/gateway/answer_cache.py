"""The gateway's view of every session: its newest version, its newest answers, and the asks that wait.

It serves the query socket. A standing question that is asked gets its newest ready answer from here, without
the engine (*Attention Once* equation 11), with the ages of the version it was read from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from daemon import protocol
from daemon.ages import Ages, Times, VenueClock, ages
from daemon.api import messages
from daemon.api.auth import Access
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import questions_of
from daemon.gateway.waiting import Waiting
from daemon.tenants import LOCAL, Client, Tenant
from feeds.market_data import Answer, Flag
from flash.lookup import Lookup
from flash.question import Question
from metrics.catalogue import METRICS, STAGES
from metrics.store import MetricStore

TIERS = ("cached", "ready", "computed")
"""Latency tiers of asks (*Attention Once* section 3.9.7)."""
_HERE = Client(LOCAL, "")


class ReadyAnswer(NamedTuple):
    """A standing question's answer, and the times of the newest record in the version it was read from."""

    answer: Answer
    times: Times


@dataclass
class SessionState:
    """State of a session. ``times``: of its newest version's newest record; ``clock``: its venue's.

    ``paused``: standing questions that are not asked now, those in ``questions`` are; `ask_these` sets both.
    ``answers``: the newest answer of each question, by its hash. ``news`` is set, and replaced, with every
    answer.
    """

    symbol: str
    more_symbols: tuple[str, ...] = ()
    promise_ns: int = 0
    stale_after_ns: int = 0
    silent_after_ns: int = 0
    questions: tuple[Question, ...] = ()
    paused: tuple[Question, ...] = ()
    lookup: Lookup = field(default_factory=lambda: Lookup.of(()))
    """Finds both."""
    version: int = 0
    live_tokens: int = 0
    live_records: int = 0
    times: Times | None = None
    clock: VenueClock = field(default_factory=VenueClock)
    answers: dict[str, ReadyAnswer] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    removed: bool = False

    def ask_these(
        self, questions: Iterable[Question], paused: Iterable[Question], coming: Iterable[Question] = ()
    ) -> None:
        """Have these standing questions from now on; ``paused`` are not asked, ``coming`` not yet."""
        self.questions, self.paused = tuple(questions), tuple(paused)
        self.lookup = Lookup.of((*self.questions, *self.paused, *coming))

    def ages(self, times: Times | None) -> Ages:
        """Of a record of this session, now."""
        return ages(times, self.clock.ahead_ns, time.time_ns(), time.monotonic_ns())

    def dated(self, times: Times | None) -> dict[str, int]:
        """The members of a reply that say how old what it was read from is."""
        event, source, daemon = self.ages(times)
        as_of = 0 if times is None else times.as_of
        return {"as_of": as_of, "staleness_ns": event, "source_age_ns": source, "daemon_age_ns": daemon}

    def is_stale(self, event_age_ns: int) -> bool:
        """Whether data this long after its event is flagged `stale`."""
        return 0 < self.stale_after_ns < event_age_ns

    @property
    def last_seen_age_ns(self) -> int:
        """Time since the venue was last heard, or since the session began."""
        return time.monotonic_ns() - self.clock.last_seen_ns

    @property
    def is_silent(self) -> bool:
        """Whether the venue has not been heard for too long: a quiet market sends heartbeats."""
        return 0 < self.silent_after_ns < self.last_seen_age_ns

    def flags_now(self, event_age_ns: int) -> tuple[Flag, ...]:
        """Flags of an answer that goes out now, of data this long after its event."""
        now: dict[Flag, bool] = {"stale": self.is_stale(event_age_ns), "silent": self.is_silent}
        return tuple(flag for flag, is_set in now.items() if is_set)

    def answers_of(self, questions: Sequence[Question], min_version: int = 0) -> list[Answer]:
        """The questions' newest answers of this version or a newer one."""
        found = (self.answers.get(question.hash) for question in questions)
        return [known.answer for known in found if known and known.answer.data_version >= min_version]


class Sessions:
    """Sessions, answers and pending asks. Lives on the event loop.

    ``access`` is told the tokens that asks take.
    """

    def __init__(
        self,
        config: Config,
        store: MetricStore,
        send: Callable[[protocol.Command], None],
        access: Access | None = None,
    ) -> None:
        self._store, self._access = store, access or Access()
        self._send = send
        self._promise_ns = config.promise_ns
        self.states: dict[str, SessionState] = {}
        self.clocks: dict[str, VenueClock] = {}
        """Of the sessions' venues."""
        asked = list(questions_of(config))
        for session in config.sessions:
            self.add(session, [each.question for each in asked if each.session == session.name])
        self._asks: Waiting[protocol.Asked] = Waiting()
        self._asking: dict[int, Client] = {}
        """Who asked, until the engine has ended an ask, which its client may have left."""
        self._answered = {
            tier: (
                store.counter("foretick_asks_total", outcome=tier).inc,
                store.histogram("foretick_stage_seconds", stage=f"ask_{tier}").observe,
            )
            for tier in TIERS
        }

    # Called by the gateway.

    def add(self, session: SessionConfig, questions: Sequence[Question] = (), version: int = 0) -> None:
        """There is another session, whose versions count on from ``version``."""
        state = SessionState(session.symbol, session.more_symbols, version=version)
        state.ask_these(questions, ())
        state.clock.last_seen_ns = time.monotonic_ns()
        self.states[session.name], self.clocks[session.name] = state, state.clock
        self.change(session)

    def change(self, session: SessionConfig) -> None:
        """A session has other settings."""
        state = self.states[session.name]
        state.promise_ns, state.stale_after_ns = self._promise_ns(session), session.stale_after
        state.silent_after_ns = session.silent_after

    def remove(self, name: str) -> SessionState:
        """A session is gone, and so is what waits for its answers; returns its last state."""
        state = self.states.pop(name)
        del self.clocks[name]
        state.removed = True
        state.news.set()
        return state

    def committed(self, event: protocol.Committed) -> None:
        """A session has a new version."""
        state = self.states[event.session]
        state.version, state.times = event.version, event.times
        state.live_tokens, state.live_records = event.live_tokens, event.live_records

    def answered(self, answer: Answer, times: Times) -> None:
        """A standing question has a new answer; ``times`` of its version's newest record."""
        state = self.states[answer.session]
        known = state.answers.get(answer.question_hash)
        # versions of another engine may begin lower
        if known is None or _age(known.answer) <= _age(answer):
            state.answers[answer.question_hash] = ReadyAnswer(answer, times)
        state.news.set()
        state.news = asyncio.Event()

    def questions_set(self, session: str, questions: Sequence[Question]) -> None:
        """A session has these standing questions from now on; answers to others are forgotten."""
        state = self.states[session]
        state.ask_these(questions, state.paused)
        asked = {question.hash for question in questions}
        state.answers = {key: answer for key, answer in state.answers.items() if key in asked}

    def asked(self, event: protocol.Asked | protocol.AskFailed) -> None:
        """The engine replied to an ask.

        One without input since its restart does not know the times, but this process does.
        """
        client = self._asking.pop(event.id, None)
        if client is not None:
            self._access.charge(client, event.tokens)
        if isinstance(event, protocol.Asked):
            state = self.states.get(event.reply.session) or SessionState("")
            dated = state.dated(event.times or state.times)
            flags = (*event.reply.flags, *(("silent",) if state.is_silent else ()))
            reply = msgspec.structs.replace(event.reply, flags=flags, **dated)
            self._asks.done(reply.id, msgspec.structs.replace(event, reply=reply))
        else:
            self._asks.refused(event)

    def engine_gone(self, message: str) -> None:
        """Fail every ask in flight: the engine is gone."""
        self._asking.clear()
        self._asks.engine_gone(message)

    def observe(self, request: messages.ClientRequest, reply: messages.Reply, latency_ns: int) -> None:
        """Count an ask that was answered or refused, and a refused label; answers have a tier's latency."""
        if isinstance(reply, messages.AskReply):
            count, observe = self._answered[tier_of(reply)]
            count()
            observe(latency_ns)
        elif isinstance(reply, messages.ErrorReply):
            if isinstance(request, messages.Ask):
                self._store.inc("foretick_asks_total", outcome=reply.code)
            elif isinstance(request, messages.Label):
                self._store.inc("foretick_labels_total", outcome=reply.code)

    # Called for clients.

    def ready(self, session: str, question: Question) -> messages.AskReply | None:
        """The newest ready answer of a standing ``question``; None without one."""
        state = self.state(session)
        known = state.answers.get(question.hash)
        return None if known is None else _reply(0, session, known, state)

    def cached(self, request: messages.Ask) -> messages.AskReply | None:
        """A standing question's ready answer that is young enough; None where only the engine can answer."""
        state = self.state(request.session)
        found = state.lookup.find(request.question, request.choices)
        known = None if found is None else state.answers.get(found.hash)
        if known is None or not _is_young(known, state, request.max_age_s):
            return None
        return _reply(request.id, request.session, known, state)

    async def ask(self, request: messages.Ask, client: Client = _HERE) -> messages.AskReply:
        """A standing question's ready answer that is young enough, else the engine's."""
        return self.cached(request) or await self.ask_engine(request, client)

    async def ask_engine(self, request: messages.Ask, client: Client = _HERE) -> messages.AskReply:
        """Answer from the engine, ignoring the cache. Its tokens are charged once the engine has ended it."""
        asked = self._computed(request)
        tenant = client.tenant
        self._access.tokens(client)

        def numbered(number: int) -> protocol.ComputeAsk:
            self._asking[number] = client
            sent = msgspec.structs.replace(asked.request, id=number)
            return msgspec.structs.replace(asked, request=sent, tenant=tenant.name, weight=tenant.weight)

        found = await self._asks.reply(
            lambda number: self._send(numbered(number)),
            lambda number: self._send(protocol.CancelAsk(number)),
        )
        return msgspec.structs.replace(found.reply, id=request.id)

    def _computed(self, request: messages.Ask) -> protocol.ComputeAsk:
        """What the engine is asked: a standing question as it stands. Raises QueryError for nonsense."""
        lookup = self.state(request.session).lookup
        found = lookup.find(request.question, request.choices)
        if found is not None:
            question = found.question
            check_computed(question)
            words = {"question": question.text, "choices": question.choices or ()}
            return protocol.ComputeAsk(msgspec.structs.replace(request, **words), question=question)
        text = lookup.text_of(request.question)
        try:
            Question("ask", text, request.choices or None, request.max_tokens)
        except ValueError as error:
            raise messages.QueryError("bad_request", str(error)) from None
        return protocol.ComputeAsk(msgspec.structs.replace(request, question=text))

    async def sessions(self, request: messages.ListSessions) -> messages.SessionsReply:
        """All sessions."""
        return self.listed(request.id)

    def listed(self, number: int, session: str = "") -> messages.SessionsReply:
        """All sessions, or one, in reply to request ``number``."""
        return messages.SessionsReply(
            number,
            tuple(
                messages.SessionInfo(
                    name=name,
                    symbol=state.symbol,
                    more_symbols=state.more_symbols,
                    data_version=state.version,
                    live_tokens=state.live_tokens,
                    live_records=state.live_records,
                    questions=tuple(question.name for question in state.questions),
                    **state.dated(state.times),
                    last_seen_age_ns=state.last_seen_age_ns,
                    silent=state.is_silent,
                    promise_ns=state.promise_ns,
                    promises_missed=int(self._store.value("foretick_promises_missed_total", session=name)),
                    bars_skipped=int(self._store.value("foretick_bars_skipped_total", session=name)),
                    bars_waiting=int(self._store.value("foretick_bars_waiting", session=name)),
                )
                for name, state in self.states.items()
                if session in ("", name)
            ),
        )

    async def answers(self, request: messages.Answers) -> messages.AnswersReply:
        """Latest answers; waits for ``min_version``."""
        state, least = self.state(request.session), request.min_version
        named = {each.question for each in state.lookup.named(request.question)}
        wanted = [each for each in state.questions if not request.question or each in named]
        if not wanted:
            raise messages.QueryError(
                "bad_request", f"{request.session} has no standing question {request.question!r}"
            )
        try:
            async with asyncio.timeout(request.timeout_s):
                while least and len(state.answers_of(wanted, least)) < len(wanted):
                    await state.news.wait()
                    if state.removed:
                        raise messages.QueryError(
                            "unknown_session", f"{request.session} was removed meanwhile"
                        )
        except TimeoutError:
            raise messages.QueryError(
                "timeout",
                f"{request.session} is at version {state.version}; version {least} was not "
                f"answered within {request.timeout_s:g} s",
            ) from None
        return messages.AnswersReply(request.id, request.session, tuple(state.answers_of(wanted)))

    async def stats(self, request: messages.Stats, tenant: Tenant) -> messages.StatsReply:
        """Every counter and gauge, and the stages' quantiles; for one who is no operator, only those of the
        sessions that it sees, and its own.
        """
        stages = {}
        for stage in STAGES if tenant.operator else ():
            n = self._store.count("foretick_stage_seconds", stage=stage)
            quantile = partial(self._store.quantile, "foretick_stage_seconds", stage=stage)
            stages[stage] = messages.Quantiles(n, *(quantile(q=q) if n else 0.0 for q in (0.5, 0.9, 0.99)))
        return messages.StatsReply(request.id, series_values(self._store, tenant), stages)

    def state(self, session: str) -> SessionState:
        """The state of a session; QueryError when there is none."""
        state = self.states.get(session)
        if state is None:
            raise messages.unknown_session(session, self.states)
        return state


def _is_young(known: ReadyAnswer, state: SessionState, max_age_s: float | None) -> bool:
    """Whether the answer is of the newest version, or its data no older than ``max_age_s``."""
    if max_age_s is None or known.answer.data_version >= state.version:
        return True
    return state.ages(known.times).event <= max_age_s * 1e9


def check_computed(question: Question) -> None:
    """Raise QueryError for a standing question that has ready answers only: open bars are on no tape."""
    if question.provisional:
        why = f"{question.name} reads open bars, so it has ready answers only, and none that this asks for"
        raise messages.QueryError("bad_request", why)


def _reply(number: int, session: str, known: ReadyAnswer, state: SessionState) -> messages.AskReply:
    """The answer with its data's ages now, by which it is `stale`, in reply to request ``number``."""
    answer, dated = known.answer, state.dated(known.times)
    flags = [flag for flag in answer.flags if flag not in ("stale", "silent")]
    return messages.AskReply(
        id=number,
        session=session,
        data_version=answer.data_version,
        text=answer.text,
        choice=answer.choice,
        logit_gap=answer.logit_gap,
        cached=True,
        untrained=answer.untrained,
        flags=(*flags, *state.flags_now(dated["staleness_ns"])),
        probability=answer.probability,
        choice_set=answer.choice_set,
        **dated,
    )


def tier_of(reply: messages.AskReply) -> str:
    """The latency tier that answered an ask (*Attention Once* section 3.9.7)."""
    if reply.cached:
        return "cached"
    return "ready" if messages.READY_EXIT in reply.flags else "computed"


def series_values(store: MetricStore, tenant: Tenant = LOCAL) -> dict[str, float]:
    """Every counter and gauge that the tenant sees, by name and labels, as Prometheus writes them."""
    values: dict[str, float] = {}
    for metric in METRICS:
        if metric.kind != "histogram":
            for labels in store.series(metric):
                if not _shown(labels, tenant):
                    continue
                text = ",".join(f'{label}="{value}"' for label, value in labels.items())
                values[f"{metric.name}{{{text}}}" if text else metric.name] = store.value(
                    metric.name, **labels
                )
    return values


def _shown(labels: Mapping[str, str], tenant: Tenant) -> bool:
    if tenant.operator:
        return True
    session = labels.get("session")
    return labels.get("tenant") == tenant.name if session is None else tenant.sees(session)


def _age(answer: Answer) -> tuple[int, int]:
    return answer.epoch, answer.data_version
