"""Numbers and times that are read in compiled code: what they take is what the readers of one text read."""

from datetime import UTC, datetime, timedelta

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.columns.text_kernel import Integers, distinct, instants_of, integers_of, units_of
from feeds.decimals import parse_fixed, to_units
from feeds.timestamps import time_parser

ANY = st.text(st.sampled_from("0123456789.-+eETZ: x"), max_size=32)
PLAIN = st.decimals(min_value=0, max_value=9_200_000_000, places=9).map(lambda each: f"{each:f}")
MOMENTS = st.builds(
    lambda at, digits, zone: f"{at:%Y-%m-%dT%H:%M:%S}{'.' if digits else ''}{digits}{zone}",
    st.datetimes(datetime(1970, 1, 1), datetime(2199, 12, 31)),
    st.text(st.sampled_from("0123456789"), max_size=10),
    st.sampled_from(["Z", "z", "+00:00", "", "-05:00"]),
)


@given(st.lists(ANY | PLAIN, max_size=8))
@example(["9200000000.000000001", "1.", ".5", "00012", ""])
def test_numbers(texts: list[str]) -> None:
    for text, found in zip(texts, units_of(texts).tolist(), strict=True):
        if found >= 0:
            assert to_units(parse_fixed(text)) == found


@given(st.decimals(min_value=0, max_value=9_000_000_000, places=4))
def test_plain_numbers_are_taken(number: object) -> None:
    assert units_of([f"{number:f}"])[0] >= 0


@given(st.lists(ANY | MOMENTS, max_size=8))
@example(["2024-02-30T00:00:00Z", "2023-02-29T00:00:00Z", "2100-02-29T00:00:00Z", "2024-02-29T23:59:60Z"])
@example(["2024-13-01T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01T00:00:00.Z"])
def test_times(texts: list[str]) -> None:
    parse = time_parser("iso")
    for text, found in zip(texts, instants_of(texts).tolist(), strict=True):
        if found >= 0:
            assert parse(text) == (found, 0)


def spans_of(texts: list[str]) -> tuple[bytes, Integers, Integers]:
    """Texts one after the other, and where each begins and ends."""
    ends = np.cumsum(list(map(len, texts)), dtype=np.int64)
    return "".join(texts).encode(), ends - list(map(len, texts)), ends


@given(st.lists(st.text("ab", max_size=5), min_size=1, max_size=80))
@example([text for n in range(300) for text in (f"{n}", f"{n}0", f"{n}00")])
def test_words_are_the_texts_that_are_given(texts: list[str]) -> None:
    codes, words = distinct(*spans_of(texts))
    assert [words[at] for at in codes.tolist()] == texts
    assert sorted(words) == sorted(set(texts))


@given(st.lists(st.integers(-(10**18) + 1, 10**18 - 1), min_size=1))
def test_integers(numbers: list[int]) -> None:
    assert integers_of(*spans_of(list(map(str, numbers)))).tolist() == numbers


def test_every_day_of_the_calendar() -> None:
    days = [datetime(1970, 1, 1, 12, tzinfo=UTC) + timedelta(n) for n in range(365 * 229)]
    found = instants_of([f"{day:%Y-%m-%dT%H:%M:%S}.25Z" for day in days if day.year < 2199]).tolist()
    assert found == [(n * 86_400 + 43_200) * 10**9 + 250_000_000 for n in range(len(found))]


def test_beyond_the_calendar_of_the_kernel_nothing_is_taken() -> None:
    assert instants_of(["1969-12-31T23:59:59Z", "2200-01-01T00:00:00Z"]).tolist() == [-1, -1]
