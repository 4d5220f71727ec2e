"""What a desk teaches: a question, and its right answers by a rule, a Python function or a file of labels."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from feeds.timestamps import parse_instant
from ingest.bar_kernel import Bars
from ingest.compact import CENTRE
from tapes.question_file import QuestionError, QuestionFile, checked, rule_of
from tapes.rules import UNDEFINED, VOLUMES, Ints, Labels, Levels, Rule
from training.sources import Recorded, Source

Kind = Literal["rule", "labeller", "labels"]
_COLUMNS = ["time", "symbol", "answer"]
_TRIED = 6
"""Bars of a tape at which a labeller is asked again, with less of the tape."""


class TaughtFile(QuestionFile, frozen=True, forbid_unknown_fields=True):
    """A question file with a ``labeller`` (FILE.py:FUNCTION) or ``labels`` (CSV) in place of a rule."""

    rule: str | tuple[str, ...] = ""
    labeller: str = ""
    labels: str = ""


@dataclass(frozen=True)
class TaughtQuestion:
    """A question, its right answers as a `Rule`, and the file it comes from.

    ``labels``: the file of labels, whose rule knows none before it has the bars (`with_labels`).
    """

    rule: Rule
    kind: Kind
    source: dict[str, Any]
    labels: Path | None = None


def read_taught(path: Path, window: int, *, taped: bool = False) -> TaughtQuestion:
    """Read a question for the tape model, which reads ``window`` bars. Raises QuestionError.

    ``taped``: there is a recorded tape, which has a future to learn.
    """
    question = read_own(path, window)
    if why := _unreadable(question.rule, window, taped):
        raise QuestionError(f"{path}: {why}")
    return question


def _unreadable(rule: Rule, window: int, taped: bool) -> str:
    """Why the tape model cannot be taught the answers; "" where it can."""
    if rule.horizon and not taped:
        return "it looks ahead, and generated tapes have no future to learn: give --tape and --format"
    if rule.timed:
        return "its rule reads the time of day, which the tape model's lines do not show"
    if rule.bars > window:
        return f"its rule reads {rule.bars} bars, and the tape model is shown {window}"
    return ""


def read_own(path: Path, window: int) -> TaughtQuestion:
    """Read a question for any model; ``window``: bars that it is shown. Raises QuestionError."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=TaughtFile)
    except OSError as error:
        raise QuestionError(f"cannot read the question {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise QuestionError(f"{path} is no question: {error}") from error
    given = [kind for kind in ("rule", "labeller", "labels") if getattr(found, kind)]
    if len(given) != 1:
        raise QuestionError(f"{path}: it needs one of rule, labeller and labels, and has {given or 'none'}")
    source: dict[str, Any] = msgspec.to_builtins(found)
    try:
        if found.rule:
            fields = {name: getattr(found, name) for name in QuestionFile.__struct_fields__}
            return TaughtQuestion(rule_of(QuestionFile(**fields)), "rule", source)
        blank = _blank(found)
        if found.labels:
            return TaughtQuestion(blank, "labels", source, path.parent / found.labels)
        return TaughtQuestion(_by_python(blank, path.parent, found.labeller, window), "labeller", source)
    except ValueError as error:
        raise QuestionError(f"{path}: {error}") from error


def _blank(found: TaughtFile) -> Rule:
    """The question without labels. Raises ValueError."""
    if found.where or found.define or found.max_gap_minutes:
        raise ValueError("where, define and max_gap_minutes belong to a rule")

    def unknown(levels: Levels) -> Labels:
        return _labels(np.full(levels.close.shape, UNDEFINED), None)

    means, partial = found.labels or found.labeller, bool(found.labels)
    choices, horizon = checked(found.choices), found.horizon
    return Rule(found.name, found.text, choices, means, "", unknown, 1, partial=partial, horizon=horizon)


def _labels(value: Ints, margin: Any) -> Labels:
    return Labels(value.astype(np.int16), np.zeros(value.shape) if margin is None else margin)


# A Python labeller.


def bars_shown(levels: Levels) -> dict[str, Any]:
    """What a labeller gets: float64 [tapes, bars] of each column, prices in price units, volumes relative."""
    prices = {
        name: (100 * levels.percent[:, None] + getattr(levels, name) - CENTRE).astype(np.float64)
        for name in ("open", "high", "low", "close")
    }
    return prices | {"volume": VOLUMES[levels.volume]}


def _by_python(blank: Rule, folder: Path, named: str, window: int) -> Rule:
    """The rule of FILE.py:FUNCTION. Raises QuestionError."""
    file, colon, name = named.rpartition(":")
    spec = importlib.util.spec_from_file_location("foretick_labeller", folder / file)
    if not colon or spec is None or spec.loader is None:
        raise QuestionError(f"labeller is FILE.py:FUNCTION, not {named!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name)
    except Exception as error:  # whatever a desk's own module raises
        raise QuestionError(f"{named} cannot be loaded: {type(error).__name__}: {error}") from error

    def value(levels: Levels) -> Ints:
        try:
            found = np.asarray(function(bars_shown(levels)))
        except Exception as error:
            raise QuestionError(f"{named} failed: {type(error).__name__}: {error}") from error
        if found.shape != levels.close.shape or not np.issubdtype(found.dtype, np.integer):
            shape = f"whole numbers {list(levels.close.shape)} [tapes, bars]"
            raise QuestionError(f"{named} must return {shape}, not {found.dtype} {list(found.shape)}")
        if found.size and not UNDEFINED <= found.min() <= found.max() < len(blank.choices):
            most = len(blank.choices) - 1
            given = f"{found.min()} to {found.max()}"
            raise QuestionError(f"{named} returned {given}: -1 is none, {most} the last choice")
        return found.astype(np.int64)

    def label(levels: Levels) -> Labels:
        found = value(levels)
        _check_reads_shown(named, value, levels, found, levels.window or window, blank.horizon)
        known = np.arange(found.shape[1]) + blank.horizon < found.shape[1]
        return _labels(np.where(known, found, UNDEFINED), None)

    return replace(blank, label=label)


def _check_reads_shown(
    named: str, value: Callable[[Levels], Ints], levels: Levels, found: Ints, window: int, horizon: int
) -> None:
    """Raise QuestionError where a label changes with bars beyond the ``horizon``, or with evicted ones."""
    tapes, bars = levels.close.shape
    if tapes > 1 and (value(_cut(levels, 0, bars, 2)) != found[::2]).any():
        raise QuestionError(f"{named} reads other tapes than a bar's own")
    beyond = f"looks more than {horizon} bars ahead" if horizon else "looks ahead"
    last = bars - 1 - horizon
    for bar in np.linspace(min(window - 1, last), last, _TRIED if last >= 0 else 0).astype(int).tolist():
        for first, why in ((0, beyond), (max(bar + 1 - window, 0), f"reads more than {window} bars")):
            again = value(_cut(levels, first, bar + 1 + horizon))[:, -1 - horizon]
            if (again != found[:, bar]).any():
                raise QuestionError(f"{named} {why}: without them its label of a bar is another one")


def _cut(levels: Levels, first: int, stop: int, every: int = 1) -> Levels:
    """Some bars of every such tape."""
    columns = {
        name: getattr(levels, name)[::every, first:stop]
        for name in ("open", "high", "low", "close", "volume")
    }
    return replace(levels, **columns, percent=levels.percent[::every], minute=None, at=None)


# A file of labels.


def read_labelled(path: Path, window: int, source: Source) -> Rule:
    """The rule of any question, asked about tapes of this source. Raises QuestionError."""
    question = read_own(path, window)
    if question.labels is None:
        return question.rule
    if not isinstance(source, Recorded):
        raise QuestionError(f"{path}: its labels are of a recorded file: give --tape and --format")
    return with_labels(question, source.stretch().everything, source.symbols()).rule


def with_labels(question: TaughtQuestion, bars: Bars, symbols: frozenset[str]) -> TaughtQuestion:
    """The question with the labels of its file, which are of these bars. Raises QuestionError."""
    assert question.labels is not None
    opened = np.where(bars["interval"] > 0, bars["ts_open"], bars["ts_last_event"]).tolist()
    known = dict(zip(opened, bars["ts_last_event"].tolist(), strict=True))
    values = _read_labels(question.labels, question.rule.choices, known, symbols)
    times = np.array(sorted(values), np.int64)
    answers = np.array([values[time] for time in times.tolist()], np.int64)
    return replace(question, rule=by_time(question.rule, times, answers))


def by_time(rule: Rule, times: Ints, answers: Ints) -> Rule:
    """The question with ``answers`` at bars whose newest records have these ``times``, ns, ascending."""

    def label(levels: Levels) -> Labels:
        assert levels.at is not None, "labels are of recorded bars"
        at = np.minimum(np.searchsorted(times, levels.at), len(times) - 1)
        return _labels(np.where(times[at] == levels.at, answers[at], UNDEFINED), None)

    return replace(rule, label=label)


def _read_labels(
    path: Path, choices: tuple[str, ...], known: Mapping[int, int], symbols: frozenset[str]
) -> dict[int, int]:
    """The answer by the bar's newest time. ``known``: that of each bar by its opening time, ns."""
    found: dict[int, int] = {}
    before: dict[str, int] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            if next(rows, None) != _COLUMNS:
                raise QuestionError(f"{path}: its first line must be {','.join(_COLUMNS)}")
            for row in rows:
                here = f"{path}, line {rows.line_num}"
                if len(row) != len(_COLUMNS):
                    raise QuestionError(f"{here}: it has {len(row)} columns instead of {len(_COLUMNS)}")
                text, symbol, answer = row
                opened = _instant(here, text)
                if opened <= before.get(symbol, opened - 1):
                    raise QuestionError(f"{here}: {text} is not after the line before it: sort by time")
                before[symbol] = opened
                if symbol not in symbols or opened not in known:
                    others = f"of {symbol}, but of {', '.join(sorted(symbols))}"
                    of = others if symbol not in symbols else f"that opened at {text}"
                    raise QuestionError(f"{here}: the tape has no bar {of}")
                if answer not in choices:
                    raise QuestionError(f"{here}: {answer!r} is no choice; there are: {', '.join(choices)}")
                found[known[opened]] = choices.index(answer)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise QuestionError(f"cannot read the labels {path}: {error}") from error
    if not found:
        raise QuestionError(f"{path} has no label")
    return found


def _instant(here: str, text: str) -> int:
    try:
        return int(text) if text.isdecimal() else int(parse_instant(text))
    except ValueError as error:
        raise QuestionError(f"{here}: {error}") from error
