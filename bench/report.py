"""Everything one run measured, and its tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bench.hits import Condition, Hits
from bench.kafka_rate import KafkaRate
from bench.machine import Machine
from bench.questions_result import Questions
from bench.ring_rate import RingRate
from bench.tables import head, median_and_range, ms, pair, ratio, table


class Report(msgspec.Struct, frozen=True):
    """One run of `foretick bench stream`; parts that were not asked for are empty."""

    command: str
    started: str
    threads: int
    machine: Machine
    load_at_end: float = 0.0
    ring: RingRate | None = None
    kafka: KafkaRate | None = None
    hits: Hits | None = None
    questions: list[Questions] = []


def render(report: Report) -> str:
    """All tables."""
    parts = [head(report.command, report.started, report.machine, report.threads, report.load_at_end)]
    parts += [_questions(questions) for questions in report.questions]
    if report.hits is not None:
        parts.append(_hits(report.hits))
    if report.kafka is not None:
        parts.append(_kafka(report.kafka))
    if report.ring is not None:
        parts.append(_ring(report.ring))
    return "\n\n".join(parts) + "\n"


def _questions(q: Questions) -> str:
    title = (
        f"### Questions, {q.model} model\n\n{q.parameters / 1e6:.1f} million parameters; a question has "
        f"{q.question_tokens} tokens, a bar {q.bar_tokens:.1f}, an update {q.bars_an_update} bars. "
        f"{q.agreed} of {q.compared} answers equal the reference's (the others are ties within fp32); "
        f"largest difference of their logits {q.largest_logit_difference:.1g}."
    )
    summary = table(
        ("", "ours", "kept cache", "ours / kept"),
        [
            ("question p50, ms", ms(q.ours.p50_ms), ms(q.kept.p50_ms), f"{q.ratio_kept:.2f} (paired)"),
            (
                "question p99, ms",
                ms(q.ours.p99_ms),
                ms(q.kept.p99_ms),
                ratio(q.ours.p99_ms, q.kept.p99_ms),
            ),
            ("questions", str(q.ours.n), str(q.kept.n), ""),
            (
                "slope, ms for 1,000 tokens",
                f"{q.slope_ours:.2f}",
                f"{q.slope_kept:.2f}",
                ratio(q.slope_ours, q.slope_kept),
            ),
            (
                "reading an update p50, ms",
                ms(q.ingest_ours.p50_ms),
                ms(q.ingest_kept.p50_ms),
                f"{q.ingest_ratio:.2f} (paired)",
            ),
            (
                "reading an update, slowest, ms",
                ms(q.ingest_ours.max_ms),
                ms(q.ingest_kept.max_ms),
                ratio(q.ingest_ours.max_ms, q.ingest_kept.max_ms),
            ),
        ],
    )
    points = table(
        ("context, tokens", "ours, ms", "kept cache, ms", "dense, ms", "ours / kept", "dense / ours"),
        [
            (
                f"{p.context_tokens:,}",
                ms(p.ours_ms),
                ms(p.kept_ms),
                "" if p.dense_ms is None else ms(p.dense_ms),
                ratio(p.ours_ms, p.kept_ms),
                "" if p.dense_ms is None else f"{p.dense_ms / p.ours_ms:.1f}",
            )
            for p in q.points
        ],
    )
    return f"{title}\n\n{summary}\n\nMedians by context:\n\n{points}"


def _hits(hits: Hits) -> str:
    rows = [(*_condition(c),) for c in hits.conditions]
    columns = (
        "condition",
        "engine threads",
        "hit, ms",
        "latest answer, ms",
        "bare echo, ms",
        "hit / echo, p50",
        "computed ask, ms",
        "hits",
        "computed asks (time waited)",
        "in forward passes",
    )
    return (
        "### Flash hits through the query socket\n\n"
        f"Round trips at the client, p50 / p99; the source hands over {hits.batch:,} records at a time.\n\n"
        f"{table(columns, rows)}"
    )


def _condition(c: Condition) -> Iterable[str]:
    yield c.name
    yield str(c.engine_threads)
    yield pair(c.hits)
    yield pair(c.latest)
    yield pair(c.echo)
    yield "" if c.hits is None else ratio(c.hits.p50_ms, c.echo.p50_ms)
    yield pair(c.computed)
    # Not a share: the client waits for each answer, so asks that miss are few because they are slow.
    yield str(0 if c.hits is None else c.hits.n)
    yield (
        "0"
        if c.computed is None
        else f"{c.computed.n} (about {c.computed.n * c.computed.p50_ms / 1e3:.1f} s)"
    )
    yield f"{c.forward_share:.0%}"


def _kafka(k: KafkaRate) -> str:
    stages = [
        ("Kafka to bars as tokens, two processes", k.whole),
        ("source alone, not decoded", k.source),
        ("decoding alone", k.decode),
        ("intake alone: decode, account, pack, push", k.intake),
        ("data plane alone: ring, bars, tokens", k.plane),
    ]
    rows = [(name, *median_and_range(rate), ratio(rate.median, k.whole.median)) for name, rate in stages]
    rows.append(
        (
            "source and intake one after the other, computed",
            f"{k.predicted:,.0f}",
            "",
            ratio(k.predicted, k.whole.median),
        )
    )
    return (
        f"### Kafka to bars\n\n{k.whole.n:,} trades of {k.bytes_a_record:.0f} bytes of JSON, {k.markets} "
        f"partitions; {k.bars:,} bars, {k.tokens:,} tokens; {len(k.whole.per_second)} runs.\n\n"
        + table(("", "records a second, median", "range", "over Kafka to bars"), rows)
    )


def _ring(r: RingRate) -> str:
    ways = [
        (f"ring, {r.batch} at a time", r.ring),
        (f"`multiprocessing.Queue`, {r.batch} at a time", r.queue_batched),
        ("`multiprocessing.Queue`, one by one", r.queue),
    ]
    rows = [(name, *median_and_range(rate), ratio(r.ring.median, rate.median)) for name, rate in ways]
    # no ratio: its runs differ several times over for a reason not found, so it is no limit to measure by
    rows.append(("the bytes copied in and out in one process", *median_and_range(r.copied), ""))
    return (
        f"### Ring\n\nRecords of 128 bytes between two processes, {len(r.ring.per_second)} runs.\n\n"
        + table(("", "records a second, median", "range", "ring over it"), rows)
    )
