"""What the engine's parts keep for each session: made, changed, saved, restored and removed in one place."""

from dataclasses import dataclass

from msgspec import structs

from daemon.config.schema import SessionConfig
from daemon.engine.answers import StandingAnswers, Versions
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.request_runner import RequestRunner
from daemon.engine.rollups import Rollups
from daemon.engine.rule_labels import RuleLabels
from daemon.engine.snapshot_store import PartsState
from flash.registry import Registry, Standing
from regions.tape import Tape
from scheduler.refresh import Refresher
from scheduler.refresh_policy import RefreshPolicy
from scheduler.request import Failure
from scheduler.scheduler import Scheduler


def refresh_policy(session: SessionConfig) -> RefreshPolicy:
    """When the session's window is prefilled again."""
    s = session
    return RefreshPolicy(s.semantics == "exact", s.refresh_every, s.refresh_idle, s.divergence_every)


@dataclass(frozen=True, eq=False)
class SessionParts:
    """All that has state by session, but for tape, input and snapshots. Used between two batches."""

    scheduler: Scheduler
    registry: Registry
    versions: Versions
    confidence: Confidence
    labels: RuleLabels
    requests: RequestRunner
    answers: StandingAnswers
    refresher: Refresher
    rollups: Rollups

    def add(self, session: SessionConfig, tape: Tape, standing: tuple[Standing, ...]) -> None:
        """There is another session."""
        self.confidence.add(session.name)
        self.labels.add(session)
        self.registry.replace(session.name, standing)
        self.change(session, tape)

    def change(self, session: SessionConfig, tape: Tape) -> None:
        """A session has these settings."""
        self.answers.add(session)
        self.refresher.watch(tape, refresh_policy(session))
        self.rollups.set(session, tape)

    def remove(self, tape: Tape, failure: Failure) -> None:
        """A session goes; what is asked of it ends with ``failure``."""
        name = tape.name
        self.answers.leave(name)
        self.refresher.forget(tape)
        self.rollups.forget(tape)
        self.scheduler.remove(tape, failure)
        self.registry.remove(name)
        self.requests.remove(name)
        self.answers.remove(name)
        self.labels.remove(name)
        self.confidence.remove(name)

    def save(self, tape: Tape) -> PartsState | None:
        """The state of a session; None where that cannot be had now: see `settled`."""
        name, newest = tape.name, self.requests.record(tape.name, tape.version)
        if newest is None or not self.settled(tape):
            return None
        anchor = newest.anchor
        return PartsState(
            newest=structs.replace(newest, anchor=None),
            stale_records=self.refresher.stale_records(tape),
            rolled=self.rollups.cut(tape),
            asked=self.answers.cut(name),
            adapted=self.confidence.cut(name),
            lineage=self.versions.log(tape).copied(),
            labels=self.labels.cut(name),
            anchor=None if anchor is None else anchor.stored,
        )

    def settled(self, tape: Tape) -> bool:
        """Whether neither the window nor its prefix is being replaced."""
        return tape.settled and self.refresher.settled(tape) and self.rollups.settled(tape)

    def restore(self, tape: Tape, state: PartsState, *, has_log: bool) -> None:
        """Go on from the state of a session whose tape came back. ``has_log``: see `SavedSession`."""
        self.requests.restore(tape.name, tape.version, state.record)
        newest = self.requests.record(tape.name, tape.version)
        assert newest is not None, "it was restored"
        self.answers.restore(tape, state.asked, newest)
        self.confidence.restore(tape.name, state.adapted)
        self.confidence.keep(tape.name, self.registry.standing(tape.name))
        self.labels.restore(tape.name, state.labels)
        self.refresher.restore(tape, state.stale_records)
        self.versions.restore(tape, state.lineage, has_log=has_log)
        if state.rolled is not None:
            self.rollups.restore(tape, state.rolled)
