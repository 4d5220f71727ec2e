"""`foretick bench`: measure, and render the measurements. Commands import heavy modules on use."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.suites import SUITES

_FILE = click.Path(dir_okay=False, path_type=Path)
_SAVED = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_ANY = click.Path(exists=True, path_type=Path)
_DTYPES = ("float32", "bfloat16")
_MODELS = {"embedded": ("embedded",), "80m": ("80m",), "both": ("embedded", "80m")}
_option = partial(click.Option, show_default=True)
_OPTIONS = (
    _option(["--quick"], is_flag=True, help="Small sizes, to check that it runs."),
    _option(["--json", "json_file"], type=_FILE, help="Save each part to this file; its other parts stay."),
    _option(["--docs"], type=_FOLDER, help="Save to measurements/ in this directory, and render all pages."),
    _option(["--threads"], type=click.IntRange(1), default=2, help="Torch's threads on a CPU."),
)
_HELP = {
    "stream": "The paper's scenario, flash hits under load, and Kafka to bars.",
    "data": "Recorded files to bars; from tick to answer, by rate and sessions, with and without prompts.",
    "recovery": "An engine that is killed: from a snapshot, with a spare engine, from the log alone.",
    "query": "The interfaces to clients: cached answers, and listeners.",
    "engine": "Regions and engine on a CPU: questions, updates, many readers.",
    "scheduler": "Policies in simulated time and on the engine, k-LPM, plans, cost of scheduling.",
    "gpu": "Questions, reading, swap and attention on a GPU, against its own bandwidth and matrix rate.",
    "peers": "Our engine beside vLLM, llama.cpp and a kept Hugging Face cache, one running at a time.",
}
_OWN = {
    "stream": (
        _option(
            ["--model", "models"], type=click.Choice(list(_MODELS)), default="both",
            callback=lambda _, __, model: _MODELS[model],
        ),
    ),
    "query": (
        _option(["--llama"], type=_SAVED, help="Python of the environment that has xllamacpp: of decisions."),
        _option(["--model"], type=_SAVED, help="A GGUF file, which it and the daemon answer with."),
    ),
    "scheduler": (
        _option(["--model"], type=_FOLDER, help="A released Llama's directory: of the part drafts, too."),
    ),
    "gpu": (
        _option(["--device"], default="cuda", help="Device to measure on."),
        _option(["--profiles"], type=click.Path(path_type=Path), help="Directory for the cost curves."),
    ),
    "peers": (
        _option(["--vllm"], type=_SAVED, help="Python of the environment that has vLLM."),
        _option(["--llama"], type=_SAVED, help="Python of the one that has llama-cpp-python and gguf."),
        _option(["--model"], type=_ANY, help="A released Llama, directory or GGUF file: of its part alone."),
        _option(["--dtype", "dtypes"], type=click.Choice(_DTYPES), multiple=True, default=_DTYPES),
        _option(["--seed"], default=1, help="Of the order at each step."),
    ),
}  # fmt: skip


@click.group()
def bench() -> None:
    """Benchmarks: every figure next to a reference measured in the same run."""


def _run(
    suite: str, parts: tuple[str, ...], json_file: Path | None, docs: Path | None, **options: Any
) -> None:
    """Measure and print."""
    import threadpoolctl  # noqa: F401  # an extra: missed before the first part, not in the middle

    from bench.render import page
    from bench.run import MeasurementFailed, SuiteRun, run

    if docs is not None:
        if json_file is not None:
            raise click.UsageError("--docs saves to its own file: give either --json or --docs")
        json_file = docs / "measurements" / f"{suite}.json"
    if suite == "peers" and options.get("model") is not None:
        parts = parts or ("file" if options["model"].is_file() else "released",)
    settings = SuiteRun(say=partial(click.echo, err=True), **options)
    arguments = sys.argv[1:] if sys.argv[1:2] == ["bench"] else ["bench", *sys.argv[1:]]  # `python -m bench`
    try:
        found = run(suite, " ".join(["foretick", *arguments]), settings, parts, json_file)
    except MeasurementFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(page(found), nl=False)
    if docs is not None:
        _publish(docs)


for _suite, _parts in SUITES.items():
    _part = _option(
        ["--part", "parts"], type=click.Choice(list(_parts)), multiple=True, help="Only these parts."
    )
    bench.add_command(
        click.Command(
            _suite, callback=partial(_run, _suite), params=[*_OWN.get(_suite, ()), _part, *_OPTIONS],
            help=_HELP[_suite],
        )
    )  # fmt: skip


@bench.command()
@click.argument("json_files", type=_SAVED, nargs=-1)
@click.option("--docs", type=_FOLDER, help="Render all pages in this directory again.")
def render(json_files: tuple[Path, ...], docs: Path | None) -> None:
    """Print the tables of saved suites, or write all pages."""
    from bench.render import page
    from bench.run import read

    click.echo("\n".join(page(read(json_file)) for json_file in json_files), nl=False)
    if docs is not None:
        _publish(docs)


def _publish(docs: Path) -> None:
    from bench.render import publish

    try:
        written = publish(docs)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{docs}: {error}") from None
    click.echo(f"wrote {', '.join(map(os.fspath, written))}", err=True)
