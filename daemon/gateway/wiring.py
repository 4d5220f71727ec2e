"""Constructs the gateway's parts and connects them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from daemon.api.auth import Access, tenant_labels
from daemon.api.events import Events
from daemon.api.generation import Generator
from daemon.api.http_api import api_routes
from daemon.api.http_requests import Requests
from daemon.api.http_server import HttpServer
from daemon.api.pushes import Pushes
from daemon.api.serving import generation_routes
from daemon.api.websocket import SocketLimits
from daemon.api.zmq import AnswerQuery, QueryServer
from daemon.config.derived_limits import DerivedLimits
from daemon.config.errors import ConfigError
from daemon.config.instruments import Instrument, instruments_of
from daemon.config.schema import ALL, Config, QualityConfig, TracesConfig
from daemon.config.standing import with_revisions
from daemon.config.symbols import Names
from daemon.cores import cores_of, usable
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.outbox import Outbox
from daemon.gateway.checkpoint.publisher import Publisher
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.connectors import make_routes, make_sources
from daemon.gateway.credentials import query_keys, tenants_of, tls_of
from daemon.gateway.engine_client import EngineClient, InprocEngine, OnEvent, ProcessEngine
from daemon.gateway.engine_manager import RESTART_AFTER_S, Connect, EngineManager, stuck_after_s
from daemon.gateway.engine_processes import EngineProcesses
from daemon.gateway.frequent_asks import FrequentAsks
from daemon.gateway.gateway import Gateway
from daemon.gateway.generations import Generations
from daemon.gateway.group_generator import GroupGenerator
from daemon.gateway.host_metrics import HostMetrics
from daemon.gateway.inputs import Inputs
from daemon.gateway.label_requests import LabelRequests
from daemon.gateway.load_shedder import LoadShedder
from daemon.gateway.notify import Notifier
from daemon.gateway.past_files import PastFiles
from daemon.gateway.past_requests import PastRequests
from daemon.gateway.patterns import Patterns, silent_ns
from daemon.gateway.peer_events import PeerEvents
from daemon.gateway.peers import Peers
from daemon.gateway.pending import PendingCommands
from daemon.gateway.prompt_quota import PromptQuota
from daemon.gateway.prompts import Prompts
from daemon.gateway.queries import Queries
from daemon.gateway.question_requests import Questions
from daemon.gateway.reconfigure import LiveSessions
from daemon.gateway.record_decoder import RingTurns
from daemon.gateway.services import Services
from daemon.gateway.signal_requests import SignalRequests
from daemon.gateway.source_runner import COMMIT_EVERY_S, SourceRunner
from daemon.gateway.standby import Standby
from daemon.gateway.status import Status
from daemon.gateway.stream_names import StreamNames
from daemon.gateway.watermarks import closed_until
from daemon.session_life import CLOSED
from daemon.supervision import TaskEnded, Tasks
from daemon.traces.recent_traces import RecentTraces
from daemon.traces.trace_context import Tracer
from engine.step import Executor
from feeds.connector import SettingError, SinkRoute, settings_in
from feeds.curve import Keys
from feeds.kafka_transactions import KafkaTransactions
from feeds.push_source import PushedSource
from feeds.quality.calendar import Calendar
from feeds.quality.gap_file import GapFile
from feeds.quality.silence import SilenceMonitor
from feeds.secret_files import read_headers
from feeds.source import LogSource, MemberSource, Source
from ingest.plane import WatchBars
from ingest.record import FLAG_REPLAY
from ingest.ring import Ring
from metrics.catalogue import OTHER
from metrics.store import MetricStore

if TYPE_CHECKING:
    from daemon.api.mcp_http import McpHttp
    from daemon.engine.service import EngineHost
    from daemon.traces.trace_exporter import TraceExporter

WrapEngine = Callable[[Executor], Executor]
"""Wraps an executor."""


@dataclass(frozen=True)
class _Base:
    """What all parts share."""

    config: Config
    sources: Sequence[Source]
    routes: Sequence[SinkRoute]
    keys: Keys | None
    access: Access
    labels: Mapping[str, list[str]]
    store: MetricStore
    tasks: Tasks
    failed: asyncio.Future[None]
    engine: EngineManager
    pending: PendingCommands
    traces: RecentTraces
    exporter: TraceExporter | None
    limits: DerivedLimits

    @property
    def wait_s(self) -> float:
        """The longest wait of a client, seconds."""
        return self.config.query.max_wait / 1e9


@dataclass(frozen=True)
class _DataWay:
    """From the sources to the published answers."""

    sessions: Sessions
    questions: Questions
    events: Events
    progress: ProgressStore
    publisher: Publisher
    order: RingTurns
    inputs: Inputs
    live: LiveSessions


@dataclass(frozen=True)
class _RequestWay:
    """From the clients' requests to their replies."""

    shedder: LoadShedder
    generations: Generations
    generator: Generator
    prompts: Prompts
    pushes: Pushes
    peers: Peers
    peer_events: PeerEvents | None
    answer: AnswerQuery


