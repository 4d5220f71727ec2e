"""The life of a session within one daemon, as a table: gateway and engine run it, each on its own copy.

What either may do with a session follows from its state (`FOLLOWING`, `VOID`, `REBUILDING` and the others).
What the gateway has to do when partitions come and go is in the table's actions.
`python -m daemon.session_life` prints the table of docs/lifecycle.md.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, Self

from metrics.store import MetricStore

log = logging.getLogger(__name__)


class _Word(StrEnum):
    """A word, and what it means."""

    about: str

    def __new__(cls, word: str, about: str) -> Self:
        """A member."""
        made = str.__new__(cls, word)
        made._value_, made.about = word, about
        return made


class State(_Word):
    """Where a session stands in this daemon."""

    ABSENT = "absent", "It is not open here, and takes no memory."
    RESTORING = "restoring", "Its tape is opened, from a snapshot or empty; questions wait until it is there."
    RESETTING = "resetting", "It is about to be opened again: it takes no records, and is asked as it was."
    COLD = "cold", "Another daemon answers it, and its tape does not come from that one's snapshot yet."
    WARMING = "warming", "Another daemon answers it, and this one reads behind it."
    TAKING_OVER = (
        "taking over",
        "Its partition is ours, and the engine does not know yet up to where the other daemon has answered.",
    )
    REPLAYING = "replaying", "This daemon answers it; bars that were answered before are still to come."
    LIVE = "live", "This daemon answers it, and each of its bars is asked about."
    REVOKED = "revoked", "Its partition went to another daemon, and its tape stands where it was left."
    OUTDATED = (
        "outdated",
        "Another daemon has answered further than its tape knows, or may have: reset it before it is read.",
    )


class Event(_Word):
    """What happens to a session."""

    ADDED = "added", "A configuration or a client adds it."
    REOPENING = "reopening", "The engine is about to replace its tape."
    OPENED = "opened", "Its tape is open."
    FAILED = "failed", "The engine did not open it."
    FOLLOWED = "followed", "Its partition is read behind the owner from now on."
    READ = "read", "Its records were read behind the owner from the first one on."
    NOT_RESTORED = "not restored", "A standby's engine found no snapshot of it."
    STANDBY = "standby", "The daemon is a standby: another one answers all sessions."
    TAKEN_OVER = "taken over", "Its partition, which was read behind its owner, comes to us."
    PROMOTED = "promoted", "The engine knows up to where the other daemon has answered."
    CAUGHT_UP = "caught up", "No bar that was answered before is to come."
    RESET = "reset", "Its partition comes to us and is read again, from what is committed."
    ASSIGNED = "assigned", "Records of its partition are read from now on."
    REVOKED = "revoked", "No partition of it is ours any more."
    VOIDED = "voided", "Its partition went to another daemon together with what was in no transaction."
    OVERTAKEN = "overtaken", "Another daemon has committed more of it, or is not followed any more."
    ENGINE_STARTED = (
        "engine started",
        "An engine starts, after the daemon's start or another engine's end: it goes on from what is known.",
    )
    CLOSED = "closed", "It is neither read nor followed here any more, or not yet."
    REMOVED = "removed", "A configuration or a client removes it."


class Action(StrEnum):
    """What the gateway does. The engine performs none: it is what these commands are for."""

    DROP = "drop"
    """Drop what is under way and is made again: exactly once also complete versions, which no transaction has
    taken; at least once these are on their way.
    """
    DROP_ALL = "drop all"
    """Drop complete versions, too, which the other daemon has made."""
    REOPEN = "reopen"
    """`CloseSession` with ``keeps`` if it is open, then `OpenSession`."""
    TAKE_OVER = "take over"
    """`TakeOver`."""
    NOTIFY_ASSIGNED = "notify assigned"
    """`PartitionsAssigned`."""
    NOTIFY_REVOKED = "notify revoked"
    """`PartitionsRevoked`."""


FOLLOWING = frozenset({State.COLD, State.WARMING, State.TAKING_OVER})
"""Another daemon publishes: every bar is one that it has answered."""
VOID = frozenset({State.ABSENT, State.OUTDATED, State.RESETTING})
"""What the engine still says of the tape counts for nothing."""
STALE = VOID | FOLLOWING
"""Opened again before this daemon reads its partition from what is committed."""
ELSEWHERE = frozenset({*FOLLOWING, State.REVOKED})
"""Another daemon writes the session's snapshots."""
REBUILDING = frozenset({*ELSEWHERE, State.REPLAYING, State.RESETTING})
"""Bars were answered before, or by another daemon: they are neither held back nor skipped."""
CLOSED = frozenset({State.ABSENT, State.RESTORING})
"""The engine has no tape of it."""
REPLACED = frozenset({State.RESETTING, State.RESTORING})
"""The engine is asked about the old tape at most, and changes nothing about it."""


