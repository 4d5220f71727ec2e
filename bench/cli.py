"""`foretick bench`: measure, and render what was measured. Heavy modules are imported by what needs them."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

THREADS = 2
PARTS = ("ring", "kafka", "hits", "questions")
ENGINE_PARTS = ("questions", "sessions", "window", "standing", "prefix", "refresh", "bookkeeping")
SCHEDULER_PARTS = ("cost", "flood", "engine", "prefix", "simulated")


@click.group()
def bench() -> None:
    """Benchmarks: every figure beside a reference measured in the same run."""


@bench.command()
@click.option("--model", type=click.Choice(["embedded", "80m", "both"]), default="both", show_default=True)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only these; default: all.")
@click.option("--quick", is_flag=True, help="Small sizes: to see that it works, not for figures.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Save to.")
def stream(model: str, parts: tuple[str, ...], quick: bool, json_file: Path | None) -> None:
    """The paper's scenario, flash hits under load, Kafka to bars, and the ring."""
    from bench.report import render as tables
    from bench.suite import Disagreement, Miscounted, MockUnavailable, measure

    models = ("embedded", "80m") if model == "both" else (model,)
    try:
        report = measure(*_this_run("stream"), models, parts or PARTS, **_ways(json_file, quick=quick))
    except (Disagreement, Miscounted, MockUnavailable) as error:
        raise click.ClickException(str(error)) from None
    click.echo(tables(report), nl=False)


@bench.command()
@click.option("--part", "parts", type=click.Choice(ENGINE_PARTS), multiple=True, help="Only these.")
@click.option("--quick", is_flag=True, help="Small sizes: to see that it works, not for figures.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Save to.")
def engine(parts: tuple[str, ...], quick: bool, json_file: Path | None) -> None:
    """Regions and engine on a CPU: questions, updates, many readers, a sliding window, refresh, forks."""
    from bench.engine_report import render as tables
    from bench.engine_suite import measure
    from bench.questions_result import Disagreement

    try:
        report = measure(*_this_run("engine"), parts or ENGINE_PARTS, **_ways(json_file, quick=quick))
    except Disagreement as error:
        raise click.ClickException(str(error)) from None
    click.echo(tables(report), nl=False)


@bench.command()
@click.option("--part", "parts", type=click.Choice(SCHEDULER_PARTS), multiple=True, help="Only these.")
@click.option("--quick", is_flag=True, help="Small sizes: to see that it works, not for figures.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Save to.")
def scheduler(parts: tuple[str, ...], quick: bool, json_file: Path | None) -> None:
    """Policies in simulated time and on the engine, k-LPM, questions in a flood, cost of scheduling."""
    from bench.scheduler_report import render as tables
    from bench.scheduler_suite import measure

    report = measure(*_this_run("scheduler"), parts or SCHEDULER_PARTS, **_ways(json_file, quick=quick))
    click.echo(tables(report), nl=False)


@bench.command()
@click.option("--quick", is_flag=True, help="A tiny model: to see that it works, on a CPU too.")
@click.option("--device", default="cuda", show_default=True, help="Where to measure.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Save to.")
@click.option("--profiles", type=click.Path(file_okay=False, path_type=Path), help="Save the cost curves in.")
def gpu(quick: bool, device: str, json_file: Path | None, profiles: Path | None) -> None:
    """Figures of one GPU: questions, standing questions, ingest, swap and recompute, attention."""
    from bench.gpu import run
    from engine.model.loading import ModelError

    try:
        click.echo(run(quick=quick, device=device, json_file=json_file, profiles=profiles), nl=False)
    except ModelError as error:
        raise click.ClickException(str(error)) from None


@bench.command()
@click.argument("json_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--into", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Page to update.")
def render(json_file: Path, into: Path | None) -> None:
    """Print the tables of a saved run, or put them between a page's markers."""
    from bench.page import put_into
    from bench.saved import tables_of

    section, tables = tables_of(json_file)
    if into is None:
        click.echo(tables, nl=False)
        return
    try:
        put_into(into, section, tables)
    except ValueError as error:
        raise click.ClickException(f"{into}: {error}") from None
    click.echo(f"wrote {os.fspath(into)}")


def _this_run(name: str) -> tuple[str, str, int]:
    """What every report begins with: the command, when it began, threads."""
    arguments = " ".join(sys.argv[1:]) or f"bench {name}"
    return f"foretick {arguments}", datetime.now(UTC).isoformat(" ", "minutes"), THREADS


def _ways(json_file: Path | None, *, quick: bool) -> dict[str, Any]:
    """How any of them runs, tells what it does, and keeps what it found."""
    say = partial(click.echo, err=True)
    return {"quick": quick, "say": say, "keep": partial(_save, json_file)}


def _save(json_file: Path | None, report: Any) -> None:
    """After each part: a run takes minutes and may be cut short."""
    from bench.save import save

    if json_file is not None:
        save(json_file, report)
