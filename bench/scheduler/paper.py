"""Results of *Stream2LLM* (section 6), for comparison with ours."""

from typing import NamedTuple

Range = tuple[float, float]
EVICTIONS = ("recompute", "swap", "cost")


class Pressed(NamedTuple):
    """Speed-ups of the TTFT over vLLM-NS at P50 and P99, and preemptions; each by `EVICTIONS`."""

    p50: tuple[float, float, float]
    p99: tuple[float, float, float]
    preemptions: tuple[int, int, int]


PRESSED = {
    ("crawler", "vLLM-S"): Pressed((8.59, 7.29, 8.25), (0.78, 0.66, 0.71), (2448, 779, 1735)),
    ("crawler", "fcfs"): Pressed((8.77, 7.78, 8.30), (10.03, 6.69, 8.62), (3552, 709, 1575)),
    ("crawler", "lcas"): Pressed((8.61, 7.32, 7.82), (9.23, 4.80, 9.14), (12564, 1049, 3486)),
    ("crawler", "mcps"): Pressed((5.92, 3.86, 4.96), (0.73, 0.48, 0.77), (3316, 721, 1741)),
    ("anns", "vLLM-S"): Pressed((2.53, 2.26, 2.63), (0.19, 0.18, 0.19), (130, 35, 125)),
    ("anns", "fcfs"): Pressed((2.70, 2.37, 2.70), (1.84, 1.26, 2.04), (342, 50, 331)),
    ("anns", "lcas"): Pressed((2.38, 1.62, 2.44), (1.79, 0.97, 1.79), (385, 48, 373)),
    ("anns", "mcps"): Pressed((2.20, 1.47, 2.23), (0.19, 0.22, 0.19), (215, 40, 237)),
}
"""Tables 3 and 4; 4,322 requests of the crawler and 500 of ANNS."""

PRESSED_BASE = {"crawler": (0.64, 8.97), "anns": (0.72, 6.56)}
"""Table 3: P50 and P99 of vLLM-NS, seconds."""

SWAPPED = {"crawler": (0.17, 0.21), "anns": (0.0, 0.02)}
"""Table 4: share of the victims that the choice by cost swaps; lowest and highest of the policies."""

_STREAMING = ("vLLM-S", "fcfs", "lcas", "mcps")
SPEED_UPS: dict[tuple[str, float, str, str], float | Range] = {
    **{("crawler", qps, name, "P50"): (3.9, 4.3) for qps in (0.5, 1.0) for name in _STREAMING},
    **{("crawler", 4.0, name, "P50"): (10.8, 11.0) for name in _STREAMING},
    **{("anns", 1.0, name, "P95"): (2.49, 2.63) for name in _STREAMING},
    ("anns", 2.0, "vLLM-S", "P50"): (1.30, 1.42),
    ("anns", 2.0, "fcfs", "P95"): 2.26,
    ("anns", 2.0, "lcas", "P95"): 1.81,
    ("anns", 2.0, "mcps", "P95"): 1.53,
}
"""Section 6.2: speed-ups over vLLM-NS, where numbers are given."""

OVER_STREAMING = {
    ("crawler", 2.0): {"fcfs": 1.44, "lcas": 1.32, "mcps": 0.73},
    ("crawler", 4.0): {"fcfs": 3.16, "lcas": 2.64, "mcps": 0.71},
}
"""Section 6.2: P95 of vLLM-S over that of the others."""

OVERHEAD_P99_US = {500: (1_000.0, 165.0)}
"""Section 6.5, us, by requests: at most, sorting and budgets of a step; and the P99 of sorting alone."""


def order(workload: str, qps: float) -> dict[str, float]:
    """P95 speed-ups of the streaming policies over one of them, where the paper gives their order."""
    if over := OVER_STREAMING.get((workload, qps)):
        return {"vLLM-S": 1.0, **over}
    found = {name: v for (w, q, name, at), v in SPEED_UPS.items() if (w, q, at) == (workload, qps, "P95")}
    return {name: value for name, value in found.items() if isinstance(value, float)}
