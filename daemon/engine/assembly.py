"""Constructs the engine's parts and connects them."""

import logging
import random
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakSet

from msgspec import structs

from daemon import protocol
from daemon.api.generation import ModelEntry
from daemon.config.by_model import by_model, keys_of_file
from daemon.config.derived_limits import DerivedLimits
from daemon.config.schema import Config
from daemon.config.signals import unmet_clauses
from daemon.config.standing import questions_of
from daemon.config.symbols import numbered
from daemon.engine.answers import Emit, StandingAnswers, Versions
from daemon.engine.build import Built, Loaded, build, limits_of, registry_of
from daemon.engine.capacity_metrics import CapacityMetrics
from daemon.engine.confidence_metrics import Confidence, check_error
from daemon.engine.maintenance import Maintenance
from daemon.engine.metrics import EngineObserver, MemoryMetrics
from daemon.engine.prompt_builder import PromptBuilder, PromptCaches
from daemon.engine.prompt_view import PromptView
from daemon.engine.question_capacity import loads_of
from daemon.engine.question_changes import StandingQuestions
from daemon.engine.ready_events import ReadyEvents
from daemon.engine.request_runner import RequestRunner
from daemon.engine.rollups import Rollups
from daemon.engine.rule_labels import RuleLabels
from daemon.engine.sampling_defaults import sampling_defaults
from daemon.engine.service import EngineHost, ServedModel
from daemon.engine.session_lifecycle import EngineSessions
from daemon.engine.session_parts import SessionParts, refresh_policy
from daemon.engine.snapshot_writer import Snapshots
from daemon.engine.tape_feeder import TapeFeeder
from daemon.progress import Progress
from daemon.supervision import Threads
from engine.divergence import Probe, probe
from engine.graphs.runner import GraphRunner
from engine.model.chat_format import PromptFormat
from engine.step import Executor
from flash.registry import Registry
from ingest.plane import WatchBars
from ingest.ring import Ring
from metrics.store import MetricStore
from regions.offload.copy_threads import CopyThreads
from regions.prefix_index import PrefixIndex
from scheduler.costs import LearningExecutor
from scheduler.inbox import Inbox
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.rebuild import Rebuilder
from scheduler.refresh import Comparison, Refresher
from scheduler.scheduler import Scheduler
from scheduler.turns import Turns
from scheduler.worker import Worker

log = logging.getLogger(__name__)


def load_engine(
    config: Config,
    progress: Mapping[str, Progress],
    ahead: tuple[Loaded, ...],
    ring: Ring,
    store: MetricStore,
    emit: Emit,
    symbols: Mapping[str, int],
    wrap: Callable[[Executor], Executor] | None = None,
    watch: WatchBars = lambda session, bars: None,
) -> EngineHost:
    """The configured engine, which goes on from its ``progress``. Raises SettingError.

    ``ahead``: see `build`; the others as in `wire_engine`. ``wrap`` gives the executor.
    """
    built = build(config, progress, ahead, tell=lambda doing: emit(protocol.EngineLoads(doing)))
    executor = None if wrap is None else wrap(built.engine)
    standby = config.recovery.standby
    return wire_engine(
        config, built, ring, store, emit, symbols=symbols, executor=executor, standby=standby, watch=watch
    )


