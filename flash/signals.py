"""Signals: what a desk acts on, made of answers to standing questions by conditions on them.

A condition is a list of clauses, each about one question of one session, that hold at once. A signal is fired
when the last of them begins to hold, and again only after one of them has ceased to. `stepped` is a pure
function of what was known and the answers of one data version, so whoever goes on from a stored state makes
the signals that would have been made without a stop.

Each session's state is its own, and is stored with its progress. Sessions may be restored from different
moments: a signal is named by the answers with which its clauses began to hold, whichever came last, and each
session that has fired it remembers that name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

_ID_BYTES = 8


@dataclass(frozen=True)
class Said:
    """An answer. ``value``: the number that its text is, if it is one."""

    answer_id: str
    version: int
    text: str
    value: Decimal | None
    probability: float | None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clause:
    """What must hold of the answers to a question of ``session``; empty or None asks for nothing.

    ``answers``: the text is one of them; ``changed``: it differs from the one before, which is one of
    ``before``, if there are any; ``above``: the number is at least that, ``below``: it is less;
    ``min_probability``: the answer has it. ``rearm``: once that number, or else the probability, is met, it
    is until it passes this one. ``for_bars``: answers in a row of which the rest holds.
    """

    session: str
    question: str
    answers: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    changed: bool = False
    above: Decimal | None = None
    below: Decimal | None = None
    min_probability: float | None = None
    rearm: Decimal | None = None
    for_bars: int = 1


@dataclass(frozen=True)
class SignalRule:
    """A signal of one session: its clauses, of this session and maybe others.

    It is suppressed within ``cooldown_ns`` of event time, and ``cooldown_bars`` data versions of ``session``,
    of the one before. Answers with one of the flags ``withheld_by``, or the text ``none`` where no clause
    names that, are undefined.
    """

    name: str
    session: str
    clauses: tuple[Clause, ...]
    cooldown_ns: int = 0
    cooldown_bars: int = 0
    withheld_by: tuple[str, ...] = ()
    none: str = "NONE"

    @cached_property
    def hash(self) -> str:
        """Identity: with another condition nothing is known of it."""
        return _digest(repr(self))

    @property
    def sessions(self) -> tuple[str, ...]:
        """Those whose answers it reads."""
        return tuple(dict.fromkeys(each.session for each in self.clauses))


class ClauseState(msgspec.Struct, frozen=True, array_like=True):
    """``met``: the clause holds, ``since`` the answer with this id; "" if it has from its first answer on.

    ``defined``: the newest answer is. ``run``: answers in a row that meet it, at most `for_bars`. ``ceased``:
    an answer did not meet it. ``last``: the newest defined text. ``newest``: the answer that it was read
    from last: id, data version, text, number, probability.
    """

    met: bool = False
    since: str = ""
    defined: bool = False
    run: int = 0
    ceased: bool = False
    last: str | None = None
    newest: tuple[str, int, str, str | None, float | None] = ("", 0, "", None, None)


class Firing(msgspec.Struct, frozen=True, array_like=True):
    """The newest signal of a rule that this session has fired, by its id, suppressed or not.

    ``as_of``, ``version``: of the newest one that was not suppressed; -1 before the first.
    """

    signal_id: str
    as_of: int = -1
    version: int = -1


class SessionSignals(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one session: its clauses, by rule and number, and its firings, by rule."""

    clauses: dict[str, ClauseState] = {}
    fired: dict[str, Firing] = {}


@dataclass(frozen=True)
class MadeSignal:
    """A rule has fired, at a version of ``session``; ``answers``: of its clauses, in order."""

    rule: SignalRule
    signal_id: str
    session: str
    version: int
    as_of: int
    answers: tuple[ClauseState, ...]
    suppressed: bool
    """By its cooldown."""


UNKNOWN = SessionSignals()


