"""A plan: the load, the device, the formulas and the simulation side by side, and what limits.

Quantities have the names of the daemon's metrics (`docs/planning.md`).
"""

from collections.abc import Sequence
from contextlib import closing

import msgspec
import numpy as np
from msgspec.structs import replace

from daemon.config.by_model import by_model
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import is_asked
from daemon.engine.capacity_metrics import sessions_estimate
from flash.capacity import Shape, max_sessions
from lab.plan.arrivals import arrivals
from lab.plan.capacity import (
    BAR_TOKENS,
    Capacity,
    capacity,
    ready_tokens,
    standing_of,
)
from lab.plan.load import Load
from lab.plan.simulator import Simulator
from lab.plan.sources import Sources, sources_of, weights_of
from lab.theory.equations import mean_latency
from scheduler.costs import CostModel
from scheduler.planner import cell_budget

KEPT = 0.99
"""Share of the bars that must be read in time for the objective to count as met, and of the bars that must be
answered at their own version for the questions to count as carried."""
BARS = 30


class Quantiles(msgspec.Struct, frozen=True):
    """Of times, seconds."""

    p50: float
    p99: float
    mean: float


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated daemon did; None: nothing of the kind happened. 0 seconds: nothing was simulated."""

    seconds: float = 0.0
    close_to_answer_s: Quantiles | None = None
    end_to_end_s: Quantiles | None = None
    ask_computed_s: Quantiles | None = None
    ttft_pool_s: Quantiles | None = None
    utilisation_ratio: float = 0.0
    freshness_met_ratio: float = 0.0
    coalesced_ratio: float = 0.0
    """Share of the bars that were answered only together with a later version."""
    cell_budget_ratio: float = 0.0
    """Most of the cell budget that requests used at once."""
    pool_ratio: float = 0.0
    """Most of the pool in use at once."""
    sessions_by_pool: int = 0
    """As many as would fill the pool; 0: not known."""
    bars: int = 0
    versions: int = 0
    answers: int = 0
    passes: int = 0
    bars_skipped: int = 0
    bars_waiting: int = 0
    """At the end."""
    unanswered: dict[str, int] = {}
    """Questions, asks and prompts by the code they failed with."""


class HitMix(msgspec.Struct, frozen=True, kw_only=True):
    """Asks by the tier that answers them (equation 18); seconds."""

    cached: float
    ready: float
    computed: float
    mean_s: float | None
    """None: no ask was computed, so its time is unknown."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One rate. ``overload``: why the configuration does not fit; empty: it does."""

    profile: str
    model: str
    sessions: int
    questions: int
    load: Load
    capacity: Capacity
    simulated: Simulated
    hit_mix: HitMix
    sessions_max: int
    limit: str
    sessions_simulated: int | None = None
    """The most sessions of this kind that meet their objective in simulation; None: not searched."""
    overload: tuple[str, ...] = ()


def plan(
    config: Config, load: Load, memory: int, costs: CostModel | None = None, *, search: bool = False
) -> Plan:
    """Plan for the configuration; ``memory``: bytes of the device; ``costs``: None is the configured profile.

    ``search``: also find by simulation how many such sessions meet their freshness objective. Raises
    SettingError naming the key at fault.
    """
    sources = sources_of(config, costs)
    if sources.kv_bytes(sources.blocks * config.pool.block_size) + sources.outline.weight_bytes > memory:
        shape, simulated = _shape_of(sources, None), Simulated()
    else:
        shape, simulated = _simulate(sources, load)
    found, most = capacity(sources, shape, load, memory), None
    if search and simulated.seconds:
        most = _search(config, load, sources.costs, found.sessions)
    return Plan(
        profile=sources.costs.source if sources.costs.device == "unknown" else sources.costs.device,
        model=sources.outline.name,
        sessions=len(config.sessions),
        questions=sum(len(sources.registry.standing(s.name)) for s in config.sessions),
        load=load,
        capacity=found,
        simulated=simulated,
        hit_mix=_hit_mix(load, sources.costs, simulated),
        sessions_max=found.sessions,
        limit=found.limit,
        sessions_simulated=most,
        overload=tuple(_overload(len(config.sessions), found, simulated)),
    )


