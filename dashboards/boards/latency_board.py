"""From a tick to its answer by stage, how fresh answers are, and what clients wait."""

from dashboards.expressions import STAGE, buckets, gauge, mean, per_second, quantile
from dashboards.panels import HALF, Rows, gauges, heatmap, rates, series, stage_quantiles
from metrics.catalogue import AGES

# Measured from ring entry; the time before it is unknown.
_WHOLE = "end_to_end"
_ASKS = "ask_cached|ask_ready|ask_computed"
_TIERS = "cached|ready|computed"
_STEPS = "ring_wait|bars|tokenise|queue_flash|forward|publish"
_SLOW = "queue_flash|forward|publish"


def rows() -> Rows:
    """By class of work, then by session."""
    return {
        "Tick to answer": _tick_to_answer(),
        "Standing questions": _standing(),
        "Requests of clients": _requests(),
        "Freshness": _freshness(),
    }


def _tick_to_answer() -> list[object]:
    return [
        heatmap(
            "Tick to answer",
            "Ring entry of the newest tick in the version, to its answer acknowledged by the sink.",
            buckets(STAGE, "le", stage=_WHOLE),
        ),
        series("Tick to answer, quantiles", "s", *stage_quantiles(_WHOLE), span=HALF),
        series("p99 by stage", "s", (quantile(STAGE, 0.99, "stage", stage=_SLOW), "{{stage}}"), span=HALF),
        series("Mean by stage", "s", (mean(STAGE, "stage", stage=_STEPS), "{{stage}}"), span=HALF),
    ]


def _standing() -> list[object]:
    return [
        series("Wait and forward pass", "s", *stage_quantiles("queue_flash|forward")),
        series("Close to answer", "s", *stage_quantiles("close_to_answer")),
        rates("Bars answered with a later one, a second", "foretick_flash_coalesced_total", "session"),
    ]


def _requests() -> list[object]:
    # Attention Once, equation 18: the tiers' means, weighted by their shares of all answers
    effective = [(mean(STAGE, stage=_ASKS), "effective"), (mean(STAGE, "stage", stage=_ASKS), "{{stage}}")]
    ttft = [
        (quantile("foretick_ttft_seconds", q, "class"), f"p{q * 100:g} {{{{class}}}}") for q in (0.5, 0.99)
    ]
    served = per_second("foretick_asks_total", "outcome", outcome=_TIERS)
    every = per_second("foretick_asks_total", outcome=_TIERS)
    return [
        series("Asks and free text: wait", "s", *stage_quantiles("queue_session")),
        series("Asks: request to reply, by tier", "s", *stage_quantiles(_ASKS)),
        series("Asks: effective average latency, and by tier", "s", *effective),
        series("Hit mix of asks", "percentunit", (f"{served} / scalar({every})", "{{outcome}}")),
        series("End of input to first token", "s", *ttft),
        rates("Asks a second, by outcome", "foretick_asks_total", "outcome"),
    ]


def _freshness() -> list[object]:
    ages = [
        (gauge("foretick_staleness_seconds", "session", since=since), f"{{{{session}}}} {since}")
        for since in AGES
    ]
    missed = "Bars that miss their freshness objective, a second"
    return [
        series("Staleness by session, since the event, the source and this daemon had it", "s", *ages),
        rates(missed, "foretick_freshness_misses_total", "session"),
        gauges("Closed bars that wait for the engine", "short", "foretick_bars_waiting", "session"),
        rates("Bars skipped unread, a second", "foretick_bars_skipped_total", "session"),
        rates("Data versions a second", "foretick_versions_total", "session"),
        gauges("Age of the Kafka input while some waits", "s", "foretick_consumer_lag_seconds", "partition"),
    ]