def make_gateway(
    config: Config,
    *,
    source: Source | Sequence[Source] | None = None,
    routes: Sequence[SinkRoute] | None = None,
    notifier: Notifier | None = None,
    connect: Connect | None = None,
    executor: WrapEngine | None = None,
    watch: WatchBars = lambda session, bars: None,
    processes: EngineProcesses | None = None,
    commit_every_s: float = COMMIT_EVERY_S,
    restart_after_s: Sequence[float] = RESTART_AFTER_S,
    serves: bool = True,
) -> Gateway:
    """A daemon of this configuration, on the running event loop; not started.

    ``source`` (one or several), ``routes``, ``connect``, ``executor`` and ``processes`` replace what is
    configured. ``watch`` sees an inproc engine's bars; ``serves``: ports are bound. Raises SettingError.
    """
    cores = cores_of(config, usable())
    processes = processes or EngineProcesses(config, cores)
    base = _base(config, source, routes, processes, restart_after_s)
    data = _data_way(base, commit_every_s)
    requests = _request_way(base, data)
    connect = connect or partial(_connect, base, data, processes, executor, watch)
    http, query, agents, status = _servers(base, data, requests, processes, serves=serves)
    return Gateway(
        cores=cores,
        store=base.store,
        tasks=base.tasks,
        failed=base.failed,
        notifier=notifier or Notifier(),
        routes=base.routes,
        engine=base.engine,
        connect=partial(_started, data.inputs, connect),
        input=data.inputs,
        status=status,
        sessions=data.sessions,
        shedder=requests.shedder,
        live=data.live,
        pending=base.pending,
        publisher=data.publisher,
        originals=data.order.originals,
        prompts=requests.prompts,
        generations=requests.generations,
        peers=requests.peers,
        peer_events=None if requests.peer_events is None else requests.peer_events.run,
        frequent=None if requests.generations.frequent is None else requests.generations.frequent.run,
        http=http,
        query=query,
        agents=None if agents is None else agents.run,
        past=_past_files(base.config, data),
        exporter=base.exporter,
        access=base.access,
        events=data.events,
    )


