"""Progress as it is stored, and records that somebody else wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.progress import Position, Progress, StoredProgress, WindowStart, decode_stored, encode_stored
from feeds.decoding import Undecodable

numbers = st.integers(0, 2**63 - 1)
positions = st.builds(Position, st.text(max_size=8), st.text(max_size=64), numbers, numbers)
progress = st.builds(
    Progress,
    numbers,
    numbers,
    numbers,
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple),
    st.builds(WindowStart, st.integers(0, 2**32 - 1), st.lists(positions, max_size=2).map(tuple)),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), numbers), max_size=2).map(tuple),
)


@given(progress, numbers, st.text(max_size=30))
def test_what_is_stored_comes_back(each: Progress, epoch: int, owner: str) -> None:
    stored = StoredProgress(each, epoch, owner)
    assert decode_stored(encode_stored(stored)) == stored


@given(st.binary())
def test_a_foreign_record_is_refused_or_read_as_one(data: bytes) -> None:
    try:
        found = decode_stored(data)
    except Undecodable:
        return
    assert isinstance(found, StoredProgress)


@given(progress, st.data())
def test_a_record_that_is_cut_off_is_refused(each: Progress, data: st.DataObject) -> None:
    record = encode_stored(StoredProgress(each))
    with pytest.raises(Undecodable):
        decode_stored(record[: data.draw(st.integers(0, len(record) - 1))])
