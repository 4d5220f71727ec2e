"""Files that users of other tools reported as read wrongly, each with what is right."""

from decimal import Decimal

from tests.feeds.declared import BARS, MINUTE, TRADES, Read, exact, read

TEN = 1_709_632_800_000_000_000
"""2024-03-05T10:00Z."""
LINES = TRADES.replace('container = "csv"', 'container = "jsonl"')


def closes(found: Read) -> list[tuple[int, Decimal]]:
    return [((bar.ts_event - TEN) // MINUTE, exact(bar.close)) for bar in found.bars]


def test_close_stamps_of_999_ms() -> None:
    form = BARS.replace('interval = "1m"', 'interval = "1m"\nstamp = "close"').replace("iso", "epoch-ms")
    header = "time,open,high,low,close,volume\n"
    found = read(form, f"{header}1709632859999,1,2,1,2,1\n1709632919999,2,3,2,3,1\n")
    assert [bar.ts_event for bar in found.bars] == [TEN, TEN + MINUTE]


def test_a_file_newest_first() -> None:
    rows = [f"2024-03-05T{10 + n // 60}:{n % 60:02}:00Z,1,2,1,{1 + n / 1000:.3f},5" for n in range(120)]
    found = read(BARS, "\n".join(["time,open,high,low,close,volume", *rows[::-1], ""]))
    assert closes(found) == [(n, Decimal(1000 + n) / 1000) for n in range(120)]


def test_nanoseconds_are_not_cut() -> None:
    stamps = ("00.000000900", "00.000000100", "30.000000100")
    rows = "".join(f"2024-03-05T10:00:{stamp}Z,1,1,1\n" for stamp in stamps)
    found = read(TRADES, f"time,price,size,id\n{rows}")
    assert [each.ts_event - TEN for each in found.records] == [900, 100, 30 * 10**9 + 100]
    pattern = TRADES.replace("iso", "%Y-%m-%dT%H:%M:%S.%fZ")
    assert read(pattern, f"time,price,size,id\n{rows}").records == found.records


def test_numbers_in_scientific_notation() -> None:
    form = LINES.replace('"time"', '"timestamp"').replace("iso", "epoch-ms")
    text = '{"timestamp":1709632801000,"price":7.12e-05,"size":100.0,"id":"1"}\n'
    text += '{"timestamp":1709632802000,"price":0.0000713,"size":1e3,"id":"2"}\n'
    found = read(form, text)
    assert [(exact(each.price), exact(each.size)) for each in found.trades] == [
        (Decimal("0.0000712"), Decimal(100)),
        (Decimal("0.0000713"), Decimal(1000)),
    ]


def test_signed_sizes() -> None:
    form = """
    container = "jsonl"
    [[records]]
    kind = "trade"
    venue = "T"
    symbol = "S"
    each = "t"
    signed = "size"
    time = { field = "1", format = "epoch-ms" }
    fields = { id = "0", size = "2", price = "3" }
    """
    text = '{"t":[[1,1709632800100,2.5,100.1],[2,1709632801100,-1.5,100.0],[3,1709632802100,-4,99.9]]}\n'
    found = read(form, text)
    assert [(exact(each.size), each.side) for each in found.trades] == [
        (Decimal("2.5"), "buy"),
        (Decimal("1.5"), "sell"),
        (Decimal(4), "sell"),
    ]


def test_date_and_time_in_two_columns() -> None:
    form = """
    container = "csv"
    header = false
    [[records]]
    kind = "bar"
    venue = "T"
    symbol = "S"
    interval = "1m"
    time = { field = [0, 1], format = "%Y.%m.%d %H:%M" }
    fields = { open = 2, high = 3, low = 4, close = 5, volume = 6 }
    """
    rows = [f"2024.03.05,10:{n:02},1.0810,1.0910,1.0710,1.08{n:02},30" for n in range(60)]
    assert closes(read(form, "\n".join(rows))) == [(n, Decimal(f"1.08{n:02}")) for n in range(60)]


def test_one_stray_quotation_mark() -> None:
    rows = [f"2024-03-05T10:{n:02}:00Z,1,2,1,2,5" for n in range(60)]
    rows[20] = f'"{rows[20]}'
    found = read(BARS, "\n".join(["time,open,high,low,close,volume", *rows]))
    assert [minute for minute, _ in closes(found)] == [n for n in range(60) if n != 20]
    ((line, reason, message),) = found.bad
    assert (line, reason) == (22, "type")
    assert message.startswith(
        "a quotation mark is not closed within max_field_lines = 1: '\"2024-03-05T10:20:00Z"
    )


def test_unfinished_candles() -> None:
    form = BARS.replace('container = "csv"', 'container = "jsonl"').replace(
        "interval", 'ready = "last"\ninterval'
    )
    rows = [
        (0, 10, 10, 1),
        (0, "10.5", "10.4", 3),
        (0, "10.9", "10.2", 9),
        (1, "10.3", "10.2", 2),
        (1, 11, 11, 8),
    ]
    text = "".join(
        f'{{"time":"2024-03-05T10:0{minute}:00.000Z","open":"10","high":"{high}","low":"10","close":"{close}",'
        f'"volume":"{volume}"}}\n'
        for minute, high, close, volume in [*rows, (2, 11, 11, 1)]
    )
    found = read(form, text)
    assert [(exact(bar.high), exact(bar.close), exact(bar.volume)) for bar in found.bars] == [
        (Decimal("10.9"), Decimal("10.2"), Decimal(9)),
        (Decimal(11), Decimal(11), Decimal(8)),
        (Decimal(11), Decimal(11), Decimal(1)),
    ]
    assert found.skipped == {"unfinished_candles": 3}
