"""Summaries of simulated runs: quantiles, tails and counts, as JSON and as a table."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from lab.simulation.run import Result

LARGE_INVALIDATION = 10_000
"""Tokens; the paper reports the share of requests that invalidate more (appendix A.1)."""
CCDF_POINTS = 200
NON_STREAMING = "vllm-ns"
"""Policy name for vLLM without streaming: prompts are submitted when their retrieval is over."""


class Spread(msgspec.Struct, frozen=True):
    """A quantity over the requests of a run."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """One run. Times in seconds of virtual time; counts over all requests."""

    workload: str
    qps: float | None
    """None for a trace, which has its own arrivals."""
    policy: str
    eviction: str
    profile: str
    requests: int
    failures: dict[str, int]
    ttft_s: Spread
    """Answered requests: from the end of the retrieval (the last input) to the first token."""
    ttft_ccdf: list[tuple[float, float]]
    """(TTFT in s, share of requests above it)."""
    completion_s: float
    """Time until the last request ended (trace completion time)."""
    preempted_swap: int
    preempted_recompute: int
    preempted_requests: int
    invalidated_tokens: Spread
    """Tokens in KV that changes of the prompt invalidated, per request."""
    invalidated_large: float
    """Share of requests that invalidated more than 10,000 tokens."""
    recomputed_tokens: int
    swapped_tokens: int
    reused_tokens: int
    """Tokens found in the prefix cache or computed by another request of a group."""
    computed_tokens: int
    passes: int
    busy: float
    """Share of the time in which the device computed."""
    copying_s: float
    """Time for which passes waited for swapped blocks."""
    peak_tokens: int
    """Most KV in the pool at once."""


def summarize(
    result: Result, *, workload: str, qps: float | None, policy: str, eviction: str, profile: str
) -> Summary:
    """The figures of one run. Raises ValueError when no request was answered."""
    columns, ttft = result.columns, result.ttft_ns / 1e9
    if not len(ttft):
        raise ValueError(f"{policy}: no request was answered; failures: {result.failures}")
    swaps, recomputes, lost = columns["swaps"], columns["recomputes"], columns["invalidated_tokens"]
    return Summary(
        workload=workload,
        qps=qps,
        policy=policy,
        eviction=eviction,
        profile=profile,
        requests=len(columns["request"]),
        failures=result.failures,
        ttft_s=spread(ttft),
        ttft_ccdf=ccdf(ttft),
        completion_s=result.ended_ns / 1e9,
        preempted_swap=int(swaps.sum()),
        preempted_recompute=int(recomputes.sum()),
        preempted_requests=int(((swaps + recomputes) > 0).sum()),
        invalidated_tokens=spread(lost.astype(np.float64)),
        invalidated_large=float((lost > LARGE_INVALIDATION).mean()),
        recomputed_tokens=int(columns["recomputed_tokens"].sum()),
        swapped_tokens=int(columns["swapped_tokens"].sum()),
        reused_tokens=int(columns["reused_tokens"].sum()),
        computed_tokens=result.computed_tokens,
        passes=result.passes,
        busy=result.busy_ns / result.ended_ns if result.ended_ns else 0.0,
        copying_s=result.copying_ns / 1e9,
        peak_tokens=result.peak_tokens,
    )


def spread(values: NDArray[np.float64]) -> Spread:
    """Summarise a non-empty array; quantiles are values of it (numpy's `higher`)."""
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99), method="higher").tolist()
    return Spread(float(values.mean()), p50, p95, p99, float(values.max()))


def ccdf(values: NDArray[np.float64]) -> list[tuple[float, float]]:
    """(value, share above it), rising, at up to `CCDF_POINTS` values, which are densest in the tail."""
    ordered = np.sort(values)
    n = len(ordered)
    above = np.unique(np.geomspace(1, n, CCDF_POINTS).astype(np.int64))[::-1]  # how many lie above, falling
    return [(float(ordered[n - 1 - count]) if count < n else 0.0, count / n) for count in above.tolist()] + [
        (float(ordered[-1]), 0.0)
    ]


def table(summaries: Sequence[Summary]) -> str:
    """One row per run, with the speedup over a `NON_STREAMING` run at the same rate."""
    lines = [
        f"{'qps':>6} {'policy':<14} {'TTFT P50':>17} {'P95':>17} {'P99':>17} {'mean':>8} {'done':>9} "
        f"{'swap':>6} {'recomp':>7} {'>10K inv':>8} {'reused':>7} {'busy':>5}  failed"
    ]
    for run in summaries:
        base = next((r for r in summaries if r.policy == NON_STREAMING and r.qps == run.qps), None)
        ttft = run.ttft_s
        times = " ".join(
            _with_speedup(getattr(ttft, at), getattr(base.ttft_s, at) if base and base is not run else None)
            for at in ("p50", "p95", "p99")
        )
        reused = run.reused_tokens / max(1, run.reused_tokens + run.computed_tokens)
        rate = "trace" if run.qps is None else f"{run.qps:g}"
        failed = ", ".join(f"{code} {n}" for code, n in run.failures.items()) or "-"
        lines.append(
            f"{rate:>6} {run.policy:<14} {times} {ttft.mean:>7.3f}s "
            f"{run.completion_s:>8.1f}s {run.preempted_swap:>6} {run.preempted_recompute:>7} "
            f"{run.invalidated_large:>8.1%} {reused:>7.1%} {run.busy:>5.0%}  {failed}"
        )
    return "\n".join(lines)


def _with_speedup(value: float, base: float | None) -> str:
    speedup = "" if base is None or not value else f" {base / value:5.2f}x"
    return f"{value:.3f}s{speedup}".rjust(17)
