"""How good answers were, beside sums over one answer after the other."""

from itertools import pairwise
from math import isclose
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from daemon.api.messages import PastAnswer, PastVersion, Tally
from daemon.gateway.question_quality import (
    TREND,
    by_age,
    by_regime,
    found_in,
    regimes_of,
    reliability,
    tally_of,
)

probabilities = st.none() | st.floats(0, 1) | st.sampled_from([0.1, 0.3, 0.7, 1.0])
answers = st.builds(
    PastAnswer,
    question=st.sampled_from(["trend", "volume"]),
    text=st.sampled_from(["UP", "DOWN"]),
    logit_gap=st.floats(0, 9),
    probability=probabilities,
    choice_set=st.none() | st.sampled_from([(), ("UP",), ("DOWN", "UP")]),
    label=st.none() | st.sampled_from(["UP", "DOWN"]),
)


@st.composite
def tapes(draw: st.DrawFn) -> list[PastVersion]:
    """Versions with gaps in their numbers, some without a close."""
    number, found = 0, []
    for each in draw(st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(90, 110)), max_size=60)):
        number += each[0]
        close = None if each[1] is None else f"{each[1]}.50"
        given_ = tuple({a.question: a for a in draw(st.lists(answers, max_size=2))}.values())
        found.append(PastVersion(number, number * 10, close, given_))
    return found


def judged(given_: list[PastAnswer]) -> list[PastAnswer]:
    return [each for each in given_ if each.label is not None and each.probability is not None]


def same(tally: Tally, given_: list[PastAnswer]) -> bool:
    """Whether a tally is that of these answers, counted one by one."""
    told, right, covered, sets = judged(given_), 0, 0, 0
    for each in told:
        if each.text == each.label:
            right += 1
        if each.choice_set is not None:
            sets += 1
            covered += each.label in each.choice_set
    counts = tally.answers, tally.labels, tally.right, tally.covered, tally.sets
    if counts != (len(given_), len(told), right, covered, sets):
        return False
    if not told:
        return tally.probability is None
    return isclose(tally.probability or 0, fmean(p for each in told if (p := each.probability) is not None))


@given(st.lists(answers, max_size=30))
def test_a_tally_counts_what_is_labelled(given_: list[PastAnswer]) -> None:
    assert same(tally_of(given_), given_)


@given(st.lists(answers, max_size=60))
def test_bins_part_the_labelled_answers_by_probability(given_: list[PastAnswer]) -> None:
    bins = reliability(given_)
    assert sum(each.tally.labels for each in bins) == len(judged(given_))
    for n in range(10):
        least, most = n / 10, (n + 1) / 10 if n < 9 else 2.0
        tenths = (n, 10) if n == 9 else (n,)
        inside = [each for each in judged(given_) if int((each.probability or 0) * 10) in tenths]
        (found,) = [each for each in bins if each.least == least] or [None]
        assert (found is None) is (not inside)
        assert found is None or same(found.tally, inside)
        assert all(least - 1e-9 <= (each.probability or 0) <= most for each in inside)


@given(tapes())
def test_regimes_are_thirds_of_the_volatility_and_the_direction(tape: list[PastVersion]) -> None:
    closes = [(each.data_version, float(each.close)) for each in tape if each.close is not None]
    regimes = regimes_of(tape)
    assert list(regimes) == [number for number, _ in closes[TREND:]]
    moved = {
        closes[i][0]: fmean(abs(b[1] - a[1]) for a, b in pairwise(closes[i - TREND : i + 1]))
        for i in range(TREND, len(closes))
    }
    sizes = ("calm", "usual", "volatile")
    by_name = {name: [n for n, found in regimes.items() if name in found] for name in sizes}
    assert sum(map(len, by_name.values())) == len(moved)
    assert len(by_name["calm"]) <= len(moved) / 3
    assert len(by_name["volatile"]) <= len(moved) / 3
    largest_calm = max((moved[n] for n in by_name["calm"]), default=0)
    assert all(moved[n] >= largest_calm for n in (*by_name["usual"], *by_name["volatile"]))
    least_volatile = min((moved[n] for n in by_name["volatile"]), default=99)
    assert all(moved[n] <= least_volatile for n in (*by_name["usual"], *by_name["calm"]))
    for i in range(TREND, len(closes)):
        change = closes[i][1] - closes[i - TREND][1]
        names = regimes[closes[i][0]]
        assert ("rising" in names, "falling" in names) == (change > 0, change < 0)


@given(tapes())
def test_each_regime_and_each_block_has_its_answers(tape: list[PastVersion]) -> None:
    found, regimes = found_in(tape, "trend"), regimes_of(tape)
    every = [(v.data_version, a) for v in tape for a in v.answers if a.question == "trend"]
    for regime in by_regime(tape, found):
        assert same(regime.tally, [a for n, a in every if regime.name in regimes.get(n, ())])
    newest = tape[-1].data_version if tape else 0
    blocks = by_age(newest, 40, found)
    ages = {(newest - n) // 4 * 4 for n, _ in every}
    assert [each.versions_ago for each in blocks] == sorted(ages, reverse=True)
    for block in blocks:
        inside = [(n, a) for n, a in every if block.versions_ago <= newest - n < block.versions_ago + 4]
        assert same(block.tally, [a for _, a in inside])
        assert isclose(block.mean_gap, fmean(a.logit_gap for _, a in inside), abs_tol=1e-9)
        assert block.as_of == max(n for n, _ in inside) * 10
