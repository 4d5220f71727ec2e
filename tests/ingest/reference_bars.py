"""Bars in plain Python with dictionaries and sorting: the oracle of the numba builder."""

from dataclasses import dataclass, field

from ingest.bar_kernel import EMPTY, GAP, ROLLED, SKEWED, SPANS, SPREAD
from ingest.bars import BarPolicy

MOST = 2**63 - 1


@dataclass
class Tick:
    ts_event: int
    price: int
    size: int = 1
    skewed: bool = False
    gap_before: bool = False  # records were lost between the one before and this one
    says_gap: bool = False  # ... and the feed's numbering showed it, not the ring
    stream: int = 1
    offset: int = 0
    more: bool = False  # its message has more records


@dataclass
class ReferenceSession:
    """Ticks one by one; `closed` has (open time, o, h, l, c, v, ticks, flags) per bar.

    `ticks` are its ticks, and `reads` stream, first and last offset of those, in the order of their arrival;
    an empty bar has the `reads` of the bar before it. ``rolls``: when another contract follows.
    """

    policy: BarPolicy
    rolls: tuple[int, ...] = ()
    reads: list[tuple[tuple[int, int, int], ...]] = field(default_factory=list)
    ticks: list[list[Tick]] = field(default_factory=list)
    closed: list[tuple[int, ...]] = field(default_factory=list)
    open: dict[int, list[Tick]] = field(default_factory=dict)
    gaps: set[int] = field(default_factory=set)  # intervals whose bar has the gap flag
    newest: int | None = None
    floor: int | None = None  # intervals below are closed
    late: int = 0
    empty_run: int = 0
    pending_gap: bool = False

    def tick(self, tick: Tick) -> None:
        interval = self.policy.interval_ns
        if tick.gap_before:
            self.pending_gap = True
            self.gaps |= set(self.open)
        self.heartbeat(tick)
        index = tick.ts_event // interval
        if self.floor is not None and index < self.floor:
            self.late += 1
            return
        self.open.setdefault(index, []).append(tick)
        if self.pending_gap:
            self.gaps.add(index)
            self.pending_gap = False

    def heartbeat(self, tick: Tick) -> None:
        """Only the time and the offset of ``tick``."""
        if self.newest is None or tick.ts_event > self.newest:
            self.newest = tick.ts_event
            # Bars whose end the watermark has reached: (index + 1) * interval <= watermark.
            self.close_below((self.newest - self.policy.lateness_ns) // self.policy.interval_ns)

    def flush(self) -> None:
        if self.open:
            self.close_below(max(self.open) + 1)

    def close_below(self, limit: int) -> None:
        start = limit if self.floor is None else self.floor
        if not self.closed and self.open:
            start = min(self.open)
        for index in range(start, limit):
            if index in self.open:
                self.emit(index)
            elif (
                self.closed
                and self.policy.empty == "fill"
                and self.empty_run < self.policy.max_fill
                and not self.rolled(index)
            ):
                self.empty_run += 1
                last = self.closed[-1][4]
                flags = EMPTY | (GAP if self.pending_gap else 0) | (self.closed[-1][7] & SPREAD)
                at = index * self.policy.interval_ns
                self.closed.append((at, last, last, last, last, 0, 0, flags))
                self.reads.append(self.reads[-1])
                self.ticks.append([])
        self.floor = limit if self.floor is None else max(self.floor, limit)

    def rolled(self, index: int) -> bool:
        """Whether another contract begins behind the newest closed bar, up to this interval."""
        at = index * self.policy.interval_ns
        return bool(self.closed) and any(self.closed[-1][0] < roll <= at for roll in self.rolls)

    def emit(self, index: int) -> None:
        ticks = self.open.pop(index)
        ordered = sorted(ticks, key=lambda tick: tick.ts_event)  # stable: equal times keep arrival order
        prices = [tick.price for tick in ticks]
        volume = sum(tick.size for tick in ticks)
        flags = (SKEWED if any(tick.skewed for tick in ticks) else 0) | (GAP if index in self.gaps else 0)
        self.empty_run = 0
        self.ticks.append(ticks)
        own: dict[int, list[int]] = {}
        for tick in ticks:
            own.setdefault(tick.stream, []).append(tick.offset)
        before = self.reads[-1] if self.rolled(index) else ()
        flags |= ROLLED if before else 0
        kept = dict(list(own.items())[:SPANS])  # the others are not remembered
        flags |= SPREAD if len(own) > SPANS else 0
        for stream, _, last in before:
            flags |= SPREAD if stream not in kept and len(kept) == SPANS else 0
            if stream in kept or len(kept) < SPANS:
                kept.setdefault(stream, []).append(last)
        self.reads.append(tuple((stream, min(offsets), max(offsets)) for stream, offsets in kept.items()))
        self.closed.append(
            (
                index * self.policy.interval_ns,
                ordered[0].price,
                max(prices),
                min(prices),
                ordered[-1].price,
                volume,
                len(ticks),
                flags,
            )
        )
