"""Who waits for what, who is preempted, and what each tenant takes."""

from dashboards.expressions import labelled, mean, per_second
from dashboards.panels import Rows, gauges, rates, series, stacked


def rows() -> Rows:
    """Of all work, then of each tenant."""
    return {
        "Waiting": _waiting(),
        "Preempted and reused": _reused(),
        "Tenants": _tenants(),
        "Refused": _refused(),
    }


def _waiting() -> list[object]:
    waiting = labelled("foretick_waiting_requests", "class", "foretick_scheduler_info", "policy")
    return [
        stacked(rates("Requests that wait for a batch, by reason", "foretick_wait_seconds_total", "reason")),
        rates("Seconds waited a second, by class", "foretick_wait_seconds_total", "class"),
        series("Waiting, by class and policy", "short", (waiting, "{{class}} ({{policy}})")),
        gauges("Requests by class", "short", "foretick_live_requests", "class", over="sum"),
    ]


def _reused() -> list[object]:
    drafts = per_second("foretick_draft_tokens_total", "class")
    right = per_second("foretick_draft_tokens_total", "class", outcome="accepted")
    passes = per_second("foretick_decode_passes_total", "class")
    reused = per_second("foretick_reused_tokens_total", "class")
    computed = per_second("foretick_batch_tokens_total", "class")
    preempted = per_second("foretick_preemptions_total", "class", "by_class"), "{{class}} for {{by_class}}"
    share = f"{reused} / ({reused} + {computed})", "{{class}}"
    return [
        series("Preemptions a second", "short", preempted),
        rates("Tokens of lost KV, a second", "foretick_lost_tokens_total", "kind"),
        series("Share of draft tokens accepted", "percentunit", (f"{right} / {drafts}", "{{class}}")),
        series("Tokens a pass of an answer", "short", (f"1 + {right} / {passes}", "{{class}}")),
        series("Share of tokens reused", "percentunit", share),
    ]


def _tenants() -> list[object]:
    wait = mean("foretick_tenant_wait_seconds", "tenant"), "{{tenant}}"
    return [
        rates("Requests a second, by tenant", "foretick_tenant_requests_total", "tenant"),
        rates("Requests a second, by outcome", "foretick_tenant_requests_total", "outcome"),
        rates("Tokens computed a second, by tenant", "foretick_tenant_tokens_total", "tenant"),
        rates("Engine time by tenant, seconds a second", "foretick_tenant_engine_seconds_total", "tenant"),
        series("Mean wait by tenant", "s", wait),
        rates("Readings of the tenants file a second", "foretick_tenants_reloads_total", "outcome"),
    ]


def _refused() -> list[object]:
    cached = per_second("foretick_api_cache_total", "cache", outcome="hit")
    every = per_second("foretick_api_cache_total", "cache")
    late = "Prompts refused while tapes were late, a second"
    return [
        series(late, "short", (per_second("foretick_prompts_refused_total"), "refused")),
        rates("Not taken by the query socket, a second", "foretick_query_refused_total", "reason"),
        rates("Without a right key, a second", "foretick_unauthenticated_total", "reason"),
        series("Hits of chats, texts and responses", "percentunit", (f"{cached} / {every}", "{{cache}}")),
    ]
