"""Exposition: a prometheus_client collector over a store.

Exported histograms have four bounds per octave from 4 us to 69 s, on edges of the store's own buckets: counts
are exact, and a quantile interpolated by Prometheus is within about a tenth on smooth latencies (a bound is
at most a quarter above the one before). A latency equal to a bound counts in the next bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from metrics import histogram
from metrics.catalogue import METRICS, Metric
from metrics.store import MetricStore

_STEP = histogram.SUBBUCKETS // 4
# buckets whose lower edge is a bound: 2^12 ns to 2^36 ns
BOUND_BUCKETS = np.arange(histogram.first_bucket(12), histogram.first_bucket(36) + 1, _STEP)
BOUNDS_SECONDS: tuple[float, ...] = tuple(histogram.lower_edge(int(b)) / 1e9 for b in BOUND_BUCKETS)


Gauges = Mapping[str, Mapping[str, float]]
"""Values of gauges with one label that the store does not hold, by name and the label's value."""


class StoreCollector(Collector):
    """Reads a store at each scrape; families without series still show their help and type."""

    def __init__(self, store: MetricStore, more: Gauges) -> None:
        self._store, self._more = store, more

    def collect(self) -> Iterator[Family]:
        """One family per catalogue entry, in catalogue order."""
        for metric in METRICS:
            yield self._family(metric)

    def _family(self, metric: Metric) -> Family:
        if metric.kind == "histogram":
            return self._histogram(metric)
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for labels in self._store.series(metric):
            family.add_metric(list(labels.values()), self._store.value(metric.name, **labels))
        for label, value in self._more.get(metric.name, {}).items():
            family.add_metric([label], value)
        return family

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels in self._store.series(metric):
            below = np.concatenate(([0], np.cumsum(self._store.buckets(metric.name, **labels))))
            buckets = [
                (repr(bound), float(below[bucket]))
                for bound, bucket in zip(BOUNDS_SECONDS, BOUND_BUCKETS, strict=True)
            ]
            buckets.append(("+Inf", float(below[-1])))
            total = self._store.total_seconds(metric.name, **labels)
            family.add_metric(list(labels.values()), buckets, sum_value=total)
        return family


def exposition(store: MetricStore, more: Gauges = MappingProxyType({})) -> bytes:
    """The store and ``more`` gauges in Prometheus' text format, UTF-8."""
    return generate_latest(StoreCollector(store, more))
