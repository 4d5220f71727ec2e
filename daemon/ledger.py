"""Where all records went: each is in a bar, or dropped for one reason that is counted.

What the gateway reads is passed to sessions, or refused, skipped, repeated or of no session. What it passes
to a session is in its bars, open ones included, or an event, which is in none, or late, a repeat, dropped
because of a fault, refused by the session, of another kind, or known from its snapshot. ``unaccounted`` is
the rest: records still on their way, or lost in the ring or with an engine that ended.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from metrics.catalogue import BY_NAME
from metrics.store import MetricStore


@dataclass(frozen=True, slots=True)
class RecordsRead:
    """Records of all sources. ``malformed``: by reason; ``empty``: messages without a payload, by kind.

    ``passed_over``: rows that hold no record, as their format says. ``unopened``: of symbols that a pattern
    matches and that have no session, by reason.
    """

    received: int
    passed: int
    unknown_symbol: int
    repeated: int
    heartbeats: int
    passed_over: int = 0
    malformed: Mapping[str, int] = field(default_factory=dict)
    empty: Mapping[str, int] = field(default_factory=dict)
    unopened: Mapping[str, int] = field(default_factory=dict)

    @property
    def unaccounted(self) -> int:
        """Those that are nowhere."""
        known = self.passed + self.unknown_symbol + self.repeated + self.heartbeats + self.passed_over
        counts = (self.malformed, self.empty, self.unopened)
        return self.received - known - sum(sum(each.values()) for each in counts)


@dataclass(frozen=True, slots=True)
class Kept:
    """Records that were passed to one session.

    ``late``: all of them, of which ``amended`` changed their bars after all. ``dropped``: with a fault.
    ``refused``: by reason, without late ones. ``ignored``: of another kind than its bars. ``in_snapshot``:
    read again. ``events``: that are in no bar because of what they are.
    """

    session: str
    records: int
    in_bars: int
    late: int
    amended: int
    repeated: int
    ignored: int
    in_snapshot: int
    refused: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0
    events: int = 0

    @property
    def unaccounted(self) -> int:
        """Those that are nowhere."""
        known = (
            self.events
            + self.in_bars
            + self.late
            + self.repeated
            + self.dropped
            + self.ignored
            + self.in_snapshot
        )
        return self.records - known - sum(self.refused.values())

    @property
    def late_share(self) -> float:
        """The part of its records, 0 to 1, that came too late and is in no bar."""
        return (self.late - self.amended) / self.records if self.records else 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of all records. ``lost``: overwritten in the ring, of any session."""

    read: RecordsRead
    sessions: tuple[Kept, ...]
    lost: int

    @property
    def unaccounted(self) -> dict[str, int]:
        """Records that are nowhere: those of a session by its name, those of the gateway by ""."""
        found = {"": self.read.unaccounted} | {each.session: each.unaccounted for each in self.sessions}
        return {name: records for name, records in found.items() if records}


def ledger(store: MetricStore) -> Ledger:
    """The ledger as the metrics have it now."""

    def total(name: str) -> int:
        return sum(count for _, count in _series(store, name))

    def by(name: str, label: str, **others: str) -> dict[str, int]:
        found = [(labels[label], n) for labels, n in _series(store, name) if others.items() <= labels.items()]
        return {value: n for value, n in found if n}

    read = RecordsRead(
        received=total("records"),
        passed=total("records_passed"),
        unknown_symbol=total("records_unknown_symbol"),
        repeated=total("records_repeated"),
        heartbeats=total("heartbeats"),
        passed_over=total("records_passed_over"),
        malformed=by("records_malformed", "reason"),
        empty=by("messages_empty", "kind"),
        unopened=by("records_unopened", "reason"),
    )
    sessions = []
    for labels, records in _series(store, "session_records"):
        name = labels["session"]

        def of(metric: str, session: str = name) -> int:
            return int(store.value(f"foretick_{metric}_total", session=session))

        refused = by("records_refused", "reason", session=name)
        refused.pop("late", None)
        sessions.append(
            Kept(
                name,
                records,
                in_bars=of("records_in_bars"),
                late=of("records_late"),
                amended=of("records_amended"),
                repeated=of("records_duplicate"),
                ignored=of("records_ignored"),
                in_snapshot=of("records_in_snapshot"),
                refused=refused,
                dropped=of("records_dropped"),
                events=sum(by("events", "kind", session=name).values()),
            )
        )
    return Ledger(read, tuple(sessions), total("ring_dropped"))


def _series(store: MetricStore, name: str) -> Iterator[tuple[dict[str, str], int]]:
    """The labels and the value of each series of a counter."""
    full = f"foretick_{name}_total"
    for labels in store.series(BY_NAME[full]):
        yield labels, int(store.value(full, **labels))
