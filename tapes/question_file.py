"""A desk's own question as a TOML file: its text, its choices, and the rule that says which one is right."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from tapes.expressions import MAX_HORIZON, Expression, ExpressionError, parse
from tapes.rules import UNDEFINED, YES_NO, Flags, Labels, Levels, Rule, after

MAX_CHOICES = 255
_MINUTE_NS = 60 * 10**9


class QuestionError(ValueError):
    """The file is no question with a rule; the message says why, and names the file."""


class QuestionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``rule``: a condition for each choice but the last; the first that holds decides, else the last choice.

    ``where``: a condition without which the question does not arise. ``define``: names for expressions.
    ``horizon``: bars to come that the rules read, after which the label is known. ``max_gap_minutes``: where
    more time lies between two bars before the horizon has passed, such as a night, there is no right answer.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    text: Annotated[str, msgspec.Meta(min_length=1)]
    rule: str | tuple[str, ...]
    choices: tuple[str, ...] = YES_NO
    where: str = ""
    define: dict[str, str] = {}
    horizon: Annotated[int, msgspec.Meta(ge=0, le=MAX_HORIZON)] = 0
    max_gap_minutes: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_question(path: Path) -> Rule:
    """Read a file. Raises QuestionError."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=QuestionFile)
    except OSError as error:
        raise QuestionError(f"cannot read the question {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # msgspec's are; also bytes that are not UTF-8
        raise QuestionError(f"{path} is no question: {error}") from error
    try:
        return rule_of(found)
    except ValueError as error:
        raise QuestionError(f"{path}: {error}") from error


def checked(choices: tuple[str, ...]) -> tuple[str, ...]:
    """The choices. Raises ValueError for some that cannot be."""
    if not 2 <= len(choices) <= MAX_CHOICES or len(set(choices)) < len(choices) or "" in choices:
        raise ValueError(f"a question has 2 to {MAX_CHOICES} choices, each another one and none empty")
    return choices


def rule_of(question: QuestionFile) -> Rule:
    """The question with its labeller. Raises ValueError for choices or expressions that cannot be."""
    sources = (question.rule,) if isinstance(question.rule, str) else question.rule
    choices = checked(question.choices)
    if len(sources) != len(choices) - 1:
        raise ValueError(f"{len(choices)} choices need {len(choices) - 1} rules, not {len(sources)}")
    horizon = question.horizon
    rules = [parse(source, question.define, horizon) for source in sources]
    where = parse(question.where, question.define, horizon) if question.where else None
    if where is not None and where.horizon:
        raise ValueError("`where` looks ahead, but whether a question arises must be known when it is asked")
    if horizon and not any(each.horizon for each in rules):
        raise ValueError(
            f"horizon is {horizon}, but no rule reads a column of the future, such as future.close"
        )
    longest = question.max_gap_minutes * _MINUTE_NS
    if longest and not horizon:
        raise ValueError("max_gap_minutes is of the bars to come, and needs a horizon")

    def label(levels: Levels) -> Labels:
        found = _labels(rules, where, levels)
        known = _known(question.name, horizon, longest, levels)
        return Labels(np.where(known, found.value, np.int16(UNDEFINED)), found.margin)

    read = (*rules, *([where] if where else ()))
    bars, timed = max(each.lookback for each in read) + 1, any(each.reads_time for each in read)
    means = "; else ".join(f"{c} where {s}" for c, s in zip(choices, sources, strict=False))
    undefined = f"not {question.where}" if where else ""
    return Rule(
        question.name, question.text, choices, means, undefined, label, bars, timed=timed, horizon=horizon
    )


def _known(name: str, horizon: int, longest: int, levels: Levels) -> Flags:
    """Where the horizon has passed, and without a gap of more than ``longest`` ns, unless that is 0."""
    bars = levels.close.shape[1]
    known = np.broadcast_to(np.arange(bars) + horizon < bars, levels.close.shape)
    if not longest:
        return known
    if levels.at is None:
        raise ExpressionError(f"{name}: max_gap_minutes needs times of bars, and these tapes have none")
    is_gap = np.diff(levels.at, axis=1, prepend=levels.at[:, :1]) > longest
    gaps = np.cumsum(is_gap, axis=1).astype(np.float64)
    whole: Flags = known & (after(gaps, horizon, np.inf) == gaps)
    return whole


def _labels(rules: Sequence[Expression], where: Expression | None, levels: Levels) -> Labels:
    """The first choice whose rule holds; its distance is to the nearest boundary."""
    found = [rule.condition(levels) for rule in rules]
    defined = np.logical_and.reduce([each.defined for each in found])
    if where is not None:
        asked = where.condition(levels)
        defined = defined & asked.defined & asked.truth
    value = np.full(levels.close.shape, len(rules), np.int16)
    nearest = np.full(levels.close.shape, np.inf)
    for number, each in reversed(list(enumerate(found))):
        value = np.where(each.truth, np.int16(number), value)
        nearest = np.where(each.truth, np.abs(each.margin), np.minimum(nearest, np.abs(each.margin)))
    margin = np.where(value == 0, nearest, -nearest)
    return Labels(np.where(defined, value, UNDEFINED).astype(np.int16), margin)


def check_labels(rule: Rule, tapes: Iterable[Levels]) -> None:
    """Raise QuestionError where the rule is defined nowhere on these tapes, or a choice is never right.

    Raises ExpressionError as `Expression.condition`.
    """
    counts, bars = np.zeros(len(rule.choices), np.int64), 0
    for levels in tapes:
        value = rule.label(levels).value
        counts += np.bincount(value[value != UNDEFINED], minlength=len(counts))
        bars += value.size
    if not counts.sum():
        raise QuestionError(f"{rule.name}: its rule is defined at none of {bars:,} bars")
    missing = [choice for choice, count in zip(rule.choices, counts, strict=True) if not count]
    if missing:
        raise QuestionError(
            f"{rule.name}: {', '.join(missing)} is right at none of {int(counts.sum()):,} bars"
        )
