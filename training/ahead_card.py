"""The card of a question about what comes next: skill over base rate and plain model, by fold, a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from flash.confidence import COVERAGE, threshold
from flash.temperature import softmax
from tapes.rules import Flags, Floats, Ints
from training.evaluate import Share
from training.scores import expected_calibration_error
from training.walk_forward import (
    LEAST_BLOCKS,
    Decisions,
    Fold,
    Forecast,
    WalkForwardError,
    balanced,
    base_rate,
    block_length,
    climatology,
    folds,
    forecast,
    losses,
    skill,
)

NO_SKILL = "no skill"


class Skill(msgspec.Struct, frozen=True):
    """1 - loss / loss of the reference, with its 95 % interval: 0 is no better, 1 perfect."""

    skill: float
    low: float
    high: float


class Skills(msgspec.Struct, frozen=True):
    """Of the Brier score and of the log loss."""

    brier: Skill
    log: Skill


class FoldScores(msgspec.Struct, frozen=True, kw_only=True):
    """One test fold; times are those of its first and last answer. Shares are of the first choice.

    ``expected``: its mean probability; ``base_rate``: its share in the past; ``happened``: its share here.
    """

    begin: str
    end: str
    fitted_on: int
    labels: int
    base_rate: float
    expected: float
    happened: float
    calibration_error: float
    brier_skill: float
    covered: float


class AheadScores(msgspec.Struct, frozen=True, kw_only=True):
    """What answers to one question are worth. ``stride``: bars from one to the next; ``block``: answers."""

    question: str
    horizon: int
    embargo: int
    stride: int
    block: int
    labels: int
    verdict: str
    balanced: Share
    plain_balanced: Share
    skill: Skills
    """Over the base rate that was known at each answer, or even odds where they are better."""
    over_plain: Skills
    """Over the plain model."""
    plain_skill: Skills
    """Of the plain model, over the base rate."""
    calibration_error: float
    covered: float
    by_fold: list[FoldScores]


class AheadReport(msgspec.Struct, frozen=True):
    """A walk-forward evaluation, by setting."""

    model: str
    revision: str
    data: dict[str, str | int | float]
    settings: dict[str, list[AheadScores]]


def verdict(over_base: Skill, over_plain: Skill) -> str:
    """In words: skill only where the interval lies above 0."""
    if not over_base.low > 0:
        return NO_SKILL
    if not over_plain.low > 0:
        return "skill over the base rate, none over the plain model"
    return "skill"


def time_text(ns: int) -> str:
    """A time in UTC, to the second."""
    return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def score_ahead(d: Decisions, count: int, embargo: int | None = None, numbered: bool = False) -> AheadScores:
    """Score walk-forward. ``embargo``: None for the horizon. Raises WalkForwardError: see `forecast`."""
    embargo = d.horizon if embargo is None else embargo
    split = folds(d.bar, d.horizon, count, embargo, d.first)
    parts = [(fold, forecast(d, fold, numbered)) for fold in split]
    if not parts:
        raise WalkForwardError(f"{d.name}: {len(d.label) - d.first} labels are too few for a test fold")
    test = np.concatenate([fold.test for fold, _ in parts])
    label, length = d.label[test], block_length(d.bar[test], d.horizon)
    if len(test) < LEAST_BLOCKS * length:
        raise WalkForwardError(
            f"{d.name}: {len(test):,} tested answers are fewer than {LEAST_BLOCKS} blocks of {length}, which "
            f"a horizon of {d.horizon} needs: a longer tape, or more --labels"
        )
    model, plain = (np.concatenate([made[i] for _, made in parts]) for i in (1, 2))
    base = base_rate(d, test)
    given, choices = d.logits[test].argmax(1), len(d.choices)
    over_base, over_plain = _skills(model, base, label, length), _skills(model, plain, label, length)
    covered = np.concatenate([_covered(d, fold, made) for fold, made in parts])
    confidence = model[np.arange(len(label)), given]
    return AheadScores(
        question=d.name,
        horizon=d.horizon,
        embargo=embargo,
        stride=int(np.median(np.diff(d.bar[test]))),
        block=length,
        labels=len(test),
        verdict=verdict(over_base.brier, over_plain.brier),
        balanced=Share(*balanced(given == label, label, choices, length), len(label)),
        plain_balanced=Share(*balanced(plain.argmax(1) == label, label, choices, length), len(label)),
        skill=over_base,
        over_plain=over_plain,
        plain_skill=_skills(plain, base, label, length),
        calibration_error=expected_calibration_error(confidence, given == label),
        covered=float(covered.mean()),
        by_fold=[_by_fold(d, fold, made) for fold, made in parts],
    )


def _skills(model: Floats, reference: Floats, label: Ints, length: int) -> Skills:
    ours, theirs = losses(model, label), losses(reference, label)
    return Skills(*(Skill(*skill(ours[:, i], theirs[:, i], length)) for i in (0, 1)))


def _covered(d: Decisions, fold: Fold, made: Forecast) -> Flags:
    """Whether the choice sets of a fold have the right choice."""
    fitted, label = made.fitted, d.label[fold.test]
    likely = softmax(d.logits[fold.test], fitted.temperature)[np.arange(len(label)), label]
    found: Flags = 1 - likely <= threshold(fitted.scores, fitted.labels, COVERAGE)
    return found


def _by_fold(d: Decisions, fold: Fold, made: Forecast) -> FoldScores:
    test, label = fold.test, d.label[fold.test]
    known, base, given = climatology(d, test), base_rate(d, test), d.logits[test].argmax(1)
    ours, theirs = losses(made.model, label)[:, 0], losses(base, label)[:, 0]
    confidence = made.model[np.arange(len(test)), given]
    return FoldScores(
        begin=time_text(int(d.at[test[0]])),
        end=time_text(int(d.at[test[-1]])),
        fitted_on=int((fold.train >= d.first).sum()),
        labels=len(test),
        base_rate=float(known[0, 0]),
        expected=float(made.model[:, 0].mean()),
        happened=float((label == 0).mean()),
        calibration_error=expected_calibration_error(confidence, given == label),
        brier_skill=float(1 - ours.mean() / theirs.mean()),
        covered=float(_covered(d, fold, made).mean()),
    )


FOLD_COLUMNS = (
    "from", "to", "fitted on", "labels", "base rate", "expected", "happened", "ECE", "Brier skill", "covered",
)  # fmt: skip


def lines_of(scores: AheadScores) -> Iterator[str]:
    """The card as lines of text; the verdict comes first."""
    s = scores
    yield f"{s.question}: {s.verdict}"
    yield (
        f"  {s.labels:,} answers in {len(s.by_fold)} folds, one in {s.stride} bars; horizon {s.horizon}, "
        f"embargo {s.embargo}; intervals of 95 % by blocks of {s.block} answers"
    )
    yield f"  balanced accuracy         {_share(s.balanced)}; plain model {_share(s.plain_balanced)}"
    for name, skills in (
        ("skill over the base rate ", s.skill),
        ("skill over the plain model", s.over_plain),
        ("plain over the base rate ", s.plain_skill),
    ):
        yield f"  {name:<26} Brier {_skill(skills.brier)}, log {_skill(skills.log)}"
    yield f"  ECE {s.calibration_error:.3f}; choice sets have the right answer in {100 * s.covered:.1f} %"


def fold_table(scores: AheadScores) -> Any:
    """A rich table of its folds; shares in percent."""
    from rich.table import Table

    table = Table(title=f"{scores.question} by fold: how often the first choice")
    for column in FOLD_COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for f in scores.by_fold:
        table.add_row(*fold_row(f))
    return table


def fold_row(f: FoldScores) -> tuple[str, ...]:
    """A fold as it is shown, by `FOLD_COLUMNS`."""
    shares = (f"{100 * each:.1f}" for each in (f.base_rate, f.expected, f.happened))
    worth = f"{f.calibration_error:.3f}", f"{f.brier_skill:+.3f}", f"{100 * f.covered:.1f}"
    return (f.begin, f.end, f"{f.fitted_on:,}", f"{f.labels:,}", *shares, *worth)


def _share(share: Share) -> str:
    return f"{100 * share.share:.1f} % ({100 * share.low:.1f}..{100 * share.high:.1f})"


def _skill(skill: Skill) -> str:
    return f"{skill.skill:+.4f} ({skill.low:+.4f}..{skill.high:+.4f})"
