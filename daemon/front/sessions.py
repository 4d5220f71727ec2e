"""What the front knows about every session: newest version, newest answers; and who waits for them.

It is the query socket's backend: a standing question asked of its current version is served from here,
without the engine's interpreter ever being involved (*Attention Once* equation 11).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from daemon import protocol as seam
from daemon.api.messages import (
    Answers,
    AnswersReply,
    Ask,
    AskReply,
    Code,
    Quantiles,
    QueryError,
    SessionInfo,
    Sessions,
    SessionsReply,
    Stats,
    StatsReply,
)
from daemon.config.schema import Config
from daemon.config.standing import questions_of
from feeds.messages import Answer
from flash.cache import AnswerCache
from flash.questions import Question
from metrics.catalogue import METRICS, STAGES
from metrics.store import MetricStore

T = TypeVar("T")

_CODES: dict[str, Code] = {
    "unknown_session": "unknown_session",
    "bad_request": "bad_request",
    "too_long": "too_long",
    "stopping": "shutting_down",
}


@dataclass
class SessionState:
    """Where a session is. ``received``: monotonic ns at which its newest record came in."""

    symbol: str
    questions: list[Question]
    version: int = 0
    live_tokens: int = 0
    live_records: int = 0
    as_of: int = 0
    received: int = 0

    def staleness_ns(self) -> int:
        """Age of the newest record in the newest version, since this daemon received it."""
        return time.monotonic_ns() - self.received if self.received else 0


class Board:
    """Sessions, answers and pending asks. Lives on the event loop."""

    def __init__(self, config: Config, store: MetricStore, send: Callable[[seam.Command], None]) -> None:
        self._store = store
        self._send = send
        self.cache: AnswerCache[Answer] = AnswerCache()
        self.states = {s.name: SessionState(s.symbol, []) for s in config.sessions}
        for asked in questions_of(config):
            self.states[asked.session].questions.append(asked.question)
        self._asks: dict[int, asyncio.Future[seam.AskDone]] = {}
        self._next_ask = 0
        self.untrained = False

    # Told by the front.

    def committed(self, event: seam.Committed) -> None:
        """A session has a new version."""
        state = self.states[event.session]
        state.version, state.as_of, state.received = event.version, event.as_of, event.ts_ring
        state.live_tokens, state.live_records = event.live_tokens, event.live_records

    def answered(self, answer: Answer) -> None:
        """A standing question has a new answer."""
        self.cache.put(answer.session, answer.question_hash, answer.data_version, answer)

    def asked(self, event: seam.AskDone | seam.AskFailed) -> None:
        """The engine replied to an ask."""
        future = self._asks.pop(event.id, None)
        if future is None or future.done():
            return
        if isinstance(event, seam.AskDone):
            future.set_result(event)
        else:
            future.set_exception(QueryError(_CODES.get(event.code, "engine"), event.message))

    def engine_gone(self, message: str) -> None:
        """No ask in flight will be answered any more."""
        for future in self._asks.values():
            if not future.done():
                future.set_exception(QueryError("engine", message))
        self._asks.clear()

    # The query socket's backend.

    async def ask(self, request: Ask) -> AskReply:
        """From the cache if it is a standing question of the current version, else from the engine."""
        state = self._state(request.session)
        try:
            question = Question("ask", request.question, request.choices or None, request.max_tokens)
        except ValueError as error:
            raise QueryError("bad_request", str(error)) from None
        known = self.cache.latest(request.session, question.hash)
        if known is not None and known.data_version == state.version:
            self._store.inc("foretick_asks_total", outcome="cached")
            return AskReply(
                request.id,
                request.session,
                known.data_version,
                known.text,
                known.choice,
                known.logit_gap,
                cached=True,
                untrained=known.untrained,
                flags=tuple(known.flags),
                as_of=known.as_of,
                staleness_ns=state.staleness_ns(),
            )
        done = await self._engine_ask(request)
        self._store.inc("foretick_asks_total", outcome="computed")
        return AskReply(
            request.id,
            request.session,
            done.version,
            done.text,
            done.choice,
            done.logit_gap,
            cached=False,
            untrained=self.untrained,
            flags=("untrained",) if self.untrained else (),
            as_of=state.as_of,
            staleness_ns=state.staleness_ns(),
        )

    async def _engine_ask(self, request: Ask) -> seam.AskDone:
        self._next_ask += 1
        number = self._next_ask
        future: asyncio.Future[seam.AskDone] = asyncio.get_running_loop().create_future()
        self._asks[number] = future
        self._send(
            seam.AskEngine(number, request.session, request.question, request.max_tokens, request.choices)
        )
        try:
            return await future
        finally:
            if self._asks.pop(number, None) is not None:  # it timed out or its client is gone
                self._send(seam.CancelAsk(number))

    async def sessions(self, request: Sessions) -> SessionsReply:
        """All sessions."""
        return SessionsReply(
            request.id,
            tuple(
                SessionInfo(
                    name,
                    state.symbol,
                    state.version,
                    state.live_tokens,
                    state.live_records,
                    state.as_of,
                    state.staleness_ns(),
                    tuple(question.name for question in state.questions),
                )
                for name, state in self.states.items()
            ),
        )

    async def answers(self, request: Answers) -> AnswersReply:
        """Latest answers; waits for ``min_version``."""
        state = self._state(request.session)
        wanted = [q for q in state.questions if request.question in ("", q.name, q.text)]
        if not wanted:
            raise QueryError(
                "bad_request", f"{request.session} has no standing question {request.question!r}"
            )
        if not request.min_version:
            latest = [self.cache.latest(request.session, q.hash) for q in wanted]
            return AnswersReply(request.id, request.session, tuple(a for a in latest if a is not None))
        try:
            async with asyncio.timeout(request.timeout_s):
                found = [await self._when(request.session, q.hash, request.min_version) for q in wanted]
        except TimeoutError:
            raise QueryError(
                "timeout",
                f"{request.session} is at version {state.version}; version {request.min_version} was not "
                f"answered within {request.timeout_s:g} s",
            ) from None
        return AnswersReply(request.id, request.session, tuple(found))

    async def stats(self, request: Stats) -> StatsReply:
        """Every counter and gauge, and the stages' quantiles."""
        stages = {}
        for stage in STAGES:
            n = self._store.count("foretick_stage_seconds", stage=stage)
            quantile = partial(self._store.quantile, "foretick_stage_seconds", stage=stage)
            stages[stage] = Quantiles(n, *(quantile(q=q) if n else 0.0 for q in (0.5, 0.9, 0.99)))
        return StatsReply(request.id, series_values(self._store), stages)

    async def _when(self, session: str, question_hash: str, version: int) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        give_up = self.cache.when(session, question_hash, version, partial(_resolve, future))
        try:
            return await future
        finally:
            give_up()

    def _state(self, session: str) -> SessionState:
        state = self.states.get(session)
        if state is None:
            known = ", ".join(self.states) or "none"
            raise QueryError("unknown_session", f"there is no session {session!r}; there are: {known}")
        return state


def series_values(store: MetricStore) -> dict[str, float]:
    """Every counter and gauge by its name and labels, as Prometheus writes them."""
    values: dict[str, float] = {}
    for metric in METRICS:
        if metric.kind != "histogram":
            for labels in store.series(metric):
                text = ",".join(f'{label}="{value}"' for label, value in labels.items())
                values[f"{metric.name}{{{text}}}" if text else metric.name] = store.value(
                    metric.name, **labels
                )
    return values


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)
