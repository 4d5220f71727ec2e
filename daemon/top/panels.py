"""The panels around the table of sessions, as texts in columns."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from daemon.top.snapshot import Snapshot, per_second, shown
from daemon.traces.recorded_trace import Span
from feeds.market_data import Answer
from metrics.catalogue import STAGES

_BAR = 40
"""Cells of a waterfall's longest bar."""


def plain(text: str) -> Text:
    """Text of others, without markup and without characters that a terminal would obey."""
    return Text("".join(each if each.isprintable() else "\N{MIDDLE DOT}" for each in text), no_wrap=True)


def columns(rows: Iterable[Sequence[str]]) -> Table:
    """Rows in columns, as wide as their texts."""
    grid = Table.grid(padding=(0, 1))
    for row in rows:
        grid.add_row(*map(plain, row))
    return grid


def feeds(seen: Snapshot) -> Table:
    """Sources, rings, the partition with the most unread records, and delays of venues."""
    now = seen.now
    up = now.by("foretick_source_up", "source")
    lost = now.by("foretick_records_lost_upstream_total", "source")
    dropped = now.by("foretick_ring_dropped_total", "source")
    lag = now.by("foretick_consumer_lag_records", "partition")
    rows: list[tuple[str, ...]] = [
        (source, "up" if up.get(source) else "down", f"{rate}/s", f"{lost.get(source, 0.0):,.0f} lost")
        for source in now.by("foretick_records_total", "source")
        for rate in [per_second(seen.growth.rate("foretick_records_total", source=source))]
    ]
    rows += [
        (f"ring of {source}", f"{fill:.0%}", "", f"{dropped.get(source, 0.0):,.0f} dropped")
        for source, fill in now.by("foretick_ring_fill_ratio", "source").items()
    ]
    if lag:
        worst = max(lag, key=lag.__getitem__)
        rows.append((worst, "lag", f"{lag[worst]:,.0f}", f"{sum(lag.values()):,.0f} in all"))
    delays = now.by("foretick_venue_delay_seconds", "venue")
    return columns([*rows, *((venue, "delay", shown(delay_s), "") for venue, delay_s in delays.items())])


def queues(seen: Snapshot) -> Table:
    """Requests and tokens by scheduling class, and what asks and prompts of tenants take of the engine."""
    running = seen.now.by("foretick_live_requests", "class")
    rows = [
        (each, f"{waiting:.0f}", f"{running.get(each, 0.0):.0f}", tokens)
        for each, waiting in seen.now.by("foretick_waiting_requests", "class").items()
        for tokens in [per_second(seen.growth.rate("foretick_batch_tokens_total", **{"class": each}))]
    ]
    name = "foretick_tenant_engine_seconds_total"
    rows += [
        (f"tenant {tenant}", "", "", f"{rate:.0%} of the engine")
        for tenant in seen.now.by(name, "tenant")
        if (rate := seen.growth.rate(name, tenant=tenant))
    ]
    return columns([("class", "waiting", "running", "tokens/s"), *rows])


def pool(seen: Snapshot) -> Table:
    """Blocks by tier, the tokens of all windows, and preemptions."""
    rows = []
    for tier, name in (("device", "foretick_pool_blocks"), ("host", "foretick_host_blocks")):
        blocks = seen.now.by(name, "state")
        if total := sum(blocks.values()):
            used = blocks.get("used", 0.0)
            rows.append((tier, f"{used / total:.0%}", f"{used:,.0f} of {total:,.0f} blocks"))
    rows.append(("windows", "", f"{sum(row.info.live_tokens for row in seen.rows):,} tokens"))
    rows.append(("preempted", "", f"{per_second(seen.growth.rate('foretick_preemptions_total'))}/s"))
    return columns(rows)


def stages(seen: Snapshot) -> Table:
    """Latencies since the last poll, of the stages that something passed."""
    growth, name = seen.growth, "foretick_stage_seconds"
    rows = [
        (
            stage,
            per_second(rate),
            shown(growth.mean(name, stage=stage)),
            shown(growth.quantile(0.5, name, stage=stage)),
            shown(growth.quantile(0.99, name, stage=stage)),
        )
        for stage in STAGES
        if (rate := growth.rate(f"{name}_count", stage=stage))
    ]
    return columns([("stage", "/s", "mean", "p50", "p99"), *rows])


ANSWER_COLUMNS = ("question", "answer", "logit gap", "probability", "act", "version", "age", "total", "flags")


def answer_row(answer: Answer) -> tuple[str, ...]:
    """One answer, by `ANSWER_COLUMNS`; its age is the one that it was given with."""
    return (
        answer.question,
        answer.text.strip() if answer.value is None else answer.value,
        f"{answer.logit_gap:.3f}",
        "-" if answer.probability is None else f"{answer.probability:.3f}",
        acts(answer),
        str(answer.data_version),
        shown(answer.staleness_ns / 1e9),
        shown(answer.latency.total_ns / 1e9),
        " ".join(answer.flags),
    )


def acts(answer: Answer) -> str:
    """Whether to act on an answer, and why not; "-" where its question has no `max_error`."""
    if answer.act is None:
        return "-"
    return "yes" if answer.act else f"no: {answer.abstain_reason}"


def answers(found: Sequence[Answer]) -> Table:
    """Newest answers of a session, with a head."""
    return columns([ANSWER_COLUMNS, *map(answer_row, found)])


def bars(spans: Sequence[Span]) -> Table:
    """A waterfall: each stage's name, time, share of the whole, and bar at its place."""
    total = max((each.start_ns + each.duration_ns for each in spans), default=0) or 1
    return columns(
        (each.name, shown(each.duration_ns / 1e9), f"{each.duration_ns / total:.0%}", _bar(each, total))
        for each in spans
    )


def _bar(span: Span, total: int) -> str:
    length = -(-span.duration_ns * _BAR // total)
    return (" " * (span.start_ns * _BAR // total) + "\N{FULL BLOCK}" * length).ljust(_BAR)
