"""`foretick teach`. Heavy modules are imported on use."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PATH = click.Path(dir_okay=False, path_type=Path)
_option = partial(click.option, show_default=True)
_LEARNING = 0.75
"""Of the minutes; the others are for calibration and evaluation."""


@click.command()
@click.argument("question", type=_PATH)
@_option("--out", type=_PATH, help="The question pack. Default: QUESTION.pack beside the question.")
@_option("--card", "card_file", type=_PATH, help="Its card, in Markdown. Default: QUESTION.md.")
@_option("--model", "directory", type=click.Path(file_okay=False, exists=True, path_type=Path),
         help="Directory of a tape model. Default: the embedded one.")  # fmt: skip
@_option("--tape", type=_FILE, help="A recorded file of the desk's own; its end is measured on.")
@_option("--format", "form", help="Format of the file: a built-in name, or a TOML file.")
@_option("--minutes", type=click.FloatRange(0.05, 600), default=10.0, help="Within which it ends.")
@_option("--steps", type=click.IntRange(1), default=4000, help="Steps of training, if they fit.")
@_option("--labels", type=click.IntRange(400), default=4000, help="Labels to calibrate and to measure on.")
@_option(
    "--floor", type=click.FloatRange(0, 1), default=0.75, help="Least balanced accuracy, but for a horizon."
)
@_option("--seed", type=click.IntRange(0), default=0, help="Seed of weights and tapes.")
def teach(
    question: Path,
    out: Path | None,
    card_file: Path | None,
    directory: Path | None,
    tape: Path | None,
    form: str | None,
    minutes: float,
    steps: int,
    labels: int,
    floor: float,
    seed: int,
) -> None:
    """Teach the tape model the question of a TOML file, as a question pack.

    Right answers come from its `rule`, from a Python function (`labeller`), or from a file of the desk's own
    labels (`labels`, with --tape). Only what is the question's own is trained: its token and small changes
    for its row. The model stays as it is, and so does every other answer. The pack is calibrated, and
    measured on tapes wider than those of training, and on the end of --tape. Below the floor, or no better
    than a simple rule, it is not written, and the exit status is 1. A question about what comes next learns
    from --tape alone, and is not written without skill over the base rate.
    """
    import torch

    from engine.model.question_pack import write_pack
    from tapes.expressions import ExpressionError
    from tapes.question_file import QuestionError
    from training.teach_run import Run

    torch.set_num_threads(1)  # products are small; tapes are read in a thread of their own
    began = time.monotonic()
    if (tape is None) != (form is None):
        raise click.UsageError("--tape and --format go together")
    target, written = out or question.with_suffix(".pack"), card_file or question.with_suffix(".md")
    for each in (target, written):  # before minutes are spent
        if not os.access(each.parent, os.W_OK):
            raise click.ClickException(f"{each} cannot be written: {each.parent} is no directory of yours")
    try:
        run = Run.of(question, directory, None if tape is None else (tape, form or ""), seed, labels)
        result = _taught(run, steps, minutes * 60, began, floor)
    except (QuestionError, ExpressionError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    written.write_text(result.card, encoding="utf-8")
    click.echo(result.card)
    if result.why:
        raise click.ClickException(f"{question.name} is not taught: {result.why}. The card is {written}.")
    write_pack(target, result.pack)
    took = time.monotonic() - began
    click.echo(f"{target} ({target.stat().st_size >> 10} KiB) and {written} after {took:.0f} s")


def _taught(run: Any, steps: int, seconds: float, began: float, floor: float) -> Any:
    """Train, calibrate and measure, with a progress bar."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with Progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task("teaching", total=1.0)
        for done in run.train(steps, _LEARNING * seconds - (time.monotonic() - began)):
            said = f"step {done.step:,} of {done.steps:,}, loss {done.loss:.3f}"
            progress.update(task, completed=_LEARNING * done.step / done.steps, description=said)

        def advance(what: str, share: float) -> None:
            begin = (1 + _LEARNING) / 2 if what == "measuring" else _LEARNING
            progress.update(task, completed=begin + (1 - _LEARNING) / 2 * share, description=what)

        return run.finished(floor, advance)
