"""The card of a question pack: what was measured, on what, how it fails, and whether it may be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def card(about: Mapping[str, Any], scores: Mapping[str, QuestionScores], why: str) -> str:
    """The card, in Markdown. ``about``: what is said of the question and of its training, in order."""
    lines = [f"# {about['name']}", "", f"> {about['text']} ({' | '.join(about['choices'])})", ""]
    lines += [f"**Refused:** {why}." if why else "**Accepted**: above the floor in every setting.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in [*about.items()][3:]]  # the others are above
    lines += ["", "## What was measured", "", "Tapes that were held out; columns as in docs/accuracy.md.", ""]
    head = ("setting", *COLUMNS[1:])
    lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    lines += [f"| {' | '.join((name, *row(each)[1:]))} |" for name, each in scores.items()]
    lines += ["", "## How it fails", "", *_failures(scores)]
    return "\n".join(lines) + "\n"


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
