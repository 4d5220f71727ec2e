"""How many sessions and questions a device carries, by the equations of *Attention Once* (3.9.5, 3.9.7, 6.3).

The times of equation 14 are those of `flash.capacity`.
"""

from collections.abc import Mapping, Sequence
from math import exp

import msgspec

from daemon.config.schema import SessionConfig
from flash.capacity import AskedTimes, Background, Shape, asked_times, max_sessions
from lab.plan.host_costs import HostCosts
from lab.plan.load import Load
from lab.plan.sources import Sources
from lab.theory.equations import background_time, sessions_max

BAR_TOKENS = 24.0
"""Of a line, where no simulation has counted them."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """By formula, for the configured sessions together. Times in seconds; None: no limit.

    ``t_data_s``: mean time between two updates of a session. ``t_ingest_s``, ``t_header_s`` and ``t_flash_s``
    are those of equation 14 for all sessions at once, the last for one question of each.
    """

    t_data_s: float
    t_ingest_s: float
    t_header_s: float
    t_flash_s: float
    t_background_s: float
    k: float
    """Questions of one update of a session, on average: `ask_every` and `ask_every_bars` count."""
    k_max: int
    """Equation 16: questions of every update that each of these sessions could have."""
    utilisation_ratio: float
    """Time in forward passes over time: background, computed asks and prompts."""
    worker_ratio: float
    """As `utilisation_ratio`, with what the host spends beside each pass."""
    gateway_ratio: float
    """Time of the gateway over time: records and answers."""
    sessions_by_compute: int | None
    """The most sessions with a `worker_ratio` below 1 (equation 15)."""
    sessions_by_kv_memory: int
    """Equation 23."""
    sessions_by_freshness: int | None
    """The most sessions whose bars, closed at once, meet the freshness objective behind one full batch."""
    session_bytes: float
    """KV memory that the daemon reserves for a session (equation 21)."""
    freshness_objective_s: float
    """The strictest freshness objective; 0: none."""

    @property
    def sessions(self) -> int:
        """The most sessions by all limits."""
        return min(self._limits.values())

    @property
    def limit(self) -> str:
        """What limits them."""
        return min(self._limits, key=lambda name: self._limits[name])

    @property
    def _limits(self) -> dict[str, int]:
        found = {
            "compute": self.sessions_by_compute,
            "KV memory": self.sessions_by_kv_memory,
            "freshness": self.sessions_by_freshness,
        }
        return {name: most for name, most in found.items() if most is not None}


def standing_of(sources: Sources, session: SessionConfig) -> AskedTimes:
    """The session's standing questions."""
    prefix, interval = sources.prefixes.newest(session.name), session.bars(sources.config.bars).interval
    standing = sources.registry.standing(session.name)
    return asked_times(standing, interval, lambda each: len(sources.prefixes.asked(each, prefix)))


def ready_tokens(sources: Sources) -> int:
    """Tokens of the ready position's header; 0 without early exit."""
    return len(sources.prompt.ready()) if sources.config.flash.early_exit else 0


def session_shape(sources: Sources, session: SessionConfig) -> Shape:
    """One session by its own settings, with a full window."""
    bar = round(BAR_TOKENS)
    window = session.retention_records * bar if session.retention_records else session.retention_tokens
    context = min(window, session.retention_tokens)
    return Shape(context, bar, standing_of(sources, session), ready_tokens(sources))


def background_s(sources: Sources, shape: Shape, together: int) -> float:
    """Time of a bar and its questions, s, of one of ``together`` such sessions that share passes."""
    device = _Device(HostCosts(sources.costs), sources.limits, shape)
    return (device.ingest(together) + device.header(together) + shape.k * device.flash(together)) / together


def capacity(sources: Sources, shape: Shape, load: Load, memory: int) -> Capacity:
    """The formulas for the configured sessions; ``memory``: bytes of the device."""
    config, costs = sources.config, HostCosts(sources.costs)
    device = _Device(costs, sources.limits, shape)
    bare = _Device(sources.costs, sources.limits, shape)
    sessions = len(config.sessions)
    data = sessions / sum(bars_per_s(sources, load.ticks))
    objective = min((p for s in config.sessions if (p := config.freshness_objective_ns(s))), default=0) * 1e-9
    size = config.pool.block_size
    session_bytes = sources.kv_bytes(sources.session_tokens)
    pool_bytes = sources.kv_bytes(sources.blocks * size)
    shared = max(0.0, pool_bytes - sessions * session_bytes)
    fixed = config.pool.blocks > 0
    ingest, header, flash = device.ingest(sessions), device.header(sessions), device.flash(sessions)

    def used(n: int, by: _Device = device) -> float:
        return by.used(n, data) + others(by)

    def others(by: _Device = device) -> float:
        return load.asks_computed * by.ask() + load.prompts * by.prompt(load)

    full = costs.batch_ns([(shape.context, sources.limits.max_batch_tokens)]) * 1e-9
    answers = sessions * shape.k / data + load.asks
    return Capacity(
        t_data_s=data,
        t_ingest_s=ingest,
        t_header_s=header,
        t_flash_s=flash,
        t_background_s=background_time(ingest, header, 0, flash) + shape.k * flash,
        k=shape.k,
        k_max=device.k_max(sessions, data, others(device)),
        utilisation_ratio=used(sessions, bare),
        worker_ratio=used(sessions),
        gateway_ratio=load.ticks * sources.costs.record_s + answers * sources.costs.answer_s,
        sessions_by_compute=max_sessions(lambda n: used(n) < 1),
        sessions_by_kv_memory=sessions_max(
            pool_bytes if fixed else memory,
            (0 if fixed else sources.outline.weight_bytes) + shared,
            session_bytes,
        ),
        sessions_by_freshness=max_sessions(lambda n: device.ingest(n) + full <= objective)
        if objective
        else None,
        session_bytes=session_bytes,
        freshness_objective_s=objective,
    )


def bars_per_s(sources: Sources, ticks: float) -> list[float]:
    """Bars a second of each session at a rate of ticks a second: intervals without a tick make none."""
    rates = dict.fromkeys(sources.symbols, ticks / len(sources.symbols))
    return [
        session_bars_per_s(session, ns, rates)
        for session, ns in zip(sources.config.sessions, sources.intervals, strict=True)
    ]


def session_bars_per_s(session: SessionConfig, interval_ns: int, rates: Mapping[str, float]) -> float:
    """Bars a second of a session; ``rates``: ticks a second, by symbol."""
    seconds = interval_ns * 1e-9
    return sum((1 - exp(-rates[symbol] * seconds)) / seconds for symbol in session.symbols)


class _Device(Background):
    """With the work that is not in the background."""

    def ask(self) -> float:
        """A computed ask, in a pass of its own."""
        tokens: Sequence[float] = [tokens for tokens, _, _ in self.shape.questions] or [32]
        return self.passes(1, round(sum(tokens) / len(tokens)))

    def prompt(self, load: Load) -> float:
        """A prompt, its answer in passes of its own."""
        passes = self.limits.max_batch_tokens
        starts = range(0, load.prompt_tokens, passes)
        prefill = sum(
            self.costs.batch_ns([(at, min(passes, load.prompt_tokens - at))]) * 1e-9 for at in starts
        )
        decode = self.costs.batch_ns([(load.prompt_tokens, 1)]) * 1e-9
        return prefill + max(0, load.answer_tokens - 1) * decode
