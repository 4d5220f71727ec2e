"""What the engine reports about its sessions: data versions and standing answers.

The engine fills each answer once. The gateway adds only what it alone knows: input offsets, ages, publication
time.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args
from weakref import WeakKeyDictionary

from daemon import protocol
from daemon.ages import Times
from daemon.config.schema import Config, SessionConfig
from daemon.engine.build import Built
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.provenance import ProvenanceLog
from daemon.engine.tape_feeder import TapeFeeder, has_gap, inputs_of, is_single, missed, origin_of
from daemon.session_life import State as Life
from daemon.traces.recorded_trace import Passes
from feeds.decimals import parse_fixed
from feeds.market_data import Answer, Basis, Flag, Latency
from flash.budgets import QuestionBudgets
from flash.confidence import Judged
from flash.evaluator import AskedState, Evaluated, FlashEvaluator
from flash.question import PreparedQuestion
from flash.registry import Registry, Standing
from flash.repeats import Repeats
from ingest.bar_kernel import (
    ACTED,
    AMENDS,
    HALTED,
    INCOMPLETE,
    JUMP,
    LACKS_LATE,
    NEWS,
    REPLAYED,
    ROLLED,
    SKEWED,
)
from ingest.feed_rules import BITS
from ingest.plane import TapeRecord
from metrics.store import GrowthHandle, MetricStore
from regions.ephemeral import Fork
from regions.tape import Tape
from scheduler.request import LifecycleEvent, Request, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem

log = logging.getLogger(__name__)

Emit = Callable[[protocol.EngineEvent], None]
_FAULTS: dict[Flag, int] = {
    flag: BITS[flag] for flag in get_args(Flag) if flag in BITS and flag != "skewed_clock"
}


def number_in(text: str) -> str | None:
    """``text`` as the shortest decimal; None if it is not a number."""
    try:
        return str(parse_fixed(text.strip()))
    except ValueError:
        return None


def decoder(
    decode: Callable[[list[int]], str], prepared: PreparedQuestion | None, record: TapeRecord | None
) -> Callable[[list[int]], str]:
    """``decode``, for an answer at the version of ``record``: a level of a compact session is its price."""
    is_price = prepared is not None and prepared.is_price
    anchor = record.anchor if record is not None and is_price else None
    return decode if anchor is None else lambda tokens: anchor.printed(decode(tokens))


class Versions:
    """Reports every new data version to the gateway, with its provenance. On the scheduler's thread."""

    def __init__(self, scheduler: Scheduler, store: MetricStore, emit: Emit) -> None:
        self._store, self._emit = store, emit
        self._logs: WeakKeyDictionary[Tape, ProvenanceLog] = WeakKeyDictionary()
        scheduler.subscribe(self.on_commit)

    def log(self, tape: Tape) -> ProvenanceLog:
        """The provenance of a tape; a new one begins with its first bar."""
        return self._logs.setdefault(tape, ProvenanceLog())

    def restore(self, tape: Tape, log: ProvenanceLog, *, has_log: bool) -> None:
        """A tape came back from a snapshot; without a log nothing is known of the bars before it."""
        self._logs[tape] = log.copied() if has_log else ProvenanceLog(state_first=None)

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem[TapeRecord]]) -> None:
        """Report a tape's new version."""
        bars = [each.payload for each in records]
        made = self.log(tape).committed([origin_of(bar) for bar in bars], tape.live_records, tape.kv)
        late = missed(bars, tape.staleness_ns, time.monotonic_ns())
        self._store.inc("foretick_freshness_misses_total", late, session=tape.name)
        self._store.inc("foretick_versions_total", session=tape.name)
        self._store.set("foretick_data_version", version, session=tape.name)
        self._store.set("foretick_session_tokens", tape.live_tokens, session=tape.name)
        self._emit(
            protocol.Committed(
                session=tape.name,
                version=version,
                bars=len(records),
                live_tokens=tape.live_tokens,
                live_records=tape.live_records,
                times=times_of(bars[-1]),
                inputs=inputs_of(bars),
                late=late,
                history=all(bar.history for bar in bars),
                made=made,
                close=close_of(bars),
            )
        )


