"""What is shown of a daemon, from two readings: sessions, and what grew meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from daemon.api.messages import SessionInfo
from daemon.top.scrape import Growth, Scrape

FAMILIES = (
    "foretick_stage_seconds",
    "foretick_records_total",
    "foretick_records_lost_upstream_total",
    "foretick_source_up",
    "foretick_ring_fill_ratio",
    "foretick_ring_dropped_total",
    "foretick_consumer_lag_records",
    "foretick_venue_delay_seconds",
    "foretick_waiting_requests",
    "foretick_live_requests",
    "foretick_batch_tokens_total",
    "foretick_tenant_engine_seconds_total",
    "foretick_preemptions_total",
    "foretick_pool_blocks",
    "foretick_host_blocks",
    "foretick_utilisation_ratio",
    "foretick_engine_up",
)
"""What is read of /metrics: nothing that has a series for each session."""


@dataclass(frozen=True)
class Reading:
    """One poll of a daemon. ``at``: when it was made, monotonic s; ``reasons``: why it is not ready.

    ``notice``: what the daemon did not show, such as metrics to one who is no operator.
    """

    at: float
    sessions: tuple[SessionInfo, ...]
    scrape: Scrape
    reasons: tuple[str, ...] = ()
    notice: str = ""


@dataclass(frozen=True)
class Row:
    """One session; ``versions_s``: data versions a second since the last poll, None for the first one."""

    info: SessionInfo
    versions_s: float | None = None

    @property
    def state(self) -> str:
        """In a word, the worst first."""
        info = self.info
        states = {
            info.owner_failure: bool(info.owner_failure),
            "halted": info.halted,
            "silent": info.silent,
            "late": info.bars_waiting > 0,
            "no data": info.data_version == 0,
        }
        return next((state for state, holds in states.items() if holds), "ok")

    @property
    def symbols(self) -> str:
        """All that it reads."""
        return " ".join(filter(None, (self.info.symbol, *self.info.more_symbols, self.info.model)))


@dataclass(frozen=True)
class Snapshot:
    """What a screen shows. ``now``: of the newest reading; ``growth``: since the one before.

    ``restarted``: counters have fallen meanwhile.
    """

    rows: tuple[Row, ...] = ()
    now: Scrape = field(default_factory=Scrape)
    growth: Growth = field(default_factory=Growth)
    restarted: bool = False


def snapshot(new: Reading, old: Reading | None = None) -> Snapshot:
    """What ``new`` shows; rates and latencies are of the time since ``old``, and unknown without it."""
    if old is None:
        return Snapshot(tuple(map(Row, new.sessions)), new.scrape)
    seconds = new.at - old.at
    versions = {each.name: each.data_version for each in old.sessions}
    rows = (
        Row(each, max(0, each.data_version - versions[each.name]) / seconds)
        if each.name in versions
        else Row(each)
        for each in new.sessions
    )
    growth = Growth.between(old.scrape, new.scrape, seconds)
    return Snapshot(tuple(rows), new.scrape, growth, new.scrape.has_fallen(old.scrape))


@dataclass(frozen=True)
class Column:
    """A column of the table of sessions: its title, what it is sorted by, and its text."""

    title: str
    key: Callable[[Row], str | float]
    text: Callable[[Row], str]


def _number(title: str, number: Callable[[SessionInfo], int]) -> Column:
    return Column(title, lambda row: number(row.info), lambda row: str(number(row.info)))


def _age(title: str, age_ns: Callable[[SessionInfo], int]) -> Column:
    def known(row: Row) -> float | None:
        return age_ns(row.info) / 1e9 if row.info.data_version else None

    return Column(
        title, lambda row: -1.0 if (age := known(row)) is None else age, lambda row: shown(known(row))
    )


COLUMNS = (
    Column("session", lambda row: row.info.name, lambda row: row.info.name),
    Column("symbol", lambda row: row.symbols, lambda row: row.symbols),
    Column("state", lambda row: row.state, lambda row: row.state),
    _age("age", lambda info: info.staleness_ns),
    _age("daemon age", lambda info: info.daemon_age_ns),
    _number("misses", lambda info: info.freshness_misses),
    _number("waiting", lambda info: info.bars_waiting),
    _number("version", lambda info: info.data_version),
    Column("versions/s", lambda row: row.versions_s or 0.0, lambda row: per_second(row.versions_s)),
    _number("bars", lambda info: info.live_records),
    _number("tokens", lambda info: info.live_tokens),
    _number("questions", lambda info: len(info.questions)),
)


def chosen(rows: Iterable[Row], words: str, column: int, reverse: bool) -> list[Row]:
    """Rows that have each of the ``words`` in their name, symbols or state, sorted by a column, then name."""
    wanted = words.lower().split()
    found = [
        row
        for row in rows
        if all(word in f"{row.info.name} {row.symbols} {row.state}".lower() for word in wanted)
    ]
    found.sort(key=lambda row: row.info.name)
    return sorted(found, key=COLUMNS[column].key, reverse=reverse)


def shown(seconds: float | None) -> str:
    """A time with its unit and three digits at most, such as 21.8 ms; "-" for None."""
    if seconds is None:
        return "-"
    units = ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (600.0, 1.0, "s"), (36_000.0, 60.0, "min"))
    size, unit = next(((size, unit) for below, size, unit in units if abs(seconds) < below), (3600.0, "h"))
    number = seconds / size
    return f"{number:.0f} {unit}" if abs(number) >= 99.95 else f"{number:.3g} {unit}"


def per_second(rate: float | None) -> str:
    """A rate; "-" for None."""
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
