"""Constructs the engine's parts and connects them."""

import random
import time
from collections.abc import Callable, Mapping
from functools import partial

from daemon import protocol
from daemon.config.schema import Config
from daemon.config.symbols import numbered
from daemon.engine.answers import Emit, StandingAnswers, Versions
from daemon.engine.build import Built, limits_of, registry_of
from daemon.engine.capacity_metrics import CapacityMetrics
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.maintenance import Maintenance
from daemon.engine.metrics import EngineObserver, MemoryMetrics
from daemon.engine.prompt_builder import PromptBuilder
from daemon.engine.prompt_view import PromptView
from daemon.engine.question_changes import StandingQuestions
from daemon.engine.request_runner import RequestRunner
from daemon.engine.rollups import Rollups
from daemon.engine.sampling_defaults import sampling_defaults
from daemon.engine.service import EngineHost
from daemon.engine.session_lifecycle import EngineSessions
from daemon.engine.session_parts import SessionParts, refresh_policy
from daemon.engine.snapshot_writer import Snapshots
from daemon.engine.tape_feeder import TapeFeeder
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
    registry = registry_of(config, built)
    config, pool, limits = built.opened, built.engine.pool, limits_of(config)
    observer = EngineObserver(store, pool)
    scheduler = scheduler_of(config, built, observer, executor)
    # Listeners on a commit are called in this order: those that record the version, then those that query it.
    feeder = TapeFeeder(
        config,
        ring,
        source,
        built,
        numbered(config.sessions) if symbols is None else symbols,
        scheduler,
        store,
        emit=emit,
        credits=credits,
        standby=standby,
        watch=watch,
    )
    versions = Versions(scheduler, store, emit)
    confidence = Confidence(config, built.prompt, built.calibration, store)
    position = ready_position(config, built, scheduler)
    prompts = PromptBuilder(built, limits, store)
    requests = RequestRunner(config, built, scheduler, prompts, confidence, emit, feeder.rebuilding, position)
    answers = StandingAnswers(config, built, scheduler, registry, confidence, store, emit, feeder)
    refresher = refresher_of(config, built, scheduler, registry, observer)
    rollups = Rollups(config, built, scheduler, store)
    parts = SessionParts(scheduler, registry, versions, confidence, requests, answers, refresher, rollups)
    snapshots = Snapshots(config, built, scheduler, feeder, parts, store)
    questions = StandingQuestions(registry, built, scheduler, limits, confidence, emit)
    sessions = EngineSessions(config, built, scheduler, feeder, questions, parts, snapshots, store, emit)
    view = PromptView(built, scheduler, prompts, registry, emit)
    threads = Threads(lambda name, why: emit(protocol.ThreadEnded(name, why)))
    rebuild = Rebuilder(scheduler, time.monotonic_ns).idle
    maintenance = Maintenance(pool, built.tapes.values(), built.tiers, store)
    idle = partial(_soonest, answers.idle, refresher.idle, rebuild, maintenance, snapshots)
    worker = Worker(scheduler, when_idle=idle, make_thread=threads.make)
    memory, ready = MemoryMetrics(built.engine, built.tiers, store), _ready_event(config, built, snapshots)
    gauges = memory, CapacityMetrics(store, pool, built.tapes), snapshots.note
    return EngineHost(
        ready, worker, feeder, questions, sessions, snapshots, parts, view, gauges, threads, emit
    )


def _ready_event(config: Config, built: Built, snapshots: Snapshots) -> protocol.EngineReady:
    """What the gateway learns of the engine when it is ready."""
    loaded = built.loaded
    resumed = {s.name: snapshots.resumed(s) for s in config.sessions if s.name in built.restored}
    return protocol.EngineReady(
        loaded.name,
        loaded.revision,
        loaded.untrained,
        str(loaded.device),
        built.engine.pool.total_blocks,
        {name: positions for name, (positions, _) in resumed.items()},
        tuple({stream for _, streams in resumed.values() for stream in streams}),
        tuple(name for name, state in built.restored.items() if state.halted),
        sampling_defaults(config.model, loaded.generation),
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
        asked, prefix = built.prefixes.asked, tape.prefix
        return [(asked(each, prefix), each.prepared.choice_tokens) for each in registry.standing(session)]

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
