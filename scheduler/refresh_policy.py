"""When a session's window is prefilled again, and behind which frozen prefix."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from regions.tape import Tape
from scheduler.tapes import TapeItems

RETRY_NS = 10**9
"""Delay before a failed rebuild, or a failed replacement of a prefix, is tried again."""


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """When a session's window is prefilled again; 0 means never.

    An ``exact`` session adopts the fresh window, after ``every_records`` evicted records or ``idle_ns``
    without input. Other sessions are only compared with it, every ``compare_ns``.
    """

    exact: bool
    every_records: int = 0
    idle_ns: int = 0
    compare_ns: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Replacement:
    """Another frozen prefix for a session."""

    frozen: tuple[int, ...]
    records: TapeItems | None
    """The window; None: the live records."""
    first: int = 0
    """Live records before this one leave the window; they count from the first that the tape ever had."""
    adopted: Callable[[], None] | None = None
    """Called when the tape has it."""
    barrier: int = 0
    """Number of the newest record that ``records`` replaces; later ones wait."""


@dataclass(eq=False, slots=True)
class SessionWindow:
    """A session's window; times in ns of the refresher's clock."""

    tape: Tape
    policy: RefreshPolicy
    committed: int
    """When the newest version was committed."""
    begun: int
    """When its last prefill began, however that ended."""
    begun_records: int = 0
    """Records evicted by then."""
    replacements: deque[Replacement] = field(default_factory=deque)
    """The next one first; one without records is alone."""
    retry: int = 0
    """A replacement that failed is not tried again before."""

    @property
    def stale_records(self) -> int:
        """Records evicted since its last prefill began."""
        return self.tape.evicted_records - self.begun_records

    @property
    def replacement(self) -> Replacement | None:
        """The next one."""
        return self.replacements[0] if self.replacements else None

    @property
    def barrier(self) -> int | None:
        """See `Queues.barriers`."""
        following = self.replacement
        return None if following is None or following.records is None else following.barrier

    def begin(self, now: int) -> None:
        """A prefill begins."""
        self.begun, self.begun_records = now, self.tape.evicted_records

    def commit(self, now: int) -> None:
        """The tape has a new version."""
        self.committed = now

    def follow(self, policy: RefreshPolicy) -> None:
        """Refresh as ``policy`` says from now on."""
        self.policy = policy

    def restore(self, stale_records: int) -> None:
        """Go on with a restored tape that lost ``records`` records since its window was prefilled last."""
        self.begun_records = self.tape.evicted_records - stale_records

    def fail(self, now: int) -> None:
        """Its replacement failed."""
        self.retry = now + RETRY_NS

    def is_due(self, now: int) -> bool:
        """To be refreshed for its evicted records, or to be compared."""
        policy = self.policy
        if policy.exact:
            return 0 < policy.every_records <= self.stale_records
        return 0 < policy.compare_ns <= now - self.begun and self.tape.evicted_records > 0

    def idle_wait(self, now: int) -> int | None:
        """ns until a session without input is to be refreshed; None when only an append can change that."""
        policy = self.policy
        if not policy.exact or not policy.idle_ns or not self.stale_records or not self.tape.resident:
            return None
        return self.committed + policy.idle_ns - now

    def replace(self, following: Replacement, newest: int) -> None:
        """Queue another prefix, and the window behind it unless the live records are meant.

        ``newest``: number of the newest record that waits. A window that was given and is not adopted yet
        stays; so does its prefix if records wait for it. What was to leave the window still leaves it.
        """
        following = replace(following, barrier=newest)
        last = self.replacements.pop() if self.replacements else None
        if last is not None and following.records is None:
            first, adopted = max(last.first, following.first), following.adopted or last.adopted
            following = replace(last, frozen=following.frozen, first=first, adopted=adopted)
        elif last is not None and last.records is not None and newest > last.barrier:
            self.replacements.append(last)  # records wait for it
        self.replacements.append(following)

    def replaced(self) -> None:
        """The next replacement was adopted: what it took out of the window left no trace."""
        done = self.replacements.popleft()
        self.begun_records = max(self.begun_records, done.first)
        if done.adopted is not None:
            done.adopted()
