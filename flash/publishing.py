"""Which answers are published, decided by a question's policy and its last published answer.

Policies: ``always``; ``changed``, where the text differs from the last published one; ``confident``, at the
least probability, or logit gap where nothing is calibrated; ``crossed``, where a number is on the other side
of a level; ``every`` n-th data version; ``never``: asks get them alone. What compares with
an earlier answer publishes the first one.
"""

from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from flash.question import Question
from flash.schedules import is_late

Suppressed = Literal["late", "unchanged", "low_confidence", "not_crossed", "not_due", "never"]
"""Why an answer is not published."""


@dataclass(frozen=True, slots=True)
class PublishedValue:
    """What an answer says. ``value``: the number that its text is, if it is one."""

    version: int
    text: str
    value: Decimal | None
    probability: float | None
    logit_gap: float
    age_ns: int = 0
    """Since the receipt of the data it was read from."""


def suppressed(question: Question, said: PublishedValue, last: PublishedValue | None) -> Suppressed | None:
    """Why ``question`` does not publish this answer after the ``last`` published one; None: it does."""
    if is_late(question, said.age_ns):
        return "late"
    match question.publish_when:
        case "changed" if last is not None and said.text == last.text:
            return "unchanged"
        case "confident" if not _is_confident(question, said):
            return "low_confidence"
        case "crossed" if not _crossed(Decimal(question.level), said, last):
            return "not_crossed"
        case "every" if last is not None and said.version < last.version + question.publish_every:
            return "not_due"
        case "never":
            return "never"
    return None


def _is_confident(question: Question, said: PublishedValue) -> bool:
    if said.probability is None:
        return said.logit_gap >= question.min_logit_gap
    return said.probability >= question.min_probability


def _crossed(level: Decimal, said: PublishedValue, last: PublishedValue | None) -> bool:
    """A number at the level counts as above it; text that is no number crosses nothing."""
    if said.value is None:
        return False
    if last is None or last.value is None:
        return True
    return (said.value >= level) != (last.value >= level)
