"""Is it up, fresh and complete?"""

from dashboards.expressions import STAGE, gauge, increase, per_second, quantile
from dashboards.panels import HALF, Rows, gauges, rates, series, stage_quantiles, stat


def rows() -> Rows:
    """Six numbers, and what they were."""
    return {"Now": _now(), "Before": _before()}


def _now() -> list[object]:
    return [
        stat("Engine", "none", gauge("foretick_engine_up", over="min"), bad_below=1),
        stat("Sources connected", "none", gauge("foretick_source_up", over="min"), bad_below=1),
        stat("Tick to answer, p99", "s", quantile(STAGE, 0.99, "stage", stage="end_to_end")),
        stat("Worst staleness", "s", gauge("foretick_staleness_seconds", since="event")),
        stat("Answers a second", "short", per_second("foretick_answers_total")),
        stat("Dropped in this range", "short", increase("foretick_ring_dropped_total"), bad_from=1),
    ]


def _before() -> list[object]:
    missed, bars = per_second("foretick_freshness_misses_total"), per_second("foretick_bars_total")
    skipped = per_second("foretick_bars_skipped_total")
    kept = f"1 - ({missed} + {skipped}) / {bars}", "kept"
    ends = [
        (per_second("foretick_engine_restarts_total"), "engine restarts"),
        (per_second("foretick_tasks_ended_total", "outcome"), "tasks {{outcome}}"),
        (per_second("foretick_integrity_failures_total"), "wrong audits of the pool"),
        (
            per_second("foretick_session_transitions_refused_total", "process"),
            "impossible events {{process}}",
        ),
        (per_second("foretick_config_reloads_total", "outcome"), "configuration {{outcome}}"),
    ]
    return [
        series("Tick to answer", "s", *stage_quantiles("end_to_end"), span=HALF),
        series("Freshness objective met", "percentunit", kept, span=HALF),
        rates("Records a second", "foretick_records_total", "source"),
        rates("Answers a second", "foretick_answers_total", "session"),
        gauges("Kafka records not read yet", "short", "foretick_consumer_lag_records", "partition"),
        rates("Dead-letter records a second", "foretick_dead_letters_total", "stage"),
        series("Utilisation", "percentunit", (gauge("foretick_utilisation_ratio"), "utilisation")),
        series("Ended, restarted and read again, a second", "short", *ends),
    ]
