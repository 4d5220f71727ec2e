"""The tables of `foretick bench engine`."""

from __future__ import annotations

from bench.engine_floor import Limits, Shape, attention_floor, causal, linear_floor, pass_floor
from bench.engine_result import Bookkeeping, EngineReport, Refresh, Together, Window
from bench.questions_result import Questions
from bench.tables import head, ms, ratio, table


def render(report: EngineReport) -> str:
    """All tables."""
    limits, shape = report.limits, report.shape
    parts = [
        head(report.command, report.started, report.machine, report.threads, report.load_at_end),
        f"{shape.parameters / 1e6:.1f} million parameters, {shape.layers} layers, {shape.q_heads} query and "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, fp32. In the same run a large matrix product "
        f"reaches {limits.gemm.median / 1e9:,.1f} GFLOP/s ({limits.gemm.low / 1e9:,.1f} to "
        f"{limits.gemm.high / 1e9:,.1f}) and a large copy {limits.copy.median / 1e9:,.1f} GB/s "
        f"({limits.copy.low / 1e9:,.1f} to {limits.copy.high / 1e9:,.1f}), read and written; floors are "
        "worked out from the medians and count every layer for every row.",
    ]
    if report.questions is not None:
        parts.append(_questions(report.questions, shape, limits))
    together = [t for t in (report.sessions, *report.standing, report.prefix) if t is not None]
    if together:
        parts.append(_together(together, shape, limits))
    if report.window is not None:
        parts.append(_window(report.window))
    if report.refresh is not None:
        parts.append(_refresh(report.refresh))
    if report.bookkeeping is not None:
        parts.append(_bookkeeping(report.bookkeeping))
    return "\n\n".join(parts) + "\n"


def _questions(q: Questions, shape: Shape, limits: Limits) -> str:
    rows = q.question_tokens
    per_1k = attention_floor(shape, limits, rows, 1000)

    def floor(new: int, context: int) -> float:
        return pass_floor(shape, limits, new, context, causal(new))

    summary = table(
        ("", "ours", "kept cache", "ours / kept"),
        [
            ("question p50, ms", ms(q.ours.p50_ms), ms(q.kept.p50_ms), f"{q.ratio_kept:.2f} (paired)"),
            ("question p99, ms", ms(q.ours.p99_ms), ms(q.kept.p99_ms), ratio(q.ours.p99_ms, q.kept.p99_ms)),
            (
                "growth, ms for 1,000 tokens",
                f"{q.slope_ours:.1f}",
                f"{q.slope_kept:.1f}",
                ratio(q.slope_ours, q.slope_kept),
            ),
            (
                "growth / attention's floor",
                ratio(q.slope_ours, per_1k.ms),
                ratio(q.slope_kept, per_1k.ms),
                "",
            ),
            (
                "reading an update p50, ms",
                ms(q.ingest_ours.p50_ms),
                ms(q.ingest_kept.p50_ms),
                f"{q.ingest_ratio:.2f} (paired)",
            ),
        ],
    )
    points = table(
        (
            "context, tokens",
            "ours, ms",
            "kept, ms",
            "dense, ms",
            "floor, ms",
            "ours / kept",
            "dense / ours",
            "ours / floor",
        ),
        [
            (
                f"{p.context_tokens:,}",
                ms(p.ours_ms),
                ms(p.kept_ms),
                "" if p.dense_ms is None else ms(p.dense_ms),
                ms(floor(rows, p.context_tokens)),
                ratio(p.ours_ms, p.kept_ms),
                "" if p.dense_ms is None else f"{p.dense_ms / p.ours_ms:.1f}",
                ratio(p.ours_ms, floor(rows, p.context_tokens)),
            )
            for p in q.points
        ],
    )
    reading = table(
        ("on a context of", "tokens", "ours, ms", "kept, ms", "floor, ms", "ours / kept", "ours / floor"),
        [
            (
                f"{before:,}",
                f"{p.update_tokens:,}",
                ms(p.ingest_ours_ms),
                ms(p.ingest_kept_ms),
                ms(floor(p.update_tokens, before)),
                ratio(p.ingest_ours_ms, p.ingest_kept_ms),
                ratio(p.ingest_ours_ms, floor(p.update_tokens, before)),
            )
            for p in q.points
            if p.ingest_ours_ms is not None and p.ingest_kept_ms is not None
            for before in [p.context_tokens - p.update_tokens]
        ],
    )
    return (
        f"### Questions and updates as the tape grows\n\nA question has {rows} tokens, an update "
        f"{q.bars_an_update} bars of {q.bar_tokens:.1f} tokens. {q.agreed} of {q.compared} answers equal the "
        f"reference's (the others are ties); largest difference of their logits "
        f"{q.largest_logit_difference:.1g}. Attention's floor grows by {per_1k.ms:.2f} ms for 1,000 tokens "
        f"(arithmetic {per_1k.arithmetic_ms:.2f} ms, reading {per_1k.reading_ms:.2f} ms).\n\n{summary}\n\n"
        f"A question, medians by context:\n\n{points}\n\nReading an update:\n\n{reading}"
    )


