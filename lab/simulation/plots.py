"""PNG plots of simulated runs: the tail of TTFT by policy, and TTFT against the request rate."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab.simulation.report import Summary

_INCH = 4.2


def plot(summaries: Sequence[Summary], path: Path) -> None:
    """Plot one panel per request rate with each policy's TTFT CCDF; with several rates also P50 and P99.

    Uses Agg directly, so it needs no display and changes no global state. Raises OSError when `path` cannot
    be written.
    """
    rates = sorted({run.qps for run in summaries}, key=lambda rate: rate or 0.0)
    by_rate = [("P50", "p50"), ("P99", "p99")] if len(rates) > 1 else []
    panels = len(rates) + len(by_rate)
    figure = Figure(figsize=(_INCH * panels, _INCH), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for ax, rate in zip(axes, rates, strict=False):
        _ccdf(ax, [run for run in summaries if run.qps == rate])
        ax.set_title(f"{summaries[0].workload}" + ("" if rate is None else f", {rate:g} requests/s"))
    for ax, (name, field) in zip(axes[len(rates) :], by_rate, strict=True):
        _against_rate(ax, summaries, name, field)
    axes[0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)


def _ccdf(ax: Axes, summaries: Sequence[Summary]) -> None:
    for run in summaries:
        points = [point for point in run.ttft_ccdf if point[0] > 0 and point[1] > 0]
        ax.step([x for x, _ in points], [y for _, y in points], where="post", label=run.policy)
    ax.set(xscale="log", yscale="log", xlabel="TTFT, s", ylabel="part of requests above")
    ax.grid(visible=True, which="major", alpha=0.3)


def _against_rate(ax: Axes, summaries: Sequence[Summary], name: str, field: str) -> None:
    for policy in dict.fromkeys(run.policy for run in summaries):
        runs = sorted((run for run in summaries if run.policy == policy), key=lambda run: run.qps or 0.0)
        times = [getattr(run.ttft_s, field) for run in runs]
        ax.plot([run.qps or 0.0 for run in runs], times, marker="o", label=policy)
    ax.set(yscale="log", xlabel="requests/s", ylabel=f"TTFT {name}, s", title=f"TTFT {name}")
    ax.grid(visible=True, which="major", alpha=0.3)