class StandingAnswers:
    """Has every version evaluated and emits the answers as events, on the scheduler's thread."""

    def __init__(
        self,
        config: Config,
        built: Built,
        scheduler: Scheduler,
        registry: Registry,
        confidence: Confidence,
        store: MetricStore,
        emit: Emit,
        feeder: TapeFeeder,
    ) -> None:
        self._prefixes, self._feeder = built.prefixes, feeder
        self._refuses_halted = config.events.on_halt == "no answers"
        self._loaded, self._decode, self._emit = built.loaded, built.prompt.decode, emit
        self._sessions: dict[str, SessionConfig] = {}
        self._confidence = confidence
        self._store = store
        self._budgets = QuestionBudgets(time.monotonic_ns, config.scheduler.share_window / 1e9)
        self._coalesced: dict[str, GrowthHandle] = {}
        for session in config.sessions:
            self.add(session)

        def answered(session: str) -> None:
            """Bars wait for it: it comes behind a refresh that the version's commit has asked for."""
            scheduler.run_between(partial(feeder.answered, session))

        self._evaluator = FlashEvaluator(
            scheduler,
            registry,
            self._evaluated,
            has_gap,
            self._not_due,
            self._texts_asked,
            self._asked,
            lambda record: record.ts_ring,
            built.costs.batch_ns,
            lambda record: record.history,
            self._is_held,
            answered if config.flash.every_bar else feeder.answered,
            self._may_ask,
        )
        self._repeats = Repeats(
            scheduler,
            registry,
            self._repeated,
            self._asked,
            self._evaluator.asked,
            lambda record: record.history,
            self._may_repeat,
        )
        self.idle = self._repeats.idle

    def add(self, session: SessionConfig) -> None:
        """There is another session, or one has other settings."""
        name = session.name
        if name not in self._sessions:
            self._coalesced[name] = self._store.growth("foretick_flash_coalesced_total", session=name)
        self._sessions[name] = session

    def cut(self, name: str) -> AskedState:
        """What was asked of a session so far."""
        return self._evaluator.cut(name)

    def restore(self, tape: Tape, cut: AskedState, newest: TapeRecord) -> None:
        """Go on from a cut, before the session's first version; ``newest``: the last record of its tape."""
        self._evaluator.restore(tape.name, cut)
        self._repeats.restore(tape, newest)

    def leave(self, name: str) -> None:
        """A session is to be removed; what is asked of it will fail."""
        self._evaluator.forget(name)
        self._repeats.forget(name)

    def remove(self, name: str) -> None:
        """A session is removed."""
        del self._sessions[name], self._coalesced[name]

    def _asked(self, standing: Standing, reader: Fork) -> Sequence[int]:
        """The tokens that ask a question; those of a provisional one begin with the open bars."""
        if standing.question.provisional:
            return (*self._feeder.open_lines(standing.session), *standing.prepared.prompt_tokens)
        return self._prefixes.asked(standing, reader.prefix)

    def _evaluated(self, done: Evaluated[TapeRecord]) -> None:
        """One question at one version."""
        standing, error = done.standing, done.request.error
        name, inputs = standing.session, inputs_of(done.payloads)
        if name not in self._sessions:
            return  # it was removed meanwhile
        self._coalesced[name].update(self._evaluator.coalesced[name])
        self._budgets.charge(standing, done.request.engine_ns)
        self._store.inc("foretick_standing_engine_seconds_total", done.request.engine_ns, session=name)
        if done.request.state is State.FINISHED:
            times = times_of(done.payloads[-1])
            passes = passes_of(done.request)
            used = self._budgets.used(standing)
            answered = self._answer(done), inputs, times, done.asked, logits_of(done), passes, used
            self._emit(protocol.Answered(*answered))
        elif error is not None:
            question = standing.question.name
            why = error.code, error.message
            self._emit(protocol.AnswerFailed(name, question, done.version, *why, inputs, done.asked))

    def _repeated(self, done: Evaluated[TapeRecord]) -> None:
        """One question at a version that was answered before."""
        if done.standing.session in self._sessions:
            inputs, times = inputs_of(done.payloads), times_of(done.payloads[-1])
            answer = self._answer(done, is_new=False)
            self._emit(protocol.Repeated(answer, inputs, times, logits_of(done)))

    def _may_ask(self, item: Standing) -> bool:
        """Whether a due question has engine time left; one that has none skips the version."""
        allowed = self._budgets.allows(item)
        if not allowed:
            label = self._store.known("question", item.question.name)
            self._store.inc("foretick_over_budget_total", question=label)
        return allowed

    def _may_repeat(self, session: str, newest: TapeRecord) -> bool:
        """Whether this daemon answers it, and no bar that was answered before is to come."""
        return self._feeder.lives.state(session) is Life.LIVE and not self._is_held(newest)

    def _is_held(self, record: TapeRecord) -> bool:
        """Whether no standing question is asked of a version that ends with it."""
        return self._refuses_halted and bool(record.flags & HALTED)

    def _not_due(self, session: str, version: int, payloads: tuple[TapeRecord, ...]) -> None:
        self._emit(protocol.NotDue(session, version, inputs_of(payloads)))

    def _texts_asked(self, session: str, version: int, payloads: tuple[TapeRecord, ...], asked: int) -> None:
        self._emit(protocol.TextsAsked(session, version, inputs_of(payloads), asked))

    def _answer(self, done: Evaluated[TapeRecord], *, is_new: bool = True) -> Answer:
        """``is_new``: it may be labelled, and is counted."""
        standing, request = done.standing, done.request
        record = done.payloads[-1]
        choice, sample = request.chosen(standing.question.choices), request.samples[0]
        decode = decoder(self._decode, standing.prepared, record)
        text = decode(list(request.answer)) if choice is None else choice
        judged, uncalibrated = None, None
        if _shows_open(done):
            uncalibrated = "provisional"  # a calibration is of closed bars
        else:
            version = done.version if is_new else None
            judged = self._confidence.of_standing(standing, version, sample.logits, choice, request.prompt)
            uncalibrated = None if judged else self._confidence.uncalibrated(standing.question)
        act, reason = (judged.act, judged.abstain_reason) if judged else (None, None)
        if act is None and standing.question.max_error is not None:
            act, reason = False, "few_labels"  # asked in a way that was not calibrated
        return Answer(
            session=standing.session,
            symbol=self._sessions[standing.session].symbol,
            question=standing.question.name,
            question_hash=standing.question_hash,
            text=text,
            choice=choice,
            logit_gap=sample.gap,
            value=number_in(text) if choice is None else None,
            probability=judged.probability if judged else None,
            choice_set=judged.choice_set if judged else None,
            uncalibrated=uncalibrated,
            act=act,
            abstain_reason=reason,
            data_version=done.version,
            as_of=record.ts_last_event,
            model=self._loaded.name,
            model_revision=self._loaded.revision,
            untrained=self._loaded.untrained,
            latency=Latency(
                ring_wait_ns=record.ring_wait_ns,
                bars_ns=record.bars_ns,
                tokenise_ns=record.tokenise_ns,
                queue_ns=done.queue_ns,
                forward_ns=done.forward_ns,
            ),
            reused_tokens=request.cached_tokens,
            computed_tokens=len(request.prompt) + len(request.answer),
            recomputed_tokens=request.recomputed_tokens,
            swapped_tokens=request.swapped_tokens,
            flags=self._flags(done, judged),
            basis=Basis(anchor=[] if record.anchor is None else list(record.anchor.numbers)),
        )

    def _flags(self, done: Evaluated[TapeRecord], judged: Judged | None) -> tuple[Flag, ...]:
        record = done.payloads[-1]
        owned: dict[Flag, bool] = {
            "gap": done.gap,
            "warm_up": record.ordinal < self._sessions[done.standing.session].warm_up_records,
            "skewed_clock": bool(record.flags & SKEWED),
            "replay": bool(record.flags & REPLAYED),
            "amended": any(each.flags & AMENDS for each in done.payloads),
            "price_jump": any(each.flags & JUMP for each in done.payloads),
            "rolled": any(each.flags & ROLLED for each in done.payloads),
            **feed_faults(done.payloads),
            "text": any(each.flags & NEWS for each in done.payloads),
            "action": any(each.flags & ACTED for each in done.payloads),
            "provisional": _shows_open(done),
            **lacking(record),
            "untrained": self._loaded.untrained,
            "rounded": record.rounded,
            "abstained": judged is not None and judged.abstained,
        }
        return tuple(flag for flag, is_set in owned.items() if is_set)


