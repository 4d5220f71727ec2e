"""`foretick bench`: measure, and render the measurements. Commands import heavy modules on use."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.suites import SUITES

_FILE = click.Path(dir_okay=False, path_type=Path)
_PYTHON = click.Path(exists=True, dir_okay=False, path_type=Path)
_DTYPES = click.Choice(["float32", "bfloat16"])
_MODELS = {"embedded": ("embedded",), "80m": ("80m",), "both": ("embedded", "80m")}
_OPTIONS = (
    click.Option(["--quick"], is_flag=True, help="Small sizes, to check that it runs."),
    click.Option(
        ["--json", "json_file"], type=_FILE, help="Save each part to this file; its other parts stay."
    ),
    click.Option(
        ["--docs"],
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Save to measurements/ in this directory, then render all pages and the table of goals there.",
    ),
    click.Option(
        ["--threads"], type=click.IntRange(1), default=2, show_default=True, help="Torch's threads on a CPU."
    ),
)  # fmt: skip


@click.group()
def bench() -> None:
    """Benchmarks: every figure next to a reference measured in the same run."""


def _add(suite: str, about: str, *own: click.Option) -> None:
    parts = click.Choice(list(SUITES[suite]))
    part = click.Option(
        ["--part", "parts"], type=parts, multiple=True, help="Only these parts; default: all."
    )
    command = partial(_run, suite)
    bench.add_command(click.Command(suite, callback=command, params=[*own, part, *_OPTIONS], help=about))


def _run(
    suite: str, parts: tuple[str, ...], json_file: Path | None, docs: Path | None, **options: Any
) -> None:
    """Measure and print."""
    import threadpoolctl  # noqa: F401  # an extra: missed before the first part, not in the middle

    from bench.render import page, publish
    from bench.run import MeasurementFailed, SuiteRun, run

    if docs is not None:
        if json_file is not None:
            raise click.UsageError("--docs saves to its own file: give either --json or --docs")
        json_file = docs / "measurements" / f"{suite}.json"

    settings = SuiteRun(say=partial(click.echo, err=True), **options)
    arguments = sys.argv[1:] if sys.argv[1:2] == ["bench"] else ["bench", *sys.argv[1:]]  # `python -m bench`
    command = " ".join(["foretick", *arguments])
    try:
        found = run(suite, command, settings, parts, json_file)
    except MeasurementFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(page(found), nl=False)
    if docs is not None:
        try:
            written = publish(docs, list(SUITES))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{docs}: {error}") from None
        click.echo(f"wrote {', '.join(map(os.fspath, written))}", err=True)


_add(
    "stream",
    "The paper's scenario, flash hits under load, Kafka to bars, and the ring.",
    click.Option(
        ["--model", "models"],
        type=click.Choice(list(_MODELS)),
        default="both",
        show_default=True,
        callback=lambda _, __, model: _MODELS[model],
    ),
)
_add("data", "Fresh answers: how soon they are live after an outage.")
_add(
    "recovery",
    "What a restart takes: from a snapshot, with a spare engine, from the log alone; what its means cost.",
    click.Option(["--broker"], default="", help="A Kafka, HOST:PORT, for `delivery` and `standby`."),
)
_add("query", "The interfaces to clients: cached answers, listeners, kept responses.")
_add(
    "engine",
    "Regions and engine on a CPU: questions, updates, many readers, a sliding window, refresh, forks.",
)
_add(
    "scheduler",
    "Policies in simulated time and on the engine, k-LPM, questions in a flood, cost of scheduling.",
)
_add(
    "gpu",
    "Questions, reading, swap and attention on a GPU, against its own bandwidth and matrix rate.",
    click.Option(["--device"], default="cuda", show_default=True, help="Device to measure on."),
    click.Option(
        ["--profiles"],
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory to save the cost curves in.",
    ),
)

_add(
    "peers",
    "Our engine beside vLLM, llama.cpp and a kept Hugging Face cache, one running at a time.",
    click.Option(["--vllm"], type=_PYTHON, help="Python of the environment that has vLLM."),
    click.Option(
        ["--llama"], type=_PYTHON, help="Python of the environment that has llama-cpp-python and gguf."
    ),
    click.Option(
        ["--dtype", "dtypes"], type=_DTYPES, multiple=True, default=_DTYPES.choices, show_default=True
    ),
    click.Option(["--seed"], default=1, show_default=True, help="Of the order at each step."),
)


@bench.command()
@click.argument(
    "json_files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True
)
@click.option("--goals", is_flag=True, help="The table of goals and verdicts, misses first.")
@click.option("--into", type=_FILE, help="Page to write, or to insert the goals into.")
def render(json_files: tuple[Path, ...], goals: bool, into: Path | None) -> None:
    """Print the tables of saved suites, or write them to a page."""
    from bench.render import goals as goals_table
    from bench.render import page, put_into
    from bench.run import read

    suites = [read(json_file) for json_file in json_files]
    text = goals_table(suites) if goals else "\n".join(map(page, suites))
    if into is None:
        click.echo(text, nl=goals)
        return
    try:
        if goals:
            put_into(into, text)
        else:
            into.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{into}: {error}") from None
    click.echo(f"wrote {os.fspath(into)}")
