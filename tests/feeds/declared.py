"""Texts read in formats that a test declares."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from feeds.batch_body import Body, BodyFormat, convert
from feeds.codec import MalformedRecord
from feeds.file_format import FileFormat, load_format, names
from feeds.market_data import AnyRecord, Bar, Quote, Trade
from feeds.recorded_file import read_records, read_text

TRADES = """
container = "csv"
[[records]]
kind = "trade"
venue = "T"
symbol = "S"
time = { field = "time", format = "iso" }
fields = { price = "price", size = "size", id = "id" }
"""
BARS = """
container = "csv"
[[records]]
kind = "bar"
venue = "T"
symbol = "S"
interval = "1m"
time = { field = "time", format = "iso" }
fields = { open = "open", high = "high", low = "low", close = "close", volume = "volume" }
"""
MINUTE = 60 * 10**9
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def ns(moment: datetime) -> int:
    """Since the epoch."""
    return (moment - EPOCH) // timedelta(microseconds=1) * 1000


def exact(value: int) -> Decimal:
    """A number in units of 1e-18."""
    return Decimal(value).scaleb(-18)


@dataclass
class Read:
    """What a text gave: records, refused lines with reason and message, skipped lines by name, notices."""

    records: list[AnyRecord] = field(default_factory=list)
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    """Symbol and time of each refused line."""
    skipped: Counter[str] = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)

    @property
    def trades(self) -> list[Trade]:
        return [each for each in self.records if isinstance(each, Trade)]

    @property
    def quotes(self) -> list[Quote]:
        return [each for each in self.records if isinstance(each, Quote)]

    @property
    def bars(self) -> list[Bar]:
        return [each for each in self.records if isinstance(each, Bar)]

    @property
    def refused(self) -> list[tuple[int, str]]:
        return [(line, reason) for line, reason, _ in self.bad]

    def refuse(self, line: int, error: MalformedRecord) -> None:
        self.bad.append((line, error.reason, error.message))
        self.places.append((error.key, error.ts_event))

    def skip(self, _line: int, name: str) -> None:
        self.skipped[name] += 1


def declared(text: str) -> FileFormat:
    """The format of a declaration, or the built-in one of a name."""
    if text in names():
        return load_format(text)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "made.toml"
        path.write_text(f'description = "made up"\n{text}')
        return load_format(path)


def with_symbols(form: str, column: str = "s") -> str:
    """The same format of trades, in a file that names each one's symbol."""
    return form.replace('symbol = "S"\n', "").replace("price =", f'symbol = "{column}", price =')


def read(form: str, content: str | bytes) -> Read:
    """A text in a format, as a file of its own."""
    found = Read()
    data = content.encode() if isinstance(content, str) else content
    text = read_text(
        BytesIO(data), declared(form), None, found.refuse, found.skip, on_notice=found.notices.append
    )
    found.records.extend(text)
    return found


def read_file(form: str, path: Path, **options: Any) -> Read:
    """A file in a format. ``options``: those of `read_records`."""
    found = Read()
    records = read_records(
        path,
        declared(form),
        on_malformed=found.refuse,
        on_passed_over=found.skip,
        on_notice=found.notices.append,
        **options,
    )
    found.records.extend(records)
    return found


def pushed(form: str, content: str) -> Body:
    """A body over HTTP in a format."""
    return convert(content.encode(), BodyFormat(declared(form)), None, most=10**6, now_ns=0)
