"""Signals against a reading of the whole history, and from stored states."""

import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.signals import Clause, MadeSignal, Said, SessionSignals, SignalRule, stepped

Step = tuple[str, dict[str, Said]]
"""A version of a session, and its answers by question."""
CHOICES = {"p": ("UP", "UP", "DOWN", "NONE"), "n": ("1", "2", "3", "4", "NONE")}
"""Answers to a question of choices, and to one of numbers."""
_WORDS = [("UP",), ("DOWN",), ("UP", "NONE"), ("NONE",)]
_levels = st.sampled_from([Decimal(n) / 2 for n in range(3, 8)])
_odds = st.sampled_from([0.4, 0.8])


@st.composite
def clauses(draw: st.DrawFn, sessions: Sequence[str]) -> Clause:
    session, question = draw(st.sampled_from(sessions)), "p"
    match draw(st.sampled_from(["answers", "changed", "above", "below", "sure"])):
        case "answers":
            made = Clause(session, question, answers=draw(st.sampled_from(_WORDS)))
        case "changed":
            some, least = st.sampled_from([(), *_WORDS]), draw(st.none() | _odds)
            return Clause(session, question, draw(some), draw(some), changed=True, min_probability=least)
        case "sure":
            words, rearm = draw(st.sampled_from([(), *_WORDS])), draw(st.sampled_from([None, Decimal("0.4")]))
            made = Clause(session, question, words, min_probability=draw(_odds), rearm=rearm)
        case side:
            first, second = sorted([draw(_levels), draw(_levels)], reverse=side == "above")
            limits: dict[str, Any] = {side: first, "rearm": draw(st.sampled_from([None, second]))}
            made = Clause(session, "n", **limits)
    return replace(made, for_bars=draw(st.sampled_from([1, 1, 2, 3])))


@st.composite
def rules(draw: st.DrawFn, *sessions: str) -> SignalRule:
    found = draw(st.lists(clauses(sessions), min_size=1, max_size=2))
    return SignalRule(
        "s", found[0].session, tuple(found), draw(st.integers(0, 4)), draw(st.integers(0, 2)), ("gap",)
    )


def histories(random: Random, *sessions: str) -> list[Step]:
    found: list[Step] = []
    for n in range(random.randint(8, 30)):
        answers = {}
        for question in random.choice(["p", "n", "pn", "pn"]):
            text = random.choice(CHOICES[question])
            value = Decimal(text) if text.isdecimal() else None
            odds = random.choice([None, 0.3, 0.6, 0.9, 0.9])
            flags = random.choice([(), (), (), (), ("gap",)])
            answers[question] = Said(f"{n}{question}", n, text, value, odds, flags)
        found.append((random.choice(sessions), answers))
    return found


def marks(rule: SignalRule, clause: Clause, answers: list[Said]) -> str:
    """T: the answer meets the clause, M: only one that is met already, F: it does not, U: it is undefined."""
    word, last = "", None
    for said in answers:
        none = said.text == "NONE" and "NONE" not in clause.answers + clause.before
        sure = "T"
        if clause.min_probability is not None:
            again = clause.min_probability if clause.rearm is None else float(clause.rearm)
            odds = said.probability
            sure = (
                "U"
                if odds is None
                else "T"
                if odds >= clause.min_probability
                else "M"
                if odds >= again
                else "F"
            )
        mark = sure
        if said.flags or none:
            mark = "U"
        elif clause.above is not None or clause.below is not None:
            limit = clause.below if clause.above is None else clause.above
            again = limit if clause.rearm is None else clause.rearm
            is_up = clause.above is not None
            value = said.value
            fits = [value is not None and (value >= level) == is_up for level in (limit, again)]
            mark = "U" if value is None else "T" if fits[0] else "M" if fits[1] else "F"
        elif clause.changed:
            new = last not in (None, said.text) and (not clause.before or last in clause.before)
            mark = (
                "U"
                if sure != "T"
                else "T"
                if new and (not clause.answers or said.text in clause.answers)
                else "F"
            )
        elif clause.answers and said.text not in clause.answers:
            mark = "F"
        last = last if mark == "U" else said.text
        word += mark
    return word


