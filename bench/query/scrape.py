"""What a scrape of `/metrics` costs, by sessions, beside prometheus_client's own registry of the series."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from bench.figures import Figure, Setting, latency
from bench.run import SuiteRun, Turns
from metrics import histogram
from metrics.catalogue import METRICS
from metrics.export import bound_buckets, exposition
from metrics.store import MetricStore

_AGAINST = "prometheus_client's registry"


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The text of `/metrics` from a store with this many sessions, as the gateway makes it, without HTTP. The
    reference is the text of a registry of prometheus_client that holds the same series in its own counters,
    gauges and histograms, all of a family with the same buckets; the two are made in turn.
    """
    sessions, repeats = run.sized(((3, 300, 2000), 15), ((3,), 3))
    for count in sessions:
        names = [f"session-{number}" for number in range(count)]
        store = MetricStore.local({"session": names, "source": ["kafka"], "sink": ["kafka"]})
        turns = Turns(partial(exposition, store), partial(generate_latest, registry_of(store)))
        for _ in range(repeats):
            text, other = turns()
        setting: Setting = {"sessions": count}
        yield from latency("scrape", turns.ns[0], setting, "", _AGAINST, turns.ns[1], at=(0.5,))
        yield Figure("series", len(series(text)), "", "", setting, _AGAINST, len(series(other)))
        yield Figure("text", len(text) / 1024, "KiB", setting=setting)


def series(text: bytes) -> list[bytes]:
    """Its lines with values."""
    return [line for line in text.splitlines() if not line.startswith(b"#")]


def registry_of(store: MetricStore) -> CollectorRegistry:
    """All series of ``store``, all zero, in prometheus_client's own metrics."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped
    registry = CollectorRegistry()
    for metric in METRICS:
        found = list(store.series(metric))
        if not found:
            continue
        made: Counter | Gauge | Histogram
        if metric.kind == "histogram":
            bounds = [histogram.lower_edge(bucket) / 1e9 for bucket in bound_buckets(metric, found[0])]
            bounds = [*(bounds or [1.0]), inf]
            made = Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=bounds)
        else:
            kind = Counter if metric.kind == "counter" else Gauge
            made = kind(metric.name, metric.help, metric.labels, registry=registry)
        for labels in found:
            if labels:
                made.labels(**labels)
    return registry
