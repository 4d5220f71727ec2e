"""What `foretick bench scheduler` found, as plain data: rendering it needs no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from bench.figures import Latency
from bench.machine import Machine


class Cost(msgspec.Struct, frozen=True):
    """Microseconds of thread time a step with ``live`` requests.

    ``pool``: its size as a part of what they want. ``sorted_us``: ordering all of them from nothing, median.
    """

    policy: str
    live: int
    pool: float
    plan_p50: float
    plan_p99: float
    step_p50: float
    step_p99: float
    sorted_us: float


class Asked(msgspec.Struct, frozen=True):
    """Questions of one class; ``batch_ms``: p99 of a pass that may be under way in the flood."""

    cls: str
    idle: Latency
    flooded: Latency
    batch_ms: float

    @property
    def bound_ms(self) -> float:
        """1.5 times the idle p99, plus one batch."""
        return 1.5 * self.idle.p99_ms + self.batch_ms


class Flood(msgspec.Struct, frozen=True):
    """Questions while a tape's ``backlog`` and so many ``prompts`` always wait.

    ``passes``: those of the flood without a question. ``tokens_a_second``: computed meanwhile, by class.
    """

    asked: list[Asked]
    passes: Latency
    batch_tokens: int
    prompts: int
    backlog: int
    tokens_a_second: dict[str, float]


class Streamed(msgspec.Struct, frozen=True):
    """One workload under one scheduler in simulated time; TTFT in seconds from the end of the retrieval.

    ``delay``: times between chunks are multiplied by it. ``p99_seeds_s``: of each seed's run, where ``p99_s``
    is of all their requests together. ``busy``: part of the time in passes.
    ``swaps``, ``recomputes``: preemptions of a run. ``many_invalidated``: part of the requests of which more
    than 10,000 tokens were invalidated.
    """

    workload: str
    profile: str
    qps: float
    delay: float
    scheduler: str
    eviction: str
    requests: int
    failed: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    p99_seeds_s: list[float]
    completion_s: float
    busy: float
    swaps: float
    recomputes: float
    many_invalidated: float


class Simulated(msgspec.Struct, frozen=True):
    """*Stream2LLM*'s figures 8 and 9 (``rates``) and tables 3 and 4 (``pressed``)."""

    pool_tokens: int
    rates: list[Streamed]
    pressed: list[Streamed]


class Predicted(msgspec.Struct, frozen=True):
    """One scheduler simulated and measured on the same trace; TTFT P50, P95, P99 in seconds.

    ``median_error``: of the single requests, |predicted - measured| / measured. ``repeat_error``: the same
    for a second measured run in the prediction's place: no prediction is better than that. ``pace``: time of
    the scheduler's steps over what the profile says of their passes, in the run before; ``measured_pace``: in
    the run that was predicted.
    """

    scheduler: str
    predicted_s: tuple[float, float, float]
    measured_s: tuple[float, float, float]
    median_error: float
    repeat_error: float
    pace: float
    measured_pace: float
    predicted_preemptions: int
    measured_preemptions: int
    failed: int
    """Requests that failed in either, left out of everything else."""


class Measured(msgspec.Struct, frozen=True):
    """A scaled crawler trace on the real engine. ``profile_error``: median of the profile's own fit.

    ``pairs``: of schedulers whose predicted P99 lie well apart; ``agreeing``: of these, in the same order
    when measured.
    """

    scale: int
    qps: float
    requests: int
    mean_tokens: float
    pool_tokens: int
    tokens_a_second: float
    profile_error: float
    rows: list[Predicted]
    pairs: int
    agreeing: int


class PrefixRow(msgspec.Struct, frozen=True):
    """One run under one policy; TTFT in seconds.

    ``part``: the rate as a part of what the device computes without reuse. ``reused``: part of the prompts'
    tokens that were in the prefix cache. ``pace``: time of the scheduler's steps over what the profile says
    of their passes; 1 in simulated time.
    """

    load: str
    part: float
    qps: float
    policy: str
    seed: int
    p50_s: float
    p99_s: float
    reused: float
    pace: float = 1.0


class Prefix(msgspec.Struct, frozen=True):
    """k-LPM, FCFS and LPM by rate; runs in simulated time, and on the engine.

    ``foreseen``: the engine's runs in simulated time, under the profile measured before them; more seeds.
    """

    k: int
    profile: str
    simulated: list[PrefixRow]
    foreseen: list[PrefixRow] = []
    real: list[PrefixRow] = []


class SchedulerReport(msgspec.Struct, frozen=True):
    """One run of `foretick bench scheduler`; parts that were not asked for are empty."""

    command: str
    started: str
    threads: int
    machine: Machine
    kind: Literal["scheduler"] = "scheduler"
    load_at_end: float = 0.0
    cost: list[Cost] = []
    flood: Flood | None = None
    engine: Measured | None = None
    prefix: Prefix | None = None
    simulated: Simulated | None = None
