"""How the daemon is doing: its health, what is missing, and its metrics."""

from collections.abc import Collection, Sequence

from daemon.api.health import Health, health_of
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.engine_manager import EngineManager
from daemon.gateway.engine_processes import EngineProcesses
from daemon.gateway.host_metrics import FREE, HostMetrics
from daemon.gateway.inputs import Inputs
from daemon.gateway.queries import visible
from daemon.gateway.reconfigure import LiveSessions
from daemon.supervision import Tasks
from daemon.tenants import Client
from feeds.connector import SinkRoute
from metrics.catalogue import BY_NAME
from metrics.export import exposition
from metrics.store import MetricStore

_AGES = {"foretick_staleness_seconds", "foretick_venue_silence_seconds"}
"""Gauges that every session sets when they are read."""
_OF_SINKS = {
    "retries": "foretick_publish_retries_total",
    "handshakes_failed": "foretick_sink_handshakes_failed_total",
}
"""What some sinks count. Webhooks count for themselves, under their own label."""


class Status:
    """Of a gateway with these parts."""

    def __init__(
        self,
        store: MetricStore,
        tasks: Tasks,
        routes: Sequence[SinkRoute],
        engine: EngineManager,
        sessions: Sessions,
        inputs: Inputs,
        live: LiveSessions,
        host: HostMetrics,
        processes: EngineProcesses,
    ) -> None:
        self._live, self._host, self._processes = live, host, processes
        self._store, self._tasks, self._engine = store, tasks, engine
        self._sessions, self._inputs = sessions, inputs
        self._sinks = [
            (route.sink, counted, store.growth(name, sink=route.sink.name))
            for route in routes
            for counted, name in _OF_SINKS.items()
            if hasattr(route.sink, counted)
        ]

    @property
    def model(self) -> str:
        """The name of the newest engine's model; empty before there is one."""
        return "" if self._engine.model is None else self._engine.model.models[0].name

    def metrics(self, names: Collection[str] = ()) -> bytes:
        """The exposition text of the families of these names; by default of all."""
        chosen = frozenset(names) or BY_NAME.keys()
        for name, state in self._sessions.states.items() if _AGES & chosen else ():
            for since, age in state.ages(state.times)._asdict().items():
                self._store.set("foretick_staleness_seconds", age / 1e9, session=name, since=since)
            self._store.set("foretick_venue_silence_seconds", state.last_seen_age_ns / 1e9, session=name)
        for sink, counted, growth in self._sinks:
            growth.update(getattr(sink, counted))
        self._inputs.note()
        self._store.set("foretick_kept_versions_bytes", self._sessions.past_bytes())
        if FREE in chosen:
            self._host.note()
        return exposition(self._store, self._inputs.gauges(), chosen)

    def health(self, client: Client) -> Health:
        """What is missing, and what is silent or late of what the client sees."""
        listed = visible(self._sessions.listed(0).sessions, client.tenant)
        return health_of(self.not_ready(), listed, self.model, spare=self._processes.has_spare)

    def is_stuck(self) -> bool:
        """Whether a forward pass does not end: only a restart of the daemon helps."""
        return self._engine.liveness.is_stuck()

    def not_ready(self) -> list[str]:
        """What is missing; empty when the daemon is ready."""
        reasons = [] if self._engine.ready.is_set() else ["the engine is not up"]
        reasons += self._inputs.missing()
        reasons += [f"session {name} is not open: {why}" for name, why in self._live.unopened.items()]
        return reasons + [f"{name} ended: {why}" for name, why in self._tasks.ended.items()]