def _base(
    config: Config,
    source: Source | Sequence[Source] | None,
    routes: Sequence[SinkRoute] | None,
    processes: EngineProcesses,
    restart_after_s: Sequence[float],
) -> _Base:
    config = _with_revisions(config)
    if source is None:
        sources = make_sources(config)
    else:
        sources = list(source) if isinstance(source, Sequence) else [source]
    own = routes is None
    routes = make_routes(config) if routes is None else list(routes)
    keys = query_keys(config.query)
    tenants = tenants_of(config, keys)
    labels = labels_of(config, sources, routes) | {"tenant": tenant_labels(tenants)}
    store = MetricStore.create(labels)
    routes += _webhooks(config, store) if own else []
    scheduling = config.scheduler
    store.set("foretick_scheduler_info", 1, policy=scheduling.policy, eviction=scheduling.eviction)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    engine = EngineManager(
        config.source.ring_capacity,
        "pause" if _lossless(sources) else "overwrite",
        restart_after_s,
        close=processes.close,
        max_loading_s=config.process.max_loading / 1e9,
        stuck_s=stuck_after_s(config.query.max_wait),
        wake_fd=processes.wake_fd,
    )
    limits = DerivedLimits.of(config)
    exporter = _exporter(config.traces, store, limits.exported_traces)
    return _Base(
        config=config,
        sources=sources,
        routes=routes,
        keys=keys,
        access=Access(tenants, store, window_s=config.scheduler.share_window / 1e9),
        labels=labels,
        store=store,
        tasks=Tasks(partial(_task_ended, store, failed)),
        failed=failed,
        engine=engine,
        pending=PendingCommands(engine.connected),
        traces=_traces(config.traces, exporter),
        exporter=exporter,
        limits=limits,
    )


def _with_revisions(config: Config) -> Config:
    """Raises SettingError for a question pack that cannot be read."""
    try:
        return with_revisions(config)
    except ConfigError as error:
        raise SettingError(error.problems[0].key, error.problems[0].message) from error


def _webhooks(config: Config, store: MetricStore) -> list[SinkRoute]:
    """Raises SettingError."""
    if not config.webhooks:
        return []
    # imported here: its HTTP client is an extra
    from daemon.gateway.webhooks import webhook_routes

    return webhook_routes(config, store)


def _exporter(settings: TracesConfig, store: MetricStore, most: int) -> TraceExporter | None:
    """Where traces go, if anywhere, while at most ``most`` wait. Raises SettingError."""
    if not settings.endpoint:
        return None
    # imported here: its HTTP client is an extra
    from daemon.traces.trace_exporter import Collector, TraceExporter

    with settings_in("traces"):
        headers = read_headers("headers_file", settings.headers_file)
    resource = dict(each.split("=", 1) for each in settings.resource)
    named = {"service.name": settings.service_name, "service.instance.id": socket.gethostname()}
    return TraceExporter(Collector(settings.endpoint, headers, named | resource), store, most)


def _traces(settings: TracesConfig, exporter: TraceExporter | None) -> RecentTraces:
    if exporter is None:
        return RecentTraces(kept=settings.kept)
    return RecentTraces(Tracer(settings.sample_ratio), settings.kept, exporter.put)


def _data_way(base: _Base, commit_every_s: float) -> _DataWay:
    store, sources, pending = base.store, base.sources, base.pending
    patterns = Patterns(base.config.patterns, _instruments(base.config), Names(base.config.symbols))
    events, progress = _events_and_progress(base, patterns)
    config = _with_opened(base.config, patterns, progress, store)
    standby = Standby(store, configured=config.recovery.standby)
    several = len(sources) > 1
    trackers = [OffsetTracker(progress.describe, each.name if several else "") for each in sources]
    streams = StreamNames(several=several)
    sessions = Sessions(config, store, partial(_is_open, config, base.engine, standby))
    sink = _transactional(base)
    outbox = Outbox(
        base.routes,
        sessions.states,
        store,
        trackers[0].source_of if trackers else lambda session: None,
        lossless=_lossless(sources),
        backlog=base.limits.deliveries,
        listener=events.publish,
    )
    order = RingTurns(base.limits.kept_originals)
    publisher = Publisher(
        config,
        {source.name: each for source, each in zip(sources, trackers, strict=True)},
        sessions,
        store,
        progress=progress,
        outbox=outbox,
        standby=standby,
        streams=streams,
        traces=base.traces,
        links=order.links.of,
    )
    inputs = Inputs(config, order, standby, store, base.tasks)
    questions = Questions(sessions, pending)
    parts = sessions, questions, publisher, inputs, progress, store, pending, standby, patterns
    live = LiveSessions(config, *parts)
    for source, of_source in zip(sources, trackers, strict=True):
        silence = silence_monitor(config.quality)
        sessions.silences.append(silence)
        runner = SourceRunner(
            config,
            source,
            of_source,
            store,
            outbox,
            live,
            progress=progress,
            send=pending.send,
            standby=standby,
            streams=streams,
            order=order,
            clocks=sessions.clocks,
            silence=silence,
            gaps=_gaps_of(config, source, silence),
            sink=sink,
            commit_every_s=commit_every_s,
        )
        inputs.add(runner)
    return _DataWay(sessions, questions, events, progress, publisher, order, inputs, live)


