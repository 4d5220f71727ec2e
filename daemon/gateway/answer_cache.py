"""The gateway's view of every session: its newest version and its newest answers.

A standing question that is asked gets its newest ready answer from here, without the engine (*Attention Once*
equation 11), with the ages of the version it was read from.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from daemon import protocol
from daemon.ages import Ages, Times, VenueClock, ages
from daemon.api import messages
from daemon.config.answerable import refusal_of
from daemon.config.schema import Config, ModelConfig, SessionConfig
from daemon.config.standing import questions_of
from daemon.gateway.kept_versions import KeptVersions
from daemon.tenants import LOCAL, Tenant
from feeds.market_data import Answer, AnswerMetadata, Flag
from feeds.quality.silence import SilenceMonitor
from flash.lookup import Lookup
from flash.question import Question
from metrics.catalogue import METRICS, STAGES
from metrics.store import MetricStore

TIERS = ("cached", "ready", "computed")
"""Latency tiers of asks (*Attention Once* section 3.9.7)."""

_new_id = partial(secrets.token_bytes, 8)


class ReadyAnswer(NamedTuple):
    """A standing question's answer, and the times of the newest record in the version it was read from.

    ``logits``: of its choices, where they are known. ``engine_used``: see `flash.budgets`.
    """

    answer: Answer
    times: Times
    logits: tuple[float, ...] = ()
    engine_used: float = 0.0


@dataclass
class SessionState:
    """State of a session. ``times``: of its newest version's newest record; ``clock``: its venue's.

    ``paused``: standing questions that are not asked now, those in ``questions`` are; `ask_these` sets both.
    ``answers``: the newest answer of each question, by its hash. ``news`` is set, and replaced, with every
    answer.
    """

    symbol: str
    more_symbols: tuple[str, ...] = ()
    freshness_objective_ns: int = 0
    stale_after_ns: int = 0
    silent_after_ns: int = 0
    questions: tuple[Question, ...] = ()
    paused: tuple[Question, ...] = ()
    lookup: Lookup = field(default_factory=lambda: Lookup.of(()))
    """Finds both."""
    model: ModelConfig = field(default_factory=ModelConfig)
    version: int = 0
    live_tokens: int = 0
    live_records: int = 0
    times: Times | None = None
    clock: VenueClock = field(default_factory=VenueClock)
    answers: dict[str, ReadyAnswer] = field(default_factory=dict)
    silences: Sequence[SilenceMonitor] = ()
    """Of all sources, where they say whether answers are silent."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    removed: bool = False
    halted: bool = False
    """Trading of one of its symbols is."""
    past: KeptVersions = field(default_factory=lambda: KeptVersions(0))
    cache_epoch: bytes = field(default_factory=_new_id)
    """Another one whenever questions about the same version may be answered otherwise."""

    def ask_these(
        self, questions: Iterable[Question], paused: Iterable[Question], coming: Iterable[Question] = ()
    ) -> None:
        """Have these standing questions from now on; ``paused`` are not asked, ``coming`` not yet."""
        self.questions, self.paused = tuple(questions), tuple(paused)
        self.lookup = Lookup.of((*self.questions, *self.paused, *coming))
        self.invalidate()

    def configured(self, session: SessionConfig, model: ModelConfig, freshness_objective_ns: int) -> None:
        """It has these settings."""
        self.model = model
        self.freshness_objective_ns, self.stale_after_ns = freshness_objective_ns, session.stale_after
        self.silent_after_ns = session.silent_after
        self.past.priced(session.price_decimals, session.scale)
        self.invalidate()

    def committed(self, event: protocol.Committed) -> None:
        """There is a new version."""
        self.version, self.times = event.version, event.times
        self.live_tokens, self.live_records = event.live_tokens, event.live_records
        self.past.committed(event.version, event.times.as_of, event.close, history=event.history)

    def answered(self, ready: ReadyAnswer) -> None:
        """A standing question has a new answer."""
        self.past.answered(ready.answer)
        known = self.answers.get(ready.answer.question_hash)
        # versions of another engine may begin lower
        if known is None or _age(known.answer) <= _age(ready.answer):
            self.answers[ready.answer.question_hash] = ready
        self.news.set()
        self.news = asyncio.Event()

    def questions_set(self, questions: Sequence[Question]) -> None:
        """It has these standing questions from now on; answers to others are forgotten."""
        self.ask_these(questions, self.paused)
        asked = {question.hash for question in questions}
        self.answers = {key: answer for key, answer in self.answers.items() if key in asked}

    def halt(self, is_halted: bool) -> None:
        """Its trading has halted, or goes on."""
        self.halted = is_halted

    def invalidate(self) -> None:
        """Kept replies may not be given again: its window was made again, or it is read in another way."""
        self.cache_epoch = _new_id()

    def remove(self) -> None:
        """It is gone, and so is what waits for its answers."""
        self.removed = True
        self.news.set()

    def ages(self, times: Times | None) -> Ages:
        """Of a record of this session, now."""
        return ages(times, self.clock.ahead_ns, time.time_ns(), time.monotonic_ns())

    def with_ages(self, times: Times | None) -> dict[str, int]:
        """The members of a reply that say how old what it was read from is."""
        event, source, daemon = self.ages(times)
        as_of = 0 if times is None else times.as_of
        return {"as_of": as_of, "staleness_ns": event, "source_age_ns": source, "daemon_age_ns": daemon}

    def is_stale(self, event_age_ns: int) -> bool:
        """Whether data this long after its event is flagged `stale`."""
        return 0 < self.stale_after_ns < event_age_ns

    @property
    def last_seen_age_ns(self) -> int:
        """Time since the venue last sent something, or since the session began."""
        return time.monotonic_ns() - self.clock.last_seen_ns

    @property
    def is_silent(self) -> bool:
        """Whether a venue, or a symbol, has been silent for too long: a quiet market sends heartbeats."""
        if 0 < self.silent_after_ns < self.last_seen_age_ns:
            return True
        now, wall = time.monotonic_ns(), time.time_ns()
        for symbol in (self.symbol, *self.more_symbols) if self.silences else ():
            watching = [each for each in self.silences if each.has_seen(symbol)]
            if watching and all(each.is_silent(symbol, now, wall) for each in watching):
                return True
        return False

    def flags_now(self, event_age_ns: int) -> tuple[Flag, ...]:
        """Flags of an answer that goes out now, of data this long after its event."""
        now: dict[Flag, bool] = {
            "stale": self.is_stale(event_age_ns),
            "silent": self.is_silent,
            "halted": self.halted,
        }
        return tuple(flag for flag, is_set in now.items() if is_set)

    def ready(self, question_hash: str, max_age_s: float | None = None) -> ReadyAnswer | None:
        """The newest answer to a question, if it is of the newest version or its data is young enough."""
        known = self.answers.get(question_hash)
        if known is None or max_age_s is None or known.answer.data_version >= self.version:
            return known
        return known if self.ages(known.times).event <= max_age_s * 1e9 else None

    def metadata(self, ready: ReadyAnswer) -> dict[str, Any]:
        """Members of a `ReplyMetadata`: the answer's, with its data's ages now, by which it is `stale`."""
        answer, dated = ready.answer, self.with_ages(ready.times)
        flags = [flag for flag in answer.flags if flag not in ("stale", "silent", "halted")]
        members = {name: getattr(answer, name) for name in (*AnswerMetadata.__struct_fields__, "model")}
        flags += self.flags_now(dated["staleness_ns"])
        return members | dated | {"flags": tuple(flags), "cached": True}

    def answers_of(self, questions: Sequence[Question], min_version: int = 0) -> list[Answer]:
        """The questions' newest answers of this version or a newer one."""
        found = (self.answers.get(question.hash) for question in questions)
        return [known.answer for known in found if known and known.answer.data_version >= min_version]


