"""When a question is asked, and when its answer is too late.

It is asked of every data version, every N bars, or every N seconds of event time.
"""

from typing import NamedTuple

from flash.question import Question

SUPERSEDED = "superseded"
"""Failure code of a free-text question that is asked of a newer version instead."""


class DataVersion(NamedTuple):
    """A data version of a session: bars so far, and the event time of the newest one in ns."""

    bars: int
    as_of: int


def is_due(question: Question, now: DataVersion, last: DataVersion | None) -> bool:
    """Whether to ask ``question``, last asked at ``last``; its first version is always due.

    Periods of event time begin at multiples of their length since the Unix epoch: a question is due at the
    first version of each.
    """
    if last is None:
        return True
    period = question.ask_every_ns
    if period:
        return now.as_of // period > last.as_of // period
    return now.bars - last.bars >= question.ask_every_bars


def is_late(question: Question, age_ns: int) -> bool:
    """Whether answers from data received ``age_ns`` ago are too late; without a deadline none is."""
    return 0 < question.answer_within_ns < age_ns
