"""The counters of one source's intake, and those that follow the source's own totals."""

from collections.abc import Iterator, Mapping

from daemon.gateway.checkpoint.offsets import Stream
from feeds.source import SeekingSource, Source
from metrics.store import CounterHandle, MetricStore

SKIPPED, LOST = "foretick_records_skipped_total", "foretick_records_lost_upstream_total"


class IntakeCounters:
    """Counts the records of ``source``. Totals that it has already are of an earlier count."""

    def __init__(self, source: Source, store: MetricStore) -> None:
        name = source.name
        self.received = store.counter("foretick_records_total", source=name)
        self.passed = store.counter("foretick_records_passed_total", source=name)
        self.skewed = store.counter("foretick_clock_skew_records_total", source=name)
        self._source, self._store = source, store
        self._of_session: dict[str, CounterHandle] = {}
        self._seeking = source if isinstance(source, SeekingSource) else None
        self._lost = store.growth(LOST, source.lost, source=name)
        self._unknown_times = store.growth("foretick_source_times_unknown_total", self._timeless, source=name)
        self._breaks = store.growth("foretick_source_breaks_total", self._breaks_so_far, source=name)
        moved = self._seeking.moved if self._seeking else 0
        self._moved = store.growth("foretick_partitions_moved_total", moved, source=name)
        self._jumped = {metric: dict(totals) for metric, totals in self._jumps.items()}

    def passed_to(self, session: str) -> CounterHandle:
        """The counter of the records that are passed to a session."""
        found = self._of_session.get(session)
        if found is None:
            found = self._store.counter("foretick_session_records_total", session=session)
            self._of_session[session] = found
        return found

    def forget_sessions(self) -> None:
        """Sessions may have come back, with counters that begin again."""
        self._of_session.clear()

    def follow(self) -> bool:
        """Bring the counters up to the source's totals; returns whether it lost records, or may have."""
        self._unknown_times.update(self._timeless)
        if self._seeking is not None:
            self._moved.update(self._seeking.moved)
        broke = self._breaks.update(self._breaks_so_far)
        return bool(self._lost.update(self._source.lost) or broke)

    def jumps(self) -> Iterator[tuple[Stream, int, str]]:
        """Streams in which offsets were not read since the last call, how many, and the metric of those."""
        for metric, totals in self._jumps.items():
            for stream, total in totals.items():
                unread = total - self._jumped[metric].get(stream, 0)
                if unread:
                    self._jumped[metric][stream] = total
                    yield stream, unread, metric

    @property
    def _jumps(self) -> Mapping[str, Mapping[Stream, int]]:
        if self._seeking is None:
            return {}
        return {SKIPPED: self._seeking.skipped, LOST: self._seeking.deleted}

    @property
    def _breaks_so_far(self) -> int:
        return getattr(self._source, "breaks", 0)

    @property
    def _timeless(self) -> int:
        return getattr(self._source, "unknown_times", 0)