def _together(all_: list[Together], shape: Shape, limits: Limits) -> str:
    timed, bound = [], []
    for t in all_:
        attention = attention_floor(shape, limits, t.rows, t.shared_tokens, t.own_tokens, t.readers)
        linear = linear_floor(shape, limits, t.rows)
        floor = attention.ms + linear.ms
        timed.append(
            (
                t.name,
                ms(t.together.p50_ms),
                ms(t.in_turn.p50_ms),
                f"{t.gain:.1f}",
                ms(t.attention_together.p50_ms),
                ms(t.attention_in_turn.p50_ms),
                f"{t.attention_gain:.1f}",
                "" if t.kept is None else ms(t.kept.p50_ms),
                "" if t.kept_ratio is None else f"{t.kept_ratio:.2f}",
            )
        )
        bound.append(
            (
                t.name,
                f"{t.rows:,}",
                f"{t.shared_tokens + t.own_tokens:,.0f}",
                f"{ms(attention.arithmetic_ms)} / {ms(attention.reading_ms)}",
                f"{ms(linear.arithmetic_ms)} / {ms(linear.reading_ms)}",
                ratio(floor, t.together.p50_ms),
                f"{t.in_turn.p50_ms / floor:.1f}",
            )
        )
    columns = ("", "one pass, ms", "in turn, ms", "gain", "attention, one pass", "in turn", "gain")
    bounds = (
        "",
        "rows",
        "context",
        "attention: arithmetic / reading, ms",
        "linear: arithmetic / reading, ms",
    )
    return (
        "### Many readers in one pass\n\nMedians of rounds in which all ways ran in turn; gains are medians "
        "of the pairs. *Pass / kept*: against kept caches asked one by one.\n\n"
        + table((*columns, "kept caches, ms", "pass / kept"), timed)
        + "\n\nWhat bounds them: every row multiplies every key and every weight itself, in one pass or in "
        "its own; a pass only saves reading the same bytes again and what each pass costs besides. *Gain at "
        "the floor*: what a perfect pass would gain over the time in turn.\n\n"
        + table((*bounds, "floor / one pass", "gain at the floor"), bound)
    )


def _window(w: Window) -> str:
    rows = [
        ("question p50, ms", ms(w.sliding.p50_ms), ms(w.grown.p50_ms), f"{w.ratio:.2f} (paired)"),
        (
            "question p99, ms",
            ms(w.sliding.p99_ms),
            ms(w.grown.p99_ms),
            ratio(w.sliding.p99_ms, w.grown.p99_ms),
        ),
        ("tokens seen", f"{w.sliding_tokens:,}", f"{w.grown_tokens:,}", ""),
        ("extents seen, most", str(max(w.extents)), str(w.grown_extents), ""),
    ]
    return (
        f"### A tape at its retention limit\n\n{w.records} bars stay, {w.bars_an_update} go in and out "
        f"{w.updates} times ({w.evicted_tokens:,} tokens evicted), frames of {w.frame_limit:,} positions. "
        f"The same window sent again as a prompt (dense) takes {ms(w.dense.p50_ms)} ms, "
        f"{w.dense.p50_ms / w.sliding.p50_ms:.0f} times a question here; reading an update takes "
        f"{ms(w.reading.p50_ms)} ms.\n\n" + table(("", "sliding", "just grown", "sliding / grown"), rows)
    )


def _refresh(r: Refresh) -> str:
    bound = 1.1 * r.idle.p99_ms + r.batch_ms
    rows = [
        ("question p50, ms", ms(r.idle.p50_ms), ms(r.during.p50_ms)),
        ("question p99, ms", ms(r.idle.p99_ms), ms(r.during.p99_ms)),
        ("1.1 times idle, plus one batch (p99), ms", "", ms(bound)),
    ]
    return (
        f"### An `exact` session's refresh\n\nA window of {r.window_tokens:,} tokens prefilled anew alone "
        f"takes {ms(r.alone_ms)} ms, in chunks of {r.chunk_tokens} tokens; the longest of its batches took "
        f"{ms(r.batch_ms)} ms. {r.refreshes} refreshes ended while the questions of the last column were "
        "asked.\n\n" + table(("", "idle", "during refreshes"), rows)
    )


def _bookkeeping(b: Bookkeeping) -> str:
    columns = ("µs at a context of", *(f"{n:,}" for n in b.contexts), "longest / shortest")
    rows = [(o.name, *(f"{us:.1f}" for us in o.us), f"{o.us[-1] / o.us[0]:.1f}") for o in b.operations]
    return "### Metadata\n\n" + table(columns, rows)
