"""The audit of a topic against a plain reference, and against what happened to the answers."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from daemon.audit.completeness import Audit, Range, SessionAudit
from daemon.progress import Progress
from feeds.market_data import Answer
from tests.kit.engine_events import ANSWER

Numbered = tuple[int, int, str]
"""Epoch, sequence, answer id."""


def answer(epoch: int, sequence: int, name: str, session: str = "aaa") -> Answer:
    return msgspec.structs.replace(ANSWER, session=session, epoch=epoch, sequence=sequence, answer_id=name)


def audited(answers: list[Numbered], *, whole: bool = False) -> SessionAudit:
    audit = Audit(whole=whole)
    for each in answers:
        audit.take(answer(*each))
    (found,) = audit.result()
    return found


def plainly_lost(answers: list[Numbered], *, whole: bool) -> list[int]:
    """Each number by itself: the last epoch that begins at or below it must show it."""
    epochs = sorted({epoch for epoch, _, _ in answers})
    begins = {e: min(number for epoch, number, _ in answers if epoch == e) for e in epochs}
    if whole and epochs[0] == 1:
        begins[1] = 1
    seen = {(epoch, number) for epoch, number, _ in answers}
    newest = max(number for epoch, number, _ in answers if epoch == epochs[-1])
    lost = []
    for number in range(min(begins.values()), newest + 1):
        owner = max((epoch for epoch in epochs if begins[epoch] <= number), default=None)
        if owner is not None and (owner, number) not in seen:
            lost.append(number)
    return lost


ids = st.integers(0, 12).map(str)
topics = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 14), ids), min_size=1, max_size=40)


@given(topics, st.booleans())
def test_any_topic_is_judged_as_by_a_plain_reference(answers: list[Numbered], whole: bool) -> None:
    found = audited(answers, whole=whole)
    numbers = [number for first, last in found.lost for number in range(first, last + 1)]
    assert numbers == plainly_lost(answers, whole=whole)
    assert found.missing == len(numbers)
    counts = Counter(name for _, _, name in answers)
    assert found.repeated == sum(counts.values()) - len(counts)
    assert (found.answers, found.epochs) == (len(answers), len({epoch for epoch, _, _ in answers}))
    seen: set[tuple[int, int]] = set()
    known: set[str] = set()
    conflicts = 0
    for epoch, number, name in answers:
        conflicts += (epoch, number) in seen and name not in known
        seen.add((epoch, number))
        known.add(name)
    assert found.conflicts == conflicts


@given(st.data())
def test_engines_that_go_on_from_what_is_acknowledged_leave_a_clean_topic_until_one_answer_is_taken_out(
    data: st.DataObject,
) -> None:
    """Each engine publishes on from the newest acknowledged number; what it repeats has the same id."""
    answers: list[Numbered] = []
    acknowledged = 0
    for epoch in range(1, data.draw(st.integers(1, 5)) + 1):
        published = data.draw(st.integers(epoch == 1, 6))
        answers += [(epoch, acknowledged + n, f"answer {acknowledged + n}") for n in range(1, published + 1)]
        acknowledged += data.draw(st.integers(0, published))
    found = audited(answers, whole=True)
    assert found.holds(exactly_once=False)
    assert found.holds(exactly_once=True) == (len({name for _, _, name in answers}) == len(answers))
    taken = data.draw(st.integers(0, len(answers) - 1))
    _, number, name = answers[taken]
    rest = answers[:taken] + answers[taken + 1 :]
    newest = max((n for e, n, _ in rest if e == max(e for e, _, _ in rest)), default=0)
    begun = any(epoch == 1 for epoch, _, _ in rest)
    if begun and number < newest and not any(other == name for _, _, other in rest):
        assert audited(rest, whole=True).lost == [(number, number)]


def test_answers_missing_at_the_end_show_in_comparison_with_what_is_committed() -> None:
    def tail(committed: Progress, *, whole: bool = False, answers: tuple[Numbered, ...]) -> list[Range]:
        audit = Audit(whole=whole)
        for each in answers:
            audit.take(answer(*each))
        found = {each.session: each for each in audit.result({"aaa": committed})}
        assert all(each.holds(exactly_once=False) == (not each.lost) for each in found.values())
        return found["aaa"].lost if found else []

    some = ((2, 5, "5"), (2, 6, "6"))
    assert tail(Progress(2, 9, 6), answers=some) == []
    assert tail(Progress(2, 9, 8), answers=some) == [(7, 8)]
    assert tail(Progress(3, 9, 8), answers=some) == [(7, 8)]
    # a newer engine publishes again what was not committed when it began, and has not come so far
    assert tail(Progress(2, 9, 8), answers=(*some, (2, 7, "7"), (2, 8, "8"), (3, 7, "7"))) == []
    # what the topic no longer holds, or --since leaves out, is not missed
    assert tail(Progress(2, 9, 8), answers=()) == []
    assert tail(Progress(2, 9, 8), answers=(), whole=True) == [(1, 8)]
    assert tail(Progress(2, 9, 0), answers=(), whole=True) == []


def test_two_owners_of_a_session_contradict_each_other() -> None:
    found = audited([(3, 7, "a"), (3, 8, "b"), (3, 8, "c")])
    assert (found.conflicts, found.repeated, found.lost) == (1, 0, [])
    assert not found.holds(exactly_once=False)


def test_answers_without_numbers_are_counted_and_nothing_is_said_about_them() -> None:
    found = audited([(0, 0, ""), (0, 0, "")])
    assert (found.answers, found.unnumbered, found.lost, found.repeated) == (2, 2, [], 0)
    assert found.holds(exactly_once=True)


def test_sessions_are_judged_by_themselves() -> None:
    audit = Audit(whole=False)
    for session, numbers in {"bbb": (1, 2, 4), "aaa": (5, 6)}.items():
        for number in numbers:
            audit.take(answer(1, number, f"{session} {number}", session))
    assert [(each.session, each.lost) for each in audit.result()] == [("aaa", []), ("bbb", [(3, 3)])]
