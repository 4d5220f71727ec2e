"""The store: values, layout, and two processes on one block."""

import fcntl
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import histogram, shm
from metrics.catalogue import BY_NAME, METRICS, OPEN_LABELS, STAGES
from metrics.store import Block, MetricStore, UnknownSeriesError

LABELS = {
    "partition": ["t/0"],
    "venue": ["V"],
    "session": ["btc", "spx"],
    "source": ["kafka"],
    "sink": ["kafka", "zmq"],
    "policy": ["fcfs"],
    "eviction": ["cost"],
    "webhook": ["desk"],
    "question": ["trend", "other"],
    "tenant": ["local", "desk"],
}
STAGE = "foretick_stage_seconds"


@pytest.fixture
def shared() -> Iterator[MetricStore]:
    store = MetricStore.create(LABELS)
    yield store
    store.close()
    store.unlink()


def test_catalogue_is_well_formed() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("foretick_")
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert set(metric.values) <= set(metric.labels)
        assert set(metric.labels) - set(metric.values) <= set(OPEN_LABELS)


def test_series_do_not_touch_each_other() -> None:
    """Every series gets its own value; all are still there at the end."""
    store = MetricStore.local(LABELS)
    expected: dict[tuple[str, tuple[str, ...]], int] = {}
    for metric in METRICS:
        for labels in store.series(metric):
            n = len(expected) + 1
            expected[metric.name, tuple(labels.values())] = n
            if metric.kind == "counter":
                store.inc(metric.name, n, **labels)
            elif metric.kind == "gauge":
                store.set(metric.name, n, **labels)
            else:
                store.observe(metric.name, n * 1000, **labels)
    for (name, values), n in expected.items():
        labels = dict(zip(BY_NAME[name].labels, values, strict=True))
        if BY_NAME[name].kind == "histogram":
            assert store.count(name, **labels) == 1
            assert store.total_seconds(name, **labels) == pytest.approx(n * 1e-6)
        else:
            scale = 1e9 if BY_NAME[name].kind == "counter" and BY_NAME[name].in_seconds else 1
            assert store.value(name, **labels) == n / scale
    sizes = (math.prod(len(m.values.get(label) or LABELS[label]) for label in m.labels) for m in METRICS)
    assert len(expected) == sum(sizes)


def test_a_reason_not_in_the_list_counts_as_other() -> None:
    store = MetricStore.local({})
    store.inc("foretick_batch_tokens_total", 7, cls="flash")  # as "class" may be spelt
    assert store.value("foretick_batch_tokens_total", **{"class": "flash"}) == 7
    store.inc("foretick_records_malformed_total", 2, reason="invented yesterday")
    store.inc("foretick_records_malformed_total", reason="other")
    assert store.value("foretick_records_malformed_total", reason="other") == 3
    with pytest.raises(UnknownSeriesError, match="invented"):
        store.inc("foretick_oom_total", outcome="invented")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("foretick_nonsense_total", {}),
        ("foretick_bars_total", {}),
        ("foretick_bars_total", {"session": "nobody"}),
        ("foretick_bars_total", {"session": "btc", "source": "kafka"}),
        ("foretick_engine_up", {}),
    ],
)
def test_unknown_series_is_refused_by_name(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(UnknownSeriesError, match=name):
        MetricStore.local(LABELS).inc(name, **labels)


@pytest.mark.parametrize("labels", [{"stage": ["x"]}, {"session": ["a", "a"]}])
def test_bad_label_values_are_refused(labels: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match=next(iter(labels))):
        MetricStore.local(labels)


@given(
    values=st.lists(st.integers(1_000, 10**12), min_size=1, max_size=200),
    q=st.floats(0, 1),
)
@settings(max_examples=100)
def test_quantile_is_within_a_32nd_of_numpy(values: list[int], q: float) -> None:
    store = MetricStore.local({})
    handle = store.histogram(STAGE, stage="forward")
    for value in values:
        handle.observe(value)
    exact = float(np.quantile(np.array(values, np.float64), q, method="inverted_cdf"))
    assert store.quantile(STAGE, q, stage="forward") * 1e9 == pytest.approx(exact, rel=1 / 32)
    assert store.count(STAGE, stage="forward") == len(values)
    assert store.total_seconds(STAGE, stage="forward") == pytest.approx(sum(values) / 1e9)


@given(st.integers(-(10**6), 2**63 - 1))
@settings(max_examples=300)
def test_every_latency_lands_between_its_edges(ns: int) -> None:
    bucket = histogram.bucket_of(ns)
    clamped = min(max(ns, 0), histogram.LIMIT_NS - 1)
    assert histogram.lower_edge(bucket) <= clamped < histogram.lower_edge(bucket + 1)


def test_edges_are_where_the_kernel_changes_bucket() -> None:
    for bucket in range(1, histogram.BUCKETS):
        edge = histogram.lower_edge(bucket)
        assert (histogram.bucket_of(edge - 1), histogram.bucket_of(edge)) == (bucket - 1, bucket)
    assert histogram.first_bucket(36) == histogram.bucket_of(1 << 36)


def test_empty_histogram_has_no_quantile() -> None:
    store = MetricStore.local({})
    assert math.isnan(store.quantile(STAGE, 0.5, stage="ask_ready"))
    with pytest.raises(ValueError, match="0 and 1"):
        store.quantile(STAGE, 1.5, stage="ask_ready")


def _engine(name: str) -> None:
    store = MetricStore.attach([Block(name, LABELS)])
    bars = store.counter("foretick_bars_total", session="spx")
    for _ in range(1000):
        bars.inc(3)
        store.observe(STAGE, 5_000_000, stage="forward")
    store.set("foretick_data_version", 41.0, session="spx")
    store.close()


def test_two_processes_share_a_store(shared: MetricStore) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_engine, args=(shared.blocks[0].name,))
    process.start()
    shared.inc("foretick_records_total", 5, source="kafka")
    process.join(60)
    assert process.exitcode == 0
    assert shared.value("foretick_bars_total", session="spx") == 3000
    assert shared.value("foretick_bars_total", session="btc") == 0
    assert shared.value("foretick_data_version", session="spx") == 41.0
    assert shared.count(STAGE, stage="forward") == 1000
    assert shared.quantile(STAGE, 0.99, stage="forward") == pytest.approx(0.005, rel=1 / 32)
    # The other process ended: in Python's own shared memory the block would be unlinked by now.
    again = MetricStore.attach([Block(shared.blocks[0].name, LABELS)])
    assert again.value("foretick_records_total", source="kafka") == 5
    again.close()


