"""Plans as a table: a row a quantity, a column a rate."""

from collections.abc import Callable, Sequence

from lab.plan.plan import Plan, Quantiles


def tables(plans: Sequence[Plan]) -> str:
    """`table` of each model, and how much of the device they use together."""
    by_model: dict[str, list[Plan]] = {}
    for each in plans:
        by_model.setdefault(each.model, []).append(each)
    found = [table(each) for each in by_model.values()]
    if len(found) > 1:
        used = ", ".join(f"{share:.1%}" for share in _together(plans).values())
        found.append(f"all models together, utilisation by formula: {used}")
    return "\n\n".join(found)


def _together(plans: Sequence[Plan]) -> dict[float, float]:
    """Shares of the device's time that all models use, by rate."""
    found: dict[float, float] = {}
    for each in plans:
        found[each.load.ticks] = found.get(each.load.ticks, 0.0) + each.capacity.utilisation_ratio
    return found


def table(plans: Sequence[Plan]) -> str:
    """The plans of one configuration at several rates; what does not fit is said below."""
    first = plans[0]
    head = (
        f"{first.sessions} sessions, {first.questions} standing questions, model {first.model}, "
        f"profile: {first.profile}"
    )
    rows: list[tuple[str, Callable[[Plan], str]]] = [
        ("ticks a second", lambda p: f"{p.load.ticks:g}"),
        ("asks, prompts a second", lambda p: f"{p.load.asks:g}, {p.load.prompts:g}"),
        ("", lambda p: ""),
        ("by formula", lambda p: ""),
        ("  time between bars (T_data)", lambda p: _time(p.capacity.t_data_s)),
        ("  background (T_ingest + T_header + k T_f)", lambda p: _time(p.capacity.t_background_s)),
        ("  utilisation", lambda p: f"{p.capacity.utilisation_ratio:.1%}"),
        ("  utilisation with the host's part", lambda p: f"{p.capacity.worker_ratio:.1%}"),
        ("  utilisation of the gateway", lambda p: f"{p.capacity.gateway_ratio:.1%}"),
        ("  questions a bar, of k_max", lambda p: f"{p.capacity.k:g} of {p.capacity.k_max}"),
        ("  sessions by compute", lambda p: _count(p.capacity.sessions_by_compute)),
        ("  sessions by KV memory", lambda p: _count(p.capacity.sessions_by_kv_memory)),
        ("  sessions by freshness", lambda p: _count(p.capacity.sessions_by_freshness)),
        ("  sessions at most, limited by", lambda p: f"{p.sessions_max}, {p.limit}"),
        ("", lambda p: ""),
        ("simulated", lambda p: f"{p.simulated.seconds:g} s" if p.simulated.seconds else "not run"),
        ("  close to answer, p50 / p99", lambda p: _quantiles(p.simulated.close_to_answer_s)),
        ("  tick to answer (end_to_end), p50 / p99", lambda p: _quantiles(p.simulated.end_to_end_s)),
        ("  computed ask, p50 / p99", lambda p: _quantiles(p.simulated.ask_computed_s)),
        ("  prompt to first token, p50 / p99", lambda p: _quantiles(p.simulated.ttft_pool_s)),
        ("  utilisation", lambda p: f"{p.simulated.utilisation_ratio:.1%}"),
        ("  sessions that fill the pool", lambda p: str(p.simulated.sessions_by_pool or "-")),
        ("  freshness objective met", _kept),
        ("  answered with a later version", lambda p: f"{p.simulated.coalesced_ratio:.1%}"),
        ("  cell budget, pool in use at most", _memory),
        ("  asks cached, ready, computed", _hits),
        ("  mean ask (equation 18)", lambda p: _time(p.hit_mix.mean_s) if p.load.asks else "-"),
        ("  without an answer", _unanswered),
    ]
    if first.sessions_simulated is not None:
        rows.append(("  sessions that meet it", lambda p: f"{p.sessions_simulated}"))
    cells = [(name, [of(each) for each in plans]) for name, of in rows]
    wide = max(len(name) for name, _ in cells)
    columns = [max(len(row[n]) for _, row in cells) for n in range(len(plans))]
    lines = [head, ""]
    lines += [
        f"{name:<{wide}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row, columns, strict=True)).rstrip()
        for name, row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def overloads(plans: Sequence[Plan]) -> list[str]:
    """A line for each reason why a rate does not fit."""
    found = [f"{each.load.ticks:g} ticks a second, {why}" for each in plans for why in each.overload]
    if len({each.model for each in plans}) > 1:
        found += [
            f"{ticks:g} ticks a second, all models together need {share:.1%} of the device's time"
            for ticks, share in _together(plans).items()
            if share > 1
        ]
    return found


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _quantiles(found: Quantiles | None) -> str:
    return "-" if found is None else f"{_time(found.p50)} / {_time(found.p99)}"


def _count(most: int | None) -> str:
    return "no limit" if most is None else f"{most}"


def _kept(plan: Plan) -> str:
    objective = plan.capacity.freshness_objective_s
    return f"{plan.simulated.freshness_met_ratio:.1%} of {_time(objective)}" if objective else "none set"


def _memory(plan: Plan) -> str:
    return f"{plan.simulated.cell_budget_ratio:.1%}, {plan.simulated.pool_ratio:.1%}"


def _hits(plan: Plan) -> str:
    mix = plan.hit_mix
    return f"{mix.cached:.0%}, {mix.ready:.0%}, {mix.computed:.0%}" if plan.load.asks else "-"


def _unanswered(plan: Plan) -> str:
    return ", ".join(f"{code} {n}" for code, n in plan.simulated.unanswered.items()) or "-"
