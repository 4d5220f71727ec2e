"""The *Latency* dashboard: from a tick to its answer, how fresh the answers are, and what was lost."""

from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import heatmap, stat, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from dashboards.expressions import STAGE, buckets, gauge, increase, labelled, mean, per_second, quantile
from metrics.catalogue import AGES

UID = "foretick-latency"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_HALF, _THIRD, _SIXTH = 12, 8, 4
# Measured from ring entry; the time before it is unknown.
_WHOLE = "end_to_end"
_ASKS = "ask_cached|ask_ready|ask_computed"
_TIERS = "cached|ready|computed"
_STEPS = "ring_wait|bars|tokenise|queue_flash|forward|publish"
_SLOW = "queue_flash|forward|publish"

Query = tuple[str, str]
"""A PromQL expression and the legend of its series."""


def build() -> str:
    """The dashboard as Grafana's JSON: always the same bytes, ending in one newline."""
    dashboard = (
        Dashboard("Foretick: latency")
        .uid(UID)
        .description("Tick to answer by stage, freshness by session, losses, queues and KV pool.")
        .tags(["foretick"])
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").type("prometheus").label("Data source"))
        .with_variable(_session_variable())
    )
    rows = {
        "Now": _now(),
        "Tick to answer": _tick_to_answer(),
        "Questions": _questions(),
        "Confidence": _confidence(),
        "Freshness": _freshness(),
        "Carried state": _carried_state(),
        "Losses": _losses(),
        "Scheduler": _scheduler(),
        "Queues and memory": _queues_and_memory(),
        "Capacity": _capacity(),
    }
    number = count(1)
    for title, panels in rows.items():
        dashboard = dashboard.with_row(Row(title).id(next(number)))
        for panel in panels:
            dashboard = dashboard.with_panel(panel.id(next(number)))
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build())
    return text + "\n"