def close_of(records: Sequence[TapeRecord]) -> int | None:
    """Of the newest bar of the first symbol; None without one: an event, or a bar that was corrected."""
    bars = (each.bar for each in reversed(records) if not is_single(each))
    return next((bar.close for bar in bars if not bar.leg), None)


def times_of(record: TapeRecord) -> Times:
    """When its newest tick was where."""
    replay = bool(record.flags & REPLAYED)
    return Times(record.ts_last_event, record.ts_source, record.ts_ring, replay, record.ts_closed)


def passes_of(request: Request) -> Passes:
    """When it was where first, and when it ended."""
    first = dict(reversed(request.events))
    return Passes(
        queued=first.get(LifecycleEvent.QUEUED, 0),
        scheduled=first.get(LifecycleEvent.SCHEDULED, 0),
        prefilled=first.get(LifecycleEvent.KV_ON_GPU, 0),
        finished=first.get(LifecycleEvent.FINISHED, 0),
    )


def logits_of(done: Evaluated[TapeRecord]) -> tuple[float, ...]:
    """Those of the question's choices; none of a text."""
    return done.request.samples[0].logits if done.standing.question.choices else ()


def feed_faults(records: Sequence[TapeRecord]) -> dict[Flag, bool]:
    """Flags of faults in the records of these bars."""
    flags = 0
    for each in records:
        flags |= each.flags
    return {flag: bool(flags & bit) for flag, bit in _FAULTS.items()}


def lacking(record: TapeRecord | None) -> dict[Flag, bool]:
    """Flags of an answer whose window ends with ``record``: whether records of its bars are missing."""
    flags = 0 if record is None else record.flags
    return {"late": bool(flags & LACKS_LATE), "incomplete": bool(flags & INCOMPLETE)}


def _shows_open(done: Evaluated[TapeRecord]) -> bool:
    """Whether the question stood behind open bars."""
    prepared = done.standing.prepared.prompt_tokens
    return done.standing.question.provisional and len(done.request.prompt) > len(prepared)
