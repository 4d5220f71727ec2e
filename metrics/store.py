"""The metric values: blocks of 8-byte words, shared by the gateway and the engine process.

The layout of a block is a pure function of the catalogue and the label values, so two processes with the same
configuration agree on it; a fingerprint in the first word detects other layouts. There are no locks: each
series has **one writer thread** and any number of readers, and aligned 8-byte stores are atomic.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import numpy as np

from metrics.catalogue import BY_NAME, METRICS, OPEN_LABELS, OTHER, Kind, Metric
from metrics.histogram import BUCKETS, WORDS, Words, quantile, record
from metrics.shm import SharedBlock

Labels = Mapping[str, Sequence[str]]
Key = tuple[str, tuple[str, ...]]
LATER = tuple(metric for metric in METRICS if "session" in metric.labels)
"""The metrics of a session that comes later."""


class UnknownSeriesError(KeyError):
    """No such metric, kind, label or label value in this store."""

    def __str__(self) -> str:
        return str(self.args[0])


class CounterHandle:
    """A resolved counter; `inc` costs about a tenth of a microsecond."""

    __slots__ = ("_index", "_words")

    def __init__(self, words: memoryview, index: int) -> None:
        self._words, self._index = words, index

    def inc(self, n: int = 1) -> None:
        """Add `n` (0 or more); in nanoseconds if the unit is seconds."""
        self._words[self._index] += n


class GrowthHandle:
    """A counter that follows a total kept elsewhere."""

    __slots__ = ("_counter", "_seen")

    def __init__(self, counter: CounterHandle, seen: int) -> None:
        self._counter, self._seen = counter, seen

    def update(self, total: int) -> int:
        """Add the total's growth since the last call; returns it."""
        grown, self._seen = total - self._seen, total
        self._counter.inc(grown)
        return grown


class GaugeHandle:
    """A resolved gauge."""

    __slots__ = ("_floats", "_index")

    def __init__(self, floats: memoryview[float], index: int) -> None:
        self._floats, self._index = floats, index

    def set(self, value: float) -> None:
        """Replace the value."""
        self._floats[self._index] = value


class HistogramHandle:
    """A resolved histogram. Kernels may call `metrics.histogram.record` themselves."""

    __slots__ = ("base", "words")

    def __init__(self, words: Words, base: int) -> None:
        self.words, self.base = words, base

    def observe(self, ns: int) -> None:
        """Count one latency in nanoseconds."""
        record(self.words, self.base, ns)


class Block(NamedTuple):
    """A shared block of a store, to attach it by: its name, and the label values that it is laid out for."""

    name: str
    labels: Labels


class _Part:
    """The words of one block. That of a ``later`` session has only the series that name it."""

    def __init__(
        self, labels: Labels, block: SharedBlock | None, *, fresh: bool, later: bool = False
    ) -> None:
        self.series, words, fingerprint = layout(labels, LATER if later else METRICS)
        self.labels, self.block = labels, block
        self.labelled: dict[str, list[tuple[str, ...]]] = {}
        """The label values of each metric's series, in layout order."""
        for name, values in self.series:
            self.labelled.setdefault(name, []).append(values)
        buffer = memoryview(bytearray(8 * words)) if block is None else block.buffer
        if buffer.nbytes != 8 * words or (not fresh and buffer.cast("Q")[0] != fingerprint):
            raise ValueError("the shared metric store has other label values or another catalogue")
        self.integers, self.floats = buffer.cast("Q"), buffer.cast("d")
        self.array = np.frombuffer(buffer, np.uint64)
        self.integers[0] = fingerprint

    @classmethod
    def attach(cls, block: Block, *, later: bool = False) -> _Part:
        shared = SharedBlock.attach(block.name)
        try:
            return cls(block.labels, shared, fresh=False, later=later)
        except ValueError:
            shared.close()
            raise


