"""Every metric that Foretick exports: name, kind, help and labels.

The store's layout, the exposition and the dashboards follow from this list. Names start with `foretick_`.
Times are recorded in nanoseconds and exported in seconds, as Prometheus recommends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from metrics.feed_faults import FAULT_NAMES

Kind = Literal["counter", "gauge", "histogram"]

# The stages from a tick to its answer, in order; the last ones span several of them. See `metrics.export` for
# the quantiles that each can give.
STAGES: tuple[str, ...] = (
    "ring_wait",  # ring entry -> drained by the engine
    "bars",  # drained batch -> its closed bars
    "tokenise",  # closed bars -> token ids
    "queue_flash",  # queued -> first batch, by scheduling class
    "queue_session",
    "forward",  # one forward pass
    "publish",  # answer handed to the sink -> acknowledged
    "close_to_answer",  # ring entry of the record that closed the newest bar -> answer acknowledged
    "end_to_end",  # ring entry of the newest tick in the version -> answer acknowledged
    "ask_cached",  # query socket request -> reply, by the tier that answered (see OUTCOMES)
    "ask_ready",
    "ask_computed",
)
# Stages with an objective of their own; and stages and histograms of which only the mean is read.
OBJECTIVES: tuple[str, ...] = ("close_to_answer", "end_to_end")
MEANS: tuple[str, ...] = (
    "ring_wait",
    "bars",
    "tokenise",
    "foretick_tenant_wait_seconds",
    "foretick_transaction_seconds",
    "foretick_hand_over_seconds",
)
CLASSES: tuple[str, ...] = ("flash", "session", "pool", "stream")
# The classes of asks, free text and prompts: those that clients see the tokens of.
ANSWERING: tuple[str, ...] = ("session", "pool")
# Kinds of records that are in no bar, in the order of their numbers in the ring.
EVENTS: tuple[str, ...] = ("text", "status", "action", "book")
# What became of a trace that was to be exported: taken, refused or not answered, or too many waited.
EXPORTED: tuple[str, ...] = ("sent", "failed", "dropped")
Treatment = Literal["line", "flag", "ignore"]
BLOCK_STATES: tuple[str, ...] = ("free", "used")
# What the age of a record counts from.
AGES: tuple[str, ...] = ("event", "source", "daemon")
# Counts the values that a label's list does not name.
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
    "avro",
    "protobuf",
    "schema",  # a registry has none with this id, or it is of another kind
    "envelope",  # the record is inside another message, such as Debezium's
    "framing",  # bytes before the record, such as a schema registry's
    "corrupt",  # the source's own container of messages cannot be read, such as a batch of Kafka
    "frames",  # a message of another number of ZeroMQ frames, or without a header
    "internal",  # an error of the daemon's own code
]
REASONS: tuple[str, ...] = (*get_args(Reason), OTHER)
# Messages without a payload.
EMPTY: tuple[str, ...] = ("tombstone", "empty")

# What became of an attempt to send a signal, or of a signal that is not sent any more.
WEBHOOKS: tuple[str, ...] = ("delivered", "failed", "given_up", "dropped")
SIGNALS: tuple[str, ...] = ("fired", "suppressed")
ABSTAINED: tuple[str, ...] = ("low_confidence", "few_labels", "error_budget")
# Why a question got no answer.
SUPPRESSED: tuple[str, ...] = (
    "unchanged",
    "low_confidence",
    "not_crossed",
    "not_due",
    "never",
    "late",
    "skipped",
    "superseded",
)
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
# How an ask on the query socket ended: by the tier that answered it (Attention Once section 3.9.7: a standing
# question's answer, the ready position's, a forward pass), or with an error's code.
OUTCOMES: tuple[str, ...] = (
    "cached",
    "ready",
    "computed",
    "too_long",
    "timeout",
    "busy",
    "cancelled",
    "engine",
    "rebuilding",
    OTHER,
)
# How a label ended: what it says of the answer, or an error's code.
LABEL_OUTCOMES: tuple[str, ...] = ("right", "wrong", "unknown_version", "not_calibrated", "repeated", OTHER)
# How a request of the OpenAI, Anthropic and System One APIs ended: client_closed, when the client left.
API_OUTCOMES: tuple[str, ...] = (
    "done",
    "client_closed",
    "bad_request",
    "too_long",
    "busy",
    "engine",
    "timeout",
    OTHER,
)
# Why a request was left out of a batch: an exhausted budget, or a class that goes first.
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
# Why a symbol that a pattern matches has no session.
UNOPENED: tuple[str, ...] = ("activity", "limit", "refused", "outside")
DRAFTS: tuple[str, ...] = ("accepted", "rejected")
# How a request lost its KV: dropped or swapped out by preemption, or invalidated by an update of its prompt.
LOSSES: tuple[str, ...] = ("recomputed", "swapped", "invalidated")
# How clients listen to events.
TRANSPORTS: tuple[str, ...] = ("sse", "websocket", "zeromq", "mcp")
# Why the query socket did not take a message: too many bytes, not msgpack, no request of the protocol,
# another version of it, an id that is still being answered, too many requests in all or of one client.
QueryRefusal = Literal[
    "too_long",
    "unreadable",
    "bad_request",
    "unsupported_version",
    "in_flight",
    "busy",
    "busy_client",
    "shutting_down",
]
# Labels whose values depend on the deployment; the store gets them when it is created, but for partitions and
# venues, which a source learns later.
OPEN_LABELS: tuple[str, ...] = (
    "session",
    "source",
    "sink",
    "tenant",
    "policy",
    "eviction",
    "partition",
    "venue",
    "webhook",
    "question",
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `values` holds the values of fixed labels; the other labels are in `OPEN_LABELS`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def in_seconds(self) -> bool:
        """Whether it is stored in nanoseconds and exported in seconds."""
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
        "Time in each stage from tick to answer. Worry when end_to_end exceeds the delay you can accept.",
        stage=STAGES,
    ),
    _counter(
        "foretick_traces_exported_total",
        "Traces for the OpenTelemetry collector. Worry when failed or dropped ones grow: it takes them too "
        "slowly, or not at all.",
        outcome=EXPORTED,
    ),
    _counter(
        "foretick_records_total",
        "Records read from the source, usable or not. Worry when it stops growing while the market is open.",
        "source",
    ),
    _counter(
        "foretick_records_passed_total",
        "Records of the source that were passed to sessions.",
        "source",
    ),
    _counter(
        "foretick_session_records_total",
        "Records passed to the session. It takes them into bars, or drops them and counts why.",
        "session",
    ),
    _gauge(
        "foretick_source_up",
        "Whether a source is connected, 0 or 1. Worry at 0: its symbols get no records.",
        "source",
    ),
    _counter(
        "foretick_source_failures_total",
        "Failures of one of several sources, which is then opened again. Worry when it grows.",
        "source",
    ),
    _counter(
        "foretick_source_handshakes_failed_total",
        "ZeroMQ peers of a source without a valid key. Worry when it grows: a wrong key, or an intruder.",
        "source",
    ),
    _counter(
        "foretick_sink_handshakes_failed_total",
        "ZeroMQ subscribers without a valid key. Worry when it grows: a wrong key, or an intruder.",
        "sink",
    ),
    _counter(
        "foretick_records_malformed_total",
        "Malformed records refused, by reason; each goes to the DLQ topic. Worry when it grows.",
        reason=REASONS,
    ),
    _counter(
        "foretick_messages_empty_total",
        "Messages without a payload, which are skipped: tombstones of Kafka (a null value) and empty ones. "
        "Normal in a compacted topic.",
        "source",
        kind=EMPTY,
    ),
    _counter(
        "foretick_records_passed_over_total",
        "Rows of messages in a declared format that hold no record, as the format says.",
        "source",
    ),
    _counter(
        "foretick_schema_requests_failed_total",
        "Requests to the schema registry that failed. Worry when it grows: the source waits for it.",
        "source",
    ),
    _counter(
        "foretick_source_breaks_total",
        "Times that a connection broke which does not repeat what was sent meanwhile. The next answers have "
        "the flag gap.",
        "source",
    ),
    _counter(
        "foretick_source_times_unknown_total",
        "Messages whose source time, such as Kafka's timestamp, is outside the years 1990 to 2099 and is "
        "not used. Worry: a producer writes another unit than milliseconds.",
        "source",
    ),
    _counter(
        "foretick_records_unknown_symbol_total",
        "Records of symbols that no session reads. Normal when a topic carries other symbols.",
    ),
    _counter(
        "foretick_records_unopened_total",
        "Records of symbols that a pattern matches and that have no session: too few came yet, the pattern "
        "has as many sessions as it may, or the engine refused one. outside: of an alias or a contract, at a "
        "time at which it is of no symbol. Worry when limit or refused grows.",
        reason=UNOPENED,
    ),
    _counter(
        "foretick_heartbeats_total",
        "Heartbeats of venues that sessions read.",
        "source",
    ),
    _counter(
        "foretick_records_late_total",
        "Records whose bar had closed: dropped, amended or refused (late). Raise lateness when it grows.",
        "session",
    ),
    _counter(
        "foretick_records_amended_total",
        "Late records whose bar was written again with them (late = amend).",
        "session",
    ),
    _counter(
        "foretick_records_refused_total",
        "Usable records that a session refused and sent to the DLQ. Worry when it grows.",
        "session",
        reason=("late", "price_jump", "interval", "quality"),
    ),
    _counter(
        "foretick_records_dropped_total",
        "Records with a fault that were dropped, as `[quality]` says.",
        "session",
    ),
    _counter(
        "foretick_feed_faults_total",
        "Records with a fault, by kind; of silence, its beginnings. Worry when a kind grows that your feed "
        "should not have.",
        "source",
        kind=FAULT_NAMES,
    ),
    _gauge(
        "foretick_symbols_silent",
        "Symbols of which nothing came for far longer than is usual, while their venue is open. Worry above "
        "0: a feed that is connected and dead.",
        "source",
    ),
    _counter(
        "foretick_price_jumps_total",
        "Records with a price beyond price_jump. Worry at any increase: a wrong price, or a split.",
        "session",
    ),
    _counter(
        "foretick_records_ignored_total",
        "Records of another kind or price_scale than the session's bars, ignored. Worry when it grows: "
        "a topic mixes kinds.",
        "session",
    ),
    _counter(
        "foretick_records_in_snapshot_total",
        "Records read again that the session's snapshot has already, ignored. Normal after a restart.",
        "session",
    ),
    _counter(
        "foretick_events_total",
        "Records that are in no bar: headlines, states of trading, corporate actions, books. `[events]` says "
        "whether they are lines of the tape, flags of answers, or ignored.",
        "session",
        kind=EVENTS,
    ),
    _gauge(
        "foretick_session_halted",
        "Whether trading of one of the session's symbols has halted, 0 or 1.",
        "session",
    ),
    _counter(
        "foretick_records_in_bars_total",
        "Records that are in bars, open ones included.",
        "session",
    ),
    _counter(
        "foretick_records_duplicate_total",
        "Records dropped because their symbol had them before, by number or id, and content. Normal after a "
        "reconnect.",
        "session",
    ),
    _counter(
        "foretick_clock_skew_records_total",
        "Records received before their event time. Worry when it grows: a clock is wrong.",
        "source",
    ),
    _counter(
        "foretick_records_repeated_total",
        "Records skipped because they were read before. Normal after a reconnect.",
        "source",
    ),
    _counter(
        "foretick_recovery_progress_refused_total",
        "Records of progress, or files of it, that were damaged or not foretick's. Their "
        "sessions number their answers from 1 again.",
    ),
    _counter(
        "foretick_recovery_progress_failed_total",
        "Times that the file of progress could not be written. It is tried again every second.",
    ),
    _gauge(
        "foretick_standby",
        "1 while this daemon is a standby of another (recovery.standby), 0 while it answers. Worry when no "
        "daemon of a group shows 0.",
    ),
    _gauge(
        "foretick_promotion_seconds",
        "Time from being given partitions until this daemon answered the sessions that it had followed; 0 "
        "before that.",
    ),
    _gauge(
        "foretick_partitions_warming",
        "Partitions that this daemon reads behind their owner, to take them over. Worry when it stays above "
        "0 in a daemon that is no standby: it does not catch up.",
        "source",
    ),
    _counter(
        "foretick_session_transitions_refused_total",
        "Events of a session that cannot happen in its state, by the process that saw them. The log "
        "names both, and the session stays as it is. Worry when it grows: it is a defect.",
        process=("gateway", "engine"),
    ),
    _counter(
        "foretick_hand_overs_total",
        "Partitions that another daemon had and this one reads now: planned where their owner handed them "
        "over, unplanned where that was gone. Worry when unplanned grows: daemons die or hang.",
        kind=("planned", "unplanned"),
    ),
    _histogram(
        "foretick_hand_over_seconds",
        "Time from when this daemon noticed that the group changes until it read a partition that another "
        "one had. Its sessions are silent meanwhile.",
    ),
    _counter(
        "foretick_records_skipped_total",
        "Offsets skipped: after an outage, because the records are older than any window holds, or in a "
        "batch that cannot be read. The log names the partition; answers after the jump carry the flag gap.",
        "source",
    ),
    _counter(
        "foretick_partitions_moved_total",
        "Partitions that a rebalance of the consumer group took from this daemon. Their sessions get no "
        "records here; the new owner reads on from the committed offsets.",
        "source",
    ),
    _counter(
        "foretick_records_lost_upstream_total",
        "Records missing from a feed's numbering, and offsets that Kafka deleted before they were read. "
        "Worry at any increase: data was lost before this daemon.",
        "source",
    ),
    _counter(
        "foretick_ring_dropped_total",
        "Records overwritten before they were read. Worry at any increase: data is lost, the engine is slow.",
        "source",
    ),
    _counter(
        "foretick_ring_pauses_total",
        "Times a full ring paused its source. Worry when it grows steadily: the engine is too slow.",
        "source",
    ),
    _counter("foretick_bars_total", "Bars closed.", "session"),
    _counter(
        "foretick_bars_skipped_total",
        "Bars skipped unread, because newer ones that waited fill the window. Worry when it grows "
        "steadily: the session has more data than the engine can read.",
        "session",
    ),
    _gauge(
        "foretick_bars_waiting",
        "Closed bars that wait until the engine has read others of their session. Worry while it is not 0.",
        "session",
    ),
    _counter(
        "foretick_bars_rounded_total",
        "Bars with a price finer than price_decimals, or between two levels of a compact line. Normal where "
        "compact windows span over 400 ticks.",
        "session",
    ),
    _counter(
        "foretick_volumes_saturated_total",
        "Bars whose volume is more than 300 times below or above their anchor's: its code is the limit.",
        "session",
    ),
    _counter(
        "foretick_anchors_total",
        "New anchors of compact sessions. If it grows with every few bars, set a larger unit.",
        "session",
    ),
    _counter(
        "foretick_freshness_misses_total",
        "Bars read later than the session's freshness objective (max_staleness). Worry when it grows: the "
        "device lacks the capacity.",
        "session",
    ),
    _counter(
        "foretick_prompts_refused_total",
        "Prompts refused because tapes were late. Worry when it grows: more load than the device can carry.",
    ),
    _counter(
        "foretick_versions_total",
        "Data versions committed. Worry when it falls far behind foretick_bars_total.",
        "session",
    ),
    _counter("foretick_answers_total", "Answers that every sink acknowledged.", "session"),
    _counter(
        "foretick_answers_failed_total",
        "Standing questions without a published answer, by reason. Worry when it grows.",
        reason=FAILURES,
    ),
    _counter(
        "foretick_answers_suppressed_total",
        "Answers that a question's publish_when or deadline kept from the sinks; skipped and superseded "
        "ones were not computed, or not to the end. Worry when late, skipped or superseded grow: overload.",
        reason=SUPPRESSED,
    ),
    _counter(
        "foretick_signals_total",
        "Signals that conditions on answers have fired; suppressed ones came within a cooldown.",
        outcome=SIGNALS,
    ),
    _counter(
        "foretick_webhook_attempts_total",
        "Requests of webhooks. Worry when failed ones grow: the receiver refuses them or hangs; given_up and "
        "dropped signals are not sent again, and the log names them.",
        "webhook",
        outcome=WEBHOOKS,
    ),
    _counter("foretick_webhook_seconds_total", "Time of a webhook's requests until their status.", "webhook"),
    _gauge("foretick_webhook_waiting", "Signals that wait to be sent. Worry when it grows.", "webhook"),
    _counter(
        "foretick_flash_coalesced_total",
        "Bars answered only together with a later version. Worry when it grows steadily: overload.",
        "session",
    ),
    _counter(
        "foretick_choice_sets_total",
        "Choice sets of calibrated answers, by size. Worry when empty or several grow: the market is unlike "
        "the tapes of the calibration.",
        "session",
        size=("empty", "one", "several"),
    ),
    _counter(
        "foretick_labels_total",
        "Labels of past answers, by what they say of them or by error. If unknown_version grows, they come "
        "too late.",
        outcome=LABEL_OUTCOMES,
    ),
    _counter(
        "foretick_labelled_sets_total",
        "Choice sets that got a label, by whether they had it. Worry when the share of yes stays below "
        "model.coverage.",
        "session",
        covered=("yes", "no"),
    ),
    _counter(
        "foretick_labelled_right_total",
        "Answers that were right by their label, of those of foretick_labelled_sets_total. Worry when the "
        "share falls.",
        "session",
    ),
    _counter(
        "foretick_standing_engine_seconds_total",
        "Time of the engine that answers to standing questions took: of each pass, by their tokens.",
        "session",
    ),
    _counter(
        "foretick_over_budget_total",
        "Data versions that a standing question skipped, over all sessions, because its engine_share was "
        "used up; other: a question that had none in the configuration at the start. Worry when it grows and "
        "the question matters.",
        "question",
    ),
    _counter(
        "foretick_frequent_changes_total",
        "Ad hoc questions that became standing ones, that ended as such, and that were refused. Worry when "
        "both of the first grow: they come and go, and flash.standing_window is short.",
        outcome=("standing", "ended", "refused"),
    ),
    _counter(
        "foretick_packs_unreadable_total",
        "Question packs whose file was gone, or another one, when the engine was started again: their "
        "questions are paused. Worry when it grows: put the file back, and resume them.",
    ),
    _counter(
        "foretick_acted_total",
        "Answers to act on, of questions with a max_error.",
        "session",
    ),
    _counter(
        "foretick_act_abstained_total",
        "Answers not to act on, of questions with a max_error, by reason. Worry when few_labels stays, which "
        "says that labels do not come, or error_budget grows: the market is unlike what the labels were of.",
        "session",
        reason=ABSTAINED,
    ),
    _counter(
        "foretick_asks_total",
        "Ad-hoc questions, by the tier that answered, or by error.",
        outcome=OUTCOMES,
    ),
    _counter(
        "foretick_api_requests_total",
        "Requests of the OpenAI, Anthropic and System One APIs, by how they ended (client_closed: the client "
        "left). Worry when engine or timeout grows.",
        outcome=API_OUTCOMES,
    ),
    _counter(
        "foretick_api_cache_total",
        "Look-ups of rendered chats, tokenised texts and questions, and whole responses that were kept.",
        cache=("render", "tokenise", "question", "response"),
        outcome=("hit", "miss"),
    ),
    _counter(
        "foretick_publish_retries_total",
        "Retries of publishing. Worry when it grows: the broker is down or slow.",
        "sink",
    ),
    _counter(
        "foretick_transactions_total",
        "Transactions of exactly_once: committed, attempts that had no effect, and attempts without a reply, "
        "which turn out to be one or the other. Worry when aborted grows.",
        outcome=("committed", "aborted", "unknown"),
    ),
    _counter(
        "foretick_checkpoints_total",
        "Commits of progress and offsets: done, or failed and tried again. Worry when failed grows and done "
        "does not: after a restart all since the last one is answered again.",
        "source",
        outcome=("done", "failed"),
    ),
    _histogram(
        "foretick_transaction_seconds",
        "Time until a transaction is in effect, with its repeats. It is part of the stage publish.",
    ),
    _counter(
        "foretick_engine_restarts_total",
        "Restarts of the engine process. Worry at any increase: see the log.",
    ),
    _counter(
        "foretick_tasks_ended_total",
        "Tasks and threads that ended unexpectedly. Worry at any increase: it is a defect, and the log and "
        "/readyz name it.",
        outcome=("restarted", "failed"),
    ),
    _counter(
        "foretick_config_reloads_total",
        "Configurations read again at SIGHUP: done, done in part, or refused. Unless done, see the log.",
        outcome=("done", "partly", "refused"),
    ),
    _counter(
        "foretick_dead_letters_total",
        "Messages sent to the DLQ topic: not decoded (read), refused by a session (process), or "
        "answers that a sink refused (produce).",
        stage=("read", "process", "produce"),
    ),
    _gauge(
        "foretick_listeners",
        "Clients that listen to events now; each open WebSocket is one. At http.max_listeners, further ones "
        "are refused.",
        transport=TRANSPORTS,
    ),
    _gauge(
        "foretick_kept_versions_bytes",
        "About the memory of the data versions that are kept for the live page. Worry when it is large: "
        "lower http.kept_versions.",
    ),
    _counter(
        "foretick_events_dropped_total",
        "Events that clients lost because they read too slowly; each learns how many. Worry when it grows: "
        "a client is too slow.",
        transport=TRANSPORTS,
    ),
    _counter(
        "foretick_unauthenticated_total",
        "Requests and connections without a right key. Worry when it grows: a client has an old key, or "
        "somebody tries.",
        reason=("missing", "malformed", "unknown"),
    ),
    _counter(
        "foretick_tenant_requests_total",
        "Requests of each tenant: admitted, or refused for its rate, its tokens, its share of the engine's "
        "time, or because only operators may. Local is every program of this machine where there are no "
        "tenants.",
        "tenant",
        outcome=("admitted", "rate", "tokens", "engine", "forbidden"),
    ),
    _counter(
        "foretick_tenant_tokens_total",
        "Prompt and answer tokens that were computed for each tenant's own prompts.",
        "tenant",
    ),
    _counter(
        "foretick_tenant_engine_seconds_total",
        "Time of the engine that each tenant's asks and prompts took: of each pass, by their tokens.",
        "tenant",
    ),
    Metric(
        "foretick_tenant_wait_seconds",
        "histogram",
        "From a request's arrival in the engine to its first batch, of asks and prompts of each tenant; free "
        "text of standing questions is local. Worry when it grows for a tenant whose weight is high.",
        ("tenant",),
    ),
    _counter(
        "foretick_tenants_reloads_total",
        "Readings of the tenants file at SIGHUP. Worry when refused grows: the old tenants go on.",
        outcome=("done", "refused"),
    ),
    _counter(
        "foretick_query_refused_total",
        "Messages that the query socket did not take, by reason. Worry when busy grows, or unreadable: a "
        "client of another protocol.",
        reason=get_args(QueryRefusal),
    ),
    _counter(
        "foretick_query_replies_dropped_total",
        "Replies of the query socket to clients that were gone or did not read. Worry when it grows.",
    ),
    _counter(
        "foretick_peer_requests_total",
        "Requests to other daemons of the group about their sessions, by outcome: answered; moved, so that "
        "the new owner is asked; failed. Worry when failed grows: a daemon does not answer.",
        outcome=("answered", "moved", "failed"),
    ),
    _gauge(
        "foretick_peers_followed",
        "Other daemons of the group whose events this one passes on, while clients listen.",
    ),
    _counter(
        "foretick_peer_events_total",
        "Events of other daemons, by outcome: passed on; repeated, that is published again by a session's "
        "next engine, here or there, and dropped; lost. Worry when lost grows.",
        outcome=("passed", "repeated", "lost"),
    ),
    _counter(
        "foretick_pushes_total",
        "Bodies of records that clients pushed, by outcome. Worry when busy grows: the engine is too slow.",
        outcome=("accepted", "partly", "refused", "busy"),
    ),
    _counter("foretick_batches_total", "Forward passes."),
    _counter("foretick_batch_tokens_total", "Tokens computed by the model, by class.", **{"class": CLASSES}),
    _counter(
        "foretick_wait_seconds_total",
        "Time that requests waited, by reason, added when they end. Its rate is the mean number waiting.",
        **{"class": CLASSES, "reason": WAIT_REASONS},
    ),
    _histogram(
        "foretick_ttft_seconds",
        "TTFT: time from the end of a prompt's input to the first token of its answer.",
        **{"class": ANSWERING},
    ),
    _counter(
        "foretick_preemptions_total",
        "Requests of a class preempted for work of by_class. Worry when it grows steadily: the pool is too "
        "small.",
        **{"class": CLASSES, "by_class": CLASSES},
    ),
    _counter(
        "foretick_draft_tokens_total",
        "Draft tokens verified, by class and outcome. If few are accepted, turn speculation off.",
        **{"class": CLASSES, "outcome": DRAFTS},
    ),
    _counter(
        "foretick_decode_passes_total",
        "Passes of answers after their first token, by class. Each accepted draft token saved one more.",
        **{"class": CLASSES},
    ),
    _counter(
        "foretick_reused_tokens_total",
        "Tokens read from existing KV: a session's window, the prefix cache, a prompt with the same prefix.",
        **{"class": CLASSES},
    ),
    _counter(
        "foretick_lost_tokens_total",
        "Tokens whose KV was lost before the answer, by preemption or a change of the prompt (invalidated).",
        kind=LOSSES,
    ),
    _counter(
        "foretick_prefix_tokens_total",
        "Tokens read from the prefix cache (reused), added to it (saved), evicted from it, or not retained "
        "(unretained): their tenant had no share left. Worry when unretained grows: priorities are overused.",
        event=("reused", "saved", "evicted", "unretained"),
    ),
    _counter(
        "foretick_spills_total",
        "Sessions offloaded to the host tier or to disk, and those that were used before the copy was whole "
        "(abandoned). Worry when it keeps rising with foretick_restores_total: the pool is too small.",
        outcome=("host", "disk", "abandoned"),
    ),
    _counter(
        "foretick_restores_total",
        "Sessions restored to the pool. Worry when many are rebuilt: files or host blocks were missing.",
        outcome=("host", "disk", "rebuilt"),
    ),
    _counter(
        "foretick_spill_failures_total",
        "Files of offloaded sessions that could not be written or read. Worry at any increase: see the log "
        "and the disk.",
    ),
    _counter(
        "foretick_snapshots_written_total",
        "Snapshots written, for restarts. Worry when it stands still while bars close.",
        "session",
    ),
    _counter(
        "foretick_snapshot_write_failures_total",
        "Snapshots not written, for want of room (recovery.max_bytes) or by an error of the disk; the log "
        "names the session. Worry at any increase.",
        reason=("no_room", "disk"),
    ),
    _counter(
        "foretick_snapshots_refused_total",
        "Snapshots not used at a start; the log names them. Worry when torn or foreign grows; newer is "
        "normal after a crash.",
        reason=("torn", "foreign", "newer", "no_room"),
    ),
    _counter(
        "foretick_snapshots_restored_total",
        "Sessions that went on from a snapshot. One that did not was read again from the source.",
        "session",
    ),
    _gauge(
        "foretick_snapshot_age_seconds",
        "Age of the newest snapshot, 0 before the first of this engine. After a crash so much is read again.",
        "session",
    ),
    _gauge(
        "foretick_snapshot_disk_free_ratio",
        "Share of the snapshots' disk that is free, 0 to 1. Worry below 0.1: snapshots, and progress of "
        "sources without a log, can soon not be written.",
    ),
    _gauge(
        "foretick_certificate_expiry_timestamp_seconds",
        "When the certificate that this daemon shows expires, Unix time: the one of its HTTP port, or the "
        "first of its Kafka clients; 0 without one. Worry two weeks ahead: a restart reads a new one.",
        use=("http", "kafka"),
    ),
    _counter(
        "foretick_integrity_failures_total",
        "Audits that found a wrong reference count in the pool. Worry above 0: it is a defect, report it.",
    ),
    _counter(
        "foretick_oom_total",
        "Forward passes that ran out of device memory. Worry when failed grows: requests were lost.",
        outcome=("retried", "failed"),
    ),
    _counter(
        "foretick_graph_captures_total",
        "Sizes of passes that a GPU was to record as a CUDA graph; refused ones, named in the log once, and "
        "those without memory run slower. Worry when refused grows after a start.",
        outcome=("captured", "refused", "no_memory"),
    ),
    _counter(
        "foretick_refreshes_total",
        "Refreshed windows that replaced the old ones.",
        "session",
    ),
    _counter(
        "foretick_refresh_failures_total",
        "Refreshes that failed; the old window stays, a new prefix is retried. If it grows, see the log.",
        "session",
    ),
    _counter(
        "foretick_refresh_restarts_total",
        "Refreshes restarted: the whole window was evicted, or records of another session waited for its "
        "refresh. Worry when foretick_refreshes_total stops.",
    ),
    _counter(
        "foretick_divergence_samples_total",
        "Standing questions answered from both the carried and a fresh state.",
        "session",
    ),
    _counter(
        "foretick_divergence_agreements_total",
        "Standing questions answered with the same first token from both states.",
        "session",
    ),
    _gauge(
        "foretick_divergence_kl_nats",
        "KL of the next token, fresh from carried state: mean of the last sample. Void before the first.",
        "session",
    ),
    _gauge(
        "foretick_staleness_seconds",
        "Age of the latest version's newest record: since its event by the venue's clock (of a replay, since "
        "it was sent), since the broker or socket had it, since this daemon had it. Worry when it far "
        "exceeds a bar's length: the first alone means a quiet market or a slow feed, the first two a "
        "consumer behind.",
        "session",
        since=AGES,
    ),
    _gauge(
        "foretick_consumer_lag_records",
        "Records of a Kafka partition (topic/number) that are not read yet. Worry while it grows.",
        "partition",
    ),
    _gauge(
        "foretick_standby_lag_records",
        "Records of a Kafka partition (topic/number) that the daemon that answers has committed, and this "
        "standby has not read. Worry while it grows: its take-over would take longer.",
        "partition",
    ),
    _gauge(
        "foretick_consumer_lag_seconds",
        "Age of the newest record that was read of a Kafka partition while others wait; else 0.",
        "partition",
    ),
    _gauge(
        "foretick_venue_silence_seconds",
        "Time since a session's venue last sent a record or a heartbeat. Worry when it exceeds the "
        "venue's heartbeat interval: the feed is silent, not the market quiet.",
        "session",
    ),
    _gauge(
        "foretick_venue_delay_seconds",
        "Shortest time from a venue's event to its arrival here in the last one to two minutes, by the two "
        "clocks. Worry below 0: the venue's clock is ahead of ours, or ours is behind. Of two venues that "
        "differ by more than their lines do the clocks are apart: bars.venue_lag must be longer than that.",
        "venue",
    ),
    _gauge(
        "foretick_gap_ratio",
        "Mean logit gap of the latest answers over that at calibration. Worry below 0.7 or above 1.5: drift.",
        "session",
    ),
    _gauge(
        "foretick_adapted_coverage",
        "Largest coverage that labels make a question's choice sets ask for; 0 before the first label. Worry "
        "near 1: the sets hold every choice.",
        "session",
    ),
    _gauge(
        "foretick_adapted_calibrations",
        "Questions whose probabilities labels have adapted, since the calibration's are worse by them. Worry "
        "when it stays: calibrate again.",
        "session",
    ),
    _gauge(
        "foretick_acted_error_ratio",
        "Share wrong of the latest thousand labelled answers that were to be acted on, of the worst "
        "question; absent before the first label of one. Worry near max_error.",
        "session",
    ),
    _gauge(
        "foretick_frequent_questions",
        "Ad hoc questions that are standing ones because they come often (flash.standing_after).",
    ),
    _gauge("foretick_data_version", "Latest data version.", "session"),
    _gauge(
        "foretick_pool_blocks",
        "KV blocks of the pool, by state. Worry when none is free and preemptions grow.",
        state=BLOCK_STATES,
    ),
    _gauge("foretick_host_blocks", "KV blocks of the host tier, by state.", state=BLOCK_STATES),
    _gauge(
        "foretick_ring_fill_ratio",
        "Share of the ring in use, 0 to 1. Worry near 1: the source will pause or lose records.",
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
    _gauge(
        "foretick_utilisation_ratio",
        "Share of the last ten seconds in forward passes, 0 to 1. Worry near 1: the device is at its limit.",
    ),
    _gauge(
        "foretick_sessions_open",
        "Sessions that have memory in this daemon: where daemons share the partitions of a topic, those that "
        "are read here or about to be. Compare with `foretick_sessions_capacity`.",
    ),
    _gauge(
        "foretick_sessions_capacity",
        "Sessions like the present ones that the device could carry, by what limits them: compute by the "
        "measured costs of passes, beside the asks and prompts of the last ten seconds (*Attention Once* "
        "equation 15), KV memory by the share of the pool that they use. Compare with `foretick plan`. Worry "
        "when it is near their number. 0: none, or not known yet.",
        limit=("compute", "kv_memory"),
    ),
    _gauge(
        "foretick_k_max",
        "Standing questions of every bar that each of the present sessions could have beside the asks and "
        "prompts of the last ten seconds (*Attention Once* equation 16), by the measured costs of passes; of "
        "several models, each as if alone, the least. "
        "Compare with `foretick plan`. Worry when a session has as many. 0: none, or not known yet.",
    ),
    _gauge("foretick_scheduler_info", "Always 1; the labels name policy and eviction.", "policy", "eviction"),
    _gauge("foretick_engine_up", "1 while the engine process answers. Worry at 0."),
    _gauge("foretick_session_tokens", "Tokens in a session's window.", "session"),
    _gauge(
        "foretick_rollup_missing_bars",
        "Bars that left the window before its rollup had them, so that questions see them nowhere until the "
        "next one. Worry while it is not 0: refreshes are slower than the data.",
        "session",
    ),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
