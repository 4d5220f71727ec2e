"""Every metric Foretick exports: name, kind, help, unit and labels, in one place.

The store's layout, the exposition and the dashboards are generated from this list. Names start with
`foretick_`; times are recorded in nanoseconds and leave the process in seconds, as Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# The way of a tick to its answer, in order; the last two span several steps.
STAGES: tuple[str, ...] = (
    "ring_wait",  # ring entry -> drained by the engine
    "bars",  # drained batch -> its closed bars
    "tokenise",  # closed bars -> token ids
    "queue_flash",  # queued -> first batch, by scheduling class
    "queue_session",
    "queue_pool",
    "queue_stream",
    "forward",  # one forward pass
    "publish",  # answer handed to the sink -> acknowledged
    "end_to_end",  # ring entry of the newest tick in the version -> answer acknowledged
    "ask",  # query socket request -> reply
)
CLASSES: tuple[str, ...] = ("flash", "session", "pool", "stream")
# Those of them that generate: a tape is only read.
ANSWERING: tuple[str, ...] = CLASSES[:3]
BLOCK_STATES: tuple[str, ...] = ("free", "used")
# What the store counts a value as that is not in a list which has this one.
OTHER = "other"
# Why a record was refused.
REASONS: tuple[str, ...] = (
    "json",
    "msgpack",
    "missing_field",
    "type",
    "price",
    "size",
    "timestamp_unit",
    "clock",
    "oversize",
    "symbol",
    "bar_ohlc",
    "encoding",
    OTHER,
)
# Why a question got no answer.
FAILURES: tuple[str, ...] = (
    "too_long",
    "engine",
    "nan_logits",
    "no_memory",
    "open_failed",
    "publish",
    "cancelled",
    "stopping",
    OTHER,
)
# How an ask on the query socket ended: served from the cache, computed, or an error's code.
OUTCOMES: tuple[str, ...] = (
    "cached",
    "computed",
    "bad_request",
    "unknown_session",
    "too_long",
    "timeout",
    "busy",
    "engine",
    "shutting_down",
)
# What became of a batch for which the device had no memory: run again at half the size, or that failed, too.
OOM_OUTCOMES: tuple[str, ...] = ("retried", "failed")
# Why a request was not in a batch, in the scheduler's words: the budget that ran out, the class before it.
WAIT_REASONS: tuple[str, ...] = (
    "step",
    "tokens",
    "rows",
    "cells",
    "blocks",
    "high_water",
    "order",
    "restore",
    "behind flash",
    "behind session",
    "behind pool",
    OTHER,
)
PREEMPTIONS: tuple[str, ...] = ("recompute", "swap")
DRAFTS: tuple[str, ...] = ("accepted", "rejected")
# How a request's KV was given up: dropped or moved to the host by preemption, made useless by another prompt.
LOSSES: tuple[str, ...] = ("recomputed", "swapped", "invalidated")
# Between the device pool and the host tier.
DIRECTIONS: tuple[str, ...] = ("out", "in")
# Where a session that had left the pool came back from; rebuilt: prefilled anew from its own tokens.
RESTORES: tuple[str, ...] = ("host", "disk", "rebuilt")
# Labels whose values a deployment decides; the store is told them when it is created.
OPEN_LABELS: tuple[str, ...] = ("session", "source", "sink", "policy", "eviction")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `values` holds the fixed values of labels; labels without are among `OPEN_LABELS`."""

    name: str
    kind: Kind
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


def _counter(name: str, text: str, unit: str, *labels: str, **values: tuple[str, ...]) -> Metric:
    return Metric(name, "counter", text, unit, (*labels, *values), values)


def _gauge(name: str, text: str, unit: str, *labels: str, **values: tuple[str, ...]) -> Metric:
    return Metric(name, "gauge", text, unit, (*labels, *values), values)


