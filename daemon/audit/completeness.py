"""Whether a topic holds every answer of its sessions: by their numbers, whoever published them.

A session's answers are numbered without a gap within an epoch, and the next epoch goes on at most one behind
the newest number before it. So for each number the last epoch that begins at or below it must show it. An
answer that is published again has the `answer_id` of the first time. What is missing at the end shows only in
comparison with the progress of the sessions, which the daemon commits behind acknowledged answers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from daemon.progress import Progress
from feeds.market_data import Answer

Range = tuple[int, int]
"""First and last number, both included."""


class SessionAudit(msgspec.Struct, frozen=True):
    """What the topic holds of one session.

    ``lost``: numbers that are missing; ``repeated``: answers beyond the first with their id; ``conflicts``:
    answers with the number of another one of the same epoch, as of two daemons that both own the session.
    ``unnumbered``: without a number, as older daemons publish them; nothing is said about those.
    """

    session: str
    answers: int
    epochs: int
    first: int
    newest: int
    lost: list[Range]
    repeated: int
    conflicts: int
    unnumbered: int

    @property
    def missing(self) -> int:
        """How many are lost."""
        return sum(last - first + 1 for first, last in self.lost)

    def holds(self, exactly_once: bool) -> bool:
        """Whether nothing is lost and nothing contradicts; with ``exactly_once``, nothing repeated either."""
        return not (self.lost or self.conflicts or (exactly_once and self.repeated))


class Audit:
    """Takes a topic's answers in any order. ``whole``: it was read from its first message ever."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._sessions: dict[str, _Session] = {}

    def take(self, answer: Answer) -> None:
        """One more answer of the topic. Keeps about 150 bytes of it."""
        self._sessions.setdefault(answer.session, _Session()).take(answer)

    def result(self, progress: Mapping[str, Progress] | None = None) -> list[SessionAudit]:
        """By session, sorted by name. ``progress``: of sessions, committed before the topic was read.

        A session without any answer is lost only if the topic was read from its first message ever.
        """
        progress = progress or {}
        silent = {name for name, each in progress.items() if self._whole and each.sequence}
        return [
            self._sessions.get(name, _Session()).audit(name, self._whole, progress.get(name, Progress()))
            for name in sorted(self._sessions.keys() | silent)
        ]


@dataclass
class _Session:
    answers: int = 0
    repeated: int = 0
    conflicts: int = 0
    unnumbered: int = 0
    epochs: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    ids: set[int] = field(default_factory=set)

    def take(self, answer: Answer) -> None:
        self.answers += 1
        if not answer.sequence:
            self.unnumbered += 1
            return
        known = hash(answer.answer_id) in self.ids
        self.ids.add(hash(answer.answer_id))
        self.repeated += known
        numbers = self.epochs[answer.epoch]
        self.conflicts += answer.sequence in numbers and not known
        numbers.add(answer.sequence)

    def audit(self, name: str, whole: bool, progress: Progress) -> SessionAudit:
        epochs = [numbers for _, numbers in sorted(self.epochs.items())]
        begins = [min(numbers) for numbers in epochs]
        if whole and 1 in self.epochs:  # the first engine's first answer has number 1
            begins[0] = 1
        lost = _lost(epochs, begins)
        newest = max(epochs[-1]) if epochs else 0
        # a newer epoch begins at most one behind what is committed, and its numbers count from there
        behind = progress.epoch >= max(self.epochs, default=0)
        if (epochs or whole) and behind and progress.sequence > newest:
            lost.append((newest + 1, progress.sequence))
        return SessionAudit(
            session=name,
            answers=self.answers,
            epochs=len(epochs),
            first=min(epochs[0]) if epochs else 0,
            newest=newest,
            lost=lost,
            repeated=self.repeated,
            conflicts=self.conflicts,
            unnumbered=self.unnumbered,
        )


def _lost(epochs: list[set[int]], begins: list[int]) -> list[Range]:
    """Numbers that the last epoch beginning at or below them does not show, up to the newest number."""
    end = max(epochs[-1]) + 1 if epochs else 0
    found: list[Range] = []
    for numbers, begin in zip(reversed(epochs), reversed(begins), strict=True):
        if begin < end:
            found[:0] = _missing(numbers, begin, end - 1)
            end = begin
    return found


def _missing(numbers: set[int], first: int, last: int) -> Iterator[Range]:
    """What of ``first`` to ``last`` is not in ``numbers``."""
    for number in (*sorted(each for each in numbers if first <= each <= last), last + 1):
        if number > first:
            yield first, number - 1
        first = number + 1
