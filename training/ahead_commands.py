"""What `foretick evaluate` and `calibrate` do with questions that are asked in time order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from feeds.timestamps import parse_instant
from flash.confidence import QuestionCalibration
from tapes.expressions import ExpressionError
from tapes.question_file import QuestionError
from training.ahead import History, ask, fit_ahead
from training.ahead_card import AheadReport, AheadScores, fold_table, lines_of, score_ahead
from training.sources import Placement, Reader, Recorded, Setting
from training.walk_forward import Decisions, WalkForwardError


def evaluate_ahead(
    reader: Reader,
    source: Recorded,
    placements: Sequence[Placement],
    window: int,
    labels: int,
    model: tuple[str, str],
    json_file: Path | None,
    *,
    folds: int,
    embargo: int | None,
) -> None:
    """Ask, score walk-forward, and show the cards. ``model``: its name and revision."""
    history = _history(reader, source, window, labels)
    settings: dict[str, list[AheadScores]] = {}
    console = Console(width=None if Console().is_terminal else 140)
    for placement in dict.fromkeys(placements):
        setting = Setting(placement, 1, window)
        decisions = _ask(reader, history, setting)
        with _refusals():
            settings[setting.name] = [
                score_ahead(each, folds, embargo, setting.numbered) for each in decisions
            ]
        for scores in settings[setting.name]:
            console.print(f"{model[0]}, {setting.name}", *lines_of(scores), sep="\n", highlight=False)
            console.print(fold_table(scores))
    if json_file is not None:
        report = AheadReport(*model, {**source.described, "window": window}, settings)
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def calibrate_ahead(
    reader: Reader, source: Recorded, placements: Sequence[Placement], window: int, labels: int, until: str
) -> list[QuestionCalibration]:
    """Fit on what is known ``until`` a time, or at the tape's end."""
    try:
        until_ns = int(parse_instant(until)) if until else 0
    except ValueError as error:
        raise click.UsageError(f"--until: {error}") from None
    history = _history(reader, source, window, labels, until_ns)
    found = []
    for placement in dict.fromkeys(placements):
        setting = Setting(placement, 1, window)
        found += fit_ahead(_ask(reader, history, setting), history, setting.numbered)
    return found


def _history(reader: Reader, source: Recorded, window: int, labels: int, until_ns: int = 0) -> History:
    """Where is asked: evenly, or at labels that were given by hand."""
    history = History.of(source, window, labels, until_ns)
    by_hand = [rule for rule in reader.asked.rules if rule.partial]
    return history.labelled(by_hand, labels) if by_hand else history


def _ask(reader: Reader, history: History, setting: Setting) -> list[Decisions]:
    with Progress(transient=True) as progress, _refusals():
        task = progress.add_task(setting.name, total=1.0)
        return ask(reader, history, setting, lambda share: progress.update(task, completed=share))


@contextmanager
def _refusals() -> Iterator[None]:
    """What cannot be asked or scored, as the command says it."""
    try:
        yield
    except (QuestionError, ExpressionError, WalkForwardError) as error:
        raise click.ClickException(str(error)) from None
