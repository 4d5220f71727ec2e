"""The exposition, parsed by prometheus_client's own parser; quantiles as Prometheus computes them."""

import math

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics.catalogue import BY_NAME, MEANS, METRICS
from metrics.export import bound_buckets, exposition
from metrics.histogram import lower_edge
from metrics.store import MetricStore

STAGE = "foretick_stage_seconds"


def histogram_quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    """Prometheus' `histogram_quantile` on cumulative (bound, count) pairs: linear within a bucket."""
    rank = q * buckets[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    raise AssertionError("the last bucket holds everything")


def test_every_catalogue_name_appears_even_without_series() -> None:
    families = {f.name: f for f in text_string_to_metric_families(exposition(MetricStore.local({})).decode())}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_values_come_out_under_their_labels() -> None:
    store = MetricStore.local({"session": ['odd "name"\n'], "source": ["k"], "sink": []})
    store.inc("foretick_bars_total", 12, session='odd "name"\n')
    store.set("foretick_staleness_seconds", 0.25, session='odd "name"\n', since="event")
    store.inc("foretick_records_malformed_total", 3, reason="json")
    store.set("foretick_gap_ratio", math.nan, session='odd "name"\n')
    store.inc("foretick_wait_seconds_total", 1_500_000_000, cls="pool", reason="behind flash")
    samples = {
        (s.name, tuple(s.labels.values())): s.value
        for f in text_string_to_metric_families(exposition(store).decode())
        for s in f.samples
    }
    assert samples["foretick_bars_total", ('odd "name"\n',)] == 12
    assert samples["foretick_staleness_seconds", ('odd "name"\n', "event")] == 0.25
    assert samples["foretick_records_malformed_total", ("json",)] == 3
    assert samples["foretick_records_malformed_total", ("price",)] == 0
    assert samples["foretick_wait_seconds_total", ("pool", "behind flash")] == 1.5
    assert ("foretick_gap_ratio", ('odd "name"\n',)) not in samples


def test_only_families_of_the_given_names_are_exported() -> None:
    store = MetricStore.local({"session": ["a"]})
    text = exposition(store, {}, {"foretick_bars_total", "foretick_engine_up", "no_metric"}).decode()
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert names == {"foretick_bars_total", "foretick_engine_up"}


@pytest.mark.parametrize(("stage", "within"), [("end_to_end", 0.2), ("forward", 1.5)])
@pytest.mark.parametrize("scale_ns", [3e6, 2e9])
def test_p99_as_prometheus_reads_it_is_as_near_as_promised(
    scale_ns: float, stage: str, within: float
) -> None:
    values = np.random.default_rng(1).lognormal(np.log(scale_ns), 0.7, 20_000).astype(int)
    store = MetricStore.local({})
    handle = store.histogram(STAGE, stage=stage)
    for value in values.tolist():
        handle.observe(value)
    family = next(f for f in text_string_to_metric_families(exposition(store).decode()) if f.name == STAGE)
    own = [s for s in family.samples if s.labels["stage"] == stage]
    buckets = [(float(s.labels["le"]), s.value) for s in own if s.name.endswith("_bucket")]
    bounds = [lower_edge(bucket) / 1e9 for bucket in bound_buckets(BY_NAME[STAGE], {"stage": stage})]
    assert [bound for bound, _ in buckets] == [*bounds, float("inf")]
    for bound, count in buckets:
        assert count == np.count_nonzero(values < round(bound * 1e9) if bound < 1e3 else values > -1)
    assert next(s.value for s in own if s.name.endswith("_count")) == len(values)
    assert next(s.value for s in own if s.name.endswith("_sum")) == pytest.approx(values.sum() / 1e9)
    for q in (0.5, 0.9, 0.99):
        assert histogram_quantile(q, buckets) * 1e9 == pytest.approx(np.quantile(values, q), rel=within)


def test_of_what_only_the_mean_is_read_sum_and_count_are_exported() -> None:
    store = MetricStore.local({"tenant": ["local"]})
    families = {f.name: f for f in text_string_to_metric_families(exposition(store).decode())}
    for name in MEANS:
        family = families.get(name, families[STAGE])
        own = [s for s in family.samples if s.labels.get("stage", family.name) == name]
        assert sorted(s.name.removeprefix(family.name) for s in own) == ["_bucket", "_count", "_sum"]
