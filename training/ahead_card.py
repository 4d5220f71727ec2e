"""The card of a question about what comes next: what its answers are worth, in figures and in words."""

from collections.abc import Iterator
from typing import Any

from training.ahead_scores import AheadScores, Skill
from training.evaluate import Share

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
    yield (
        f"  ECE {s.calibration_error:.3f}; choice sets have the right answer in {100 * s.covered:.1f} %, "
        f"{100 * s.adaptive:.1f} % where labels adapt them"
    )


def fold_table(scores: AheadScores) -> Any:
    """A rich table of its folds; shares in percent."""
    from rich.table import Table

    table = Table(title=f"{scores.question} by fold: how often the first choice")
    for column in FOLD_COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for f in scores.by_fold:
        shares = (f"{100 * each:.1f}" for each in (f.base_rate, f.expected, f.happened))
        worth = f"{f.calibration_error:.3f}", f"{f.brier_skill:+.3f}", f"{100 * f.covered:.1f}"
        table.add_row(f.begin, f.end, f"{f.fitted_on:,}", f"{f.labels:,}", *shares, *worth)
    return table


def _share(share: Share) -> str:
    return f"{100 * share.share:.1f} % ({100 * share.low:.1f}..{100 * share.high:.1f})"


def _skill(skill: Skill) -> str:
    return f"{skill.skill:+.4f} ({skill.low:+.4f}..{skill.high:+.4f})"
