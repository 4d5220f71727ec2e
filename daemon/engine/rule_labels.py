"""Labels that the rule of a question gives by itself, as the bars close that it speaks of.

A version waits until the horizon of each rule has passed, or the next bar has closed. Then its answer, if
it is remembered, gets its label as from a client (`flash.late_labels`). An answer never waits for a label,
and knows of those only that were known when it was judged. On the scheduler's thread.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from daemon.config.label_rules import rules_of
from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import is_asked
from daemon.engine.build import Built
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.labelled_bars import ClosedBar, RuleLabelState, WaitingVersion, label_of
from daemon.engine.tape_feeder import is_single
from flash.late_labels import LabelError
from flash.registry import Registry
from ingest.bar_kernel import ACTED, ROLLED
from ingest.compact import CompactSpec
from ingest.plane import TapeRecord
from regions.tape import Tape
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem
from tapes.rules import UNDEFINED

WINDOW = 1_024
"""Bars of a window that a rule can see."""
_WAITING = 4_096
"""Versions of one question that wait; beyond, the oldest goes without a label."""
_BEHIND = 64
"""Versions that are due while there is other work; beyond, one is labelled with each bar."""


@dataclass
class _Session:
    spec: CompactSpec
    newest: deque[ClosedBar]
    bars: int = 0
    split: int = 0
    waiting: dict[str, deque[WaitingVersion]] = field(default_factory=dict)

    def around(self, at: WaitingVersion, horizon: int) -> list[ClosedBar]:
        """What the version shows since the last split, and the horizon; empty where bars are forgotten."""
        end = len(self.newest) - (self.bars - at.bars) + horizon
        begin = end - horizon - min(at.shown, WINDOW, at.bars - self.split)
        return list(islice(self.newest, begin, end)) if 0 <= begin <= end - horizon else []


class RuleLabels:
    """Follows the bars of all sessions with such questions."""

    def __init__(
        self, config: Config, built: Built, scheduler: Scheduler, registry: Registry, confidence: Confidence
    ) -> None:
        self._rules, self._lines = rules_of(config), built.lines
        self._registry, self._confidence = registry, confidence
        self._asked = [asked for asked in config.questions if asked.rule]
        self._behind = _BEHIND + max((rule.horizon for rule in self._rules.values()), default=0)
        self._sessions: dict[str, _Session] = {}
        for session in config.sessions:
            self.add(session)
        scheduler.subscribe(self.on_commit)

    def add(self, session: SessionConfig) -> None:
        """There is another session."""
        if not session.more_symbols and any(is_asked(each, session.name) for each in self._asked):
            line, window = self._lines[session.name], min(session.retention_records or WINDOW, WINDOW)
            spec = CompactSpec(line.price_decimals, price_scale=line.price_scale)
            self._sessions[session.name] = _Session(spec, deque(maxlen=window + self._behind))

    def remove(self, session: str) -> None:
        """A session is removed."""
        self._sessions.pop(session, None)

    def cut(self, name: str) -> RuleLabelState | None:
        """What a session waits for; None where nothing is labelled."""
        found = self._sessions.get(name)
        if found is None:
            return None
        versions = {question: tuple(each) for question, each in found.waiting.items()}
        keys = [(question, each.version) for question, waiting in versions.items() for each in waiting]
        answers = self._confidence.waiting(name, keys)
        return RuleLabelState(tuple(found.newest), found.bars, found.split, versions, answers)

    def restore(self, name: str, cut: RuleLabelState | None) -> None:
        """Go on from a cut."""
        found = self._sessions.get(name)
        if found is None or cut is None:
            return
        found.newest.extend(cut.newest)
        found.bars, found.split = cut.bars, cut.split
        kept = self._rules.keys() & cut.versions.keys()  # the others have no rule any more
        found.waiting = {question: deque(cut.versions[question], _WAITING) for question in kept}
        self._confidence.remember(name, cut.answers)

    def on_commit(self, tape: Tape, version: int, records: Sequence[TapeItem[TapeRecord]]) -> None:
        """Take a version's bars; corrections and events are none. A split or a roll begins again."""
        found = self._sessions.get(tape.name)
        if found is None:
            return
        for record in (each.payload for each in records):
            if record.flags & (ACTED | ROLLED):
                found.newest.clear()
                found.split = found.bars
            if not is_single(record):
                found.newest.append(ClosedBar.of(record))
                found.bars += 1
        asked = {each.question_hash for each in self._registry.standing(tape.name)}
        for question in self._rules.keys() & asked:
            waiting = found.waiting.setdefault(question, deque(maxlen=_WAITING))
            if self._is_due(found, question, _BEHIND):
                self._label(tape.name, found, question)
            waiting.append(WaitingVersion(version, found.bars, tape.live_records))

    def idle(self) -> float | None:
        """Give one label, if one is due; see `scheduler.worker.Worker`."""
        for name, found in self._sessions.items():
            for question in found.waiting:
                while self._is_due(found, question):
                    if self._label(name, found, question):
                        return 0.0
        return None

    def _is_due(self, found: _Session, question: str, since: int = 0) -> bool:
        """Whether the oldest version that waits can have had its label for more than ``since`` bars."""
        rule, waiting = self._rules[question], found.waiting[question]
        return bool(waiting) and waiting[0].bars + max(rule.horizon, 1) + since <= found.bars

    def _label(self, name: str, found: _Session, question: str) -> bool:
        """Label the oldest version that waits; whether it took work."""
        at, rule = found.waiting[question].popleft(), self._rules[question]
        standing = next((s for s in self._registry.standing(name) if s.question_hash == question), None)
        if standing is None or not self._confidence.awaits(name, question, at.version):
            return False
        value = label_of(rule, found.around(at, rule.horizon), found.spec)
        if value != UNDEFINED:
            try:
                self._confidence.label(standing, at.version, rule.choices[value])
            except LabelError:  # its choices are others, or a client was first
                return False
        return True