METRICS: tuple[Metric, ...] = (
    Metric(
        "foretick_stage_seconds",
        "histogram",
        "Time spent in each stage between a tick and its answer.",
        "seconds",
        ("stage",),
        {"stage": STAGES},
    ),
    _counter("foretick_records_total", "Messages taken from the source.", "records", "source"),
    _counter("foretick_records_malformed_total", "Records refused, by reason.", "records", reason=REASONS),
    _counter("foretick_records_unknown_symbol_total", "Records of a symbol no session asks for.", "records"),
    _counter("foretick_records_late_total", "Records whose bar was already closed.", "records", "session"),
    _counter(
        "foretick_records_ignored_total",
        "Records of a kind that does not make the session's bars.",
        "records",
        "session",
    ),
    _counter(
        "foretick_clock_skew_records_total",
        "Records received before their exchange time by this machine's clock.",
        "records",
        "source",
    ),
    _counter("foretick_records_repeated_total", "Records already seen, skipped.", "records", "source"),
    _counter("foretick_records_lost_upstream_total", "Gaps in a feed's numbering.", "records", "source"),
    _counter("foretick_ring_dropped_total", "Records lost before they were read.", "records", "source"),
    _counter("foretick_ring_pauses_total", "Times a full ring paused its source.", "pauses", "source"),
    _counter("foretick_bars_total", "Bars closed.", "bars", "session"),
    _counter("foretick_versions_total", "Data versions committed.", "versions", "session"),
    _counter("foretick_evicted_tokens_total", "Tokens evicted from sliding regions.", "tokens", "session"),
    _counter("foretick_answers_total", "Answers acknowledged by every sink.", "answers", "session"),
    _counter("foretick_answers_failed_total", "Questions that got no answer.", "answers", reason=FAILURES),
    _counter(
        "foretick_flash_coalesced_total",
        "Bars whose standing questions were answered only together with later ones.",
        "bars",
        "session",
    ),
    _counter("foretick_asks_total", "Ad-hoc questions, by how they ended.", "asks", outcome=OUTCOMES),
    _counter("foretick_publish_retries_total", "Publications tried again.", "publications", "sink"),
    _counter("foretick_engine_restarts_total", "Engine processes restarted by the front.", "restarts"),
    _counter("foretick_dead_letters_total", "Records sent to the dead letter topic.", "records"),
    _counter("foretick_batches_total", "Forward passes run.", "batches"),
    _counter("foretick_batch_tokens_total", "Tokens run through the model.", "tokens", **{"class": CLASSES}),
    _counter(
        "foretick_wait_seconds_total",
        "Time that requests waited for a batch, by what kept them out; counted when they end.",
        "seconds",
        **{"class": CLASSES, "reason": WAIT_REASONS},
    ),
    Metric(
        "foretick_ttft_seconds",
        "histogram",
        "From the end of a prompt's input to the first token of its answer.",
        "seconds",
        ("class",),
        {"class": ANSWERING},
    ),
    _counter(
        "foretick_preemptions_total",
        "Requests that left the pool for work of a higher rank (by_class), dropped or swapped to the host.",
        "requests",
        **{"kind": PREEMPTIONS, "class": CLASSES, "by_class": CLASSES},
    ),
    _counter("foretick_draft_tokens_total", "Guessed tokens that were verified.", "tokens", outcome=DRAFTS),
    _counter(
        "foretick_reused_tokens_total",
        "Tokens that answers were given from and that were not computed for them: of a session's past, of "
        "the prefix cache, of a prompt that begins alike.",
        "tokens",
        **{"class": CLASSES},
    ),
    _counter(
        "foretick_lost_tokens_total",
        "Tokens whose KV left the pool before the answer: dropped or swapped to the host by preemption, or "
        "invalidated by a prompt that changed.",
        "tokens",
        kind=LOSSES,
    ),
    _counter(
        "foretick_prefix_tokens_total",
        "Tokens of prompts and frozen prefixes: read from the prefix cache, added to it, dropped from it.",
        "tokens",
        event=("reused", "saved", "evicted"),
    ),
    _counter("foretick_swaps_total", "Copies to and from the host tier.", "swaps", direction=DIRECTIONS),
    _counter("foretick_spills_total", "Sessions moved out of the pool, to the host or to disk.", "sessions"),
    _counter("foretick_restores_total", "Sessions brought back to the pool.", "sessions", outcome=RESTORES),
    _counter(
        "foretick_snapshot_failures_total",
        "Session files that could not be written, or not be had back.",
        "files",
    ),
    _counter("foretick_integrity_failures_total", "Audits of the pool's books that failed.", "audits"),
    _counter("foretick_oom_total", "Forward passes that found no memory.", "passes", outcome=OOM_OUTCOMES),
    _counter("foretick_refreshes_total", "Windows computed anew and gone on from.", "windows", "session"),
    _counter(
        "foretick_refresh_restarts_total",
        "Windows begun again because the tape had moved past them before they were ready.",
        "windows",
    ),
    _counter(
        "foretick_divergence_samples_total",
        "Standing questions asked of the carried and of a freshly computed state.",
        "questions",
        "session",
    ),
    _counter(
        "foretick_divergence_agreements_total",
        "Those of them whose answers begin with the same token.",
        "questions",
        "session",
    ),
    _gauge(
        "foretick_divergence_kl_nats",
        "KL divergence of the next token, fresh from carried state; mean over the last sample's questions.",
        "nats",
        "session",
    ),
    _gauge(
        "foretick_staleness_seconds",
        "Age of the newest record in the latest data version, since it was received.",
        "seconds",
        "session",
    ),
    _gauge("foretick_data_version", "Latest data version.", "versions", "session"),
    _gauge("foretick_pool_blocks", "KV blocks by state.", "blocks", state=BLOCK_STATES),
    _gauge("foretick_host_blocks", "KV blocks of the host tier by state.", "blocks", state=BLOCK_STATES),
    _gauge("foretick_prefix_cache_tokens", "Tokens in the prefix cache.", "tokens"),
    _gauge(
        "foretick_pool_fragmentation_ratio",
        "Share of the free blocks outside the longest free run, 0 to 1.",
        "ratio",
    ),
    _gauge("foretick_ring_fill_ratio", "Share of the ring in use, 0 to 1.", "ratio", "source"),
    _gauge(
        "foretick_waiting_requests",
        "Requests that are not admitted yet, and tapes with records to take, by class.",
        "requests",
        **{"class": CLASSES},
    ),
    _gauge(
        "foretick_live_requests", "Requests and tapes under way, by class.", "requests", **{"class": CLASSES}
    ),
    _gauge(
        "foretick_scheduler_info",
        "Always 1: the labels say how this daemon schedules.",
        "info",
        "policy",
        "eviction",
    ),
    _gauge("foretick_engine_up", "1 while the engine process answers.", "bool"),
    _gauge("foretick_session_tokens", "Tokens in a session's live tape.", "tokens", "session"),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
