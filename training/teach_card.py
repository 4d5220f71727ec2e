"""The card of a question pack: what was measured, on what, how it fails, and whether it may be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from training.ahead_card import FOLD_COLUMNS, NO_SKILL, AheadScores, fold_row, lines_of
from training.evaluate import COLUMNS, QuestionScores, row

FLOOR = 0.75
LEAST = 200
"""Labels below which a setting's scores decide nothing."""


def refusal(scores: Mapping[str, QuestionScores], floor: float) -> str:
    """Why the question is not good enough; "" where it is. ``scores`` by setting."""
    decided = {name: each for name, each in scores.items() if each.accuracy.answers >= LEAST}
    if not decided:
        return f"there are too few labels to judge by: {LEAST} are needed of tapes that were held out"
    for name, each in decided.items():
        right, simple = each.balanced.share, each.simple_balanced
        if right < floor:
            return f"{name}: its balanced accuracy is {right:.1%}, below the floor of {floor:.0%}"
        if simple is not None and right <= simple:
            why = f"a decision tree on the last ten bars: {simple:.1%} balanced accuracy against {right:.1%}"
            return f"{name}: it is no better than a simple rule ({why})"
    return ""


def refusal_ahead(scores: AheadScores) -> str:
    """The same of a question about what comes next, which has no floor: whether there is skill."""
    if scores.verdict != NO_SKILL:
        return ""
    found = scores.skill.brier
    return f"{NO_SKILL}: over the base rate {found.skill:+.4f} ({found.low:+.4f}..{found.high:+.4f}), Brier"


def card(about: Mapping[str, Any], measured: Sequence[str], why: str) -> str:
    """The card, in Markdown. ``about``: what is said of the question and of its training, in order;
    ``measured``: lines of `measured_on` or of `measured_ahead`.
    """
    lines = [f"# {about['name']}", "", f"> {about['text']} ({' | '.join(about['choices'])})", ""]
    lines += [f"**Refused:** {why}." if why else "**Accepted**.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in [*about.items()][3:]]  # the others are above
    return "\n".join([*lines, "", "## What was measured", "", *measured]) + "\n"


def measured_on(scores: Mapping[str, QuestionScores]) -> list[str]:
    """On tapes that were held out, by setting."""
    head = ("setting", *COLUMNS[1:])
    lines = ["Tapes that were held out, above the floor in every setting where it is accepted; columns as in"]
    lines += ["docs/accuracy.md.", "", f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    lines += [f"| {' | '.join((name, *row(each)[1:]))} |" for name, each in scores.items()]
    return [*lines, "", "## How it fails", "", *_failures(scores)]


def measured_ahead(scores: AheadScores) -> list[str]:
    """Walk-forward, behind the bars that were trained on."""
    lines = ["Walk-forward, behind the bars that were trained on: docs/questions.md.", ""]
    lines += [f"- {line.strip()}" for line in lines_of(scores)]
    lines += ["", "## By fold", "", "How often the first choice, in percent.", ""]
    lines += [f"| {' | '.join(FOLD_COLUMNS)} |", "|---|---|" + "---:|" * (len(FOLD_COLUMNS) - 2)]
    return [*lines, *(f"| {' | '.join(fold_row(each))} |" for each in scores.by_fold)]


def _failures(scores: Mapping[str, QuestionScores]) -> list[str]:
    found = ["| setting | distance to the boundary | answers | right, % |", "|---|---|---:|---:|"]
    for name, each in scores.items():
        for part in each.distances:
            end = " or more" if part.end is None else f" to {part.end:g}"
            found.append(f"| {name} | {part.begin:g}{end} | {part.answers:,} | {100 * part.accuracy:.1f} |")
    for name, each in scores.items():
        if each.undefined_found is not None:
            claimed = each.undefined_claimed or 0.0
            said = (
                f"NONE wins in {each.undefined_found:.0%} of {each.undefined:,} bars without a right answer"
            )
            found += ["", f"{name}: {said}, and in {claimed:.1%} of those with one."]
    return found