def _is_open(config: Config, engine: EngineManager, standby: Standby, session: str) -> bool:
    """Whether the engine can be asked about a session; also while none is up, which is said then."""
    if not config.opens_by_partition or not engine.ready.is_set():
        return True
    return standby.lives.state(session) not in CLOSED


def _instruments(config: Config) -> Mapping[str, Instrument]:
    """Raises SettingError for a file that cannot be read."""
    try:
        return instruments_of(config)
    except ConfigError as error:
        raise SettingError(error.problems[0].key, error.problems[0].message) from error


def _with_opened(config: Config, patterns: Patterns, progress: ProgressStore, store: MetricStore) -> Config:
    """With the sessions that patterns have opened before, where a file tells of them."""
    found = []
    for name, (opened, stored) in progress.opened.items():
        silence = silent_ns(stored, time.time_ns())
        if (session := patterns.reopened(name, opened, silence)) is not None:
            store.add_session(name)
            patterns.add(session)
            found.append(session)
    return msgspec.structs.replace(config, sessions=(*config.sessions, *found))


def _events_and_progress(base: _Base, patterns: Patterns) -> tuple[Events, ProgressStore]:
    """With each session's progress it is stored which events were published."""
    config, store, sources = base.config, base.store, base.sources
    keeps_no_offsets = any(each.kind == "dropping" for each in sources)
    directory = config.recovery.path if keeps_no_offsets and config.recovery.interval else None
    in_group = config.query.forward and any(isinstance(each, LogSource) for each in sources)
    events = Events(
        time.time_ns(),
        store,
        max_clients=config.http.max_listeners,
        kept=config.http.kept_events,
        in_group=in_group,
        ended=lambda start: progress.newest_event(start),
    )
    progress = ProgressStore(store, directory, config.query.advertise, lambda: events.own, patterns.opened)
    return events, progress


def _frequent(config: Config, data: _DataWay, store: MetricStore) -> FrequentAsks | None:
    """What lets questions stand that are asked often, where that is on."""
    if not config.flash.standing_after:
        return None
    return FrequentAsks(config.flash, data.sessions, data.questions, store)


def _past_files(config: Config, data: _DataWay) -> PastFiles | None:
    """Where what sessions keep of their versions is stored, unless nothing is."""
    if not (config.recovery.interval and config.http.kept_versions):
        return None
    return PastFiles(config.recovery.path, data.sessions, data.inputs.serves)


def _others(data: _DataWay) -> frozenset[str]:
    """Addresses of the group's other daemons."""
    return data.inputs.peers() - {data.progress.address}


def _generations(base: _Base, data: _DataWay, quota: PromptQuota, shedder: LoadShedder) -> Generations:
    config, store = base.config, base.store
    return Generations(
        data.sessions,
        base.pending,
        quota,
        base.access,
        admit=shedder.admit,
        max_wait_s=base.wait_s,
        counted=lambda outcome: store.inc("foretick_api_cache_total", cache="response", outcome=outcome),
        model=lambda: base.engine.model,
        limits=(config.scheduler.max_prompt_tokens, config.scheduler.max_new_tokens),
        since=int(time.time()),
        traces=base.traces,
        frequent=_frequent(config, data, store),
        kept=base.limits.kept_responses,
        early_exit=config.flash.early_exit,
    )


