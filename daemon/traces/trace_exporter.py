"""Sends traces to an OpenTelemetry collector, beside the daemon's work: what it does not take is dropped."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice

import httpx2

from daemon.traces.otlp import encode_traces
from daemon.traces.recent_traces import MakeTrace
from metrics.store import MetricStore

log = logging.getLogger(__name__)

BATCH = 512
"""Traces of one request."""
EVERY_S, TIMEOUT_S = 1.0, 10.0
"""How long traces are collected, and how long the collector may take."""
RETRY_AFTER_S = (1.0, 2.0, 4.0)
"""Pauses before a batch is sent again; then it is dropped."""
_AGAIN = frozenset((429, 502, 503, 504))
"""Statuses after which OTLP lets a client send again."""


@dataclass(frozen=True)
class Collector:
    """Where traces go, with which headers, and which attributes the daemon has there."""

    endpoint: str
    headers: Mapping[str, str]
    resource: Mapping[str, str]


class TraceExporter:
    """A queue of at most ``most`` traces, and the task that empties it.

    On the event loop, but for the encoding.
    """

    def __init__(self, collector: Collector, store: MetricStore, most: int = 4000) -> None:
        self._collector, self._store, self._most = collector, store, most
        self._waiting = deque[MakeTrace]()
        self._any = asyncio.Event()
        self._failing = False

    def put(self, make: MakeTrace) -> None:
        """Have a trace sent; one too many is dropped, and counted."""
        if len(self._waiting) >= self._most:
            self._count("dropped", 1)
            return
        self._waiting.append(make)
        self._any.set()

    async def run(self) -> None:
        """Send what comes, until it is cancelled."""
        async with self._client() as client:
            while True:
                await self._any.wait()
                if len(self._waiting) < BATCH:
                    await asyncio.sleep(EVERY_S)
                self._any.clear()
                while self._waiting:
                    await self._send(client, self._take(), RETRY_AFTER_S)

    async def flush(self, within_s: float) -> None:
        """Send what still waits, for at most so long; the rest is dropped, and counted."""
        try:
            async with asyncio.timeout(within_s), self._client() as client:
                while self._waiting:
                    await self._send(client, self._take(), ())
        except TimeoutError:
            left, where = len(self._waiting), self._collector.endpoint
            log.warning("%s did not take the last %d traces in time", where, left)
        except Exception:  # the daemon ends all the same
            log.exception("the last traces were not sent")
        self._count("dropped", len(self._waiting))
        self._waiting.clear()

    def _client(self) -> httpx2.AsyncClient:
        # without proxies and passwords of ~/.netrc: a collector is inside the network
        return httpx2.AsyncClient(headers=dict(self._collector.headers), timeout=TIMEOUT_S, trust_env=False)

    def _take(self) -> list[MakeTrace]:
        batch = list(islice(self._waiting, BATCH))
        for _ in batch:
            self._waiting.popleft()
        return batch

    async def _send(
        self, client: httpx2.AsyncClient, batch: list[MakeTrace], pauses_s: tuple[float, ...]
    ) -> None:
        """Nothing that goes wrong here is the daemon's affair. A batch that is interrupted waits again."""
        try:
            body = await asyncio.to_thread(self._encoded, batch)
            why = await self._post(client, body)
            for pause_s in pauses_s:
                if why is None or not why[1]:
                    break
                await asyncio.sleep(pause_s)
                why = await self._post(client, body)
        except asyncio.CancelledError:
            self._waiting.extendleft(reversed(batch))
            raise
        except Exception:
            log.exception("%d traces could not be sent", len(batch))
            self._count("failed", len(batch))
            return
        self._count("sent" if why is None else "failed", len(batch))
        if why is None and self._failing:
            log.info("%s takes traces again", self._collector.endpoint)
        elif why is not None and not self._failing:
            log.warning("%s takes no traces, which are dropped: %s", self._collector.endpoint, why[0])
        self._failing = why is not None

    async def _post(self, client: httpx2.AsyncClient, body: bytes) -> tuple[str, bool] | None:
        """None if it was taken; else why not, and whether it may be sent again."""
        try:
            headers = {"content-type": "application/json"}
            reply = await client.post(self._collector.endpoint, content=body, headers=headers)
        except httpx2.HTTPError as error:
            return str(error) or type(error).__name__, True
        if reply.status_code < HTTPStatus.MULTIPLE_CHOICES:
            return None
        return f"status {reply.status_code}", reply.status_code in _AGAIN

    def _encoded(self, batch: list[MakeTrace]) -> bytes:
        return encode_traces([make() for make in batch], self._collector.resource)

    def _count(self, outcome: str, traces: int) -> None:
        self._store.inc("foretick_traces_exported_total", traces, outcome=outcome)