def wire_engine(
    config: Config,
    built: Built,
    ring: Ring,
    store: MetricStore,
    emit: Emit,
    *,
    symbols: Mapping[str, int] | None = None,
    executor: Executor | None = None,
    credits: int = 0,
    standby: bool = False,
    watch: WatchBars = lambda session, bars: None,
) -> EngineHost:
    """The engine over one ring. Raises SettingError for an unusable standing question.

    ``store``: the first of its sources is the ring's. ``symbols``: their numbers in the ring, by default in
    order. ``executor`` replaces the first model's engine. ``credits``, ``standby``, ``watch``: see
    `TapeFeeder`.
    """
    parts = by_model(config)
    inbox = Inbox(time.monotonic_ns)
    observer = EngineObserver(store, *(each.engine.pool for each in built.all))
    schedulers = [
        scheduler_of(part, each, observer, None if number else executor, inbox)
        for number, (part, each) in enumerate(zip(parts, built.all, strict=True))
    ]
    names = {session.name for each in built.all for session in each.opened.sessions}
    opened = structs.replace(config, sessions=tuple(s for s in config.sessions if s.name in names))
    # Listeners on a commit are called in this order: record the version, begin its refresh, ask of it.
    feeder = TapeFeeder(
        opened,
        ring,
        store.blocks[0].labels["source"][0],
        list(zip(built.all, schedulers, strict=True)),
        numbered(opened.sessions) if symbols is None else symbols,
        store,
        emit=emit,
        credits=credits,
        standby=standby,
        watch=watch,
    )
    models: list[ServedModel] = []
    idle: list[Callable[[], float | None]] = []
    for number, (part, each, scheduler) in enumerate(zip(parts, built.all, schedulers, strict=True)):
        with keys_of_file(config, number):
            model, hooks = _served(part, each, scheduler, feeder, observer, store, emit)
        models.append(model)
        idle += hooks
    _warn_of_unmet_clauses(config, parts, models)
    threads = Threads(lambda name, why: emit(protocol.ThreadEnded(name, why)))
    _copy_aside(list(zip(built.all, schedulers, strict=True)), threads, emit)
    steps = schedulers[0] if len(schedulers) == 1 else Turns(schedulers, inbox, time.monotonic_ns, observer)
    spare = partial(capture_one, graphs_of(built))
    worker = Worker(steps, when_idle=partial(_soonest, *idle), make_thread=threads.make, spare_work=spare)
    gauges = _gauges(built, models, store)
    return EngineHost(_ready_event(opened, models), worker, feeder, models, gauges, threads, emit)


def _gauges(built: Built, models: Sequence[ServedModel], store: MetricStore) -> list[Callable[[], None]]:
    """What is read at each heartbeat: memory, capacity, and the age of snapshots."""
    memory = MemoryMetrics([(each.engine, each.tiers) for each in built.all], store)
    tapes = ChainMap(*(each.tapes for each in built.all))
    capacity = CapacityMetrics(
        store, [each.engine.pool for each in built.all], tapes, loads=partial(loads_of, models)
    )
    return [memory, capacity, *(each.snapshots.note for each in models)]


def _copy_aside(models: Sequence[tuple[Built, Scheduler]], threads: Threads, emit: Emit) -> None:
    """Have two threads copy the sessions of all models: one out of their pools, one back.

    A pass on a GPU leaves the cores to them.
    """
    engines = [built.engine for built, _ in models]
    pools = WeakSet(each.pool for each in engines)  # the threads outlast an engine of this process
    copies = CopyThreads(
        threads.make,
        [each.between_passes for each in engines if each.model.device.type == "cpu"],
        urgent=lambda: any(each.leaving for each in pools),
    )
    for built, scheduler in models:
        if built.tiers.residency is not None:
            built.tiers.residency.serve(
                copies,
                scheduler.run_between,
                copies.wait,
                lambda session: emit(protocol.WindowRebuilt(session)),
            )


def _warn_of_unmet_clauses(config: Config, parts: Sequence[Config], models: Sequence[ServedModel]) -> None:
    """Name the clauses of signals that no answer can meet. ``parts``: of each model, as by `by_model`."""
    unjudged: dict[tuple[str, str], str] = {}
    for part, each in zip(parts, models, strict=True):
        unjudged |= each.parts.confidence.unjudged(part, each.built.prefixes.by_number)
    for clause in unmet_clauses(config, unjudged):
        log.warning("%s", clause)


