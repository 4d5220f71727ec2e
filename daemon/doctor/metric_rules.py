"""When the metrics of a running daemon are a reason to worry, as their help says, and what to do then."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from daemon.doctor.diagnosis import Diagnosis, Verdict, fine
from daemon.top.scrape import Series
from metrics.catalogue import BY_NAME
from metrics.feed_faults import FAULT_NAMES

Labels = frozenset[tuple[str, str]]
Samples = Mapping[Series, float]
Worry = Literal["above", "below", "low", "rises"]
NAMED = 3
"""Series that a diagnosis names."""


@dataclass(frozen=True)
class Rule:
    """``metric`` (without `foretick_`) of ``labels`` is a worry when a series of it is ``above`` ``bound`` in
    either of two scrapes, or ``below`` it; ``low``, which is below it but not 0; or ``rises`` by more than it
    between two scrapes.

    ``step``: what to do, and the guide. ``share_of``: a metric and its labels, by which the sum is divided.
    """

    metric: str
    worry: Worry
    bound: float
    step: tuple[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    verdict: Verdict = "warning"
    share_of: tuple[str, Mapping[str, str]] | None = None


def judge_metrics(before: Samples, after: Samples) -> Iterator[Diagnosis]:
    """Each rule that worries, by two scrapes; where none does, that."""
    found = [each for rule in RULES if (each := judge_rule(rule, before, after))]
    yield from found or [fine("metrics", f"{len(RULES)} rules over {len(after)} series find nothing")]


def judge_rule(rule: Rule, before: Samples, after: Samples) -> Diagnosis | None:
    """What to worry about, if anything."""
    found = [
        f"{_shown(labels)}{value:g}"
        for labels, value in _values(rule, before, after).items()
        if _worries(rule, value)
    ]
    if not found:
        return None
    more = f" and {len(found) - NAMED} others" if len(found) > NAMED else ""
    means = BY_NAME[f"foretick_{rule.metric}"].help
    seen = f"{rule.worry} {rule.bound:g}: {', '.join(found[:NAMED])}{more}. {means}"
    return Diagnosis(f"metrics.{rule.metric}", rule.verdict, seen, *rule.step)


def _values(rule: Rule, before: Samples, after: Samples) -> dict[Labels, float]:
    """What the rule looks at, by labels."""
    new = _of(after, rule.metric, rule.labels)
    if rule.worry == "rises":
        old = _of(before, rule.metric, rule.labels)
        return {labels: value - old.get(labels, 0.0) for labels, value in new.items()}
    if rule.share_of is not None:
        whole = sum(_of(after, *rule.share_of).values())
        return {frozenset(rule.labels.items()): sum(new.values()) / whole} if whole > 0 else {}
    if rule.worry == "above":  # what comes and goes may be away for a moment
        old = _of(before, rule.metric, rule.labels)
        return {labels: max(value, old.get(labels, value)) for labels, value in new.items()}
    return new


def _worries(rule: Rule, value: float) -> bool:
    if rule.worry in ("above", "rises"):
        return value > rule.bound
    return value < rule.bound and (rule.worry == "below" or value != 0)


def _of(samples: Samples, metric: str, labels: Mapping[str, str]) -> dict[Labels, float]:
    name, wanted = f"foretick_{metric}", frozenset(labels.items())
    return {found: value for (each, found), value in samples.items() if each == name and wanted <= found}


def _shown(labels: Labels) -> str:
    return "".join(f"{name} {value} " for name, value in sorted(labels))


_HERE = "operations.md"
_LOG = "read the log, which names it", f"{_HERE}#when-a-part-of-the-daemon-ends"
_DEFECT = "report it with `foretick dump`", f"{_HERE}#doctor"
_ENGINE = "find in the log why it ended: memory, the GPU, a hung pass", f"{_HERE}#when-the-engine-dies"
_LOST = (
    "compare with `foretick feed inspect`; the log names offsets that Kafka deleted unread",
    f"{_HERE}#when-kafka-has-deleted-what-was-not-read",
)
_SOURCE = "read the log, which says why", f"{_HERE}#several-sources"
_LOAD = "see `foretick plan`: fewer sessions, longer bars, or another daemon", f"{_HERE}#too-much-data"
_POOL = "raise pool.blocks, or set pool.host_blocks", f"{_HERE}#sizing-the-pool"
_DLQ = "`foretick dlq list` says which and why", f"{_HERE}#dlq-records"
_CLOCKS = "synchronise this machine's clock and the venue's", "quality.md"
_DISK = "look at the disk, and at recovery.max_bytes", f"{_HERE}#recovery"
_GROUP = "look at the other daemons of the group", f"{_HERE}#several-daemons"
_BROKER = "look at the sink's broker", f"{_HERE}#when-the-broker-is-gone"
_PATTERN = "raise max_sessions of the pattern", f"{_HERE}#many-symbols"
_RESTART = "read in the log which keys need a restart, and restart it", f"{_HERE}#start-readiness-stop"
_RELOAD = "`foretick check` names the keys", f"{_HERE}#start-readiness-stop"
_FEED = (
    "look at the feed (`foretick feed inspect`), or say in [quality] what is done with these",
    "quality.md",
)
_LATE = "raise bars.lateness, or bars.venue_lag for a slower venue", "configuration.md#bars"
_COMMITS = "read in the log what the broker or the disk refuses", f"{_HERE}#when-the-broker-is-gone"
_CALIBRATE = "calibrate again (`foretick calibrate`)", "accuracy.md"
_LABELS = "calibrate again, or mend what sends labels", "accuracy.md"
FAULTY = sorted(set(FAULT_NAMES) - {"silent", "skewed_clock", "reordered", "duplicate"})
"""Kinds of faults that have no rule of their own, and that good feeds do not have."""
_WEBHOOK = "look at whom it calls, and at the log, which says why", "signals.md#webhooks"
_UNSENT = ("failed", "given_up", "dropped")
_CLIENTS = "look at the clients: their keys, how many requests at a time, how fast they read", "clients.md"

RULES = (
    Rule("engine_up", "below", 1, _ENGINE, verdict="problem"),
    Rule("engine_restarts_total", "above", 0, _ENGINE),
    Rule("tasks_ended_total", "above", 0, _DEFECT, verdict="problem"),
    Rule("integrity_failures_total", "above", 0, _DEFECT, verdict="problem"),
    Rule("session_transitions_refused_total", "above", 0, _DEFECT),
    Rule("oom_total", "above", 0, ("lower pool.blocks", _POOL[1]), {"outcome": "failed"}, "problem"),
    Rule("source_up", "below", 1, _SOURCE, verdict="problem"),
    Rule("source_failures_total", "rises", 0, _SOURCE),
    Rule("source_times_unknown_total", "rises", 0, _SOURCE),
    Rule("schema_requests_failed_total", "rises", 0, ("look at the registry", "formats.md#schemas")),
    Rule("records_lost_upstream_total", "above", 0, _LOST),
    Rule("records_malformed_total", "rises", 0, _DLQ),
    Rule("records_refused_total", "rises", 0, _DLQ),
    Rule("dead_letters_total", "rises", 0, _DLQ),
    *(Rule("feed_faults_total", "rises", 0, _FEED, {"kind": kind}) for kind in FAULTY),
    Rule("records_late_total", "rises", 0, _LATE),
    Rule("records_unopened_total", "rises", 0, _PATTERN, {"reason": "limit"}),
    Rule("clock_skew_records_total", "rises", 0, _CLOCKS),
    Rule("venue_delay_seconds", "below", 0, _CLOCKS),
    Rule("consumer_lag_seconds", "above", 10, _LOAD),
    Rule("consumer_lag_records", "rises", 1000, _LOAD),
    Rule("standby_lag_records", "rises", 1000, _LOAD),
    Rule("ring_dropped_total", "above", 0, _LOAD),
    Rule("ring_pauses_total", "rises", 0, _LOAD),
    Rule("ring_fill_ratio", "above", 0.9, _LOAD),
    Rule("freshness_misses_total", "rises", 0, _LOAD),
    # a slow burn shows in few scrapes; the alerts' objective is 99 %
    Rule("freshness_misses_total", "above", 0.01, _LOAD, share_of=("bars_total", {})),
    Rule("bars_skipped_total", "rises", 0, _LOAD),
    Rule("prompts_refused_total", "rises", 0, _LOAD),
    Rule("rollup_missing_bars", "above", 0, _LOAD),
    Rule("utilisation_ratio", "above", 0.9, _LOAD),
    Rule("sessions_open", "above", 0.9, _LOAD, share_of=("sessions_capacity", {"limit": "compute"})),
    Rule("sessions_open", "above", 0.9, _LOAD, share_of=("sessions_capacity", {"limit": "kv_memory"})),
    Rule("pool_blocks", "above", 0.98, _POOL, {"state": "used"}, share_of=("pool_blocks", {})),
    Rule("preemptions_total", "rises", 0, _POOL),
    Rule("draft_tokens_total", "below", 0.3, ("set scheduler.max_drafts = 0", "scheduling.md"),
         {"outcome": "accepted"}, share_of=("draft_tokens_total", {})),
    Rule("answers_failed_total", "rises", 0, _LOG),
    *(Rule("webhook_attempts_total", "rises", 0, _WEBHOOK, {"outcome": each}) for each in _UNSENT),
    Rule("refresh_failures_total", "rises", 0, _LOG),
    Rule("publish_retries_total", "rises", 0, _BROKER),
    Rule("transactions_total", "rises", 0, _BROKER, {"outcome": "aborted"}),
    Rule("checkpoints_total", "rises", 0, _COMMITS, {"outcome": "failed"}),
    Rule("recovery_progress_failed_total", "above", 0, _DISK),
    Rule("recovery_progress_refused_total", "above", 0, _DISK),
    Rule("snapshot_write_failures_total", "above", 0, _DISK),
    Rule("snapshots_refused_total", "above", 0, _DISK, {"reason": "torn"}),
    Rule("spill_failures_total", "above", 0, _DISK),
    Rule("hand_overs_total", "above", 0, _GROUP, {"kind": "unplanned"}),
    Rule("peer_requests_total", "rises", 0, _GROUP, {"outcome": "failed"}),
    Rule("config_reloads_total", "above", 0, _RELOAD, {"outcome": "refused"}),
    Rule("config_reloads_total", "above", 0, _RESTART, {"outcome": "partly"}),
    Rule("tenants_reloads_total", "above", 0, _RELOAD, {"outcome": "refused"}),
    Rule("unauthenticated_total", "rises", 0, _CLIENTS),
    Rule("source_handshakes_failed_total", "above", 5, _CLIENTS),
    Rule("query_refused_total", "rises", 0, _CLIENTS, {"reason": "busy"}),
    Rule("events_dropped_total", "rises", 0, _CLIENTS),
    Rule("query_replies_dropped_total", "rises", 0, _CLIENTS),
    Rule("gap_ratio", "above", 1.5, _CALIBRATE),
    Rule("gap_ratio", "low", 0.7, _CALIBRATE),
    Rule("adapted_coverage", "above", 0.995, _LABELS),
)  # fmt: skip
