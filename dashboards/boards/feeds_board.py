"""What comes in, what is wrong with it, and what was lost."""

from dashboards.expressions import gauge, per_second
from dashboards.panels import Rows, counters, gauges, rates, series


def rows() -> Rows:
    """From the connection to the bars."""
    return {
        "Connections": _connections(),
        "Where records go": _records(),
        "What is wrong with them": _faults(),
        "What was lost": _losses(),
        "Bars": _bars(),
    }


def _connections() -> list[object]:
    failures = [
        (per_second("foretick_source_failures_total", "source"), "opened again {{source}}"),
        (per_second("foretick_source_breaks_total", "source"), "broke without repeats {{source}}"),
        (per_second("foretick_source_handshakes_failed_total", "source"), "wrong keys {{source}}"),
        (per_second("foretick_schema_requests_failed_total", "source"), "schema registry {{source}}"),
    ]
    return [
        gauges("Connected", "none", "foretick_source_up", "source", over="min"),
        series("Failures a second", "short", *failures),
        gauges("Silence of the venue", "s", "foretick_venue_silence_seconds", "session"),
        gauges("Silent symbols", "short", "foretick_symbols_silent", "source", over="sum"),
        gauges("Shortest delay by venue", "s", "foretick_venue_delay_seconds", "venue", over="min"),
        rates("Heartbeats a second", "foretick_heartbeats_total", "source"),
        gauges("Kafka records not read yet", "short", "foretick_consumer_lag_records", "partition"),
        gauges("Age of the Kafka input while some waits", "s", "foretick_consumer_lag_seconds", "partition"),
        gauges("Ring fill", "percentunit", "foretick_ring_fill_ratio", "source"),
        rates("Pushed bodies a second, by outcome", "foretick_pushes_total", "outcome"),
    ]


def _records() -> list[object]:
    ways = {
        "read": "foretick_records_total",
        "passed to sessions": "foretick_records_passed_total",
        "of unknown symbols": "foretick_records_unknown_symbol_total",
        "not of the session's kind": "foretick_records_ignored_total",
        "in a snapshot already": "foretick_records_in_snapshot_total",
        "in bars": "foretick_records_in_bars_total",
    }
    skipped = {
        "without a payload": "foretick_messages_empty_total",
        "rows without a record": "foretick_records_passed_over_total",
        "read before": "foretick_records_repeated_total",
        "came before": "foretick_records_duplicate_total",
    }
    return [
        counters("Records a second", **ways),
        counters("Skipped as they should be, a second", **skipped),
        rates(
            "Symbols of a pattern without a session, records a second",
            "foretick_records_unopened_total",
            "reason",
        ),
        rates("Records of sessions a second", "foretick_session_records_total", "session"),
        rates("Headlines, states, actions and books a second", "foretick_events_total", "kind"),
        gauges("Halted", "none", "foretick_session_halted", "session"),
    ]


def _faults() -> list[object]:
    clocks = {
        "received before their event": "foretick_clock_skew_records_total",
        "source times not used": "foretick_source_times_unknown_total",
    }
    return [
        rates("Feed faults a second, by kind", "foretick_feed_faults_total", "kind"),
        rates("Malformed records a second, by reason", "foretick_records_malformed_total", "reason"),
        rates("Records refused by sessions, a second", "foretick_records_refused_total", "reason"),
        rates("Dead-letter records a second, by stage", "foretick_dead_letters_total", "stage"),
        rates("Price jumps a second", "foretick_price_jumps_total", "session"),
        counters("Clocks: records a second", **clocks),
    ]


def _losses() -> list[object]:
    lost = [
        (per_second("foretick_ring_dropped_total", "source"), "at the ring {{source}}"),
        (per_second("foretick_records_lost_upstream_total", "source"), "upstream {{source}}"),
        (per_second("foretick_ring_pauses_total", "source"), "pauses {{source}}"),
        (per_second("foretick_records_skipped_total", "source"), "offsets skipped {{source}}"),
    ]
    return [
        series("Lost before they were read, and pauses, a second", "short", *lost),
        rates("Records dropped for a fault, a second", "foretick_records_dropped_total", "session"),
        rates("Late records a second", "foretick_records_late_total", "session"),
        rates("Late records that amended a bar, a second", "foretick_records_amended_total", "session"),
    ]


def _bars() -> list[object]:
    lines = {
        "rounded": "foretick_bars_rounded_total",
        "volume beyond its code": "foretick_volumes_saturated_total",
        "new anchors": "foretick_anchors_total",
    }
    return [
        rates("Bars a second", "foretick_bars_total", "session"),
        counters("Bars whose line is not exact, a second", **lines),
        series(
            "Tape by session, tokens", "short", (gauge("foretick_session_tokens", "session"), "{{session}}")
        ),
    ]