def _session_variable() -> Any:
    return (
        QueryVariable("session")
        .label("Session")
        .datasource(_SOURCE)
        .query("label_values(foretick_data_version, session)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _now() -> list[Any]:
    return [
        _stat("Engine", "none", gauge("foretick_engine_up", over="min"), bad_below=1),
        _stat("Tick to answer, p99", "s", quantile(STAGE, 0.99, "stage", stage=_WHOLE)),
        _stat("Worst staleness", "s", gauge("foretick_staleness_seconds", since="event")),
        _stat("Records a second", "short", per_second("foretick_records_total")),
        _stat("Answers a second", "short", per_second("foretick_answers_total")),
        _stat("Dropped in this range", "short", increase("foretick_ring_dropped_total"), bad_from=1),
    ]


def _tick_to_answer() -> list[Any]:
    return [
        heatmap.Panel()
        .title("Tick to answer")
        .description("Ring entry of the newest tick in the version, to its answer acknowledged by the sink.")
        .datasource(_SOURCE)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .height(9)
        .span(_HALF)
        .with_target(_query(buckets(STAGE, "le", stage=_WHOLE), "{{le}}", 0).format("heatmap")),
        _series("Tick to answer, quantiles", "s", *_quantiles(_WHOLE), span=_HALF),
        _series("p99 by stage", "s", (quantile(STAGE, 0.99, "stage", stage=_SLOW), "{{stage}}"), span=_HALF),
        _series("Mean by stage", "s", (mean(STAGE, "stage", stage=_STEPS), "{{stage}}"), span=_HALF),
    ]


def _questions() -> list[Any]:
    suppressed = "Answers suppressed by publish_when (late, skipped: by a deadline), a second"
    # Attention Once, equation 18: the tiers' means, weighted by their shares of all answers
    effective = [(mean(STAGE, stage=_ASKS), "effective"), (mean(STAGE, "stage", stage=_ASKS), "{{stage}}")]
    return [
        _series("Standing questions: wait and forward pass", "s", *_quantiles("queue_flash|forward")),
        _series("Asks and free text: wait", "s", *_quantiles("queue_session")),
        _series("Asks: request to reply, by tier", "s", *_quantiles(_ASKS)),
        _rates("Answers a second", "foretick_answers_total", "session"),
        _rates("Asks a second, by outcome", "foretick_asks_total", "outcome"),
        _series("Asks: effective average latency, and by tier", "s", *effective),
        _rates("Questions without an answer, a second", "foretick_answers_failed_total", "reason"),
        _stacked(_rates(suppressed, "foretick_answers_suppressed_total", "reason")),
        _rates(
            "OpenAI and Anthropic requests a second, by outcome", "foretick_api_requests_total", "outcome"
        ),
    ]


def _confidence() -> list[Any]:
    sets = increase("foretick_labelled_sets_total", "session")
    covered = increase("foretick_labelled_sets_total", "session", covered="yes")
    coverage = [
        (f"{covered} / {sets}", "covered {{session}}"),
        (gauge("foretick_adapted_coverage", "session"), "asked for {{session}}"),
    ]
    return [
        _gauges("Logit gap over that at calibration", "short", "foretick_gap_ratio", "session"),
        _rates("Choice sets a second, by size", "foretick_choice_sets_total", "size"),
        _rates("Labels a second, by outcome", "foretick_labels_total", "outcome"),
        _series("Choice sets that have their label, in this range", "percentunit", *coverage),
    ]


def _freshness() -> list[Any]:
    skipped = "Standing evaluations skipped for a newer version, a second"
    late = "Prompts refused while tapes were late, a second"
    ages = [
        (gauge("foretick_staleness_seconds", "session", since=since), f"{{{{session}}}} {since}")
        for since in AGES
    ]
    return [
        _series("Staleness by session, since the event, the source and this daemon had it", "s", *ages),
        _gauges("Kafka records not read yet", "short", "foretick_consumer_lag_records", "partition"),
        _gauges("Age of the Kafka input while some waits", "s", "foretick_consumer_lag_seconds", "partition"),
        _series("Standby daemons", "short", (gauge("foretick_standby", over="sum"), "standby")),
        _rates("Data versions a second", "foretick_versions_total", "session"),
        _rates(skipped, "foretick_flash_coalesced_total", "session"),
        _gauges("Closed bars that wait for the engine", "short", "foretick_bars_waiting", "session"),
        _rates(
            "Bars that miss their freshness objective, a second", "foretick_freshness_misses_total", "session"
        ),
        _series(late, "short", (per_second("foretick_prompts_refused_total"), "refused")),
        _rates("Bars skipped unread, a second", "foretick_bars_skipped_total", "session"),
    ]


def _carried_state() -> list[Any]:
    agreements = increase("foretick_divergence_agreements_total", "session")
    samples = increase("foretick_divergence_samples_total", "session")
    same = f"{agreements} / {samples}", "{{session}}"
    refreshed = [
        (increase("foretick_refreshes_total", "session"), "{{session}}"),
        (increase("foretick_refresh_restarts_total"), "restarted"),
    ]
    divergence = "KL(fresh || carried) of the next token, nats"
    return [
        _series("Share of answers equal from a fresh state, in this range", "percentunit", same),
        _gauges(divergence, "short", "foretick_divergence_kl_nats", "session"),
        _series("Refreshed windows, in this range", "short", *refreshed),
    ]


def _losses() -> list[Any]:
    lost = [
        (per_second("foretick_ring_dropped_total", "source"), "at the ring {{source}}"),
        (per_second("foretick_records_lost_upstream_total", "source"), "upstream {{source}}"),
        (per_second("foretick_ring_pauses_total", "source"), "pauses {{source}}"),
    ]
    refused = [
        (per_second("foretick_records_malformed_total", "reason"), "malformed: {{reason}}"),
        (per_second("foretick_records_unknown_symbol_total"), "unknown symbol"),
        (per_second("foretick_records_refused_total", "reason"), "refused: {{reason}}"),
        (per_second("foretick_records_duplicate_total"), "came before"),
        (per_second("foretick_price_jumps_total"), "price jumps"),
    ]
    transactions = mean("foretick_transaction_seconds"), "mean"
    return [
        _series("Lost before they were read, and pauses, a second", "short", *lost),
        _rates("Late records a second", "foretick_records_late_total", "session"),
        _rates("Feed faults a second, by kind", "foretick_feed_faults_total", "kind"),
        _series("Refused records a second", "short", *refused),
        _rates("Transactions a second, by outcome", "foretick_transactions_total", "outcome"),
        _series("Transactions: time until in effect", "s", transactions),
    ]


def _scheduler() -> list[Any]:
    drafts = per_second("foretick_draft_tokens_total")
    right = per_second("foretick_draft_tokens_total", outcome="accepted")
    reused = per_second("foretick_reused_tokens_total", "class")
    computed = per_second("foretick_batch_tokens_total", "class")
    waiting = labelled("foretick_waiting_requests", "class", "foretick_scheduler_info", "policy")
    ttft = [
        (quantile("foretick_ttft_seconds", q, "class"), f"p{q * 100:g} {{{{class}}}}") for q in (0.5, 0.99)
    ]
    preempted = per_second("foretick_preemptions_total", "class", "by_class"), "{{class}} for {{by_class}}"
    share = f"{reused} / ({reused} + {computed})", "{{class}}"
    return [
        _stacked(
            _rates("Requests that wait for a batch, by reason", "foretick_wait_seconds_total", "reason")
        ),
        _rates("Seconds waited a second, by class", "foretick_wait_seconds_total", "class"),
        _series("Waiting, by class and policy", "short", (waiting, "{{class}} ({{policy}})")),
        _series("End of input to first token", "s", *ttft),
        _series("Preemptions a second", "short", preempted),
        _rates("Tokens of lost KV, a second", "foretick_lost_tokens_total", "kind"),
        _series("Share of draft tokens accepted", "percentunit", (f"{right} / {drafts}", "right")),
        _series("Share of tokens reused", "percentunit", share),
        _rates("Prefix cache, tokens a second", "foretick_prefix_tokens_total", "event"),
    ]


def _queues_and_memory() -> list[Any]:
    used = gauge("foretick_pool_blocks", over="sum", state="used")
    total = gauge("foretick_pool_blocks", over="sum", state="free|used")
    return [
        _gauges("Requests by class", "short", "foretick_live_requests", "class", over="sum"),
        _gauges("Ring fill", "percentunit", "foretick_ring_fill_ratio", "source"),
        _series("KV pool in use", "percentunit", (f"{used} / {total}", "used")),
        _rates("Tokens a second, by class", "foretick_batch_tokens_total", "class"),
        _gauges("Tape by session, tokens", "short", "foretick_session_tokens", "session"),
        _gauges("Bars in neither window nor rollup", "short", "foretick_rollup_missing_bars", "session"),
        _rates("Passes out of memory, a second", "foretick_oom_total", "outcome"),
    ]


def _capacity() -> list[Any]:
    """What `foretick plan` predicts, under the same names."""
    served = per_second("foretick_asks_total", "outcome", outcome=_TIERS)
    every = per_second("foretick_asks_total", outcome=_TIERS)
    missed, bars = per_second("foretick_freshness_misses_total"), per_second("foretick_bars_total")
    skipped = per_second("foretick_bars_skipped_total")
    used = gauge("foretick_utilisation_ratio"), "utilisation"
    kept = f"1 - ({missed} + {skipped}) / {bars}", "kept"
    return [
        _series("Utilisation", "percentunit", used),
        _series(
            "Sessions open, and capacity by limit",
            "short",
            (gauge("foretick_sessions_open", over="sum"), "open"),
            (gauge("foretick_sessions_capacity", "limit"), "{{limit}}"),
        ),
        _series("Hit mix of asks", "percentunit", (f"{served} / scalar({every})", "{{outcome}}")),
        _series("Close to answer", "s", *_quantiles("close_to_answer")),
        _series("Freshness objective met", "percentunit", kept),
    ]


def _rates(title: str, counter: str, by: str) -> Any:
    """A counter's increase per second, one line per value of the label ``by``."""
    return _series(title, "short", (per_second(counter, by), f"{{{{{by}}}}}"))


def _gauges(title: str, unit: str, name: str, by: str, over: str = "max") -> Any:
    """A gauge, one line per value of the label ``by``."""
    return _series(title, unit, (gauge(name, by, over=over), f"{{{{{by}}}}}"))


def _quantiles(stages: str) -> list[Query]:
    return [
        (quantile(STAGE, q, "stage", stage=stages), f"p{q * 100:g} {{{{stage}}}}") for q in (0.5, 0.9, 0.99)
    ]


def _query(expression: str, legend: str, index: int) -> Any:
    return (
        Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index)).datasource(_SOURCE)
    )


def _series(title: str, unit: str, *targets: Query, span: int = _THIRD) -> Any:
    legend = (
        VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = timeseries.Panel().title(title).datasource(_SOURCE).unit(unit).height(8).span(span).legend(legend)
    for index, (expression, label) in enumerate(targets):
        panel = panel.with_target(_query(expression, label, index))
    return panel


def _stacked(panel: Any) -> Any:
    return panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)


def _stat(
    title: str, unit: str, expression: str, bad_from: float | None = None, bad_below: float | None = None
) -> Any:
    steps = [Threshold(color="green")]
    if bad_from is not None:
        steps = [Threshold(color="green"), Threshold(value=bad_from, color="red")]
    if bad_below is not None:
        steps = [Threshold(color="red"), Threshold(value=bad_below, color="green")]
    return (
        stat.Panel()
        .title(title)
        .datasource(_SOURCE)
        .unit(unit)
        .height(4)
        .span(_SIXTH)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_query(expression, "", 0))
    )