def plans(
    config: Config, load: Load, memory: int, costs: CostModel | None = None, *, search: bool = False
) -> list[Plan]:
    """As `plan`, for each model that has sessions, with the memory that the others leave."""
    parts = by_model(config)
    measured = [costs, *[None] * len(config.models)]  # a profile is of the first model
    needs = [*map(_needed, parts, measured)] if len(parts) > 1 else [0]
    return [
        plan(part, load, memory - (sum(needs) - need), known, search=search)
        for part, need, known in zip(parts, needs, measured, strict=True)
        if part.sessions or len(parts) == 1
    ]


def _needed(config: Config, costs: CostModel | None) -> int:
    """Bytes of weights and of the pool; of a model without sessions, of its weights."""
    if not config.sessions:
        return weights_of(config)
    sources = sources_of(config, costs)
    return sources.outline.weight_bytes + int(sources.kv_bytes(sources.blocks * config.pool.block_size))


def simulate(sources: Sources, load: Load) -> Simulated:
    """One simulated run."""
    return _simulate(sources, load)[1]


def repeated(config: Config, sessions: int) -> Config:
    """The configuration with ``sessions`` sessions: its own ones over and over, under other names."""
    own = config.sessions
    names = {s.name: [s.name] for s in own}
    made: list[SessionConfig] = []
    for number in range(sessions):
        round_, index = divmod(number, len(own))
        session = own[index]
        if round_:
            session = replace(
                session,
                name=f"{session.name}.{round_}",
                symbol=f"{session.symbol}.{round_}",
                more_symbols=tuple(f"{symbol}.{round_}" for symbol in session.more_symbols),
            )
            names[own[index].name].append(session.name)
        made.append(session)
    kept = {s.name for s in made}
    questions = tuple(
        replace(
            q,
            sessions=tuple(
                n for s, copies in names.items() if q.sessions and is_asked(q, s) for n in copies if n in kept
            ),
        )
        for q in config.questions
    )
    asked = tuple(
        q for q, old in zip(questions, config.questions, strict=True) if q.sessions or not old.sessions
    )
    return replace(config, sessions=tuple(made), questions=asked, pool=replace(config.pool, blocks=0))


def symbol_intervals(sources: Sources) -> list[list[int]]:
    """The intervals of the bars that are made of each symbol, ns."""
    found: list[list[int]] = [[] for _ in sources.symbols]
    for session, interval in zip(sources.config.sessions, sources.intervals, strict=True):
        for symbol in session.symbols:
            found[sources.symbols[symbol]].append(interval)
    return found


def _simulate(sources: Sources, load: Load) -> tuple[Shape, Simulated]:
    config = sources.config
    seconds = load.seconds or BARS * max(sources.intervals) * 1e-9
    simulator = Simulator(sources, load)
    with closing(simulator):
        shape = _shape_of(sources, simulator)
        simulator.run(arrivals(load, symbol_intervals(sources), len(config.sessions), seconds), seconds)
        return shape, _simulated(simulator, sources, seconds)


