"""Constructs the engine's parts and connects them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial

from daemon import protocol
from daemon.config.schema import Config
from daemon.config.standing import questions_of
from daemon.config.symbols import numbered
from daemon.engine.answers import Emit, StandingAnswers, Versions
from daemon.engine.build import Built, limits_of, register
from daemon.engine.capacity_metrics import CapacityMetrics
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.labels import EngineLabels
from daemon.engine.maintenance import Maintenance
from daemon.engine.metrics import EngineObserver, MemoryMetrics
from daemon.engine.prompt_builder import PromptBuilder
from daemon.engine.provenance import Lineages
from daemon.engine.question_changes import StandingQuestions
from daemon.engine.request_runner import SIGN_OF_LIFE_NS, RequestRunner
from daemon.engine.rollups import Rollups
from daemon.engine.service import EngineHost
from daemon.engine.session_lifecycle import EngineSessions, refresh_policy
from daemon.engine.snapshot_writer import Snapshots
from daemon.engine.tape_feeder import TapeFeeder
from daemon.engine.version_records import VersionRecords
from daemon.supervision import Threads
from engine.divergence import Probe, probe
from engine.step import Executor
from flash.ready import ReadyPosition
from flash.registry import Registry
from ingest.plane import WatchBars
from ingest.ring import Ring
from metrics.store import MetricStore
from regions.prefix_index import PrefixIndex
from scheduler.costs import LearningExecutor
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.rebuild import Rebuilder
from scheduler.refresh import Comparison, Refresher
from scheduler.scheduler import Scheduler
from scheduler.worker import Worker


def wire_engine(
    config: Config,
    built: Built,
    ring: Ring,
    store: MetricStore,
    emit: Emit,
    *,
    source: str,
    symbols: Mapping[str, int] | None = None,
    executor: Executor | None = None,
    credits: int = 0,
    standby: bool = False,
    watch: WatchBars = lambda session, bars: None,
) -> EngineHost:
    """The engine over one ring. Raises SettingError for an unusable standing question.

    ``symbols``: their numbers in the ring, by default in order. ``executor`` replaces the engine's (tests).
    ``credits``, ``standby``, ``watch``: see `TapeFeeder`.
    """
    engine, prompt, loaded = built.engine, built.prompt, built.loaded
    registry = Registry(built.prepare)
    for asked in questions_of(config):
        register(registry, asked)
    observer = EngineObserver(store, engine.pool)
    scheduler = scheduler_of(config, built, observer, executor)
    # Order of listeners on a commit: first those that record the version, then those that query it.
    numbers = numbered(config.sessions) if symbols is None else symbols
    entering = TapeFeeder(
        config,
        ring,
        source,
        built,
        numbers,
        scheduler,
        store,
        emit=emit,
        credits=credits,
        standby=standby,
        watch=watch,
    )
    lineages = Lineages()
    scheduler.subscribe(Versions(store, emit, lineages=lineages).on_commit)
    confidence = Confidence(config, prompt, built.calibration, store)
    ready = ready_position(config, built, scheduler)
    records = VersionRecords()
    scheduler.subscribe(records.on_commit)
    requests = RequestRunner(
        built,
        scheduler,
        PromptBuilder(built, limits_of(config), store),
        records,
        confidence,
        emit,
        rebuilding=entering.rebuilding,
        refuses=config.recovery.while_rebuilding == "refuse",
        ready=ready,
        tau=config.flash.early_exit,
        sign_of_life_ns=min(SIGN_OF_LIFE_NS, config.query.max_wait // 4),
    )
    answers = StandingAnswers(
        config, built, scheduler, registry, confidence, store, emit, entering.open_lines
    )
    refresher = refresher_of(config, built, scheduler, registry, observer)
    rollups = Rollups(config, built, scheduler, store)
    snapshots = Snapshots(
        config, built, scheduler, entering, records, answers, refresher, rollups, confidence, lineages, store
    )
    built.recovery.count(store)
    for name in built.restored:
        snapshots.give_back(name)
        snapshots.partitions_assigned(name)
    rebuilder = Rebuilder(scheduler, time.monotonic_ns)
    maintenance = Maintenance(engine.pool, built.tapes.values(), built.tiers, store)
    questions = StandingQuestions(registry, built.prefixes, built.tapes, scheduler, limits_of(config), emit)
    sessions = EngineSessions(
        config,
        built,
        scheduler,
        registry,
        entering,
        questions,
        answers,
        requests,
        records,
        confidence,
        refresher,
        rollups,
        snapshots,
        store,
        emit,
    )
    threads = Threads(lambda name, why: emit(protocol.ThreadEnded(name, why)))
    return EngineHost(
        ready=protocol.EngineReady(
            loaded.name,
            loaded.revision,
            loaded.untrained,
            str(loaded.device),
            engine.pool.total_blocks,
            {each.name: snapshots.positions(each) for each in config.sessions if each.name in built.restored},
            tuple({each for name in built.restored for each in snapshots.streams(name)}),
        ),
        scheduler=scheduler,
        worker=Worker(
            scheduler,
            when_idle=partial(_soonest, refresher.idle, rebuilder.idle, maintenance, snapshots),
            make_thread=threads.make,
        ),
        input=entering,
        questions=questions,
        sessions=sessions,
        snapshots=snapshots,
        labels=EngineLabels(registry, confidence, scheduler, emit),
        requests=requests,
        memory=MemoryMetrics(engine, built.tiers, store),
        capacity=CapacityMetrics(store, engine.pool, built.tapes),
        stop_background=refresher.stop,
        threads=threads,
        emit=emit,
    )


def ready_position(config: Config, built: Built, scheduler: Scheduler) -> ReadyPosition | None:
    """None where no ask exits early: it is off, or the model has no ready position."""
    tokens = built.prompt.ready() if config.flash.early_exit else ()
    return ReadyPosition(scheduler, tokens) if tokens else None


def scheduler_of(
    config: Config, built: Built, observer: Observer, executor: Executor | None = None
) -> Scheduler:
    """The daemon's scheduler: its policy, prefix cache, host tier and cost model."""
    settings, engine, clock = config.scheduler, built.engine, time.monotonic_ns
    ordering = Ordering(settings.policy, settings.k)
    return Scheduler(
        LearningExecutor(executor or engine, built.costs, clock),
        engine.pool,
        limits_of(config),
        clock,
        observer,
        ordering,
        costs=built.costs,
        tier=built.tiers.host,
        index=PrefixIndex(engine.cache) if ordering.by_prefix else None,
        rng=random.Random(0),
    )


def refresher_of(
    config: Config, built: Built, scheduler: Scheduler, registry: Registry, observer: Observer
) -> Refresher:
    """Keeps exact sessions fresh, and compares carried with fresh states of all sessions."""

    def questions(session: str) -> list[Probe]:
        tape = built.tapes.get(session)
        if tape is None:  # it is being closed
            return []
        asked = partial(built.prefixes.asked_behind, prefix=tape.prefix)
        return [(asked(each), each.prepared.choice_tokens) for each in registry.standing(session)]

    return Refresher(
        scheduler,
        built.engine,
        built.engine,
        [(built.tapes[s.name], refresh_policy(s)) for s in config.sessions],
        Comparison(questions, partial(probe, built.engine), config.scheduler.max_batch_tokens),
        observer,
        time.monotonic_ns,
        frame_limit=built.engine.frame_limit,
        catch_up_tokens=config.scheduler.chunk_min,
    )


def _soonest(*hooks: Callable[[], float | None]) -> float | None:
    """Call every idle hook; returns the seconds until the first is due again."""
    return min((wait for hook in hooks if (wait := hook()) is not None), default=None)