def since(clause: Clause, word: str) -> int | None:
    """At which answer the clause began to hold, -1: it has from its first one on; None: it does not."""

    def met(part: str) -> bool:
        return re.search(f"T[TM]{{{clause.for_bars - 1}}}[TMU]*$", part) is not None

    if not met(word):
        return None
    begun = next(n for n in range(len(word), -1, -1) if not met(word[:n]))
    held = [met(word[:n]) or re.search("T[TM]*$", word[:n]) is not None for n in range(len(word))]
    ceased = any(mark == "F" or (mark == "M" and not held[n]) for n, mark in enumerate(word[:begun]))
    return begun if ceased else -1


def expected(rule: SignalRule, history: list[Step]) -> list[tuple[int, bool]]:
    """By reading all that came before again: at which steps it fires, and whether it is suppressed."""
    found: list[tuple[int, bool]] = []
    known, counts = set(), dict[str, int]()
    loud: list[tuple[int, int]] = []
    for n, (session, _) in enumerate(history):
        counts[session] = version = counts.get(session, 0) + 1
        if all(each.session != session for each in rule.clauses):
            continue
        begun = []
        for clause in rule.clauses:
            of = [said[clause.question] for name, said in history[: n + 1]
                  if name == clause.session and clause.question in said]  # fmt: skip
            word = marks(rule, clause, of)
            at = None if word[-1:] in ("", "U") else since(clause, word)
            begun.append(None if at is None else "" if at < 0 else of[at].answer_id)
        if None in begun or not any(begun) or tuple(begun) in known:
            continue
        known.add(tuple(begun))
        cool = any(
            n - at < rule.cooldown_ns or 0 <= version - of < rule.cooldown_bars for at, of in loud[-1:]
        )
        loud += [] if cool else [(n, version)]
        found.append((n, cool))
    return found


def run(
    rules: list[SignalRule],
    history: list[Step],
    begin: int = 0,
    states: dict[str, SessionSignals] | None = None,
) -> list[tuple[dict[str, SessionSignals], list[MadeSignal]]]:
    """After each step, the states and what was fired."""
    states, found = dict(states or {}), []
    for n, (session, said) in enumerate(history):
        if n < begin:
            continue
        version = sum(name == session for name, _ in history[: n + 1])
        reading = [each for each in rules if session in each.sessions]
        states[session], made = stepped(reading, states, session, version, n, said)
        found.append((dict(states), made))
    return found


@given(rules("a", "b"), st.randoms(use_true_random=False))
def test_signals_are_those_of_reading_the_whole_history(rule: SignalRule, random: Random) -> None:
    for _ in range(20):
        history = histories(random, "a", "b")
        made = [each for _, found in run([rule], history) for each in found]
        assert [(each.as_of, each.suppressed) for each in made] == expected(rule, history)
        ids = [each.signal_id for each in made]
        assert len(set(ids)) == len(ids)


@given(st.lists(rules("a", "b"), max_size=3, unique_by=lambda each: each.hash), st.randoms())
def test_a_state_that_is_stored_goes_on_as_if_it_never_was(rules: list[SignalRule], random: Random) -> None:
    history = histories(random, "a", "b")
    whole = run(rules, history)
    for cut, (stored, _) in enumerate(whole, 1):
        read = {
            name: msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=SessionSignals)
            for name, each in stored.items()
        }
        assert run(rules, history, cut, read) == whole[cut:]


@given(rules("a"), rules("b"), st.randoms(), st.data())
def test_sessions_that_go_on_from_moments_of_their_own_repeat_and_lose_nothing(
    first: SignalRule, second: SignalRule, random: Random, data: st.DataObject
) -> None:
    """Rules of one session each; what was made behind the stored moments is made again, with the same ids."""
    history = histories(random, "a", "b")
    whole = run([first, second], history)
    cuts = {name: data.draw(st.integers(1, len(history))) for name in ("a", "b")}
    states = {name: found for name, cut in cuts.items() if (found := whole[cut - 1][0].get(name)) is not None}
    again = list[str]()
    for n, (session, answers) in enumerate(history):
        if n >= cuts[session]:
            version = sum(name == session for name, _ in history[: n + 1])
            reading = [each for each in (first, second) if session in each.sessions]
            states[session], made = stepped(reading, states, session, version, n, answers)
            again += [each.signal_id for each in made]
    kept = [each.signal_id for n, (_, made) in enumerate(whole) for each in made if n < cuts[each.session]]
    assert sorted(kept + again) == sorted(each.signal_id for _, made in whole for each in made)


