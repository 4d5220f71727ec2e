"""Several sources read into one ring: each connects, fails, commits and ends by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from daemon.config.schema import SessionConfig
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.source_runner import INGEST, SourceRunner
from daemon.progress import Position
from daemon.supervision import Tasks, reason_of
from feeds.backoff import delay_s
from feeds.source import DataUnreadable
from ingest.ring import Ring
from metrics.store import MetricStore

log = logging.getLogger(__name__)


class AllOffsets:
    """The trackers of several sources as one; ranges name their source."""

    def __init__(self, by_source: Mapping[str, OffsetTracker]) -> None:
        self._by_source = by_source

    def ranges(self, session: str, first: int, last: int) -> list[tuple[str, int, int, int, str]]:
        """Fields of an `InputRange` for each source and stream of the outstanding records so numbered."""
        return [
            (*found, name)
            for name, tracker in self._by_source.items()
            for found in tracker.ranges(session, first, last)
        ]

    def acknowledge(self, session: str, low_watermark: int) -> None:
        """Mark ``session``'s records numbered below ``low_watermark`` as covered by acknowledged answers."""
        for tracker in self._by_source.values():
            tracker.acknowledge(session, low_watermark)

    def is_history(self, session: str, number: int) -> bool:
        """Whether all of a session's records up to running number ``number`` were answered for before."""
        trackers = self._by_source.values()
        waiting = any(tracker.waits(session, number) for tracker in trackers)
        return not waiting and any(tracker.is_history(session, number) for tracker in trackers)

    def forget(self, session: str) -> None:
        """No answer will cover what ``session`` read."""
        for tracker in self._by_source.values():
            tracker.forget(session)

    def outstanding(self) -> int:
        """Number of records that no acknowledged answer covers yet."""
        return sum(tracker.outstanding() for tracker in self._by_source.values())


class Inputs:
    """Several sources behind the interface of one. A source that fails is opened again, with backoff."""

    def __init__(
        self, feeds: Mapping[str, SourceRunner], tracker: AllOffsets, store: MetricStore, tasks: Tasks
    ) -> None:
        self.tracker = tracker
        self.exhausted = asyncio.Event()
        """All sources have ended (replayed files)."""
        self._feeds, self._store, self._tasks = feeds, store, tasks
        self._why: dict[str, str] = {}
        self._some_up = asyncio.Event()

    @property
    def feeds(self) -> list[SourceRunner]:
        """Of each source."""
        return list(self._feeds.values())

    async def recover(self) -> None:
        """Read where sessions stand in every source, before an engine goes on from there."""
        await asyncio.gather(*(feed.recover() for feed in self._feeds.values()))

    @property
    def again(self) -> bool:
        """Whether a source begins in a past that was asked for, and that is answered again."""
        return any(feed.again for feed in self._feeds.values())

    def engine_ready(self, positions: Mapping[str, Mapping[str, Position]]) -> None:
        """See `SourceRunner.engine_ready`."""
        for feed in self._feeds.values():
            feed.engine_ready(positions)

    async def start(self, ring: Ring) -> None:
        """Connect all, and read into ``ring``; returns when one is connected."""
        self._some_up.clear()
        for feed in self._feeds.values():
            if not feed.exhausted.is_set():
                feed.begin(ring)
        for name, feed in self._feeds.items():
            self._tasks.start(_task(name), partial(self._feed, name, feed, ring), returns=True)
        await self._some_up.wait()

    def number_anew(self) -> dict[str, int]:
        """Number the symbols for a new engine, whose ring is empty: for all sources alike."""
        return [feed.number_anew() for feed in self._feeds.values()][-1]

    def number(self, sessions: Sequence[SessionConfig]) -> dict[str, int]:
        """Give numbers to the symbols of ``sessions`` that have none."""
        return [feed.number(sessions) for feed in self._feeds.values()][-1]

    def change(self, sessions: Sequence[SessionConfig]) -> None:
        """Let these sessions read the records from now on."""
        for feed in self._feeds.values():
            feed.change(sessions)

    def missing(self) -> list[str]:
        """What is not connected, or cannot be read."""
        apart = [
            f"source {name} is not connected{f': {self._why[name]}' if name in self._why else ''}"
            for name, feed in self._feeds.items()
            if not (feed.connected or feed.exhausted.is_set())
        ]
        return apart + [
            f"source {name}: {why}" for name, feed in self._feeds.items() for why in feed.unread()
        ]

    def lags(self) -> dict[str, dict[str, float]]:
        """Gauges of Kafka sources' partitions, which are named after their source."""
        merged: dict[str, dict[str, float]] = {}
        for name, feed in self._feeds.items():
            for gauge, values in feed.lags().items():
                merged.setdefault(gauge, {}).update({f"{name}/{key}": each for key, each in values.items()})
        return merged

    def note(self) -> None:
        """Bring metrics of connections up to date."""
        for feed in self._feeds.values():
            feed.note()

    def gate(self, is_open: bool) -> None:
        """Open or close the gate of every source."""
        for feed in self._feeds.values():
            feed.gate(is_open)

    async def stop_reading(self) -> None:
        """Stop reading; nothing more goes into the ring."""
        await self._tasks.stop(*map(_task, self._feeds))

    async def commit_for_ever(self) -> None:
        """Commit every second, to each source by itself: one that hangs delays no other."""
        await asyncio.gather(*(feed.commit_for_ever() for feed in self._feeds.values()))

    def serves(self, session: str) -> bool:
        """See `SourceRunner.serves`."""
        return any(feed.serves(session) for feed in self._feeds.values())

    def reads(self, session: str) -> bool:
        """Whether any source reads the session here."""
        return any(feed.reads(session) for feed in self._feeds.values())

    def owner(self, session: str) -> str | None:
        """See `SourceRunner.owner`; a session is this daemon's if any of its sources reads it here."""
        if self.reads(session):
            return None
        return next(
            (found for feed in self._feeds.values() if (found := feed.owner(session)) is not None), None
        )

    async def close(self) -> None:
        """Commit once more and disconnect."""
        await asyncio.gather(*(feed.close() for feed in self._feeds.values()))

    async def hand_over(self, forget: Callable[[], None]) -> None:
        """Several sources have no standby."""

    async def reopen(self, ring: Ring, forget: Callable[[], None]) -> None:
        """Read all again from the committed offsets; ``forget`` as for one source."""
        feeds: Sequence[SourceRunner] = list(self._feeds.values())
        await asyncio.gather(*(feed.leave() for feed in feeds))
        forget()
        for feed in feeds:
            feed.tracker.clear()
            feed.order.restart()
        await self.start(ring)

    async def _feed(self, name: str, feed: SourceRunner, ring: Ring) -> None:
        attempt = 0
        while not feed.exhausted.is_set():
            try:
                await feed.connect(ring)
                self._why.pop(name, None)
                self._some_up.set()
                await feed.read()
            except DataUnreadable:
                raise
            except Exception as error:
                self._why[name] = reason_of(error)
                feed.connected = False
                self._store.inc("foretick_source_failures_total", source=name)
                log.exception("source %s failed; the others go on", name)
                with suppress(Exception):
                    assert feed.source is not None
                    await feed.source.stop()
                await asyncio.sleep(delay_s(attempt))
                attempt += 1
        if all(each.exhausted.is_set() for each in self._feeds.values()):
            self.exhausted.set()


def _task(source: str) -> str:
    return f"{INGEST} {source}"