def _request_way(base: _Base, data: _DataWay) -> _RequestWay:
    config, store, sessions, live = base.config, base.store, data.sessions, data.live
    shedder = LoadShedder(store)
    quota = PromptQuota(config.query.max_prompts, config.query.max_prompts_each)
    generations = _generations(base, data, quota, shedder)
    prompts = Prompts(
        generations,
        base.pending,
        quota,
        base.access,
        shedder.admit,
        max_inputs=base.limits.prompt_inputs,
        remembered=base.limits.ended_prompts,
    )
    pushes = Pushes(
        {each.name: each for each in base.sources if isinstance(each, PushedSource)},
        store,
        config.source.max_message_bytes,
        lambda tenant, symbols: closed_until(live.config, sessions.states, tenant, symbols),
        lambda: data.inputs.names.also(
            {symbol for each in live.config.sessions if each.signed for symbol in each.symbols}
        ),
        lambda name, moment: data.inputs.names.symbol(name, moment) or "",
    )
    labels = LabelRequests(sessions, store, base.pending)
    signals = SignalRequests(data.publisher.signals, sessions)
    past = PastRequests(sessions, store, config.http.kept_versions)
    services = Services(
        sessions, generations, live, data.questions, labels, prompts, pushes, base.traces, signals, past
    )
    peers = Peers(base.wait_s, base.keys, store)
    queries = Queries(
        services.begin,
        base.access,
        lambda: sessions.states,
        data.inputs.owner,
        peers,
        base.wait_s,
        address=lambda: data.progress.address,
        former=data.inputs.former,
        forwards=config.query.forward,
        tracer=base.traces.tracer,
    )
    following = PeerEvents(data.events, partial(_others, data), store, base.keys)
    return _RequestWay(
        shedder,
        generations,
        GroupGenerator(generations, queries, data.inputs.owner),
        prompts,
        pushes,
        peers,
        following if data.events.in_group else None,
        queries.answer,
    )


def _servers(
    base: _Base, data: _DataWay, way: _RequestWay, processes: EngineProcesses, *, serves: bool
) -> tuple[HttpServer, QueryServer | None, McpHttp | None, Status]:
    config, store, events, limits = base.config, base.store, data.events, base.limits
    host = HostMetrics(config, store)
    status = Status(
        store, base.tasks, base.routes, base.engine, data.sessions, data.inputs, data.live, host, processes
    )
    requests = Requests(way.answer, data.sessions.observe, config.query.max_requests)
    one = SocketLimits(config.http.max_messages, limits.socket_requests, limits.subscriptions)
    agents = None
    if config.http.mcp:
        # imported here: the SDK takes a second to load, and is an extra
        from daemon.api.mcp_http import McpHttp

        most = limits.agents, limits.agent_subscriptions
        agents = McpHttp(requests, events, *most)

    def count(outcome: str) -> None:
        store.inc("foretick_api_requests_total", outcome=outcome)

    def close_streams() -> None:
        events.close()
        if agents is not None:
            agents.close()

    http = HttpServer(
        status.metrics,
        status.not_ready,
        config.http.host,
        config.http.port if serves else None,
        [
            *api_routes(requests, events, way.pushes, status.health, base.access, socket=one),
            *generation_routes(way.generator, count),
            *([] if agents is None else [agents.route]),
        ],
        closing=close_streams,
        max_listeners=config.http.max_listeners,
        max_others=limits.connections,
        access=base.access,
        tracer=base.traces.tracer,
        tls=tls_of(config.http),
        is_stuck=status.is_stuck,
        allowed_origins=config.http.allowed_origins,
    )
    if not (config.query.endpoint and serves):
        return http, None, agents, status
    query = QueryServer(
        way.answer,
        config.query.endpoint,
        events=events,
        store=store,
        max_in_flight=config.query.max_requests,
        max_in_flight_each=config.query.max_requests_each,
        max_subscriptions=limits.subscriptions,
        access=base.access,
        keys=base.keys,
        observe=data.sessions.observe,
    )
    return http, query, agents, status