@pytest.mark.parametrize("labels", [{**LABELS, "session": ["btc", "ndx"]}, {**LABELS, "session": ["btc"]}])
def test_attach_with_other_labels_is_refused(shared: MetricStore, labels: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="other label values"):
        MetricStore.attach([Block(shared.blocks[0].name, labels)])
    assert set(STAGES) == {labels["stage"] for labels in shared.series(BY_NAME[STAGE])}


def test_unlinked_store_is_gone_for_newcomers_only(shared: MetricStore) -> None:
    other = MetricStore.attach([Block(shared.blocks[0].name, LABELS)])
    shared.close()
    shared.unlink()
    shared.unlink()
    other.inc("foretick_batches_total")
    assert shared.value("foretick_batches_total") == 1
    other.close()
    with pytest.raises(FileNotFoundError):
        MetricStore.attach([Block(shared.blocks[0].name, LABELS)])


def _crash(pipe: Connection) -> None:
    pipe.send(shm.SharedBlock.create(4096).name)
    pipe.recv()
    os._exit(1)


def test_block_of_a_crashed_process_is_swept_and_a_live_one_kept(shared: MetricStore) -> None:
    """A lock of ours keeps other tests' processes from sweeping the block before it is looked at."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_crash, args=(there,))
    process.start()
    path = shm.ROOT / here.recv()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        here.send("crash")
        process.join(60)
        assert process.exitcode == 1
        shm.sweep()
        assert path.exists()
    shm.sweep()
    assert not path.exists()
    MetricStore.attach([Block(shared.blocks[0].name, LABELS)]).close()


def test_a_session_that_begins_anew_has_series_all_the_time() -> None:
    store = MetricStore.local(LABELS)
    name = LABELS["session"][0]
    missed: list[Exception] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                store.value("foretick_bars_total", session=name)
            except UnknownSeriesError as error:
                missed.append(error)
                return

    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for _ in range(200):
            store.add_session(name)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        reader.join()
    assert not missed


def test_a_closed_block_is_swept_although_its_views_live() -> None:
    block = shm.SharedBlock.create(4096)
    view = block.buffer
    block.close()
    shm.sweep()
    assert not (shm.ROOT / block.name).exists()
    assert bytes(view[:8]) == bytes(8)


def test_a_later_session_has_series_of_its_own_which_go_with_it() -> None:
    gateway = MetricStore.create(LABELS)
    engine = MetricStore.attach(gateway.blocks)
    name = LABELS["session"][0]
    try:
        block = gateway.add_session("late")
        engine.attach_session(block)
        engine.inc("foretick_bars_total", 3, session="late")
        engine.inc("foretick_bars_total", 1, session=name)
        assert gateway.value("foretick_bars_total", session="late") == 3
        bars = BY_NAME["foretick_bars_total"]
        assert {"session": "late"} in list(gateway.series(bars))
        again = MetricStore.attach(gateway.blocks)
        assert again.value("foretick_bars_total", session="late") == 3
        again.close()
        held = engine.counter("foretick_bars_total", session="late")
        for store in (gateway, engine):
            store.remove_session("late")
            store.remove_session(name)
        held.inc()  # a handle that is left over does no harm
        assert {"session": "late"} not in list(gateway.series(bars))
        with pytest.raises(UnknownSeriesError):
            gateway.value("foretick_bars_total", session=name)
        engine.attach_session(gateway.add_session(name))
        engine.inc("foretick_bars_total", session=name)
        assert gateway.value("foretick_bars_total", session=name) == 1
    finally:
        engine.close()
        gateway.unlink()
        gateway.close()


def test_a_session_that_comes_back_counts_in_its_new_block() -> None:
    store = MetricStore.local({"session": []})
    for _ in range(2):
        store.add_session("late")
        store.inc("foretick_versions_total", session="late")
        assert store.value("foretick_versions_total", session="late") == 1
        store.remove_session("late")
        with pytest.raises(UnknownSeriesError):
            store.inc("foretick_versions_total", session="late")


def test_values_without_a_series_of_their_own_are_not_kept() -> None:
    store = MetricStore.local({})
    before = len(store._found)
    for reason in ("one", "two"):
        store.inc("foretick_records_malformed_total", reason=reason)
    assert len(store._found) == before
    assert store.value("foretick_records_malformed_total", reason="other") == 2
