"""The text that is stored beside offsets, and texts that somebody else wrote."""

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from daemon.commit_metadata import MAX_BYTES, StoredProgress, pack, unpack
from daemon.progress import Position, Progress, WindowStart
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
)
standings = st.dictionaries(st.text(max_size=64), progress, max_size=8)


@given(numbers, standings)
def test_what_fits_comes_back(epoch: int, sessions: dict[str, Progress]) -> None:
    packed = pack(epoch, sessions)
    assert len(packed.text) <= MAX_BYTES
    assert packed.text.isascii()
    kept = {name: each for name, each in sessions.items() if name not in packed.excluded}
    bare = {name: replace(each, window=WindowStart()) for name, each in kept.items()}
    found = unpack(packed.text)
    assert found == StoredProgress(epoch, kept) or found == StoredProgress(epoch, bare)
    # where windows begin is told first of what may be left out
    if found.sessions != kept:
        assert len(pack(epoch, sessions, 1 << 24).text) > MAX_BYTES


@given(numbers, standings, st.integers(200, 700))
def test_no_further_session_would_fit(epoch: int, sessions: dict[str, Progress], most: int) -> None:
    packed = pack(epoch, sessions, most)
    left = packed.excluded
    if left:
        more = {
            name: replace(each, window=WindowStart())
            for name, each in sessions.items()
            if name not in left[1:]
        }
        assert len(packed.text) <= most < len(pack(epoch, more, 1 << 20).text)


def test_seventy_sessions_of_one_symbol_fit_and_three_hundred_do_not() -> None:
    opened = 1_723_161_255_000_000_000
    every = {
        f"session-{n}": Progress(
            *(7, 40_000 + n * 977, 250_000 + n * 7919, (opened + n * 10**9,)),
            WindowStart(n * 69_069 % 2**32, (Position("", "md.trades.v1", 3, 17_000_000 + n * 104_729),)),
        )
        for n in range(300)
    }
    packed = pack(7, every)
    assert len(packed.text) <= MAX_BYTES
    assert 70 <= 300 - len(packed.excluded) < 300
    assert not any(each.window.firsts for each in unpack(packed.text).sessions.values())
    hundred = dict(list(every.items())[:100])
    assert unpack(pack(7, hundred).text).sessions == hundred, "with where their windows begin"


@given(st.text() | st.binary().map(lambda data: "foretick1:" + base64.b85encode(data).decode()))
def test_a_foreign_text_is_refused(text: str) -> None:
    if text:
        with pytest.raises(Undecodable):
            unpack(text)
    else:
        assert unpack(text) == StoredProgress()


@given(standings, st.data())
def test_a_damaged_text_is_refused(sessions: dict[str, Progress], data: st.DataObject) -> None:
    text = pack(3, sessions).text
    place = data.draw(st.integers(0, len(text) - 1))
    cut = data.draw(st.booleans())
    damaged = text[:place] if cut else text[:place] + data.draw(st.characters()) + text[place + 1 :]
    if damaged not in (text, ""):
        with pytest.raises(Undecodable):
            unpack(damaged)


def test_a_text_that_unpacks_to_too_much_is_refused() -> None:
    packed = zlib.compress(b"\0" * (1 << 23))
    data = zlib.crc32(packed).to_bytes(4) + packed
    with pytest.raises(Undecodable, match="cut off"):
        unpack("foretick1:" + base64.b85encode(data).decode())
