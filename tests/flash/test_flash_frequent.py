"""Ad hoc questions that come often: when they begin to stand, when they end, and how many are remembered."""

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from flash.frequent import REMEMBERED, FrequentQuestions, is_frequent, named
from flash.question import Question

S = 10**9
ASKS, WINDOW, MOST = 3, 60 * S, 2


class Time:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def question(n: int) -> Question:
    return Question("ask", f"Is it {n}?", ("YES", "NO"))


@settings(max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_what_stands_is_what_a_list_of_all_asks_says(seed: int) -> None:
    rng, time = random.Random(seed), Time()
    frequent = FrequentQuestions(ASKS, WINDOW, MOST, time)
    asked: dict[tuple[str, int], list[int]] = defaultdict(list)
    standing: set[tuple[str, int]] = set()
    for _ in range(300):
        time.now += rng.choice((0, S, 10 * S, 100 * S))
        session, n = rng.choice("ab"), rng.randint(0, 4)
        ended = {each for each in standing if asked[each][-ASKS] <= time.now - 2 * WINDOW}
        assert set(frequent.rarer()) == {(name, named(question(n))) for name, n in ended}
        standing -= ended
        asked[session, n].append(time.now)
        times = asked[session, n][-ASKS:]
        is_often = len(times) == ASKS and times[0] > time.now - WINDOW
        room = sum(name == session for name, _ in standing) < MOST
        begins = is_often and room and (session, n) not in standing
        standing |= {(session, n)} if begins else set()
        assert frequent.ask(session, question(n)) == (named(question(n)) if begins else None)
        assert len(frequent.standing()) == len(standing)


def test_it_stands_under_a_name_of_its_own_and_is_not_published() -> None:
    stands = named(question(1))
    assert stands.name == f"asked-{question(1).hash[:12]}"
    assert (stands.hash, stands.publish_when) == (question(1).hash, "never")
    assert is_frequent(stands)
    assert not is_frequent(question(1))


def test_only_the_questions_asked_last_are_remembered_and_those_that_stand() -> None:
    frequent = FrequentQuestions(2, WINDOW, MOST, Time())
    frequent.ask("a", question(0))
    assert frequent.ask("a", question(0)) is not None
    frequent.ask("a", question(1))
    for n in range(2, REMEMBERED + 1):
        frequent.ask("a", question(n))
    assert frequent.ask("a", question(1)) is None, "its first ask is forgotten"
    assert len(frequent.standing()) == 1
    frequent.keep({"b"})
    assert len(frequent.standing()) == 0


def test_what_cannot_stand_is_counted_anew() -> None:
    frequent = FrequentQuestions(2, WINDOW, MOST, Time())
    frequent.ask("a", question(0))
    assert frequent.ask("a", question(0)) is not None
    frequent.drop("a", question(0))
    assert len(frequent.standing()) == 0
    assert frequent.ask("a", question(0)) is None
    assert frequent.ask("a", question(0)) is not None
    frequent.drop("gone", question(0))
