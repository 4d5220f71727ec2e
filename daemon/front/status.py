"""What the front tells of the daemon: /metrics, and what /readyz waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from daemon.api.messages import Ask, Request
from daemon.front.delivery import Route
from daemon.front.engine_manager import EngineManager
from daemon.front.input import Input
from daemon.front.sessions import Sessions
from daemon.supervision import Tasks
from metrics.export import exposition
from metrics.store import MetricStore


class Status:
    """Of one daemon."""

    def __init__(
        self,
        store: MetricStore,
        engine: EngineManager,
        feed: Input,
        tasks: Tasks,
        sessions: Sessions,
        routes: Sequence[Route],
    ) -> None:
        self._store, self._engine, self._input, self._tasks = store, engine, feed, tasks
        self._sessions, self._routes = sessions, routes
        self._retries: Counter[str] = Counter()

    def metrics(self) -> bytes:
        """The exposition text."""
        for name, state in self._sessions.states.items():
            self._store.set("foretick_staleness_seconds", state.staleness_ns() / 1e9, session=name)
        for route in self._routes:
            name = route.sink.name
            retries = int(getattr(route.sink, "retries", 0)) - self._retries[name]
            self._retries[name] += retries
            self._store.inc("foretick_publish_retries_total", retries, sink=name)
        return exposition(self._store)

    def not_ready(self) -> list[str]:
        """What is missing, empty when the daemon is ready."""
        reasons = [] if self._engine.ready.is_set() else ["the engine is not up"]
        if not self._input.connected:
            reasons.append("the source is not connected")
        return reasons + [f"{name} ended: {why}" for name, why in self._tasks.ended.items()]

    def observe_query(self, request: Request, outcome: str, latency_ns: int) -> None:
        """A query was answered or refused."""
        if isinstance(request, Ask):
            self._store.observe("foretick_stage_seconds", latency_ns, stage="ask")
            if outcome != "ok":
                self._store.inc("foretick_asks_total", outcome=outcome)