def stepped(
    rules: Sequence[SignalRule],
    states: Mapping[str, SessionSignals],
    session: str,
    version: int,
    as_of: int,
    said: Mapping[str, Said],
) -> tuple[SessionSignals, list[MadeSignal]]:
    """What is known of ``session`` after the answers of one of its versions, by question, and what they fire.

    ``rules``: those that read it. ``as_of``: event time of the version, ns. A question without an answer at
    this version stands where it stood.
    """
    before = states.get(session, UNKNOWN)
    clauses = {
        key: _after(rule, clause, before.clauses.get(key, ClauseState()), said.get(clause.question))
        for rule in rules
        for key, clause in keys_of(rule)
        if clause.session == session
    }
    fired = {rule.hash: before.fired[rule.hash] for rule in rules if rule.hash in before.fired}
    now = {**states, session: SessionSignals(clauses, fired)}
    made = []
    for rule in rules:
        of_rule = [now.get(each.session, UNKNOWN).clauses.get(key) for key, each in keys_of(rule)]
        found = tuple(each for each in of_rule if each is not None and each.met and each.defined)
        # what has held from the first answers on did not begin to hold
        if len(found) < len(of_rule) or not any(each.since for each in found):
            continue
        signal_id = f"{rule.name}:{rule.session}:{_digest(rule.hash, *(each.since for each in found))}"
        past = [at[rule.hash] for name in rule.sessions if rule.hash in (at := now.get(name, UNKNOWN).fired)]
        if any(each.signal_id == signal_id for each in past):
            continue
        last = max(past, key=lambda each: each.as_of, default=Firing(""))
        cool = _cools(rule, last, as_of, version)
        fired[rule.hash] = replace(last, signal_id=signal_id) if cool else Firing(signal_id, as_of, version)
        made.append(MadeSignal(rule, signal_id, session, version, as_of, found, cool))
    return now[session], made


def keys_of(rule: SignalRule) -> list[tuple[str, Clause]]:
    """Its clauses, each with its key in `SessionSignals`."""
    return [(f"{rule.hash}.{number}", clause) for number, clause in enumerate(rule.clauses)]


def _cools(rule: SignalRule, last: Firing, as_of: int, version: int) -> bool:
    """Whether the last one was too short a time ago; a version that counts lower is another count's."""
    if last.as_of < 0:
        return False
    return abs(as_of - last.as_of) < rule.cooldown_ns or 0 <= version - last.version < rule.cooldown_bars


def _after(rule: SignalRule, clause: Clause, state: ClauseState, said: Said | None) -> ClauseState:
    """The clause after an answer; an undefined one ends a run, but nothing that holds."""
    if said is None:
        return state
    value = None if said.value is None else str(said.value)
    newest = (said.answer_id, said.version, said.text, value, said.probability)
    holds = None if _is_undefined(rule, clause, said) else _holds(clause, state, said)
    if holds is None:
        return replace(state, defined=False, run=state.run if state.met else 0, newest=newest)
    if not holds:
        return ClauseState(defined=True, ceased=True, last=said.text, newest=newest)
    run = min(state.run + 1, clause.for_bars)
    met = state.met or run >= clause.for_bars
    began = said.answer_id if met and state.ceased else ""
    return ClauseState(met, state.since if state.met else began, True, run, state.ceased, said.text, newest)


def _is_undefined(rule: SignalRule, clause: Clause, said: Said) -> bool:
    if any(flag in rule.withheld_by for flag in said.flags):
        return True
    return said.text == rule.none and rule.none not in (*clause.answers, *clause.before)


def _holds(clause: Clause, state: ClauseState, said: Said) -> bool | None:
    """Whether an answer meets the clause; None where it says nothing about it."""
    held = state.met or state.run > 0
    if clause.above is not None or clause.below is not None:
        if said.value is None:
            return None
        return _in_bounds(clause, said.value, held) and _is_sure(clause, said, held=False)
    sure = _is_sure(clause, said, held)
    if clause.changed:
        if not sure:  # the next sure one is compared with the one before
            return None
        return _has_changed(clause, state.last, said.text)
    return False if clause.answers and said.text not in clause.answers else sure


def _has_changed(clause: Clause, last: str | None, text: str) -> bool:
    if last is None or text == last:
        return False
    return (not clause.before or last in clause.before) and (not clause.answers or text in clause.answers)


def _in_bounds(clause: Clause, value: Decimal, held: bool) -> bool:
    """A number at a level counts as above it."""
    above, below = clause.above, clause.below
    if held and clause.rearm is not None:
        above = None if above is None else min(above, clause.rearm)
        below = None if below is None else max(below, clause.rearm)
    return (above is None or value >= above) and (below is None or value < below)


def _is_sure(clause: Clause, said: Said, held: bool) -> bool | None:
    """Whether the answer has the probability; None where it has none."""
    if clause.min_probability is None:
        return True
    if said.probability is None:
        return None
    least = float(clause.rearm) if held and clause.rearm is not None else clause.min_probability
    return said.probability >= min(least, clause.min_probability)


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=_ID_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
