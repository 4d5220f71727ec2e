"""Everything one run measured, and its tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bench.figures import Latency, Rates
from bench.hits import Condition, Hits
from bench.kafka_rate import KafkaRate
from bench.machine import Machine
from bench.questions_result import Questions
from bench.ring_rate import RingRate

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


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
    parts = [_head(report)]
    parts += [_questions(questions) for questions in report.questions]
    if report.hits is not None:
        parts.append(_hits(report.hits))
    if report.kafka is not None:
        parts.append(_kafka(report.kafka))
    if report.ring is not None:
        parts.append(_ring(report.ring))
    return "\n\n".join(parts) + "\n"


def put_into(page: Path, tables: str) -> None:
    """Replace what stands between the page's markers. Raises ValueError when it has none."""
    page.write_text(replaced(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def replaced(text: str, tables: str) -> str:
    """``text`` with ``tables`` between its markers. Raises ValueError unless each occurs once, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the page needs one {BEGIN} and one {END} after it")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def _head(report: Report) -> str:
    machine = report.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"`{report.command}`, {report.started}: {machine.processor}, {machine.cores} cores, "
        f"{report.threads} torch threads, Python {machine.python}, {packages}. Load average "
        f"{machine.load:.1f} at the start, {report.load_at_end:.1f} at the end."
    )


def _questions(q: Questions) -> str:
    head = (
        f"### Questions, {q.model} model\n\n{q.parameters / 1e6:.1f} million parameters; a question has "
        f"{q.question_tokens} tokens, a bar {q.bar_tokens:.1f}, an update {q.bars_an_update} bars. "
        f"{q.agreed} of {q.compared} answers equal the reference's (the others are ties within fp32); "
        f"largest difference of their logits {q.largest_logit_difference:.1g}."
    )
    summary = _table(
        ("", "ours", "kept cache", "ours / kept"),
        [
            ("question p50, ms", _ms(q.ours.p50_ms), _ms(q.kept.p50_ms), f"{q.ratio_kept:.2f} (paired)"),
            (
                "question p99, ms",
                _ms(q.ours.p99_ms),
                _ms(q.kept.p99_ms),
                _ratio(q.ours.p99_ms, q.kept.p99_ms),
            ),
            ("questions", str(q.ours.n), str(q.kept.n), ""),
            (
                "slope, ms for 1,000 tokens",
                f"{q.slope_ours:.2f}",
                f"{q.slope_kept:.2f}",
                _ratio(q.slope_ours, q.slope_kept),
            ),
            (
                "reading an update p50, ms",
                _ms(q.ingest_ours.p50_ms),
                _ms(q.ingest_kept.p50_ms),
                f"{q.ingest_ratio:.2f} (paired)",
            ),
            (
                "reading an update, slowest, ms",
                _ms(q.ingest_ours.max_ms),
                _ms(q.ingest_kept.max_ms),
                _ratio(q.ingest_ours.max_ms, q.ingest_kept.max_ms),
            ),
        ],
    )
    points = _table(
        ("context, tokens", "ours, ms", "kept cache, ms", "dense, ms", "ours / kept", "dense / ours"),
        [
            (
                f"{p.context_tokens:,}",
                _ms(p.ours_ms),
                _ms(p.kept_ms),
                "" if p.dense_ms is None else _ms(p.dense_ms),
                _ratio(p.ours_ms, p.kept_ms),
                "" if p.dense_ms is None else f"{p.dense_ms / p.ours_ms:.1f}",
            )
            for p in q.points
        ],
    )
    return f"{head}\n\n{summary}\n\nMedians by context:\n\n{points}"


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
        f"{_table(columns, rows)}"
    )


def _condition(c: Condition) -> Iterable[str]:
    yield c.name
    yield str(c.engine_threads)
    yield _pair(c.hits)
    yield _pair(c.latest)
    yield _pair(c.echo)
    yield "" if c.hits is None else _ratio(c.hits.p50_ms, c.echo.p50_ms)
    yield _pair(c.computed)
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
    rows = [(name, *_rates(rate), _ratio(rate.median, k.whole.median)) for name, rate in stages]
    rows.append(
        (
            "source and intake one after the other, computed",
            f"{k.predicted:,.0f}",
            "",
            _ratio(k.predicted, k.whole.median),
        )
    )
    return (
        f"### Kafka to bars\n\n{k.whole.n:,} trades of {k.bytes_a_record:.0f} bytes of JSON, {k.markets} "
        f"partitions; {k.bars:,} bars, {k.tokens:,} tokens; {len(k.whole.per_second)} runs.\n\n"
        + _table(("", "records a second, median", "range", "over Kafka to bars"), rows)
    )


def _ring(r: RingRate) -> str:
    ways = [
        (f"ring, {r.batch} at a time", r.ring),
        (f"`multiprocessing.Queue`, {r.batch} at a time", r.queue_batched),
        ("`multiprocessing.Queue`, one by one", r.queue),
    ]
    rows = [(name, *_rates(rate), _ratio(r.ring.median, rate.median)) for name, rate in ways]
    # no ratio: its runs differ several times over for a reason not found, so it is no limit to measure by
    rows.append(("the bytes copied in and out in one process", *_rates(r.copied), ""))
    return (
        f"### Ring\n\nRecords of 128 bytes between two processes, {len(r.ring.per_second)} runs.\n\n"
        + _table(("", "records a second, median", "range", "ring over it"), rows)
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _pair(latency: Latency | None) -> str:
    return "" if latency is None else f"{_ms(latency.p50_ms)} / {_ms(latency.p99_ms)}"


def _rates(rates: Rates) -> tuple[str, str]:
    return f"{rates.median:,.0f}", f"{rates.low:,.0f} to {rates.high:,.0f}"


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}"
