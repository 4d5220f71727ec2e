"""What is published and kept back, and how far it can be trusted."""

from dashboards.expressions import gauge, increase
from dashboards.panels import Rows, counters, gauges, rates, series, stacked


def rows() -> Rows:
    """Published, calibrated, and equal to a fresh state's."""
    return {"Published": _published(), "Confidence": _confidence(), "Carried state": _carried_state()}


def _published() -> list[object]:
    suppressed = "Answers suppressed by publish_when (late, skipped: by a deadline), a second"
    return [
        rates("Answers a second", "foretick_answers_total", "session"),
        stacked(rates(suppressed, "foretick_answers_suppressed_total", "reason")),
        series("Ad hoc questions that stand", "short", (gauge("foretick_frequent_questions"), "standing")),
        rates("Ad hoc questions that began to stand, or ended", "foretick_frequent_changes_total", "outcome"),
        rates("Engine time of standing questions", "foretick_standing_engine_seconds_total", "session"),
        rates("Skipped over engine_share, a second", "foretick_over_budget_total", "question"),
        counters("Question packs that are gone, a second", packs="foretick_packs_unreadable_total"),
        rates("Questions without an answer, a second", "foretick_answers_failed_total", "reason"),
        rates("Asks a second, by outcome", "foretick_asks_total", "outcome"),
        rates("OpenAI and Anthropic requests a second, by outcome", "foretick_api_requests_total", "outcome"),
        gauges("Latest data version", "short", "foretick_data_version", "session"),
    ]


def _confidence() -> list[object]:
    sets = increase("foretick_labelled_sets_total", "session")
    covered = increase("foretick_labelled_sets_total", "session", covered="yes")
    right = increase("foretick_labelled_right_total", "session")
    rightness = f"{right} / {sets}", "{{session}}"
    coverage = [
        (f"{covered} / {sets}", "covered {{session}}"),
        (gauge("foretick_adapted_coverage", "session"), "asked for {{session}}"),
    ]
    return [
        gauges("Logit gap over that at calibration", "short", "foretick_gap_ratio", "session"),
        rates("Choice sets a second, by size", "foretick_choice_sets_total", "size"),
        rates("Labels a second, by outcome", "foretick_labels_total", "outcome"),
        series("Choice sets that have their label, in this range", "percentunit", *coverage),
        series("Labelled answers that were right, in this range", "percentunit", rightness),
        stacked(rates("Answers to act on a second", "foretick_acted_total", "session")),
        rates("Answers not to act on a second, by reason", "foretick_act_abstained_total", "reason"),
        gauges("Wrong of those to act on", "percentunit", "foretick_acted_error_ratio", "session"),
        gauges("Calibrations that labels adapt", "short", "foretick_adapted_calibrations", "session"),
    ]


def _carried_state() -> list[object]:
    agreements = increase("foretick_divergence_agreements_total", "session")
    samples = increase("foretick_divergence_samples_total", "session")
    same = f"{agreements} / {samples}", "{{session}}"
    refreshed = [
        (increase("foretick_refreshes_total", "session"), "{{session}}"),
        (increase("foretick_refresh_failures_total", "session"), "failed {{session}}"),
        (increase("foretick_refresh_restarts_total"), "restarted"),
    ]
    divergence = "KL(fresh || carried) of the next token, nats"
    return [
        series("Share of answers equal from a fresh state, in this range", "percentunit", same),
        gauges(divergence, "short", "foretick_divergence_kl_nats", "session"),
        series("Refreshed windows, in this range", "short", *refreshed),
        gauges("Bars in neither window nor rollup", "short", "foretick_rollup_missing_bars", "session"),
    ]
