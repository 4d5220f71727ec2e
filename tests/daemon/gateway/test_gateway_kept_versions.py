"""The versions that a gateway keeps, beside a list that keeps all of them as they are."""

from dataclasses import dataclass, field
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from daemon.api.messages import PastAnswer, PastVersion
from daemon.gateway.kept_versions import KeptVersions
from tests.kit.engine_events import ANSWER

QUESTIONS, CHOICES = ("trend", "volume"), ("UP", "DOWN")


@dataclass
class Plain:
    """Every version in a list, with the number of its newest change."""

    most: int
    changes: int = 0
    versions: list[tuple[int, PastVersion]] = field(default_factory=list)

    def committed(self, version: int, as_of: int, close: int | None) -> None:
        text = None if close is None else f"{Decimal(close).scaleb(-9):.2f}"
        earlier = [each for each in self.versions if each[1].data_version < version]
        self.changes += 1
        self.versions = [*earlier, (self.changes, PastVersion(version, as_of, text))][-self.most :]

    def change(self, version: int, question: str, made: PastAnswer | None, label: str = "") -> None:
        for n, (_, each) in enumerate(self.versions):
            if each.data_version == version:
                known = {answer.question: answer for answer in each.answers}
                if made is not None:
                    known = {name: a for name, a in known.items() if name != question} | {question: made}
                elif question in known:
                    known[question] = replace(known[question], label=label)
                self.changes += 1
                self.versions[n] = self.changes, replace(each, answers=tuple(known.values()))

    def since(self, change: int) -> tuple[PastVersion, ...]:
        return tuple(each for number, each in self.versions if number > change)


numbers = st.integers(1, 9)
steps = st.lists(
    st.tuples(st.just("commit"), numbers, st.none() | st.integers(1, 900).map(lambda n: n * 10_000_000))
    | st.tuples(st.just("answer"), numbers, st.sampled_from(QUESTIONS), st.sampled_from(CHOICES))
    | st.tuples(st.just("label"), numbers, st.sampled_from(QUESTIONS), st.sampled_from(CHOICES)),
    max_size=40,
)


@settings(max_examples=200)
@given(steps=steps, most=st.integers(1, 4), asked=st.integers(0, 50))
def test_they_are_the_newest_of_all_whatever_comes(
    steps: list[tuple[object, ...]], most: int, asked: int
) -> None:
    kept, plain = KeptVersions(most), Plain(most)
    begun, seen = kept.revision, 0
    for n, step in enumerate(steps):
        match step:
            case ("commit", int(version), int() | None as close):
                kept.committed(version, n, close)
                plain.committed(version, n, close)
            case ("answer", int(version), str(question), str(text)):
                answer = replace(ANSWER, data_version=version, question=question, text=text)
                kept.answered(answer)
                past = PastAnswer(question, text, ANSWER.logit_gap, flags=ANSWER.flags)
                plain.change(version, question, past)
            case ("label", int(version), str(question), str(choice)):
                kept.labelled(question, version, choice)
                plain.change(version, question, None, choice)
        if n == asked:
            seen = plain.changes
    assert kept.since(0) == plain.since(0)
    assert kept.since(begun + seen) == plain.since(seen)
    assert kept.revision == begun + plain.changes
    restored = KeptVersions(most)
    restored.restore(kept.packed())
    assert restored.since(0) == plain.since(0)
    assert restored.span == kept.span
    found = [each.data_version for _, each in plain.versions]
    assert kept.span == ((found[0], found[-1]) if found else (0, 0))
    packed = sum(
        len(msgspec.msgpack.encode((v.data_version, v.as_of, v.close, [astuple(a) for a in v.answers])))
        for _, v in plain.versions
    )
    assert kept.size_bytes - packed == 250 * len(found)


def test_a_revision_of_a_later_daemon_is_not_ours_and_gets_all() -> None:
    kept = KeptVersions(3)
    kept.committed(1, 10, None)
    assert kept.since(kept.revision) == ()
    assert kept.since(kept.revision + 1) == (PastVersion(1, 10),)


def test_closes_are_told_with_the_decimals_of_their_session() -> None:
    kept = KeptVersions(3)
    kept.priced(4, 12)
    kept.committed(1, 10, 1_234_567_800_000)
    assert kept.since(0)[0].close == "1.2346"


def test_nothing_is_kept_where_none_is_asked_for() -> None:
    kept = KeptVersions(0)
    kept.committed(1, 10, 5)
    kept.answered(replace(ANSWER, data_version=1))
    kept.labelled("trend", 1, "UP")
    assert (kept.since(0), kept.span, kept.size_bytes) == ((), (0, 0), 0)


def kept_until(version: int) -> KeptVersions:
    """Versions from 1 on, ten units of event time apart."""
    kept = KeptVersions(10)
    for number in range(1, version + 1):
        kept.committed(number, 10 * number, None)
    return kept


def numbers_of(kept: KeptVersions) -> list[int]:
    return [each.data_version for each in kept.since(0)]


def test_what_is_read_again_is_not_kept_twice() -> None:
    """An engine that goes on from somewhere before gives it other numbers, and does not answer it."""
    kept = kept_until(5)
    kept.again()
    for number, as_of in ((6, 30), (7, 40), (8, 50)):
        kept.committed(number, as_of, None, history=True)
    assert numbers_of(kept) == [1, 2, 3, 4, 5]
    kept.committed(9, 60, None)
    kept.committed(10, 50, None)  # a correction
    kept.committed(11, 50, None, history=True)  # not again
    assert numbers_of(kept) == [1, 2, 3, 4, 5, 9, 10, 11]


def test_what_is_answered_again_is_made_again() -> None:
    kept = kept_until(5)
    kept.again()
    kept.committed(6, 30, None, history=True)
    kept.committed(7, 40, None)
    assert numbers_of(kept) == [1, 2, 3, 7]
    assert kept.span == (1, 7)


def test_what_is_no_version_is_refused_whole() -> None:
    kept = kept_until(2)
    whole = kept.packed()
    other = KeptVersions(10)
    with pytest.raises(ValueError):  # noqa: PT011  # msgspec's own
        other.restore([*whole, whole[0][:-1]])
    assert other.since(0) == ()
