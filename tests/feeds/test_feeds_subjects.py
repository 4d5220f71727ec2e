"""What an unusable message speaks of is found where it can be read, and looking for it never fails."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds.source import YEAR_1990
from feeds.subjects import Subject, subjects_of

WHOLE = {"type": "trade", "venue": "V", "symbol": "S", "ts_event": YEAR_1990 + 5, "ts_recv": YEAR_1990}
AT = Subject("V:S", YEAR_1990 + 5)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_members_of_a_readable_message_name_it_whatever_else_is_wrong(encoding: str) -> None:
    encode = msgspec.msgpack.encode if encoding == "msgpack" else msgspec.json.encode
    assert subjects_of(encode(WHOLE | {"price": {}}), encoding, b"other") == [AT]
    assert subjects_of(encode(WHOLE | {"ts_event": "x"}), encoding, None) == [Subject("V:S", 0)]
    assert subjects_of(encode(WHOLE | {"ts_event": 5}), encoding, None) == [Subject("V:S", 0)]


@pytest.mark.parametrize("cut", range(1, 40))
def test_broken_json_names_what_it_still_says(cut: int) -> None:
    payload = json.dumps(WHOLE).encode()[:-cut]
    expected = 0 if str(WHOLE["ts_event"]).encode() + b"," not in payload else AT.ts_event
    assert subjects_of(payload, "json", None) == [Subject("V:S", expected)]


def test_the_key_is_the_last_resort() -> None:
    assert subjects_of(b"\xff", "json", b"V:S") == [Subject("V:S", 0)]
    assert subjects_of(b"\xff", "avro", b"V:S") == [Subject("V:S", 0)]
    assert subjects_of(b"", "json", None) == []


@given(payload=st.binary(max_size=60), key=st.none() | st.binary(max_size=8))
def test_nothing_makes_it_fail(payload: bytes, key: bytes | None) -> None:
    for encoding in ("json", "msgpack", "?"):
        for text in (payload, json.dumps(WHOLE).encode()[:50] + payload):
            assert all(isinstance(each, Subject) for each in subjects_of(text, encoding, key))
