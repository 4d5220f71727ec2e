"""A file as a source: order, pace, pause and stop, on a clock that the test controls."""

import asyncio
from pathlib import Path

import pytest

from feeds.codec import decode_record, header_encoding
from feeds.file_format import load_format
from feeds.market_data import Quote
from feeds.replay_source import ReplaySource
from feeds.source import ConnectionState, Incoming, Source

SECOND = 10**9
FIRST = 1_577_916_000_000_000_000


class Clock:
    """A clock that advances only while someone sleeps on it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def ticks(tmp_path: Path) -> Path:
    path = tmp_path / "ticks.csv"
    stamps = ["170000000", "170000000", "170001000", "170003500", "170003000"]
    path.write_text(
        "".join(f"20200101 {stamp},1.{n},2.{n},0\n" for n, stamp in enumerate(stamps, 1)) + "junk\n"
    )
    return path


def source(path: Path, clock: Clock, speed: float, **options: object) -> ReplaySource:
    return ReplaySource(
        *("tape", path, load_format("histdata_quotes"), speed),
        monotonic_s=clock.monotonic,
        sleep=clock.sleep,
        clock_ns=lambda: int(clock.now * SECOND),
        **options,  # type: ignore[arg-type]  # passed on
    )


def read(batch: list[Incoming]) -> list[Incoming]:
    """The records of a batch, without what stands for lines that are none."""
    return [message for message in batch if message.fault is None]


@pytest.mark.parametrize("speed", [1.0, 2.0])
async def test_records_come_when_their_event_time_is_due(ticks: Path, speed: float) -> None:
    clock = Clock()
    tape = source(ticks, clock, speed)
    await tape.start()
    due = [(m.offset, m.ts_recv_ns / SECOND - 100) async for batch in tape.batches() for m in read(batch)]
    assert [offset for offset, _ in due] == [
        0,
        1,
        2,
        3,
        4,
    ]  # file order, though the last two are out of time order
    for (_, when), expected in zip(due, [0, 0, 1, 3.5, 3.5], strict=True):
        assert when == pytest.approx(expected / speed, abs=1e-6)
    assert max(clock.naps) <= 0.2


async def test_speed_zero_never_waits_and_payloads_decode_as_live_ones(ticks: Path) -> None:
    clock = Clock()
    tape = source(ticks, clock, 0, max_records=2)
    assert isinstance(tape, Source)
    await tape.start()
    batches = [read(batch) async for batch in tape.batches()]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert sum(clock.naps) == 0
    message = batches[1][0]
    assert (message.topic, message.partition, message.offset) == ("ticks.csv", 0, 2)
    assert (message.key, message.headers["seq"]) == (b"HISTDATA:EURUSD", b"3")
    assert message.headers["replay"] == b"1"
    quote = decode_record(message.payload, header_encoding(message.headers))
    assert isinstance(quote, Quote)
    assert (str(quote.bid), quote.ts_event, quote.seq) == ("1.3", FIRST + SECOND, 3)
    assert (tape.malformed_lines, tape.lost) == (1, 0)


async def test_a_range_keeps_the_offsets_of_the_whole_file(ticks: Path) -> None:
    tape = source(ticks, Clock(), 0, from_ns=FIRST + SECOND, until_ns=FIRST + 3 * SECOND)
    await tape.start()
    assert [m.offset async for batch in tape.batches() for m in read(batch)] == [2]


async def test_a_paused_replay_waits_until_it_is_resumed(ticks: Path) -> None:
    tape = source(ticks, Clock(), 0, max_records=1)
    await tape.start()
    batches = tape.batches()
    assert read(await anext(batches))[0].offset == 0
    tape.pause()
    following = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0.05)
    assert not following.done()
    tape.resume()
    assert (await following)[0].offset == 1
    await batches.aclose()


async def test_stop_ends_a_replay_that_waits(ticks: Path) -> None:
    tape = ReplaySource("tape", ticks, load_format("histdata_quotes"), 0.001)
    await tape.start()
    batches = tape.batches()
    assert len(read(await anext(batches))) == 2
    rest = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0.02)
    assert not rest.done()
    await tape.stop()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(rest, 60)
    assert tape.state is ConnectionState.STOPPED


async def test_a_missing_file_and_a_negative_speed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await source(tmp_path / "none.csv", Clock(), 0).start()
    with pytest.raises(ValueError, match="speed"):
        source(tmp_path / "none.csv", Clock(), -1)
