"""Export to a collector: what it reads, and that a slow, refusing or dead one stops nothing."""

import asyncio
import time
from functools import partial

import pytest

from daemon.traces import trace_exporter
from daemon.traces.recorded_trace import Span, Trace
from daemon.traces.trace_exporter import BATCH, Collector, TraceExporter
from metrics.store import MetricStore
from tests.kit import until
from tests.kit.otlp import receiving

TRACE = Trace(
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    span_id="ffffffffffffffff",
    parent_id="00f067aa0ba902b7",
    kind="request",
    session="aaa",
    data_version=7,
    computed_tokens=30,
    error="timeout",
    began_at=1_700_000_000_000_000_001,
    duration_ns=1000,
    spans=(Span("queue", 0, 400), Span("prefill", 400, 600)),
    links=("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "no header"),
)

MOST = 2 * BATCH


def trace(number: int) -> Trace:
    return Trace(trace_id=f"{number:032x}", span_id="1" * 16, kind="answer", began_at=number, duration_ns=1)


def exporter(endpoint: str, **headers: str) -> tuple[TraceExporter, MetricStore]:
    store = MetricStore.local({"session": [], "source": [], "sink": []})
    return TraceExporter(Collector(endpoint, headers, {"service.name": "foretick"}), store, MOST), store


def counts(store: MetricStore) -> dict[str, float]:
    outcomes = ("sent", "failed", "dropped")
    return {each: store.value("foretick_traces_exported_total", outcome=each) for each in outcomes}


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_exporter, "EVERY_S", 0.0)
    monkeypatch.setattr(trace_exporter, "RETRY_AFTER_S", (0.01, 0.01))


async def test_a_collector_reads_the_trace_as_it_was(no_delay: None) -> None:
    async with receiving() as collector:
        sender, store = exporter(collector.endpoint, authorization="Bearer x")
        running = asyncio.create_task(sender.run())
        sender.put(lambda: TRACE)
        await until(lambda: counts(store)["sent"] == 1)
        running.cancel()
    root, queue, prefill = collector.spans
    assert collector.headers[0]["authorization"] == "Bearer x"
    (resource,) = collector.requests[0].resource_spans
    assert [(each.key, each.value.string_value) for each in resource.resource.attributes] == [
        ("service.name", "foretick")
    ]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE.trace_id}
    assert (root.span_id.hex(), root.parent_span_id.hex()) == (TRACE.span_id, TRACE.parent_id)
    assert [span.parent_span_id.hex() for span in (queue, prefill)] == [TRACE.span_id] * 2
    assert len({span.span_id for span in collector.spans}) == 3
    assert all(int.from_bytes(span.span_id) for span in collector.spans), "an id of zeros is none"
    assert [(span.name, span.start_time_unix_nano, span.end_time_unix_nano) for span in collector.spans] == [
        ("request", TRACE.began_at, TRACE.began_at + 1000),
        ("queue", TRACE.began_at, TRACE.began_at + 400),
        ("prefill", TRACE.began_at + 400, TRACE.began_at + 1000),
    ]
    assert [link.trace_id.hex() for link in root.links] == ["0af7651916cd43dd8448eb211c80319c"]
    assert (root.status.code, root.status.message, root.kind) == (2, "timeout", 2)
    found = {each.key: each.value for each in root.attributes}
    assert found["foretick.session"].string_value == "aaa"
    assert found["foretick.data_version"].int_value == 7
    assert found["foretick.computed_tokens"].int_value == 30
    assert found["foretick.cached"].bool_value is False


async def test_a_collector_that_hangs_costs_a_bounded_queue_and_no_time() -> None:
    async with receiving(hangs=True) as collector:
        sender, store = exporter(collector.endpoint)
        running = asyncio.create_task(sender.run())
        for number in range(BATCH):
            sender.put(partial(trace, number))
        await until(lambda: collector.asked == 1)  # the first batch is on its way, and stays there
        for number in range(MOST + 100):
            sender.put(partial(trace, number))
        assert counts(store) == {"sent": 0, "failed": 0, "dropped": 100}
        began = time.monotonic()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await sender.flush(0.2)
        assert time.monotonic() - began < 5
        assert counts(store) == {"sent": 0, "failed": 0, "dropped": 100 + MOST + BATCH}, "each of them once"


@pytest.mark.parametrize(("status", "requests"), [(503, 3), (400, 1)])
async def test_a_refused_batch_is_sent_again_only_where_that_may_help(
    no_delay: None, status: int, requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving(status) as collector:
        sender, store = exporter(collector.endpoint)
        running = asyncio.create_task(sender.run())
        for number in (1, 2):
            sender.put(partial(trace, number))
            await until(lambda n=number: counts(store)["failed"] == n)
        assert collector.asked == 2 * requests
        assert [str(status) in line.getMessage() for line in caplog.records] == [True], "said once"
        collector.status = 200
        sender.put(partial(trace, 3))
        await until(lambda: counts(store)["sent"] == 1)
        running.cancel()


async def test_no_collector_and_a_trace_that_cannot_be_made_end_nothing(no_delay: None) -> None:
    sender, store = exporter("http://127.0.0.1:9/v1/traces")
    running = asyncio.create_task(sender.run())
    sender.put(partial(trace, 1))
    await until(lambda: counts(store)["failed"] == 1)

    def broken() -> Trace:
        raise RuntimeError("a defect")

    sender.put(broken)
    await until(lambda: counts(store)["failed"] == 2)
    assert not running.done()
    running.cancel()
