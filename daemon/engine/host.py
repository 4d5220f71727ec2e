"""The engine side of the daemon: data plane, scheduler, standing questions, and the threads that run them.

The same object runs in its own process (`engine_process`) or in the front's (`inproc` mode, tests): it takes
commands, emits events, and does not know which.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from daemon import protocol as seam
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import questions_of
from daemon.engine.build import Built, limits_of
from daemon.engine.kv_metrics import KvReport
from daemon.engine.maintenance import Housekeeping
from daemon.engine.metrics import EngineObserver
from daemon.engine.prompts import EnginePrompts
from engine.divergence import Probe, probe
from flash.evaluator import FlashEvaluator, FlashFailure, FlashResult
from flash.questions import Question
from flash.registry import Registry, check_choices
from ingest import warm_up
from ingest.bars import GAP, SKEWED, BarBuilder, BarPolicy
from ingest.lines import LineSpec
from ingest.plane import DataPlane, SessionSpec, SourceRing, TapeRecord
from ingest.ring import Ring
from ingest.tokens import Tokeniser
from metrics.store import MetricStore
from regions.watch import PrefixWatch
from scheduler.background import Comparison, Rebuilder, Refresher, RefreshPolicy
from scheduler.costs import LearningExecutor
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.request import Failure, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import Record, Records
from scheduler.types import PriorityClass, Tape
from scheduler.worker import Worker

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_WAITING = 256
"""Bars waiting for the engine above which the ring is left alone: it pauses or drops as its kind says."""


class EngineHost:
    """Runs the engine over one ring. ``emit`` is called from several threads."""

    def __init__(
        self,
        config: Config,
        built: Built,
        ring: Ring,
        store: MetricStore,
        emit: Callable[[seam.EngineEvent], None],
        *,
        source: str,
    ) -> None:
        self._config = config
        self._built = built
        self._emit = emit
        self._names = [session.name for session in config.sessions]
        self._warm_up = {session.name: session.warm_up_records for session in config.sessions}
        self._submitted = dict.fromkeys(self._names, 0)
        self._coalesced = dict.fromkeys(self._names, 0)
        self._asks: dict[int, Request] = {}
        self._stop = threading.Event()
        self._input_ended = threading.Event()
        self._leave_ring = threading.Event()
        """The data plane's endless loop ends: because of either of the two above."""
        self._lock = threading.Lock()
        self._waiting = 0
        self._store = store
        self._ring = ring
        observer = EngineObserver(store, built.engine.pool)
        self._scheduler = scheduler_of(config, built, observer)
        self._scheduler.subscribe(self)
        self._prompts = EnginePrompts(
            built.prompt,
            self._scheduler,
            lambda: built.engine.open_stream(),
            built.engine.frame_limit,
            emit,
        )
        registry = Registry(built.prepare)
        for session, question in questions_of(config):
            registry.register(session, question)
        self._evaluator = FlashEvaluator(
            self._scheduler, registry, self._detokenise, self._answered, self._failed, _has_gap
        )
        keeping = Housekeeping(built.engine.pool, built.tapes.values(), built.tiers, store)
        self._report = KvReport(built.engine, built.tiers, store)
        self._refresher = refresher_of(config, built, self._scheduler, registry, observer)
        rebuilder = Rebuilder(self._scheduler, built.tapes.values(), time.monotonic_ns)
        self._worker = Worker(
            self._scheduler, when_idle=partial(_soonest, self._refresher.idle, rebuilder.idle, keeping)
        )
        self._plane = self._data_plane(ring, source)
        self._threads = [
            threading.Thread(target=self._feed, name="data-plane", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
        ]

    def start(self) -> None:
        """Begin; emits `Ready` first."""
        warm_up()
        loaded = self._built.loaded
        self._emit(
            seam.Ready(
                loaded.name,
                loaded.revision,
                loaded.untrained,
                str(loaded.device),
                self._built.engine.pool.total_blocks,
            )
        )
        self._worker.start()
        for thread in self._threads:
            thread.start()

    def handle(self, command: seam.Command) -> None:
        """Carry out one command; answers come as events."""
        if isinstance(command, seam.AskEngine):
            self._ask(command)
        elif isinstance(command, seam.CancelAsk):
            request = self._asks.pop(command.id, None)
            if request is not None:
                self._scheduler.cancel(request.id)
        elif isinstance(command, seam.PromptCommand):
            self._prompts.handle(command)
        elif isinstance(command, seam.EndInput):
            self._input_ended.set()
            self._leave_ring.set()
        else:
            self.stop(command.drain_s)

    def stop(self, drain_s: float) -> None:
        """Take what the ring holds and finish it within ``drain_s`` seconds; emits `Stopped` last."""
        deadline = time.monotonic() + drain_s
        self._stop.set()
        self._scheduler.run_between(self._refresher.stop)
        self._leave_ring.set()
        for thread in self._threads:
            thread.join(drain_s)
        drained = self._worker.stop(max(0.0, deadline - time.monotonic()))
        self._emit(seam.Stopped(drained))

    # Scheduler's thread.

    def on_commit(self, tape: Tape, version: int, records: Records) -> None:
        """Tell the front of every new data version."""
        self._taken(len(records))
        newest = _tape_record(records[-1].payload)
        self._built.tiers.inputs[tape.name] = {"last": newest.last_offset, "safe": newest.low_watermark}
        self._store.inc("foretick_versions_total", session=tape.name)
        self._store.set("foretick_data_version", version, session=tape.name)
        self._store.set("foretick_session_tokens", tape.live_tokens, session=tape.name)
        self._emit(
            seam.Committed(
                tape.name,
                version,
                len(records),
                tape.live_tokens,
                tape.live_records,
                newest.ts_last_event,
                newest.ts_recv,
                newest.ts_ring,
                _inputs([record.payload for record in records]),
            )
        )

    def on_drop(self, tape: Tape, records: Records, failure: Failure) -> None:
        """Records the engine could not take; the flash evaluator flags the gap."""
        self._taken(len(records))

    def _answered(self, result: FlashResult) -> None:
        newest, ordinal = _payload(result.payload)
        flags = []
        if result.gap:
            flags.append("gap")
        if ordinal < self._warm_up[result.session]:
            flags.append("warm_up")
        if newest.flags & SKEWED:
            flags.append("skewed_clock")
        if self._built.loaded.untrained:
            flags.append("untrained")
        self._note_coalesced(result.session)
        self._emit(
            seam.Answered(
                result.session,
                result.question,
                result.question_hash,
                result.version,
                result.text,
                result.choice,
                result.logit_gap,
                newest.ts_last_event,
                newest.ts_recv,
                newest.ts_ring,
                _inputs(result.payloads),
                seam.Stages(
                    newest.ring_wait_ns,
                    newest.bars_ns,
                    newest.tokenise_ns,
                    result.queue_ns,
                    result.forward_ns,
                ),
                result.prompt_tokens + len(result.tokens),
                result.cached_tokens,
                result.coalesced,
                tuple(flags),
                result.recomputed_tokens,
                result.swapped_tokens,
            )
        )

    def _note_coalesced(self, session: str) -> None:
        total = self._evaluator.coalesced[session]
        new, self._coalesced[session] = total - self._coalesced[session], total
        self._store.inc("foretick_flash_coalesced_total", new, session=session)

    def _failed(self, failed: FlashFailure) -> None:
        self._emit(
            seam.AnswerFailed(
                failed.session,
                failed.question,
                failed.version,
                failed.failure.code,
                failed.failure.message,
                _inputs(failed.payloads),
            )
        )

    # Asking.

    def _ask(self, ask: seam.AskEngine) -> None:
        tape = self._built.tapes.get(ask.session)
        if tape is None:
            self._emit(seam.AskFailed(ask.id, "unknown_session", f"there is no session {ask.session!r}"))
            return
        try:
            question = Question("ask", ask.text, ask.choices or None, max(1, ask.max_tokens))
            prepared = self._built.prepare(question)
            check_choices(question, prepared)
        except ValueError as error:
            self._emit(seam.AskFailed(ask.id, "bad_request", str(error)))
            return
        request = Request(
            RequestSpec(
                cls=PriorityClass.SESSION,
                session=ask.session,
                prompt=prepared.prompt_tokens,
                max_tokens=1 if ask.choices else question.max_tokens,
                on_done=lambda done: self._asked(ask, done),
                tape=tape,
                stop_ids=prepared.stop_ids,
                choices=prepared.choice_tokens,
            )
        )
        self._asks[ask.id] = request  # before submitting: the worker may be quicker than we are
        self._scheduler.submit(request)

    def _asked(self, ask: seam.AskEngine, request: Request) -> None:
        self._asks.pop(ask.id, None)
        if request.state is not State.FINISHED:
            failure = request.error or Failure("cancelled", "nobody waited for the answer any more")
            self._emit(seam.AskFailed(ask.id, failure.code, failure.message))
            return
        choice = request.chosen(ask.choices)
        self._emit(
            seam.AskDone(
                ask.id,
                request.version,
                self._detokenise(request.answer) if choice is None else choice,
                choice,
                request.samples[0].gap,
                len(request.prompt) + len(request.output),
                request.cached_tokens,
            )
        )

    def _detokenise(self, tokens: Sequence[int]) -> str:
        return self._built.prompt.decode(list(tokens))

    # Data plane's thread.

    def _data_plane(self, ring: Ring, source: str) -> DataPlane:
        bars = self._config.bars
        specs = [
            SessionSpec(session.name, source, LineSpec(session.price_decimals, session.volume_decimals))
            for session in self._config.sessions
        ]
        policy = BarPolicy(bars.interval, bars.lateness, bars.empty, bars.max_fill)
        return DataPlane(
            [SourceRing(source, ring)],
            BarBuilder(len(specs), policy),
            Tokeniser(self._built.prompt.encode),
            specs,
            self._submit,
            self._store,
            ready=lambda: self._waiting < MAX_WAITING,
            idle_close_ns=bars.idle_close,
        )

    def _submit(self, session: int, records: Sequence[TapeRecord]) -> None:
        name = self._names[session]
        first = self._submitted[name]
        self._submitted[name] += len(records)
        with self._lock:
            self._waiting += len(records)
        self._scheduler.append(
            self._built.tapes[name],
            [
                Record(record.tokens, (record, first + i), record.ts_last_event)
                for i, record in enumerate(records)
            ],
        )

    def _taken(self, records: int) -> None:
        with self._lock:
            self._waiting -= records

    def _feed(self) -> None:
        """The data plane's thread: until told to stop, then what the ring still holds."""
        self._plane.run(self._leave_ring)
        if self._input_ended.is_set():
            self._finish_input()
        while self._plane.step():
            pass

    def _finish_input(self) -> None:
        """All that is left, at the engine's pace, and the open bars; `stop` ends it early."""
        while self._ring.fill and not self._stop.is_set():
            if not self._plane.step():
                self._stop.wait(0.001)
        if not self._stop.is_set():
            self._plane.flush()
        # in this order: what no longer waits is committed, and what a commit started ends before idleness
        while not (self._waiting == 0 and self._worker.idle):
            if self._stop.wait(0.005):
                return
        self._emit(seam.InputDone())

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._emit(seam.Heartbeat(self._worker.progress, self._worker.idle))
            self._report()


def scheduler_of(config: Config, built: Built, observer: Observer) -> Scheduler:
    """The scheduler of a daemon: its policy, and what it knows of prefix cache, host tier and device."""
    settings, engine, clock = config.scheduler, built.engine, time.monotonic_ns
    ordering = Ordering(settings.policy, settings.k)
    return Scheduler(
        LearningExecutor(engine, built.costs, clock),
        engine.pool,
        limits_of(config),
        clock,
        observer,
        ordering,
        costs=built.costs,
        tier=None if built.tiers.host is None else built.tiers.host,
        index=PrefixWatch(engine.cache) if ordering.by_prefix else None,
        rng=random.Random(settings.seed),
    )


def refresher_of(
    config: Config, built: Built, scheduler: Scheduler, registry: Registry, observer: Observer
) -> Refresher:
    """What keeps exact sessions fresh and measures the others."""

    def questions(session: str) -> list[Probe]:
        return [(it.prepared.prompt_tokens, it.prepared.choice_tokens) for it in registry.standing(session)]

    return Refresher(
        scheduler,
        built.engine,
        [(built.tapes[session.name], refresh_policy(session)) for session in config.sessions],
        Comparison(questions, partial(probe, built.engine), config.scheduler.max_batch_tokens),
        observer,
        time.monotonic_ns,
        frame_limit=built.engine.frame_limit,
        catch_up_tokens=config.scheduler.chunk_min,
    )


def refresh_policy(session: SessionConfig) -> RefreshPolicy:
    """When a session's window is prefilled again."""
    return RefreshPolicy(
        session.semantics == "exact", session.refresh_every, session.refresh_idle, session.divergence_every
    )


def _soonest(*hooks: Callable[[], float | None]) -> float | None:
    """Call every idle hook; the seconds until the first of them is due again."""
    return min((wait for hook in hooks if (wait := hook()) is not None), default=None)


def _payload(payload: object) -> tuple[TapeRecord, int]:
    assert isinstance(payload, tuple)  # _submit made it
    return payload


def _tape_record(payload: object) -> TapeRecord:
    return _payload(payload)[0]


def _has_gap(payload: object) -> bool:
    return bool(_tape_record(payload).flags & GAP)


def _inputs(payloads: Sequence[object]) -> seam.Inputs:
    records = [_tape_record(payload) for payload in payloads]
    return seam.Inputs(
        min(record.first_offset for record in records),
        max(record.last_offset for record in records),
        records[-1].low_watermark,
    )