@dataclass(frozen=True)
class Transition:
    """Where an event leads, and what is to be done then."""

    to: State
    actions: tuple[Action, ...] = ()


_ANSWERING = (State.REPLAYING, State.LIVE)
_OPEN = (*_ANSWERING, State.REVOKED, *sorted(FOLLOWING), State.OUTDATED)
_ALL = (*_OPEN, State.RESETTING, State.RESTORING)


def _table() -> dict[tuple[State, Event], Transition]:
    found: dict[tuple[State, Event], Transition] = {}

    def on(event: Event, states: Iterable[State], to: State | None, *actions: Action) -> None:
        """From each of these states, if nothing else was said of it; ``to`` None: it stays as it is."""
        for state in states:
            found.setdefault((state, event), Transition(to or state, actions))

    s, e, a = State, Event, Action
    on(e.ADDED, [s.ABSENT], s.RESTORING)
    on(e.REOPENING, [s.RESETTING], s.RESTORING)
    on(e.OPENED, [s.RESTORING, s.RESETTING, s.LIVE], s.REPLAYING)
    on(e.OPENED, [s.COLD], s.WARMING)
    on(e.OPENED, _ALL, None)
    on(e.FAILED, [s.RESTORING, s.RESETTING], s.ABSENT)
    on(e.FAILED, [s.ABSENT, *_ALL], None)
    on(e.FOLLOWED, [s.WARMING, s.TAKING_OVER], None)
    on(e.FOLLOWED, [s.RESTORING], s.WARMING)
    on(e.FOLLOWED, [s.ABSENT, *_ALL], s.COLD, a.REOPEN)
    on(e.READ, [s.COLD], s.WARMING)
    on(e.NOT_RESTORED, [s.WARMING], s.COLD)
    on(e.NOT_RESTORED, _ALL, None)
    on(e.STANDBY, [s.COLD], None)
    on(e.STANDBY, _ALL, s.WARMING)
    on(e.TAKEN_OVER, FOLLOWING, s.TAKING_OVER, a.TAKE_OVER)
    on(e.TAKEN_OVER, _ALL, None, a.TAKE_OVER)
    on(e.TAKEN_OVER, [s.ABSENT], None)
    on(e.PROMOTED, [*FOLLOWING, *_ANSWERING], s.REPLAYING)
    on(e.PROMOTED, [s.REVOKED], None, a.NOTIFY_REVOKED)
    on(e.PROMOTED, [s.ABSENT, *_ALL], None)
    on(e.CAUGHT_UP, [s.REPLAYING], s.LIVE)
    on(e.CAUGHT_UP, [s.ABSENT, *_ALL], None)
    on(e.RESET, [s.ABSENT], s.RESTORING, a.REOPEN)
    on(e.RESET, [s.OUTDATED], s.RESETTING, a.DROP_ALL, a.REOPEN)
    on(e.RESET, _ALL, s.RESETTING, a.DROP, a.REOPEN)
    on(e.ASSIGNED, [s.REVOKED], s.REPLAYING, a.NOTIFY_ASSIGNED)
    on(e.ASSIGNED, [s.ABSENT], None)
    on(e.ASSIGNED, _ALL, None, a.NOTIFY_ASSIGNED)
    on(e.REVOKED, [*_ANSWERING, s.RESTORING, s.TAKING_OVER], s.REVOKED, a.NOTIFY_REVOKED)
    on(e.REVOKED, [s.RESETTING], s.OUTDATED, a.NOTIFY_REVOKED)
    on(e.REVOKED, [s.ABSENT], None)
    on(e.REVOKED, _ALL, None, a.NOTIFY_REVOKED)
    on(e.VOIDED, [s.ABSENT], None)
    on(e.VOIDED, _ALL, s.OUTDATED, a.DROP_ALL)
    on(e.OVERTAKEN, [s.ABSENT], None)
    on(e.OVERTAKEN, _ALL, s.OUTDATED)
    on(e.CLOSED, [s.ABSENT, *_ALL], s.ABSENT)
    on(e.ENGINE_STARTED, [s.ABSENT, *_ALL], s.REPLAYING)
    on(e.REMOVED, [s.ABSENT, *_ALL], s.ABSENT)
    return found


