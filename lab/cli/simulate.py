"""`foretick simulate`: scheduling policies compared in simulated time."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from daemon.cli.options import refuse

EVICTIONS = ("recompute", "swap", "cost")
POOL_TOKENS = 1_600_000
"""*Stream2LLM* section 6.1: two H200 of 141 GB, 80 % of them, less 16 GB of weights, at 128 KiB a token."""


_option = partial(click.option, show_default=True)
_count = partial(click.IntRange, 1)
_written = click.Path(path_type=Path)


@click.command("simulate")
@_option("--workload", default="crawler", help="crawler, anns, sessions or oneshot")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False), help="trace file to use instead of a workload"
)
@_option("--qps", default="4", help="requests a second; separate several with commas: 0.5,1,2,4")
@_option("--requests", type=_count(), default=1000)
@_option("--delay", type=click.FloatRange(min=0), default=1.0, help="factor on the gaps between chunks")
@_option("--max-tokens", type=_count(), default=1, help="tokens of each answer")
@_option("--seed", type=int, default=0)
@_option("--policy", default="fcfs", help="one policy, or several: vllm-ns,fcfs,klpm:4")
@_option("--eviction", type=click.Choice(EVICTIONS), default="cost")
@_option("--profile", default="h200-saturation", help="cost profile: a name or a file")
@_option("--pool-tokens", type=_count(), default=POOL_TOKENS)
@_option("--host-tokens", type=click.IntRange(min=0), default=POOL_TOKENS)
@_option("--batch-tokens", type=_count(), default=8192)
@_option("--batch-requests", type=_count(), default=256)
@click.option(
    "--prefix-cache/--no-prefix-cache", default=None, help="use a prefix cache (default: for sessions only)"
)
@click.option("--grouping/--no-grouping", default=False, help="compute common prefixes once")
@click.option("--json", "json_path", type=_written, help="write all results as JSON")
@click.option("--plot", "plot_path", type=_written, help="write a plot as PNG")
@click.option("--save-trace", "trace_path", type=_written, help="write the workload as a trace file")
def command(json_path: Path | None, plot_path: Path | None, trace_path: Path | None, **options: Any) -> None:
    """Run the scheduler in simulated time: policies compared on a synthetic workload or a trace.

    TTFT counts from the end of the retrieval. Speedups are relative to vllm-ns, if it is among the policies.
    """
    from lab.simulation import experiment
    from lab.simulation.report import table

    if plot_path is not None:
        from lab.simulation.plots import plot
    options["policies"] = tuple(options.pop("policy").split(","))
    if options["prefix_cache"] is None:
        options["prefix_cache"] = options["workload"] == "sessions" and options["trace"] is None
    try:
        options["qps"] = tuple(float(rate) for rate in options["qps"].split(","))
        plan = experiment.Experiment(**options)
        if trace_path is not None:
            experiment.save_trace(plan, trace_path)
            return
        begun, runs = time.monotonic(), []
        for summary in experiment.run(plan):
            runs.append(summary)
            took = time.monotonic() - begun
            click.echo(
                f"{summary.policy}: {summary.completion_s:.0f} s simulated, {took:.1f} s so far", err=True
            )
        click.echo(table(runs))
        if json_path is not None:
            result = msgspec.json.encode(experiment.ExperimentResult(plan, runs))
            json_path.write_bytes(msgspec.json.format(result, indent=2) + b"\n")
        if plot_path is not None:
            plot(runs, plot_path)
    except (ValueError, OSError) as error:
        refuse(error)
