"""`foretick bench`: measure, and render what was measured. Heavy modules are imported by what needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.suites import SUITES


@click.group()
def bench() -> None:
    """Benchmarks: every figure beside a reference measured in the same run."""


def _options(suite: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What every suite's command takes."""
    names = list(SUITES[suite])
    options = (
        click.option(
            "--part", "parts", type=click.Choice(names), multiple=True, help="Only these; default: all."
        ),
        click.option("--quick", is_flag=True, help="Small sizes: to see that it works, not for figures."),
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Save each part to this file; other parts in it stay.",
        ),
        click.option(
            "--threads", type=click.IntRange(1), default=2, show_default=True, help="Of torch, on a CPU."
        ),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@bench.command()
@click.option("--model", type=click.Choice(["embedded", "80m", "both"]), default="both", show_default=True)
@_options("stream")
def stream(model: str, **options: Any) -> None:
    """The paper's scenario, flash hits under load, Kafka to bars, and the ring."""
    _run("stream", models=("embedded", "80m") if model == "both" else (model,), **options)


@bench.command()
@_options("engine")
def engine(**options: Any) -> None:
    """Regions and engine on a CPU: questions, updates, many readers, a sliding window, refresh, forks."""
    _run("engine", **options)


@bench.command()
@_options("scheduler")
def scheduler(**options: Any) -> None:
    """Policies in simulated time and on the engine, k-LPM, questions in a flood, cost of scheduling."""
    _run("scheduler", **options)


@bench.command()
@click.option("--device", default="cuda", show_default=True, help="Where to measure.")
@click.option("--profiles", type=click.Path(file_okay=False, path_type=Path), help="Save the cost curves in.")
@_options("gpu")
def gpu(device: str, profiles: Path | None, **options: Any) -> None:
    """Questions, reading, swap and attention on a GPU, against its own bandwidth and matrix rate."""
    _run("gpu", device=device, profiles=profiles, **options)


@bench.command()
@click.argument(
    "json_files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True
)
@click.option("--goals", is_flag=True, help="The table of goals and verdicts, misses first.")
@click.option(
    "--into", type=click.Path(dir_okay=False, path_type=Path), help="Page to write, or to put the goals in."
)
def render(json_files: tuple[Path, ...], goals: bool, into: Path | None) -> None:
    """Print the tables of saved suites, or write them to a page."""
    from bench.render import goals as goals_table
    from bench.render import page, put_into
    from bench.run import read

    suites = [read(json_file) for json_file in json_files]
    if into is None:
        click.echo(goals_table(suites) if goals else "\n".join(map(page, suites)), nl=goals)
        return
    try:
        if goals:
            put_into(into, goals_table(suites))
        else:
            into.write_text("\n".join(map(page, suites)), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{into}: {error}") from None
    click.echo(f"wrote {os.fspath(into)}")


def _run(suite: str, parts: tuple[str, ...], json_file: Path | None, **options: Any) -> None:
    """Measure and print."""
    from bench.render import page
    from bench.run import MeasurementFailed, Run, run

    settings = Run(say=partial(click.echo, err=True), **options)
    arguments = sys.argv[1:] if sys.argv[1:2] == ["bench"] else ["bench", *sys.argv[1:]]  # `python -m bench`
    command = " ".join(["foretick", *arguments])
    try:
        found = run(suite, command, settings, parts, json_file)
    except MeasurementFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(page(found), nl=False)
