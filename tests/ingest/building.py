"""Records, bars and planes for the tests of ingest."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ingest.bar_kernel import BAR, Bars
from ingest.bars import BarBuilder, BarPolicy, one_each, reads_of
from ingest.compact import Restart
from ingest.feed_rules import actions_code
from ingest.plane import BarConsumer, DataPlane, Made, SessionSpec, TapeRecord
from ingest.record import TRADE, Records, RecordWriter
from ingest.ring import Mode, Ring
from ingest.tokens import Tokeniser
from metrics.feed_faults import RULED
from metrics.store import MetricStore

SECOND = 1_000_000_000
COUNTED = actions_code({kind.name: "count" for kind in RULED})
"""All records are kept and none is flagged, whatever is wrong with it."""


def characters(text: str) -> list[int]:
    """The simplest tokenizer."""
    return list(map(ord, text))


TOKENISER = Tokeniser(characters)


def text_of(tokens: Iterable[int]) -> str:
    return "".join(map(chr, tokens))


def trades(items: Iterable[tuple[int, int]], symbol: int = 0) -> Records:
    """Records of (event time, price), each of size 1."""
    found = list(items)
    writer = RecordWriter(max(1, len(found)))
    for offset, (moment, price) in enumerate(found):
        writer.add(TRADE, symbol, moment, moment, (price, 1, 0, 0, 0), stream=1, offset=offset)
    return writer.records


def batches(records: Records, cuts: Iterable[int]) -> Iterator[Records]:
    """The records in the batches that some cuts make."""
    n = len(records)
    borders = sorted({0, n, *(cut % (n + 1) for cut in cuts)})
    return (records[a:b] for a, b in itertools.pairwise(borders))


def as_rows(bars: Bars, *without: str) -> list[tuple[object, ...]]:
    """Bars as plain values, ``without`` some of them."""
    names = [name for name in BAR.names or () if BAR[name].shape == () and name not in without]
    return list(zip(bars[names].tolist(), reads_of(bars), strict=True))


def builder_of(n: int, policy: BarPolicy) -> BarBuilder:
    """Of n sessions, each of a symbol of its own."""
    return BarBuilder(one_each(n, policy))


def built(builder: BarBuilder, records: Records, cuts: Iterable[int] = ()) -> Bars:
    """All bars of the records, the open ones closed at the end."""
    closed = [builder.update(batch, 0) for batch in batches(records, cuts)]
    return np.concatenate([np.zeros(0, BAR), *closed, builder.flush()])


@dataclass
class Consumer(BarConsumer):
    """Takes ``rooms`` bars of a session at a time, by default all; keeps what it gets."""

    rooms: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[str, TapeRecord | Restart]] = field(default_factory=list)
    """By session, in order."""
    calls: list[list[str]] = field(default_factory=list)
    """Sessions of each call of `submit`."""

    def room(self, session: str) -> int:
        return self.rooms.get(session, 10**6)

    def submit(self, made: Made) -> None:
        self.calls.append([name for name, _ in made])
        self.seen += [(name, record) for name, records in made for record in records]

    def restart(self, session: str, restart: Restart) -> None:
        self.seen.append((session, restart))

    def records(self, session: str) -> list[TapeRecord]:
        return [each for name, each in self.seen if name == session and isinstance(each, TapeRecord)]


@contextmanager
def plane_on(
    specs: Sequence[SessionSpec],
    consumer: BarConsumer,
    clock: Callable[[], int] = lambda: 7,
    *,
    mode: Mode = "pause",
    capacity: int = 1024,
    wake_fd: int = -1,
    skips: bool = False,
) -> Iterator[tuple[DataPlane, Ring, MetricStore]]:
    """A data plane of these sessions on a ring of its own."""
    metrics = MetricStore.local({"session": [spec.name for spec in specs], "source": ["ticks"]})
    ring = Ring.create(capacity, mode, wake_fd=wake_fd, clock=clock)
    try:
        plane = DataPlane(ring, "ticks", TOKENISER, specs, consumer, metrics, clock=clock, skips=skips)
        yield plane, ring, metrics
    finally:
        ring.close()
        ring.unlink()
