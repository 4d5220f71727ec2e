"""What one message holds is read by event time, against sorting in plain Python."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.codec import YEAR_1990
from feeds.moments import in_order


def packed(records: list[dict[str, object]], encoding: str) -> list[bytes]:
    encode = msgspec.msgpack.encode if encoding == "msgpack" else msgspec.json.encode
    return [encode(each) for each in records]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@given(times=st.lists(st.integers(0, 5), max_size=12))
def test_records_are_read_by_time_and_equal_times_keep_their_order(encoding: str, times: list[int]) -> None:
    records = [{"ts_event": YEAR_1990 + time, "n": n} for n, time in enumerate(times)]
    is_newest_first = times == sorted(times, reverse=True) and times != sorted(times)
    standing = records[::-1] if is_newest_first else records
    expected = sorted(standing, key=lambda each: int(str(each["ts_event"])))
    assert in_order(packed(records, encoding), encoding) == packed(expected, encoding)


def test_a_record_without_a_readable_time_stays_behind_the_one_before_it() -> None:
    third, first, second = (json.dumps({"ts_event": YEAR_1990 + n}).encode() for n in (3, 1, 2))
    for odd in (b"{", b"null", b'{"ts_event": 1.5}', b'{"ts_event": 7}', b"[" * 5000, b'{"ts_event": 1e400}'):
        assert in_order([third, first, odd, second], "json") == [first, odd, second, third]


def test_one_record_and_unknown_encodings_are_left_alone() -> None:
    assert in_order([b"x"], "json") == [b"x"]
    assert in_order([b"b", b"a"], "avro") == [b"b", b"a"]
