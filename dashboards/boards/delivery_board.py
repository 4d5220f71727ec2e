"""Commits, transactions, hand-overs, listeners and the daemons of a group."""

from dashboards.expressions import gauge, mean, per_second
from dashboards.panels import Rows, counters, gauges, rates, series


def rows() -> Rows:
    """To the sinks, to listeners, and between daemons."""
    return {
        "Checkpoints": _checkpoints(),
        "Listeners": _listeners(),
        "Signals": _signals(),
        "Group": _group(),
    }


def _checkpoints() -> list[object]:
    progress = {
        "damaged or foreign": "foretick_recovery_progress_refused_total",
        "file not written": "foretick_recovery_progress_failed_total",
    }
    transactions = mean("foretick_transaction_seconds"), "mean"
    expiry = gauge("foretick_certificate_expiry_timestamp_seconds", "use", over="min")
    return [
        rates("Checkpoints a second, by outcome", "foretick_checkpoints_total", "outcome"),
        rates("Transactions a second, by outcome", "foretick_transactions_total", "outcome"),
        series("Transactions: time until in effect", "s", transactions),
        rates("Retries of publishing a second", "foretick_publish_retries_total", "sink"),
        counters("Records of progress, a second", **progress),
        rates("Traces for a collector, a second", "foretick_traces_exported_total", "outcome"),
        series("Certificates: time left", "s", (f"({expiry} > 0) - time()", "{{use}}")),
    ]


def _listeners() -> list[object]:
    lost = [
        (per_second("foretick_events_dropped_total", "transport"), "events {{transport}}"),
        (per_second("foretick_query_replies_dropped_total"), "replies of the query socket"),
        (
            per_second("foretick_sink_handshakes_failed_total", "sink"),
            "subscribers with a wrong key {{sink}}",
        ),
    ]
    return [
        gauges("Listeners", "short", "foretick_listeners", "transport", over="sum"),
        series("Lost by slow clients, a second", "short", *lost),
        series("Versions kept for the live page", "bytes", (gauge("foretick_kept_versions_bytes"), "kept")),
    ]


def _signals() -> list[object]:
    attempts = per_second("foretick_webhook_attempts_total", "webhook", "outcome")
    seconds = per_second("foretick_webhook_seconds_total", "webhook")
    requests = per_second("foretick_webhook_attempts_total", "webhook", outcome="delivered|failed|given_up")
    return [
        rates("Signals a second, by outcome", "foretick_signals_total", "outcome"),
        series("Webhooks: attempts a second", "short", (attempts, "{{webhook}} {{outcome}}")),
        series("Webhooks: time of an attempt", "s", (f"{seconds} / {requests}", "mean {{webhook}}")),
        gauges("Webhooks: signals that wait", "short", "foretick_webhook_waiting", "webhook", over="sum"),
    ]


def _group() -> list[object]:
    hand_over = mean("foretick_hand_over_seconds"), "mean"
    standby = [
        (gauge("foretick_standby", over="sum"), "standbys"),
        (gauge("foretick_promotion_seconds"), "last promotion, s"),
    ]
    return [
        rates("Partitions taken over, a second", "foretick_hand_overs_total", "kind"),
        series("Hand-over: not read for", "s", hand_over),
        gauges("Partitions that warm up", "short", "foretick_partitions_warming", "source", over="sum"),
        rates("Partitions that went to others, a second", "foretick_partitions_moved_total", "source"),
        series("Standby daemons", "short", *standby),
        gauges("Records that a standby lacks", "short", "foretick_standby_lag_records", "partition"),
        rates("Requests to other daemons a second", "foretick_peer_requests_total", "outcome"),
        rates("Events of other daemons a second", "foretick_peer_events_total", "outcome"),
        series("Daemons whose events are passed on", "short", (gauge("foretick_peers_followed"), "followed")),
    ]
