"""Every metric Foretick exports: name, kind, help and labels.

The store's layout, the exposition and the dashboards are generated from this list. Names start with
`foretick_`; times are recorded in nanoseconds and leave the process in seconds, as Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal["counter", "gauge", "histogram"]

# The stages between a tick and its answer, in order; the last two span several of them.
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
# The classes that generate; STREAM only prefills.
ANSWERING: tuple[str, ...] = CLASSES[:3]
BLOCK_STATES: tuple[str, ...] = ("free", "used")
# Counts every value that a list with this entry does not name.
OTHER = "other"
# Why a record was refused.
Reason = Literal[
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
]
REASONS: tuple[str, ...] = (*get_args(Reason), OTHER)
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
# A batch without device memory is retried at half its size; failed: that did not fit either.
OOM_OUTCOMES: tuple[str, ...] = ("retried", "failed")
# Why a request was not in a batch: the budget that ran out, or the class ranked before it.
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
# How a request lost its KV: dropped or swapped out by preemption, or invalidated by an update of its prompt.
LOSSES: tuple[str, ...] = ("recomputed", "swapped", "invalidated")
# Between the device pool and the host tier.
DIRECTIONS: tuple[str, ...] = ("out", "in")
# Where a session was restored from; rebuilt: prefilled again from its own tokens.
RESTORES: tuple[str, ...] = ("host", "disk", "rebuilt")
# The daemon's long-lived tasks and threads, by the first word of their names.
TASKS: tuple[str, ...] = (
    "query",
    "http",
    "ingest",
    "publish",
    "commit",
    "watchdog",
    "engine",
    "data-plane",
    "heartbeat",
    "device-worker",
    OTHER,
)
# What followed when one of them ended unasked.
ENDINGS: tuple[str, ...] = ("restarted", "failed")
# Labels whose values a deployment decides; the store is told them when it is created.
OPEN_LABELS: tuple[str, ...] = ("session", "source", "sink", "policy", "eviction")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `values` holds the fixed values of labels; labels without are among `OPEN_LABELS`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def in_seconds(self) -> bool:
        """It is kept in nanoseconds and read in seconds."""
        return self.name.removesuffix("_total").endswith("_seconds")


def _counter(name: str, text: str, *labels: str, **values: tuple[str, ...]) -> Metric:
    return Metric(name, "counter", text, (*labels, *values), values)


def _gauge(name: str, text: str, *labels: str, **values: tuple[str, ...]) -> Metric:
    return Metric(name, "gauge", text, (*labels, *values), values)


def _histogram(name: str, text: str, **values: tuple[str, ...]) -> Metric:
    return Metric(name, "histogram", text, (*values,), values)


METRICS: tuple[Metric, ...] = (
    _histogram(
        "foretick_stage_seconds",
        "Time in each stage from tick to answer. Worry when end_to_end is longer than you can wait.",
        stage=STAGES,
    ),
    _counter(
        "foretick_records_total",
        "Messages read from the source. Worry when it stands still while the market is open.",
        "source",
    ),
    _counter(
        "foretick_records_malformed_total",
        "Records refused, by reason; all are in the dead-letter topic. Worry when it grows.",
        reason=REASONS,
    ),
    _counter(
        "foretick_records_unknown_symbol_total",
        "Records of symbols that no session reads. High is normal when a topic carries other symbols.",
    ),
    _counter(
        "foretick_records_late_total",
        "Records that came after their bar had closed, and were dropped. Raise bars.lateness when it grows.",
        "session",
    ),
    _counter(
        "foretick_records_ignored_total",
        "Records of another kind than the session's bars. Worry when it grows: a topic mixes kinds.",
        "session",
    ),
    _counter(
        "foretick_clock_skew_records_total",
        "Records received before their event time. Worry when it grows: a clock is wrong.",
        "source",
    ),
    _counter(
        "foretick_records_repeated_total",
        "Records read before and skipped. Normal after a reconnect.",
        "source",
    ),
    _counter(
        "foretick_records_lost_upstream_total",
        "Records missing from a feed's numbering. Any increase is data loss before this daemon.",
        "source",
    ),
    _counter(
        "foretick_ring_dropped_total",
        "Records overwritten before they were read. Any increase is data loss: the engine is too slow.",
        "source",
    ),
    _counter(
        "foretick_ring_pauses_total",
        "Times a full ring paused its source. Worry when it grows steadily: the engine is too slow.",
        "source",
    ),
    _counter("foretick_bars_total", "Bars closed.", "session"),
    _counter(
        "foretick_versions_total",
        "Data versions committed. Worry when it falls far behind the bars.",
        "session",
    ),
    _counter(
        "foretick_evicted_tokens_total",
        "Tokens evicted from sliding regions. Grows steadily once a window is full.",
        "session",
    ),
    _counter("foretick_answers_total", "Answers that every sink acknowledged.", "session"),
    _counter(
        "foretick_answers_failed_total",
        "Standing questions without a published answer, by reason. Worry when it grows.",
        reason=FAILURES,
    ),
    _counter(
        "foretick_flash_coalesced_total",
        "Bars answered only together with a later version. High means overload.",
        "session",
    ),
    _counter("foretick_asks_total", "Ad-hoc questions, by outcome.", outcome=OUTCOMES),
    _counter(
        "foretick_publish_retries_total",
        "Publications tried again. Worry when it grows: the broker is away or slow.",
        "sink",
    ),
    _counter(
        "foretick_engine_restarts_total",
        "Engine processes that the front started again. Any increase deserves a look at the log.",
    ),
    _counter(
        "foretick_tasks_ended_total",
        "Tasks and threads that ended unasked. Any increase is a defect: the log names it.",
        task=TASKS,
        outcome=ENDINGS,
    ),
    _counter("foretick_dead_letters_total", "Records sent to the dead-letter topic."),
    _counter("foretick_batches_total", "Forward passes."),
    _counter("foretick_batch_tokens_total", "Tokens computed by the model, by class.", **{"class": CLASSES}),
    _counter(
        "foretick_wait_seconds_total",
        "Time that requests waited, by reason, added at their end. Its rate is the mean number waiting.",
        **{"class": CLASSES, "reason": WAIT_REASONS},
    ),
    _histogram(
        "foretick_ttft_seconds",
        "TTFT: time from the end of a prompt's input to the first token of its answer.",
        **{"class": ANSWERING},
    ),
    _counter(
        "foretick_preemptions_total",
        "Requests preempted for work of by_class, their KV dropped (recompute) or moved to the host (swap). "
        "Worry when it grows steadily: the pool is too small.",
        **{"kind": PREEMPTIONS, "class": CLASSES, "by_class": CLASSES},
    ),
    _counter(
        "foretick_draft_tokens_total",
        "Draft tokens verified. Few accepted ones mean that speculation does not pay.",
        outcome=DRAFTS,
    ),
    _counter(
        "foretick_reused_tokens_total",
        "Tokens read from existing KV: a session's window, the prefix cache, a prompt that begins alike.",
        **{"class": CLASSES},
    ),
    _counter(
        "foretick_lost_tokens_total",
        "Tokens whose KV was lost before the answer, by preemption or a change of the prompt (invalidated).",
        kind=LOSSES,
    ),
    _counter(
        "foretick_prefix_tokens_total",
        "Tokens read from the prefix cache (reused), added to it (saved) or evicted from it.",
        event=("reused", "saved", "evicted"),
    ),
    _counter("foretick_swaps_total", "Copies between the pool and the host tier.", direction=DIRECTIONS),
    _counter("foretick_spills_total", "Sessions moved out of the pool, to the host tier or to disk."),
    _counter(
        "foretick_restores_total",
        "Sessions brought back to the pool. Many rebuilt ones: files or host blocks were missing.",
        outcome=RESTORES,
    ),
    _counter(
        "foretick_snapshot_failures_total",
        "Session files not written or not read. Any increase deserves a look at the log and the disk.",
    ),
    _counter(
        "foretick_integrity_failures_total",
        "Audits that found a wrong reference count in the pool. Must be 0: report it.",
    ),
    _counter(
        "foretick_oom_total",
        "Forward passes for which the device had no memory. Worry about failed: requests were lost.",
        outcome=OOM_OUTCOMES,
    ),
    _counter("foretick_refreshes_total", "Windows of exact sessions prefilled again and adopted.", "session"),
    _counter(
        "foretick_refresh_restarts_total",
        "Refreshes begun again after the whole window was evicted. Worry when refreshes stand still.",
    ),
    _counter(
        "foretick_divergence_samples_total",
        "Standing questions asked of both the carried and a fresh state.",
        "session",
    ),
    _counter(
        "foretick_divergence_agreements_total",
        "Sampled questions answered with the same first token by both states.",
        "session",
    ),
    _gauge(
        "foretick_divergence_kl_nats",
        "KL of the next token, fresh from carried state: mean of the last sample. Void without samples.",
        "session",
    ),
    _gauge(
        "foretick_staleness_seconds",
        "Age, since receipt, of the latest version's newest record. Worry when it far exceeds a bar.",
        "session",
    ),
    _gauge("foretick_data_version", "Latest data version.", "session"),
    _gauge(
        "foretick_pool_blocks",
        "KV blocks of the pool, by state. Worry when none are free and preemptions grow.",
        state=BLOCK_STATES,
    ),
    _gauge("foretick_host_blocks", "KV blocks of the host tier, by state.", state=BLOCK_STATES),
    _gauge("foretick_prefix_cache_tokens", "Tokens in the prefix cache."),
    _gauge(
        "foretick_pool_fragmentation_ratio", "Share of the free blocks outside the longest free run, 0 to 1."
    ),
    _gauge(
        "foretick_ring_fill_ratio",
        "Share of the ring in use, 0 to 1. Worry near 1: the source is about to pause or lose records.",
        "source",
    ),
    _gauge(
        "foretick_waiting_requests",
        "Requests in the waiting queue and tapes with a backlog, by class.",
        **{"class": CLASSES},
    ),
    _gauge(
        "foretick_live_requests",
        "Requests in the running queue and tapes being appended to, by class.",
        **{"class": CLASSES},
    ),
    _gauge("foretick_scheduler_info", "Always 1; the labels name policy and eviction.", "policy", "eviction"),
    _gauge("foretick_engine_up", "1 while the engine process answers. Worry at 0."),
    _gauge("foretick_session_tokens", "Tokens in a session's window.", "session"),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
