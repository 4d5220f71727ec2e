"""Series of /metrics: sums by label, what grew between two scrapes, quantiles of histograms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""
_CUMULATIVE = ("_total", "_count", "_bucket")


@dataclass(frozen=True)
class Scrape:
    """Values by series."""

    values: Mapping[Series, float] = field(default_factory=dict)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of ``label``, over series of ``name`` that have ``labels``."""
        sums: dict[str, float] = defaultdict(float)
        for (found, pairs), value in self.values.items():
            if found == name and labels.items() <= pairs:
                sums[dict(pairs).get(label, "")] += value
        return dict(sums)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all series of ``name`` that have ``labels``; 0 where there is none."""
        return sum(self.by(name, "", **labels).values())

    def has_fallen(self, before: Scrape) -> bool:
        """Whether a counter is smaller than before: the daemon has started again meanwhile."""
        return any(
            value < before.values.get(series, 0.0)
            for series, value in self.values.items()
            if series[0].endswith(_CUMULATIVE)
        )


@dataclass(frozen=True)
class Growth:
    """How much counters grew in ``seconds``, which are 0 where there is one scrape only."""

    grown: Scrape = field(default_factory=Scrape)
    seconds: float = 0.0

    @classmethod
    def between(cls, old: Scrape, new: Scrape, seconds: float) -> Growth:
        """From ``old`` to ``new``; where one has fallen, all began at 0 again."""
        before = {} if new.has_fallen(old) else old.values
        grown = {series: value - before.get(series, 0.0) for series, value in new.values.items()}
        return cls(Scrape(grown), seconds)

    def rate(self, name: str, **labels: str) -> float | None:
        """The growth a second of all series of ``name`` that have ``labels``; None with one scrape only."""
        return self.grown.total(name, **labels) / self.seconds if self.seconds else None

    def mean(self, name: str, **labels: str) -> float | None:
        """Of a histogram's observations; None where there is none."""
        count = self.grown.total(f"{name}_count", **labels)
        return self.grown.total(f"{name}_sum", **labels) / count if count else None

    def quantile(self, q: float, name: str, **labels: str) -> float | None:
        """Of a histogram's observations, as Prometheus computes it: linear within a bucket.

        Above the last finite bound it is that bound. None without observations, or bounds.
        """
        buckets = self.grown.by(f"{name}_bucket", "le", **labels)
        counts = sorted((float(bound), count) for bound, count in buckets.items())
        if len(counts) < 2 or not counts[-1][1]:
            return None
        rank, lower, below = q * counts[-1][1], 0.0, 0.0
        bound, count = counts.pop(0)
        while count < rank:
            lower, below = bound, count
            bound, count = counts.pop(0)
        return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)


def parse(text: str, names: tuple[str, ...] = ("",)) -> Scrape:
    """The series whose names begin with one of ``names``, or all. Raises ValueError for other text."""
    # most lines of a large daemon are of other families, and parsing one takes 20 times as long as this test
    lines = [line for line in text.splitlines() if line.startswith(names)]
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    samples = [sample for family in families for sample in family.samples]
    return Scrape({(each.name, frozenset(each.labels.items())): each.value for each in samples})
