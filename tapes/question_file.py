"""A desk's own question as a TOML file: its text, its choices, and the rule that says which one is right."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from tapes.expressions import Expression, parse
from tapes.rules import UNDEFINED, YES_NO, Labels, Levels, Rule

MAX_CHOICES = 255


class QuestionError(ValueError):
    """The file is no question with a rule; the message says why, and names the file."""


class QuestionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``rule``: a condition for each choice but the last; the first that holds decides, else the last choice.

    ``where``: a condition without which the question does not arise. ``define``: names for expressions.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    text: Annotated[str, msgspec.Meta(min_length=1)]
    rule: str | tuple[str, ...]
    choices: tuple[str, ...] = YES_NO
    where: str = ""
    define: dict[str, str] = {}


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


def rule_of(question: QuestionFile) -> Rule:
    """The question with its labeller. Raises ValueError for choices or expressions that cannot be."""
    sources = (question.rule,) if isinstance(question.rule, str) else question.rule
    choices = question.choices
    if not 2 <= len(choices) <= MAX_CHOICES or len(set(choices)) < len(choices) or "" in choices:
        raise ValueError(f"a question has 2 to {MAX_CHOICES} choices, each another one and none empty")
    if len(sources) != len(choices) - 1:
        raise ValueError(f"{len(choices)} choices need {len(choices) - 1} rules, not {len(sources)}")
    rules = [parse(source, question.define) for source in sources]
    where = parse(question.where, question.define) if question.where else None

    def label(levels: Levels) -> Labels:
        return _labels(rules, where, levels)

    read = (*rules, *([where] if where else ()))
    bars, timed = max(each.lookback for each in read) + 1, any(each.reads_time for each in read)
    means = "; else ".join(f"{c} where {s}" for c, s in zip(choices, sources, strict=False))
    undefined = f"not {question.where}" if where else ""
    return Rule(question.name, question.text, choices, means, undefined, label, bars, timed=timed)


def _labels(rules: Sequence[Expression], where: Expression | None, levels: Levels) -> Labels:
    """The first choice whose rule holds; its distance is to the nearest boundary."""
    found = [rule.condition(levels) for rule in rules]
    defined = np.logical_and.reduce([each.defined for each in found])
    if where is not None:
        asked = where.condition(levels)
        defined = defined & asked.defined & asked.truth
    value = np.full(levels.close.shape, len(rules), np.int8)
    nearest = np.full(levels.close.shape, np.inf)
    for number, each in reversed(list(enumerate(found))):
        value = np.where(each.truth, np.int8(number), value)
        nearest = np.where(each.truth, np.abs(each.margin), np.minimum(nearest, np.abs(each.margin)))
    margin = np.where(value == 0, nearest, -nearest)
    return Labels(np.where(defined, value, UNDEFINED).astype(np.int8), margin)


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