def _served(
    config: Config,
    built: Built,
    scheduler: Scheduler,
    feeder: TapeFeeder,
    observer: Observer,
    store: MetricStore,
    emit: Emit,
) -> tuple[ServedModel, Sequence[Callable[[], float | None]]]:
    """What serves the sessions of one model, and its idle hooks.

    Raises SettingError for an unusable standing question.
    """
    registry, declared = registry_of(config, built), config
    config, pool, limits = built.opened, built.engine.pool, limits_of(config)
    versions = Versions(scheduler, store, emit)
    confidence = _confidence(declared, built, scheduler, store, emit)
    derived = DerivedLimits.of(config)
    caches = PromptCaches(
        derived.kept_chats, derived.kept_texts, derived.kept_schemas, derived.kept_questions
    )
    prompts = PromptBuilder(built, limits, store, caches)
    requests = RequestRunner(config, built, scheduler, prompts, confidence, emit, feeder.rebuilding)
    ReadyEvents(built, scheduler, registry, requests, ready_tokens(config, built.prompt), emit)
    refresher = refresher_of(config, built, scheduler, registry, observer, feeder.refreshing)
    rollups = Rollups(config, built, scheduler, store)
    answers = StandingAnswers(config, built, scheduler, registry, confidence, store, emit, feeder)
    labels = RuleLabels(config, built, scheduler, registry, confidence)
    parts = SessionParts(
        scheduler, registry, versions, confidence, labels, requests, answers, refresher, rollups
    )
    snapshots = Snapshots(config, built, scheduler, feeder, parts, store)
    questions = StandingQuestions(registry, built, scheduler, limits, confidence, emit)
    sessions = EngineSessions(config, built, scheduler, feeder, questions, parts, snapshots, store, emit)
    rebuilder = Rebuilder(scheduler, time.monotonic_ns)
    maintenance = Maintenance(pool, built.tapes.values(), built.tiers, store)
    idle = answers.idle, labels.idle, refresher.idle, rebuilder.idle, maintenance, snapshots
    view = PromptView(built, scheduler, prompts, registry, emit)
    return ServedModel(questions, sessions, snapshots, parts, view), idle


def _confidence(
    config: Config, built: Built, scheduler: Scheduler, store: MetricStore, emit: Emit
) -> Confidence:
    """What judges answers. Raises SettingError for an error that cannot be kept."""
    found = Confidence(built.opened, built.prompt, built.calibration, store, emit, built.packs)
    for asked in questions_of(config):
        check_error(found, asked)
    scheduler.subscribe(found.on_commit)
    return found


def _ready_event(config: Config, models: Sequence[ServedModel]) -> protocol.EngineReady:
    """What the gateway learns of the engine when it is ready. ``config``: with all sessions that are open."""
    built = models[0].built.all
    restored = ChainMap(*(each.restored for each in built))
    resumed = {
        session.name: model.snapshots.resumed(session)
        for model in models
        for session in config.sessions
        if session.name in model.built.restored
    }
    return protocol.EngineReady(
        tuple(
            ModelEntry(
                each.names[0],
                each.loaded.revision,
                each.names[1:],
                sampling_defaults(each.opened.model, each.loaded.generation),
            )
            for each in built
        ),
        {name: positions for name, (positions, _) in resumed.items()},
        tuple({stream for _, streams in resumed.values() for stream in streams}),
        tuple(name for name, state in restored.items() if state.halted),
    )


def ready_tokens(config: Config, prompt: PromptFormat) -> Sequence[int]:
    """The ready position's tokens; none where no ask exits early."""
    return prompt.ready() if config.flash.early_exit else ()


def scheduler_of(
    config: Config,
    built: Built,
    observer: Observer,
    executor: Executor | None = None,
    inbox: Inbox | None = None,
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
        inbox=inbox,
    )


def refresher_of(
    config: Config,
    built: Built,
    scheduler: Scheduler,
    registry: Registry,
    observer: Observer,
    on_busy: Callable[[str, bool], None] = lambda session, is_busy: None,
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
        on_busy=on_busy,
    )


def graphs_of(built: Built) -> list[GraphRunner]:
    """Of the models whose passes are captured."""
    return [each.engine.graphs for each in built.all if each.engine.graphs is not None]


def capture_one(graphs: Sequence[GraphRunner]) -> bool:
    """Capture one bucket of passes, of any model; returns whether more wait."""
    for each in graphs:
        if each.waiting:
            each.capture_next()
            break
    return any(each.waiting for each in graphs)


def _soonest(*hooks: Callable[[], float | None]) -> float | None:
    """Call every idle hook; returns the seconds until the first is due again.

    Raises the first error behind the last hook: one model's defect is not another's.
    """
    waits, errors = list[float](), list[Exception]()
    for hook in hooks:
        try:
            wait = hook()
        except Exception as error:
            errors.append(error)
        else:
            waits += [] if wait is None else [wait]
    if errors:
        raise errors[0]
    return min(waits, default=None)
