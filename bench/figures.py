"""Figures and their containers: every suite yields these; nothing else is saved or rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Setting = dict[str, str | int | float]
"""What a figure was measured under, by column name."""

Verdict = Literal["missed", "undecided", "met"]
FLOORS = "floors by"
"""The setting that says, above every table with a ratio to a floor, which rates its floors are made of."""


class Goal(msgspec.Struct, frozen=True, omit_defaults=True):
    """``limit``: of the ratio to the reference, or of our own value; `within`: a factor, either way."""

    limit: float
    side: Literal["at most", "at least", "within"] = "at most"
    of: Literal["ratio", "ours"] = "ratio"

    def excess(self, value: float) -> float:
        """How far a value is beyond the limit; the goal is met at 0 and below."""
        if self.side == "within":
            return max(value, 1 / value if value else inf) - self.limit
        return value - self.limit if self.side == "at most" else self.limit - value

    def judge(self, low: float, high: float) -> Verdict:
        """Judge a value known to lie from ``low`` to ``high``."""
        found = [self.excess(low), self.excess(high)]
        if self.side == "within" and low < 1 < high:
            found.append(1 - self.limit)
        return "met" if max(found) <= 0 else "missed" if min(found) > 0 else "undecided"


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Our value of ``name`` in ``unit``, next to the ``reference`` that ``against`` names.

    ``table``: the heading it appears under. ``n``: samples summarised; ``low`` and ``high``: the slowest and
    the fastest run or, for a mean over seeds, two standard errors to either side; ``samples``: the single
    runs or seeds if they are few.
    """

    name: str
    ours: float
    unit: str = ""
    table: str = ""
    setting: Setting = {}
    against: str = ""
    reference: float | tuple[float, float] | None = None
    paired: float | None = None
    """Median ratio of pairs taken one right after the other, if they were."""
    goal: Goal | None = None
    n: int = 1
    low: float | None = None
    high: float | None = None
    samples: list[float] = []

    @property
    def ratio(self) -> float | None:
        """Ours over the reference, of a range over its nearer end, 1 within; None if it is missing or 0."""
        if self.paired is not None:
            return self.paired
        reference = self.reference
        if isinstance(reference, tuple):
            reference = min(max(self.ours, reference[0]), reference[1])
        return self.ours / reference if reference else None

    @property
    def judged(self) -> float:
        """The value that the goal limits. Raises ValueError without a goal, or without the ratio it needs."""
        value = self.ours if self.goal and self.goal.of == "ours" else self.ratio
        if self.goal is None or value is None:
            raise ValueError(f"{self.name} has no goal, or lacks the ratio that its goal limits")
        return value

    @property
    def verdict(self) -> Verdict:
        """Undecided if the goal lies between ``low`` and ``high``. Raises ValueError without a goal."""
        value, ours = self.judged, self.goal is not None and self.goal.of == "ours"
        low, high = (self.low, self.high) if ours else (None, None)
        assert self.goal is not None  # else `judged` raised
        # of times the slowest is the highest
        return self.goal.judge(*sorted((value if low is None else low, value if high is None else high)))


class Machine(msgspec.Struct, frozen=True):
    """Processor, cores this process may use, versions of what is installed."""

    processor: str
    cores: int
    python: str
    packages: dict[str, str]


class Part(msgspec.Struct, frozen=True):
    """One part of a suite as it was run. ``load``: averages at the start and at the end, if known."""

    name: str
    title: str
    about: str
    command: str
    commit: str
    started: str
    seconds: float
    threads: int
    machine: Machine
    load: tuple[float, float] | None
    figures: list[Figure]

    @property
    def gpus(self) -> list[str]:
        """GPUs that its figures are of."""
        named = dict.fromkeys(str(figure.setting.get("device", "CPU")) for figure in self.figures)
        return [name for name in named if name != "CPU"]

    @property
    def ran_on(self) -> str:
        """What its times are of: the processor, with its GPUs."""
        return " with ".join((self.machine.processor, *self.gpus))


class Suite(msgspec.Struct, frozen=True):
    """The parts of one suite, each from the newest run that included it."""

    suite: str
    parts: list[Part] = []

    def with_part(self, part: Part, order: Sequence[str]) -> Suite:
        """The suite with ``part`` in place of an older one, in this order; other parts come last."""
        parts = [each for each in self.parts if each.name != part.name] + [part]
        return Suite(self.suite, sorted(parts, key=lambda each: [*order, each.name].index(each.name)))


def quantiles(samples: Sequence[float] | NDArray[np.float64], *at: float) -> list[float]:
    """Nearest rank: values that occurred. Raises ValueError without samples."""
    if not len(samples):
        raise ValueError("a quantile needs at least one sample")
    return [float(q) for q in np.quantile(np.asarray(samples, np.float64), at, method="inverted_cdf")]


def latency(
    name: str,
    ours_ns: Sequence[float],
    setting: Setting,
    table: str = "",
    against: str = "",
    reference_ns: Sequence[float] = (),
    *,
    at: Sequence[float] = (0.5, 0.99),
    paired: bool = True,
    goals: Mapping[float, Goal | None] | None = None,
) -> Iterator[Figure]:
    """A figure in ms for each quantile ``at``. Medians are compared by pairs if ``paired``.

    Raises ValueError without samples, or if the two sides of pairs differ in length.
    """
    ours = quantiles([ns / 1e6 for ns in ours_ns], *at)
    other = quantiles([ns / 1e6 for ns in reference_ns], *at) if len(reference_ns) else [None] * len(at)
    for q, value, reference in zip(at, ours, other, strict=True):
        of_pairs = paired and q == 0.5 and reference is not None
        ratio = median_ratio(ours_ns, reference_ns) if of_pairs else None
        title, goal = f"{name} slowest" if q == 1 else f"{name} P{100 * q:g}", (goals or {}).get(q)
        yield Figure(
            title, value, "ms", table, setting, against, reference, ratio, goal, len(ours_ns)
        )  # fmt: skip


def rate(name: str, things: float, seconds: Sequence[float], unit: str, table: str = "") -> Figure:
    """Items per second over repeated runs: the median, the slowest and the fastest run.

    One run is not enough: where two processes share few cores, the same code runs several times faster or
    slower, depending on their placement. Raises ValueError without runs.
    """
    if not seconds:
        raise ValueError("a rate needs at least one run")
    samples = [things / s for s in seconds]
    return Figure(
        name, float(np.median(samples)), unit, table, n=len(samples),
        low=min(samples), high=max(samples), samples=samples,
    )  # fmt: skip


def median_ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Median ratio of pairs taken one right after the other: lasting noise hits both of a pair."""
    return float(np.median([a / b for a, b in zip(ours, reference, strict=True)]))


def over_better(ours: Sequence[float], others: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Ours over the one of ``others`` that is best on all seeds together; equal indices are equal seeds.

    Geometric mean, and two standard errors below and above it (itself for one seed).
    """
    ratios = (np.log(np.divide(ours, other)) for other in others)
    logs = max(ratios, key=lambda each: float(each.mean()))
    middle = float(logs.mean())
    error = 2 * float(logs.std(ddof=1)) / len(logs) ** 0.5 if len(logs) > 1 else 0.0
    low, mean, high = np.exp((middle - error, middle, middle + error))
    return float(mean), float(low), float(high)
