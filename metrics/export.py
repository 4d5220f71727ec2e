"""Exposition: a prometheus_client collector over a store.

The store's own histograms are fine; each exported one has the bounds that its readers need, on edges of the
store's buckets, so that counts are exact. A latency equal to a bound counts in the next bucket.

- Stages with an objective (`OBJECTIVES`): two bounds per octave from 1 ms to 17 s. A quantile that
  Prometheus interpolates is within a fifth on smooth latencies.
- What only the mean is read of (`MEANS`): none, so sum and count.
- Others: powers of four from 16 us to 17 s; a quantile names the bucket, which shows where time goes.
"""

from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from metrics import histogram
from metrics.catalogue import BY_NAME, MEANS, METRICS, OBJECTIVES, Metric
from metrics.store import MetricStore

_OCTAVE = histogram.SUBBUCKETS
# buckets whose lower edge is a bound, up to 2^34 ns
_LAST = histogram.first_bucket(34) + 1
_FINE = range(histogram.first_bucket(20), _LAST, _OCTAVE // 2)
_COARSE = range(histogram.first_bucket(14), _LAST, 2 * _OCTAVE)


def bound_buckets(metric: Metric, labels: Mapping[str, str]) -> range:
    """The store's buckets whose lower edges are the exported bounds of a histogram's series."""
    what = labels.get("stage", metric.name)
    return _FINE if what in OBJECTIVES else range(0) if what in MEANS else _COARSE


Gauges = Mapping[str, Mapping[str, float]]
"""Values of gauges with one label that the store does not hold, by name and the label's value."""


class StoreCollector(Collector):
    """Reads a store at each scrape; families without series still show their help and type.

    ``names``: of the families that are read.
    """

    def __init__(self, store: MetricStore, more: Gauges, names: Container[str] = BY_NAME) -> None:
        self._store, self._more, self._names = store, more, names

    def collect(self) -> Iterator[Family]:
        """One family per catalogue entry, in catalogue order."""
        for metric in METRICS:
            if metric.name in self._names:
                yield self._family(metric)

    def _family(self, metric: Metric) -> Family:
        if metric.kind == "histogram":
            return self._histogram(metric)
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in self._store.readings(metric):
            family.add_metric(list(labels.values()), value)
        for label, value in self._more.get(metric.name, {}).items():
            family.add_metric([label], value)
        return family

    def _histogram(self, metric: Metric) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels in self._store.series(metric):
            below = np.concatenate(([0], np.cumsum(self._store.buckets(metric.name, **labels))))
            buckets = [
                (repr(histogram.lower_edge(bucket) / 1e9), float(below[bucket]))
                for bucket in bound_buckets(metric, labels)
            ]
            buckets.append(("+Inf", float(below[-1])))
            total = self._store.total_seconds(metric.name, **labels)
            family.add_metric(list(labels.values()), buckets, sum_value=total)
        return family


def exposition(
    store: MetricStore, more: Gauges = MappingProxyType({}), names: Container[str] = BY_NAME
) -> bytes:
    """The store and ``more`` gauges in Prometheus' text format, UTF-8; only families of these ``names``."""
    return generate_latest(StoreCollector(store, more, names))
