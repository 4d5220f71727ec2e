"""Whatever a file holds: it is read, refused line by line, or refused as a whole with a message."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.batch_body import BodyFormat, convert
from feeds.codec import check_record
from feeds.file_format import FormatError
from tests.feeds.declared import BARS, TRADES, declared, read

ZONED = TRADES.replace('"iso"', '"iso", zone = "America/New_York"')
EACH = TRADES.replace('"csv"', '"jsonl"').replace(
    'symbol = "S"', 'symbol = "S"\neach = "$.d"\nsigned = "size"'
)
FORMS = {
    "zoned": ZONED,
    "newest": f'order = "newest_first"\n{ZONED}',
    "lines": f"max_field_lines = 3\nragged = true\n{TRADES}",
    "notation": f'decimal = ","\nthousands = "."\nnull = [""]\n{TRADES}',
    "utf-16": f'encoding = "utf-16-le"\n{TRADES}',
    "ready": BARS.replace("interval", 'ready = "last"\nstamp = "close"\ninterval'),
    "json": ZONED.replace('"csv"', '"jsonl"'),
    "each": EACH,
    "capture": TRADES.replace('"csv"', '"jsonl-capture"'),
}
PIECES = st.sampled_from(
    [
        b"time,price,size,id\n",
        b"time,open,high,low,close,volume\n",
        b"2024-11-03T01:30:00",
        b"1",
        b"-1.5",
        b"7e-5",
        b",",
        b'"',
        b"\n",
        b"\r",
        b";",
        b"\xff",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\0",
        b"1709632800123456789 ",
        b'{"time":"2024-11-03T01:10:00","price":1,"size":2,"id":"3"}\n',
        b'{"d":[{"time":"',
        b"null",
        b"[[",
        b"1e999",
        b"\xed\xb3\xbf",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"9" * 500,
    ]
)
CONTENT = st.lists(PIECES | st.binary(max_size=6), max_size=40).map(b"".join)


@pytest.mark.parametrize("name", sorted(FORMS))
@given(content=CONTENT)
@example(content=b"time,price,size,id\n" * 3)
@example(content=b"")
@example(content=b'time,price,size,id\n2024-11-03T01:30:00,1,1,1\n2024-11-03T01:30:00,"')
def test_any_bytes_are_read_or_refused(name: str, content: bytes) -> None:
    try:
        found = read(FORMS[name], content)
    except FormatError:
        with pytest.raises(FormatError) as refused:
            convert(content, BodyFormat(declared(FORMS[name])), None, most=1000, now_ns=0)
        assert 0 < len(str(refused.value)) < 700
        return
    for record in found.records:
        check_record(record)
    assert all(len(message) <= 410 for _, _, message in found.bad)
    assert [record.seq for record in found.records] == list(range(1, len(found.records) + 1))
    body = convert(content, BodyFormat(declared(FORMS[name])), None, most=1000, now_ns=0)
    assert (body.usable, len(body.faults)) == (len(found.records), len(found.bad))
