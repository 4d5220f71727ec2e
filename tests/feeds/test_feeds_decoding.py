"""Everything a decoder raises becomes one documented error."""

from functools import partial

import msgspec
import pytest

from feeds.decoding import MAX_DECODING_CHARS, Undecodable, decoded

DEEP = 100_000
TO_INT = partial(msgspec.json.decode, type=int)


@pytest.mark.parametrize(
    ("decode", "payload", "part"),
    [
        (msgspec.msgpack.decode, b"", "truncated"),
        (msgspec.msgpack.decode, b"\xa3\xff\xfe\xfd", "utf-8"),
        (msgspec.msgpack.decode, b"\x91" * DEEP, "recursion"),
        (msgspec.json.decode, b"{", "truncated"),
        (msgspec.json.decode, b'"\xff"', "utf-8"),
        (msgspec.json.decode, b"[" * DEEP, "recursion"),
    ],
)
def test_what_is_no_encoding_at_all_cannot_be_decoded(decode, payload, part):
    with pytest.raises(Undecodable, match=part) as raised:
        decoded(decode, payload)
    assert not raised.value.readable


@pytest.mark.parametrize("payload", [b'"one"', b"1" * 5000, b"1.5"])
def test_a_value_of_another_type_is_readable(payload):
    with pytest.raises(Undecodable) as raised:
        decoded(TO_INT, payload)
    assert raised.value.readable


def test_the_reason_is_short_however_much_was_sent():
    class Known(msgspec.Struct, forbid_unknown_fields=True):
        pass

    with pytest.raises(Undecodable, match=r"\(\d+ characters\) x+`") as raised:
        decoded(partial(msgspec.json.decode, type=Known), b'{"%s": 1}' % (b"x" * 900_000))
    assert len(str(raised.value)) < MAX_DECODING_CHARS + 40


def test_what_can_be_decoded_is_passed_on():
    assert decoded(TO_INT, b"7") == 7