class MetricStore:
    """All series of the catalogue for given label values. Use `local`, `create` or `attach`.

    A session that comes later has its series in a block of its own, which goes with the session.
    """

    def __init__(self, part: _Part) -> None:
        self._first = part
        self._later: dict[str, _Part] = {}
        """Of sessions that came later, by name."""
        self._removed = set[str]()
        """Sessions of the first block that have gone, perhaps to come back later."""
        self._found: dict[tuple[object, ...], tuple[_Part, int]] = {}
        """What `_find` found; replaced when parts change, since a thread may still write to the old one."""

    @classmethod
    def local(cls, labels: Labels) -> MetricStore:
        """A store of this process only."""
        return cls(_Part(labels, None, fresh=True))

    @classmethod
    def create(cls, labels: Labels) -> MetricStore:
        """A store in shared memory, all zero. `labels` maps names of `OPEN_LABELS` to their values.

        A label left out has no values (its metrics have no series). Raises ValueError for a fixed or unknown
        label or a repeated value; OSError when shared memory is full.
        """
        return cls(_Part(labels, SharedBlock.create(8 * layout(labels)[1]), fresh=True))

    @classmethod
    def attach(cls, blocks: Sequence[Block]) -> MetricStore:
        """Attach another's store by its `blocks`. Raises FileNotFoundError, ValueError."""
        store = cls(_Part.attach(blocks[0]))
        for block in blocks[1:]:
            store.attach_session(block)
        return store

    @property
    def blocks(self) -> list[Block]:
        """What to `attach` this store by; without names for a local one."""
        parts = [self._first, *self._later.values()]
        return [Block("" if part.block is None else part.block.name, part.labels) for part in parts]

    def add_session(self, name: str) -> Block:
        """Make the series of another session, all zero; returns what the other process is to attach.

        Raises OSError when shared memory is full.
        """
        labels = {"session": [name]}
        size = 8 * layout(labels, LATER)[1]
        shared = None if self._first.block is None else SharedBlock.create(size, sweeps=False)
        part = _Part(labels, shared, fresh=True, later=True)
        self._add(part)
        return Block("" if shared is None else shared.name, labels)

    def has(self, label: str, value: str) -> bool:
        """Whether the store was made with this value of an open label."""
        return value in self._first.labels.get(label, ())

    def known(self, label: str, value: str) -> str:
        """The value of an open label, or `other` where the store was made without it."""
        return value if self.has(label, value) else OTHER

    def block_of(self, name: str) -> str:
        """The block of a session that came later; "" of any other."""
        part = self._later.get(name)
        return "" if part is None or part.block is None else part.block.name

    def attach_session(self, block: Block) -> None:
        """Attach the series of another session that the other process made, unless they are attached.

        Raises FileNotFoundError.
        """
        (name,) = block.labels["session"]
        if self.block_of(name) != block.name:
            self._add(_Part.attach(block, later=True))

    def remove_session(self, name: str) -> None:
        """Forget a session's series. Handles stay valid: what they write is no longer seen."""
        self._removed.add(name)
        before = self._later.pop(name, None)
        self._found = {}
        self._discard(before)

    def _add(self, part: _Part) -> None:
        (name,) = part.labels["session"]
        before, self._later[name] = self._later.get(name), part  # in one step, for readers on other threads
        self._found = {}
        self._discard(before)

    @staticmethod
    def _discard(part: _Part | None) -> None:
        if part is not None and part.block is not None:
            part.block.unlink()
            part.block.close()

    def counter(self, name: str, **labels: str) -> CounterHandle:
        """A handle for hot paths. The label `class` may be passed as `cls`. Raises UnknownSeriesError."""
        part, index = self._find("counter", name, labels)
        return CounterHandle(part.integers, index)

    def growth(self, name: str, seen: int = 0, /, **labels: str) -> GrowthHandle:
        """A counter that follows a total from its value ``seen``. Raises UnknownSeriesError."""
        return GrowthHandle(self.counter(name, **labels), seen)

    def gauge(self, name: str, **labels: str) -> GaugeHandle:
        """A handle for hot paths. Raises UnknownSeriesError."""
        part, index = self._find("gauge", name, labels)
        return GaugeHandle(part.floats, index)

    def histogram(self, name: str, **labels: str) -> HistogramHandle:
        """A handle for hot paths. Raises UnknownSeriesError."""
        part, index = self._find("histogram", name, labels)
        return HistogramHandle(part.array, index)

    def inc(self, name: str, n: int = 1, **labels: str) -> None:
        """Add `n` to a counter, in nanoseconds if its unit is seconds. Raises UnknownSeriesError."""
        self.counter(name, **labels).inc(n)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Raises UnknownSeriesError."""
        self.gauge(name, **labels).set(value)

    def observe(self, name: str, ns: int, **labels: str) -> None:
        """Count a latency of `ns` nanoseconds. Raises UnknownSeriesError."""
        self.histogram(name, **labels).observe(ns)

    def value(self, name: str, **labels: str) -> float:
        """The value of a counter or gauge in its unit. Raises UnknownSeriesError."""
        metric = BY_NAME.get(name, METRICS[0])
        if metric.kind == "gauge":
            part, index = self._find("gauge", name, labels)
            return float(part.floats[index])
        part, index = self._find("counter", name, labels)
        total = int(part.integers[index])
        return total / 1e9 if metric.in_seconds else total

    def count(self, name: str, **labels: str) -> int:
        """Number of latencies in a histogram. Raises UnknownSeriesError."""
        return int(self.buckets(name, **labels).sum())

    def total_seconds(self, name: str, **labels: str) -> float:
        """Sum of a histogram's latencies, each counted as at most 2^40 ns. Raises UnknownSeriesError."""
        part, index = self._find("histogram", name, labels)
        return float(part.integers[index]) / 1e9

    def quantile(self, name: str, q: float, **labels: str) -> float:
        """A histogram's q-quantile in seconds, within 1/32 from 1 us to 1000 s; NaN while it is empty."""
        return quantile(self.buckets(name, **labels), q) / 1e9

    def buckets(self, name: str, **labels: str) -> Words:
        """Bucket counts of a histogram, a copy, uint64 [512]."""
        part, index = self._find("histogram", name, labels)
        return part.array[index + 1 : index + 1 + BUCKETS].copy()

    def series(self, metric: Metric) -> Iterator[dict[str, str]]:
        """The label sets of a metric, in layout order."""
        for values in self._first.labelled.get(metric.name, ()):
            labels = dict(zip(metric.labels, values, strict=True))
            if self._part_of(labels) is self._first:
                yield labels
        for part in list(self._later.values()):
            for values in part.labelled.get(metric.name, ()):
                yield dict(zip(metric.labels, values, strict=True))

    def readings(self, metric: Metric) -> Iterator[tuple[dict[str, str], float]]:
        """The label sets of a counter or gauge with their values; a gauge that is NaN has none."""
        for labels in self.series(metric):
            if not isnan(value := self.value(metric.name, **labels)):
                yield labels, value

    def _part_of(self, labels: Mapping[str, str]) -> _Part | None:
        """Where series with these labels are; None if their session is gone."""
        name = labels.get("session", "")
        return self._later.get(name) or (None if name in self._removed else self._first)

    def close(self) -> None:
        """Detach this process; its handles stay valid. Idempotent."""
        for block in self._shared():
            block.close()

    def unlink(self) -> None:
        """Remove the shared blocks' names; their creator calls this once. Idempotent."""
        for block in self._shared():
            block.unlink()

    def _shared(self) -> list[SharedBlock]:
        parts = [self._first, *self._later.values()]
        return [part.block for part in parts if part.block is not None]

    def _find(self, kind: Kind, name: str, labels: Mapping[str, str]) -> tuple[_Part, int]:
        """Block and word of a series."""
        known, key = self._found, (kind, name, *labels.items())
        found = known.get(key)
        if found is None:
            part, index, is_named = self._look_up(kind, name, labels)
            found = part, index
            if is_named:  # other values have no end
                known[key] = found
        return found

    def _look_up(self, kind: Kind, name: str, labels: Mapping[str, str]) -> tuple[_Part, int, bool]:
        """Block and word of a series, and whether no value was counted as `other`."""
        metric = BY_NAME.get(name)
        if metric is None or metric.kind != kind:
            raise UnknownSeriesError(f"no {kind} named {name!r} in the catalogue")
        given = {"class" if label == "cls" else label: value for label, value in labels.items()}
        if set(given) != set(metric.labels):
            raise UnknownSeriesError(f"{name} takes the labels {metric.labels}, not {tuple(given)}")
        values = tuple(_known(metric, label, given[label]) for label in metric.labels)
        part = self._part_of(given)
        if part is None or (index := part.series.get((name, values))) is None:
            raise UnknownSeriesError(f"{name} has no series {given}")
        return part, index, values == tuple(given[label] for label in metric.labels)


def _known(metric: Metric, label: str, value: str) -> str:
    """`value`, or `other` if the fixed values include `other` but not `value`: a new reason must not fail."""
    values = metric.values.get(label, ())
    return OTHER if OTHER in values and value not in values else value


def layout(labels: Labels, metrics: Sequence[Metric] = METRICS) -> tuple[dict[Key, int], int, int]:
    """Word index of every series, number of words, and a fingerprint of both for word 0."""
    unknown = set(labels) - set(OPEN_LABELS)
    if unknown:
        raise ValueError(f"label values are given for {OPEN_LABELS}, not for {sorted(unknown)}")
    for label, values in labels.items():
        if len(set(values)) != len(values):
            raise ValueError(f"the values of label {label!r} repeat: {list(values)}")
    words_at: dict[Key, int] = {}
    words = 1
    for metric in metrics:
        choices = [tuple(metric.values.get(label) or labels.get(label, ())) for label in metric.labels]
        for values in itertools.product(*choices):
            words_at[metric.name, values] = words
            words += WORDS if metric.kind == "histogram" else 1
    return words_at, words, zlib.crc32(repr(words_at).encode()) + 1
