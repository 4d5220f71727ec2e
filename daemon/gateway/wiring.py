"""Constructs the gateway's parts and connects them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from daemon import protocol
from daemon.api.auth import Access, tenant_labels
from daemon.api.events import Events
from daemon.api.http_api import api_routes
from daemon.api.http_requests import Requests
from daemon.api.http_server import HttpServer
from daemon.api.pushes import Pushes
from daemon.api.serving import generation_routes
from daemon.api.zmq import QueryServer
from daemon.config.schema import ALL, Config, QueryConfig
from daemon.cores import cores_of, usable
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.commits import Transactions
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.publisher import Publisher
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.connectors import make_routes, make_sources
from daemon.gateway.credentials import query_keys, tenants_of, tls_of
from daemon.gateway.engine_client import EngineClient, InprocEngine, OnEvent, ProcessEngine
from daemon.gateway.engine_manager import RESTART_AFTER_S, Connect, EngineManager
from daemon.gateway.engine_processes import ENGINE, SPARE_AFTER_S, EngineProcesses
from daemon.gateway.forwarding import Forwarding
from daemon.gateway.gateway import Gateway
from daemon.gateway.generations import Generations
from daemon.gateway.group_member import SessionHooks
from daemon.gateway.inputs import AllOffsets, Inputs
from daemon.gateway.label_requests import LabelRequests
from daemon.gateway.load_shedder import LoadShedder
from daemon.gateway.notify import Notifier
from daemon.gateway.pending import PendingCommands
from daemon.gateway.prompt_quota import PromptQuota
from daemon.gateway.prompts import Prompts
from daemon.gateway.queries import Queries
from daemon.gateway.question_requests import Questions
from daemon.gateway.reconfigure import LiveSessions
from daemon.gateway.record_decoder import SequenceAllocator
from daemon.gateway.source_runner import COMMIT_EVERY_S, SourceRunner
from daemon.gateway.standby import Standby
from daemon.gateway.stream_names import Streams
from daemon.gateway.visibility import Visibility
from daemon.gateway.watermarks import closed_until
from daemon.progress import Progress
from daemon.supervision import TaskEnded, Tasks
from engine.step import Executor
from feeds.connector import SettingError, SinkRoute
from feeds.kafka_transactions import KafkaTransactions
from feeds.market_data import DeadLetter
from feeds.push_source import PushedSource
from feeds.source import MemberSource, Source, StandbySource
from ingest.plane import WatchBars
from ingest.ring import Ring
from metrics.store import MetricStore

if TYPE_CHECKING:
    from daemon.api.mcp_http import McpHttp
    from daemon.engine.service import EngineHost

WrapEngine = Callable[[Executor], Executor]
"""Wraps an executor."""


def make_gateway(
    config: Config,
    *,
    source: Source | Sequence[Source] | None = None,
    routes: Sequence[SinkRoute] | None = None,
    notifier: Notifier | None = None,
    connect: Connect | None = None,
    executor: WrapEngine | None = None,
    watch: WatchBars = lambda session, bars: None,
    engine_command: Sequence[str] = ENGINE,
    commit_every_s: float = COMMIT_EVERY_S,
    restart_after_s: Sequence[float] = RESTART_AFTER_S,
    spare_after_s: float = SPARE_AFTER_S,
) -> Gateway:
    """A daemon of this configuration, on the running event loop; not started.

    ``source`` (one or several) and ``routes`` replace the configured ones (demo, replay); ``connect``,
    ``executor`` and ``engine_command`` replace the engine or a part of it (tests). ``watch`` sees the bars of
    an engine in this process. Raises SettingError.
    """
    cores = cores_of(config, usable())
    if source is None:
        sources = make_sources(config)
    else:
        sources = list(source) if isinstance(source, Sequence) else [source]
    routes = make_routes(config) if routes is None else list(routes)
    keys = query_keys(config.query)
    tenants = tenants_of(config, keys)
    labels = labels_of(config, sources, routes) | {"tenant": tenant_labels(tenants)}
    store = MetricStore.create(labels)
    access = Access(tenants, store)
    scheduling = config.scheduler
    store.set("foretick_scheduler_info", 1, policy=scheduling.policy, eviction=scheduling.eviction)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tasks = Tasks(partial(_task_ended, store, failed))

    def send(command: protocol.Command) -> None:
        gateway.send(command)

    processes = EngineProcesses(
        config,
        frozenset[int]() if cores is None else cores.engine,
        command=engine_command,
        spare=config.process.spare_engine,
        after_s=spare_after_s,
    )

    def connect_configured(ring: Ring, wake_fd: int) -> EngineClient:
        progress = stored_progress.start(sessions.states, again=entering.again)
        now = live.now()
        if config.process.mode == "two":
            return ProcessEngine(
                now,
                ring,
                store,
                progress,
                entering.number_anew(),
                wake_fd,
                tasks,
                processes,
                standby=config.recovery.standby,
            )
        symbols, reading = entering.number_anew(), labels["source"][0]
        return InprocEngine(
            partial(_make_host, now, ring, store, reading, progress, symbols, executor, watch)
        )

    dropping = any(each.kind == "dropping" for each in sources)
    stored_progress = ProgressStore(
        store,
        config.recovery.path if dropping and config.recovery.interval else None,
        lambda: _address(config.query, gateway.query),
    )
    standby = Standby(store, configured=config.recovery.standby)
    trackers = {each.name: OffsetTracker(stored_progress.describe) for each in sources}
    tracker = AllOffsets(trackers) if len(trackers) > 1 else next(iter(trackers.values()), OffsetTracker())
    sessions = Sessions(config, store)
    lateness = LoadShedder(store)
    pending = PendingCommands(send)
    questions = Questions(sessions, pending)
    labelling = LabelRequests(sessions, store, pending)
    lossless = not sources or any(each.kind == "pausing" for each in sources)
    others = [route for route in routes if not isinstance(route.sink, KafkaTransactions)]
    streams = Streams(several=isinstance(tracker, AllOffsets))
    publisher = Publisher(
        config,
        others,
        tracker,
        sessions,
        store,
        progress=stored_progress,
        lossless=lossless,
        standby=standby,
        streams=streams,
    )
    publisher.transactions = _transactions(routes, sources, tracker, store, publisher)
    if config.recovery.standby:
        _leave_transactions(routes, sources)
    order = SequenceAllocator()

    hooks = SessionHooks(
        reset=publisher.reset_session,
        resume=lambda names: live.resume(names),
        promote=lambda: live.promote(),
        assigned=lambda names: send(protocol.PartitionsAssigned(tuple(names))),
        revoked=lambda names: send(
            protocol.PartitionsRevoked(tuple(name for name in names if not entering.reads(name)))
        ),
    )

    def feed(source: Source, tracker: OffsetTracker) -> SourceRunner:
        name = source.name if len(sources) > 1 else ""

        def dead_letter(dead_letter: DeadLetter) -> None:
            held = tracker.hold((dead_letter.topic, dead_letter.partition), dead_letter.offset)
            publisher.dead_letter(msgspec.structs.replace(dead_letter, source=name), held)

        return SourceRunner(
            config,
            source,
            tracker,
            store,
            dead_letter,
            hooks,
            progress=stored_progress,
            send=send,
            standby=standby,
            streams=streams,
            order=order,
            clocks=sessions.clocks,
            transactions=publisher.transactions,
            commit_every_s=commit_every_s,
        )

    runners = [feed(each, trackers[each.name]) for each in sources]
    entering = Inputs(config, runners, tracker, order, standby, store, tasks)
    publisher.delivery.gate = entering.gate
    if publisher.transactions is not None:
        publisher.transactions.left = runners[0].group.on_revoked
        publisher.transactions.is_unread = runners[0].is_held
    room = PromptQuota(config.query.max_prompts, config.query.max_prompts_each)
    generations = Generations(
        sessions,
        pending,
        room,
        access,
        admit=lateness.admit,
        max_wait_s=config.query.max_wait / 1e9,
        counted=lambda outcome: store.inc("foretick_api_cache_total", cache="response", outcome=outcome),
        owner=entering.owner,
        limits=(scheduling.max_prompt_tokens, scheduling.max_new_tokens),
        since=int(time.time()),
        aliases=config.model.aliases,
    )
    prompts = Prompts(generations, pending, room, access, lateness.admit)
    engine = EngineManager(
        connect or connect_configured,
        config.source.ring_capacity,
        "pause" if lossless else "overwrite",
        restart_after_s,
        close=processes.close,
    )
    live = LiveSessions(config, sessions, questions, publisher, entering, stored_progress, store, pending)
    wait_s = config.query.max_wait / 1e9
    pushed = {each.name: each for each in sources if isinstance(each, PushedSource)}
    pushes = Pushes(
        pushed,
        store,
        config.source.max_message_bytes,
        lambda tenant, symbols: closed_until(live.config, sessions.states, tenant, symbols),
    )
    queries = Queries(sessions, generations, live, questions, labelling, prompts, wait_s, pushes)
    forwarding = Forwarding(
        queries.answer,
        entering.owner,
        wait_s,
        forwards=config.query.forward,
        keys=keys,
    )
    visibility = Visibility(forwarding.answer, access, lambda: sessions.states)
    events = Events(time.time_ns(), store, max_clients=config.http.max_listeners)
    publisher.listeners = events.publish
    requests = Requests(visibility.answer, sessions.observe)
    agents = _agents(requests, events) if config.http.mcp else None

    def close_streams() -> None:
        events.close()
        if agents is not None:
            agents.close()

    gateway = Gateway(
        cores=cores,
        store=store,
        tasks=tasks,
        failed=failed,
        notifier=notifier or Notifier(),
        routes=routes,
        engine=engine,
        input=entering,
        sessions=sessions,
        lateness=lateness,
        live=live,
        pending=pending,
        publisher=publisher,
        originals=order.originals,
        prompts=prompts,
        forwarding=forwarding,
        generations=generations,
        agents=None if agents is None else agents.run,
        http=HttpServer(
            lambda: gateway.metrics(),
            lambda: gateway.not_ready(),
            config.http.host,
            config.http.port,
            [
                *api_routes(requests, events, pushes, lambda client: gateway.health(client), access),
                *generation_routes(
                    generations, lambda outcome: store.inc("foretick_api_requests_total", outcome=outcome)
                ),
                *([] if agents is None else [agents.route]),
            ],
            closing=close_streams,
            max_listeners=config.http.max_listeners,
            access=access,
            tls=tls_of(config.http),
        ),
        query=QueryServer(
            visibility.answer,
            config.query.endpoint,
            events=events,
            store=store,
            access=access,
            keys=keys,
            observe=sessions.observe,
        )
        if config.query.endpoint
        else None,
        access=access,
        events=events,
    )
    return gateway


def _agents(requests: Requests, events: Events) -> McpHttp:
    """What serves MCP clients."""
    # imported here: the SDK takes a second to load, and is an extra
    from daemon.api.mcp_http import McpHttp

    return McpHttp(requests, events)


def _transactions(
    routes: Sequence[SinkRoute],
    sources: Sequence[Source],
    tracker: OffsetTracker | AllOffsets,
    store: MetricStore,
    publisher: Publisher,
) -> Transactions | None:
    """Of the route that commits offsets together with its messages. Raises SettingError."""
    for route in routes:
        if not isinstance(route.sink, KafkaTransactions):
            continue
        if not (isinstance(tracker, OffsetTracker) and sources and isinstance(sources[0], MemberSource)):
            key = f"sink.{route.sink.name}.delivery"
            raise SettingError(key, "exactly_once needs one Kafka source, and no other")
        sources[0].read_committed = route.sink.committed
        return Transactions(route, route.sink, sources[0], tracker, store, publisher.delivery)
    return None


def _leave_transactions(routes: Sequence[SinkRoute], sources: Sequence[object]) -> None:
    """Leave the transactional id to the daemon that answers, until the partitions come."""
    for route in routes:
        if isinstance(route.sink, KafkaTransactions) and isinstance(sources[0], StandbySource):
            route.sink.stand_by()
            sources[0].before_serving = route.sink.begin


def labels_of(config: Config, sources: Sequence[Source], routes: Sequence[SinkRoute]) -> dict[str, list[str]]:
    """The values of the metrics' open labels."""
    names = [source.name for source in sources]
    return {
        "session": [session.name for session in config.sessions],
        # of the ring first: all sources together
        "source": [ALL, *names] if len(names) > 1 else names or ["none"],
        "sink": [route.sink.name for route in routes],
        "policy": [config.scheduler.policy],
        "eviction": [config.scheduler.eviction],
    }