class Sessions:
    """Sessions and their answers. Lives on the event loop. ``is_open(session)``: the engine can be asked."""

    def __init__(
        self, config: Config, store: MetricStore, is_open: Callable[[str], bool] = lambda session: True
    ) -> None:
        self._store, self.is_open = store, is_open
        self._freshness_objective_ns, self._model_of = config.freshness_objective_ns, config.model_of
        self._has_several_models = bool(config.models)
        self._kept_versions = config.http.kept_versions
        self.states: dict[str, SessionState] = {}
        self.clocks: dict[str, VenueClock] = {}
        """Of the sessions' venues."""
        self._refuses_halted = config.events.on_halt == "no answers"
        self._flags_silence = config.quality.silent == "flag"
        self.silences: list[SilenceMonitor] = []
        """One for each source."""
        asked = list(questions_of(config))
        for session in config.sessions:
            self.add(session, [each.question for each in asked if each.session == session.name])
        self._answered = {
            tier: (
                store.counter("foretick_asks_total", outcome=tier).inc,
                store.histogram("foretick_stage_seconds", stage=f"ask_{tier}").observe,
            )
            for tier in TIERS
        }

    # Called by the gateway.

    def add(self, session: SessionConfig, questions: Sequence[Question] = (), version: int = 0) -> None:
        """There is another session, or one begins again; its versions count on from ``version``."""
        before = self.states.get(session.name)
        past = KeptVersions(self._kept_versions) if before is None else before.past
        past.again()
        state = SessionState(session.symbol, session.more_symbols, version=version, past=past)
        state.ask_these(questions, ())
        state.clock.touch(time.monotonic_ns())
        state.silences = self.silences if self._flags_silence else ()
        self.states[session.name], self.clocks[session.name] = state, state.clock
        self.change(session)

    def change(self, session: SessionConfig) -> None:
        """A session has other settings."""
        self.states[session.name].configured(
            session, self._model_of(session), self._freshness_objective_ns(session)
        )

    def engine_ready(self, halted: Collection[str]) -> None:
        """An engine begins to read them; trading of these has halted."""
        for name, state in self.states.items():
            state.past.again()
            state.invalidate()
            self.halt(name, name in halted)

    def remove(self, name: str) -> SessionState:
        """A session is gone, and so is what waits for its answers; returns its last state."""
        state = self.states.pop(name)
        del self.clocks[name]
        state.remove()
        return state

    def committed(self, event: protocol.Committed) -> None:
        """A session has a new version."""
        self.states[event.session].committed(event)

    def halt(self, session: str, is_halted: bool) -> None:
        """Trading of a session has halted, or goes on."""
        if (state := self.states.get(session)) is not None:
            state.halt(is_halted)
            self._store.set("foretick_session_halted", is_halted, session=session)

    def answered(
        self, answer: Answer, times: Times, logits: tuple[float, ...] = (), engine_used: float = 0.0
    ) -> None:
        """A standing question has a new answer; ``times`` of its version's newest record."""
        self.states[answer.session].answered(ReadyAnswer(answer, times, logits, engine_used))

    def labelled(self, event: protocol.Labelled) -> None:
        """The right choice of an answer is known."""
        state = self.states[event.session]
        state.past.labelled(event.question, event.version, event.choice)
        state.invalidate()  # labels change how sure its answers are

    def past_bytes(self) -> int:
        """About what the versions that are kept take."""
        return sum(state.past.size_bytes for state in self.states.values())

    def questions_set(self, session: str, questions: Sequence[Question]) -> None:
        """A session has these standing questions from now on; answers to others are forgotten."""
        self.states[session].questions_set(questions)

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
                    owner="",
                    owner_failure="",
                    symbol=state.symbol,
                    model=state.model.name,
                    more_symbols=state.more_symbols,
                    data_version=state.version,
                    live_tokens=state.live_tokens,
                    live_records=state.live_records,
                    questions=tuple(question.name for question in state.questions),
                    **state.with_ages(state.times),
                    last_seen_age_ns=state.last_seen_age_ns,
                    silent=state.is_silent,
                    halted=state.halted,
                    freshness_objective_ns=state.freshness_objective_ns,
                    freshness_misses=int(self._store.value("foretick_freshness_misses_total", session=name)),
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

    def kept(self, request: messages.KeptAnswers) -> messages.AnswersReply:
        """The answers given last, of a session that another daemon answers now."""
        state = self.state(request.session)
        return messages.AnswersReply(request.id, request.session, tuple(state.answers_of(state.questions)))

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

    def check_open(self, session: str) -> None:
        """Raise QueryError for a session that the engine cannot be asked about."""
        if not self.is_open(session):
            why = "no record of it has been read, or it is just being brought back"
            raise messages.QueryError("rebuilding", f"{session} is not open here yet ({why}): ask later")

    def check_trading(self, session: str) -> None:
        """Raise QueryError for a session whose trading has halted, unless answers just say so."""
        if self._refuses_halted and self.state(session).halted:
            why = f"trading of {session} has halted: there is no answer before it goes on (events.on_halt)"
            raise messages.QueryError("halted", why)

    def asked(self, session: str, question: str, choices: tuple[str, ...], tenant: Tenant) -> str:
        """The session that is asked: of several models, another one of the same symbols that ``tenant`` sees
        where the model of this one cannot answer. Raises QueryError where none can.
        """
        state = self.state(session)
        if not self._has_several_models or state.lookup.find(question, choices) is not None:
            return session
        try:
            wanted = Question("ask", state.lookup.text_of(question), choices or None)
        except ValueError:  # said by who makes it
            return session
        if not (why := refusal_of(state.model, wanted)):
            return session
        able = [
            name
            for name, other in self.states.items()
            if (other.symbol, other.more_symbols) == (state.symbol, state.more_symbols)
            and tenant.sees(name)
            and not refusal_of(other.model, wanted)
        ]
        if able:  # one that can answer now, if there is one
            return min(able, key=lambda name: (not self.is_open(name), self.states[name].halted))
        raise messages.QueryError("bad_request", f"no session of {state.symbol} has a model for it: {why}")

    def state(self, session: str) -> SessionState:
        """The state of a session; QueryError when there is none."""
        state = self.states.get(session)
        if state is None:
            raise messages.unknown_session(session, self.states)
        return state


def check_computed(question: Question) -> None:
    """Raise QueryError for a standing question that has ready answers only: open bars are on no tape."""
    if question.provisional:
        why = f"{question.name} reads open bars, so it has ready answers only, and none that this asks for"
        raise messages.QueryError("bad_request", why)


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
            for labels, value in store.readings(metric):
                if _shown(labels, tenant):
                    text = ",".join(f'{label}="{name}"' for label, name in labels.items())
                    values[f"{metric.name}{{{text}}}" if text else metric.name] = value
    return values


def _shown(labels: Mapping[str, str], tenant: Tenant) -> bool:
    if tenant.operator:
        return True
    session = labels.get("session")
    return labels.get("tenant") == tenant.name if session is None else tenant.sees(session)


def _age(answer: Answer) -> tuple[int, int]:
    return answer.epoch, answer.data_version