def _simulated(simulator: Simulator, sources: Sources, seconds: float) -> Simulated:
    happened, sessions, device = simulator.outcomes, len(sources.config.sessions), simulator.device
    bars = max(1, happened.bars + simulator.skipped + simulator.waiting)
    busy, pool_ratio = simulator.forward_ns * 1e-9 / seconds, device.peak_blocks / device.pool.total_blocks
    return Simulated(
        seconds=seconds,
        close_to_answer_s=_quantiles(happened.close_to_answer),
        end_to_end_s=_quantiles(happened.end_to_end),
        ask_computed_s=_quantiles(happened.asks),
        ttft_pool_s=_quantiles(happened.prompts),
        utilisation_ratio=min(1.0, busy),
        freshness_met_ratio=1 - (happened.late + simulator.skipped) / bars,
        coalesced_ratio=simulator.coalesced / bars,
        cell_budget_ratio=happened.peak_cells / cell_budget(device.pool, sources.limits),
        pool_ratio=pool_ratio,
        sessions_by_pool=sessions_estimate(sessions, pool_ratio),
        bars=happened.bars,
        versions=happened.versions,
        answers=len(happened.close_to_answer),
        passes=device.passes,
        bars_skipped=simulator.skipped,
        bars_waiting=simulator.waiting,
        unanswered=dict(sorted(happened.unanswered.items())),
    )


def _shape_of(sources: Sources, simulator: Simulator | None) -> Shape:
    """The mean session; without a simulation its window is as long as its retention."""
    config = sources.config
    sessions = len(config.sessions)
    if simulator is not None:
        context, bar = simulator.context(), simulator.bar_tokens()
    else:
        context, bar = sum(s.retention_tokens for s in config.sessions) / sessions, BAR_TOKENS
    questions = tuple(
        (tokens, answer, times / sessions)  # of one session on average
        for session in config.sessions
        for tokens, answer, times in standing_of(sources, session)
    )
    return Shape(round(context), max(1, round(bar)), questions, ready_tokens(sources))


def _search(config: Config, load: Load, costs: CostModel, about: int) -> int:
    """By bisection, from the formulas' result on; at most four times as many."""
    each = load.ticks / len(config.sessions)

    def fits(n: int) -> bool:
        if n > 4 * max(1, about):
            return False
        found = simulate(sources_of(repeated(config, n), costs), replace(load, ticks=each * n))
        return found.freshness_met_ratio >= KEPT and found.coalesced_ratio <= 1 - KEPT

    return max_sessions(fits) or 0


def _hit_mix(load: Load, costs: CostModel, simulated: Simulated) -> HitMix:
    computed = 1 - load.asks_standing - load.asks_ready
    standard, served, mean = simulated.ask_computed_s, costs.answer_s, None
    if standard is not None or not computed:
        slow = standard.mean if standard else 0.0
        mean = mean_latency(load.asks_standing, load.asks_ready, served, served, slow)
    return HitMix(cached=load.asks_standing, ready=load.asks_ready, computed=computed, mean_s=mean)


def _overload(sessions: int, found: Capacity, simulated: Simulated) -> list[str]:
    said: list[str] = []
    if found.sessions_by_kv_memory < sessions:
        said.append(
            f"KV memory: {sessions} sessions need {sessions * found.session_bytes / 2**30:.1f} GiB, but "
            f"there is room for {found.sessions_by_kv_memory}: lower retention_tokens or max_batch_tokens"
        )
    if found.worker_ratio >= 1:
        said.append(
            f"compute: the engine would be {found.worker_ratio:.0%} busy, with room for "
            f"{found.sessions_by_compute or 0} sessions or {found.k_max} questions each: ask less often "
            "(ask_every, ask_every_bars), or use longer bars"
        )
    if found.gateway_ratio >= 1:
        said.append(
            f"gateway: records and answers would take {found.gateway_ratio:.0%} of its time: publish less "
            "(publish_when), or split the symbols between daemons"
        )
    if simulated.seconds and simulated.freshness_met_ratio < KEPT:
        said.append(
            f"freshness: only {simulated.freshness_met_ratio:.1%} of the bars are in time, with room for "
            f"{found.sessions_by_freshness or 0} sessions: raise max_staleness or stream_share"
        )
    return said


def _quantiles(values: Sequence[int]) -> Quantiles | None:
    if not values:
        return None
    seconds = np.asarray(values) * 1e-9
    p50, p99 = np.quantile(seconds, (0.5, 0.99), method="inverted_cdf").tolist()
    return Quantiles(p50, p99, float(seconds.mean()))