def _address(query: QueryConfig, server: QueryServer | None) -> str:
    """Where other daemons reach this one's query socket; empty where it is off, or bound to every address."""
    bound = "" if server is None else server.endpoint
    return query.advertise or ("" if "//0.0.0.0:" in bound or "//[::]:" in bound else bound)


def _task_ended(
    store: MetricStore, failed: asyncio.Future[None], name: str, why: str, restarted: bool
) -> None:
    """Count an ended task, and end the daemon unless the task was restarted."""
    store.inc("foretick_tasks_ended_total", outcome="restarted" if restarted else "failed")
    if not restarted and not failed.done():
        failed.set_exception(TaskEnded(name, why))


def _make_host(
    config: Config,
    ring: Ring,
    store: MetricStore,
    source: str,
    progress: dict[str, Progress],
    symbols: dict[str, int],
    wrap: WrapEngine | None,
    watch: WatchBars,
    emit: OnEvent,
) -> EngineHost:
    # imported here: with the engine in another process, the gateway does not load torch
    from daemon.engine.assembly import wire_engine
    from daemon.engine.build import build

    built = build(config, progress)
    executor = None if wrap is None else wrap(built.engine)
    return wire_engine(
        config,
        built,
        ring,
        store,
        emit,
        source=source,
        symbols=symbols,
        executor=executor,
        standby=config.recovery.standby,
        watch=watch,
    )