TRANSITIONS: Mapping[tuple[State, Event], Transition] = MappingProxyType(_table())
"""What is not in it is an error: nothing happens, and it is counted."""

Illegal = Callable[[str, State, Event], None]
"""Called with a session's name and what is not in the table."""


def count_illegal(store: MetricStore, process: Literal["gateway", "engine"]) -> Illegal:
    """Count and log what is not in the table: it is a defect of ours, and no reason to end."""

    def count(name: str, state: State, event: Event) -> None:
        store.inc("foretick_session_transitions_refused_total", process=process)
        log.error("session %s is %s, where %r cannot happen; it stays as it is", name, state, str(event))

    return count


def refuse(name: str, state: State, event: Event) -> None:
    """Raises ValueError: for a session that no daemon runs."""
    raise ValueError(f"session {name} is {state}, where {event!r} cannot happen")


class Life:
    """One session's state. Any thread."""

    __slots__ = ("_illegal", "_lock", "_name", "state")

    def __init__(self, name: str, illegal: Illegal = refuse, state: State = State.ABSENT) -> None:
        self._name, self._illegal, self.state = name, illegal, state
        self._lock = threading.Lock()

    def on(self, event: Event) -> tuple[Action, ...]:
        """This happens; returns what is to be done. Without such a transition nothing changes."""
        with self._lock:
            found = TRANSITIONS.get((self.state, event))
            if found is not None:
                self.state = found.to
                return found.actions
        self._illegal(self._name, self.state, event)
        return ()


class Lives:
    """The states of all sessions. Any thread."""

    def __init__(self, illegal: Illegal) -> None:
        self._illegal = illegal
        self._lives: dict[str, Life] = {}

    def of(self, name: str) -> Life:
        """A session's; absent unless something happened to it."""
        return self._lives.get(name) or self._lives.setdefault(name, Life(name, self._illegal))

    @property
    def open(self) -> list[str]:
        """Sessions that are not absent."""
        return [name for name, life in self._lives.items() if life.state is not State.ABSENT]

    def state(self, name: str) -> State:
        """Where a session stands."""
        found = self._lives.get(name)
        return State.ABSENT if found is None else found.state

    def among(self, names: Iterable[str], states: Collection[State]) -> set[str]:
        """Those of the sessions that are in one of these states."""
        return {name for name in names if self.state(name) in states}

    def on(self, event: Event, names: Iterable[str]) -> Mapping[Action, set[str]]:
        """This happens to these sessions; returns what is to be done, with which of them."""
        found: defaultdict[Action, set[str]] = defaultdict(set)
        for name in names:
            for action in self.of(name).on(event):
                found[action].add(name)
        return found


def table() -> str:
    """All states, and what each event does, in Markdown."""
    states = "".join(f"| {state} | {state.about} |\n" for state in State)
    events = "".join(row for event in Event for row in _rows(event))
    return (
        f"| state | meaning |\n|---|---|\n{states}\n"
        f"| event | in these states | next state | what the gateway does |\n|---|---|---|---|\n{events}"
    )


def _rows(event: Event) -> Iterable[str]:
    ends: defaultdict[tuple[str, tuple[Action, ...]], list[str]] = defaultdict(list)
    for state in State:
        if (found := TRANSITIONS.get((state, event))) and found != Transition(state):
            ends["the same" if found.to is state else found.to, found.actions].append(state)
    title = f"**{event}**: {event.about}"
    for (to, actions), states in ends.items():
        yield f"| {title} | {', '.join(states)} | {to} | {', '.join(actions)} |\n"
        title = ""


if __name__ == "__main__":
    print(table(), end="")