def said(text: str, n: int, probability: float | None = None, *flags: str) -> Said:
    return Said(f"id{n}", n, text, Decimal(text) if text[0].isdecimal() else None, probability, flags)


def fires(rule: SignalRule, *answers: Said) -> list[int]:
    history: list[Step] = [("a", {"q": each}) for each in answers]
    return [made.as_of for _, found in run([rule], history) for made in found if not made.suppressed]


def rule_of(*clauses: Clause, **more: object) -> SignalRule:
    return SignalRule("s", "a", clauses, **more)  # type: ignore[arg-type]  # a rule's


@pytest.mark.parametrize(
    ("clause", "texts", "at"),
    [
        (Clause("a", "q", ("UP",)), "UP UP DOWN UP", [3]),
        (Clause("a", "q", ("UP",)), "DOWN UP NONE UP", [1]),
        (Clause("a", "q", ("NONE",)), "DOWN NONE UP NONE", [1, 3]),
        (Clause("a", "q", ("UP",), for_bars=2), "DOWN UP NONE UP UP", [4]),
        (Clause("a", "q", changed=True), "UP UP DOWN NONE DOWN UP", [2, 5]),
        (Clause("a", "q", ("UP",), ("DOWN",), changed=True), "DOWN FLAT UP DOWN UP", [4]),
        (Clause("a", "q", above=Decimal(10)), "9 10 9 11", [1, 3]),
        (Clause("a", "q", above=Decimal(10), rearm=Decimal(8)), "9 10 9 11 7 10", [1, 5]),
        (Clause("a", "q", below=Decimal(10), rearm=Decimal(12)), "10 9 11 9 12 9", [1, 5]),
        (Clause("a", "q", above=Decimal(10)), "11 NONE 12", []),
    ],
)
def test_a_clause_fires_when_it_begins_to_hold(clause: Clause, texts: str, at: list[int]) -> None:
    assert fires(rule_of(clause), *(said(text, n) for n, text in enumerate(texts.split()))) == at


def test_probabilities_have_a_threshold_and_a_second_one_under_it() -> None:
    clause = Clause("a", "q", ("UP",), min_probability=0.8, rearm=Decimal("0.6"))
    odds = (0.5, 0.8, 0.7, 0.9, 0.5, None, 0.85)
    assert fires(rule_of(clause), *(said("UP", n, each) for n, each in enumerate(odds))) == [1, 6]


def test_answers_that_flags_withhold_are_undefined() -> None:
    rule = rule_of(Clause("a", "q", ("UP",)), withheld_by=("gap",))
    answers = (
        said("DOWN", 0),
        said("UP", 1, None, "gap"),
        said("UP", 2),
        said("DOWN", 3, None, "gap"),
        said("UP", 4),
    )
    assert fires(rule, *answers) == [2]


def test_a_cooldown_suppresses_and_does_not_delay() -> None:
    answers = [said(text, n) for n, text in enumerate(["DOWN", "UP", "DOWN", "UP", "DOWN", "UP"])]
    assert fires(rule_of(Clause("a", "q", ("UP",)), cooldown_bars=4), *answers) == [1, 5]
    assert fires(rule_of(Clause("a", "q", ("UP",)), cooldown_ns=3), *answers) == [1, 5]


def test_a_condition_that_is_edited_begins_anew() -> None:
    before, after = rule_of(Clause("a", "q", ("UP",))), rule_of(Clause("a", "q", ("UP", "FLAT")))
    history: list[Step] = [("a", {"q": said(text, n)}) for n, text in enumerate(["DOWN", "UP", "UP"])]
    ((states, _),) = run([before], history)[1:2]
    ((states, made),) = run([after], history, 2, states)
    assert not made
    assert [each.ceased for each in states["a"].clauses.values()] == [False]
    assert [key.startswith(after.hash) for key in states["a"].clauses] == [True]