def _lossless(sources: Sequence[Source]) -> bool:
    """Whether a source can wait, or there is none."""
    return not sources or any(each.kind == "pausing" for each in sources)


def _transactional(base: _Base) -> KafkaTransactions | None:
    """The sink that commits offsets together with its messages. Raises SettingError."""
    for route in base.routes:
        if isinstance(route.sink, KafkaTransactions):
            if len(base.sources) == 1 and isinstance(base.sources[0], MemberSource):
                return route.sink
            key = f"sink.{route.sink.name}.delivery"
            raise SettingError(key, "exactly_once needs one Kafka source, and no other")
    return None


def _gaps_of(config: Config, source: Source, monitor: SilenceMonitor) -> GapFile | None:
    """The file of what is usual for a source's symbols; None where nothing is kept."""
    if not config.recovery.interval:
        return None
    return GapFile(config.recovery.path / f"{source.name}.gaps", monitor, time.monotonic_ns())


def silence_monitor(quality: QualityConfig) -> SilenceMonitor:
    """Of one source. What is replayed teaches it nothing: its times are not those of its arrival."""
    calendars = {
        each.venue: Calendar(each.zone, each.hours, each.holidays, each.half_days)
        for each in quality.calendars
    }
    factor, floor_ns = quality.silence_factor, quality.silence_floor
    return SilenceMonitor(factor, floor_ns, calendars, without=FLAG_REPLAY)


def labels_of(config: Config, sources: Sequence[Source], routes: Sequence[SinkRoute]) -> dict[str, list[str]]:
    """The values of the metrics' open labels."""
    names = [source.name for source in sources]
    return {
        "session": [session.name for session in config.sessions],
        # of the ring first: all sources together
        "source": [ALL, *names] if len(names) > 1 else names or ["none"],
        "sink": [route.sink.name for route in routes],
        "webhook": [each.name for each in config.webhooks],
        "question": [*dict.fromkeys([*(q.name for q in config.questions if q.engine_share), OTHER])],
        "policy": [config.scheduler.policy],
        "eviction": [config.scheduler.eviction],
    }


def _started(inputs: Inputs, connect: Connect, ring: Ring, wake_fd: int) -> EngineClient:
    """What ``connect`` gives, for an engine that starts."""
    inputs.engine_starts()
    return connect(ring, wake_fd)


def _connect(
    base: _Base,
    data: _DataWay,
    processes: EngineProcesses,
    executor: WrapEngine | None,
    watch: WatchBars,
    ring: Ring,
    wake_fd: int,
) -> EngineClient:
    """The configured engine, which goes on from what is stored."""
    progress = data.progress.start(data.sessions.states, again=data.inputs.again)
    config, symbols, store = data.live.now(), data.inputs.symbols, base.store
    if config.process.mode == "two":
        return ProcessEngine(config, ring, store, progress, symbols, wake_fd, base.tasks, processes)

    def load(emit: OnEvent) -> EngineHost:
        # imported here: with the engine in another process, the gateway does not load torch
        from daemon.engine.assembly import load_engine

        return load_engine(config, progress, (), ring, store, emit, symbols, executor, watch)

    return InprocEngine(load)


def _task_ended(
    store: MetricStore, failed: asyncio.Future[None], name: str, why: str, restarted: bool
) -> None:
    """Count an ended task, and end the daemon unless the task was restarted."""
    store.inc("foretick_tasks_ended_total", outcome="restarted" if restarted else "failed")
    if not restarted and not failed.done():
        failed.set_exception(TaskEnded(name, why))
