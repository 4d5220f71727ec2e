"""A file held against its format before the first record: header, encoding, container, quoted fields."""

import bz2
import csv
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds import text_lines
from feeds.connectors.replay import ReplayConnector
from feeds.containers import CorruptFile, texts
from feeds.file_format import FormatError
from feeds.recorded_file import MAX_MESSAGE
from feeds.zstd import zstd
from tests.feeds.declared import BARS, TRADES, declared, pushed, read, read_file, with_symbols

HEADER = "time,price,size,id"
ROWS = [f"2024-03-05T10:{minute:02}:00Z,{100 + minute},1,{minute}" for minute in range(60)]
TEXT = "\n".join([HEADER, *ROWS, ""])
ONE = f"{HEADER}\n{ROWS[0]}\n"


def form(*lines: str) -> str:
    return "\n".join([*lines, TRADES])


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("time,price,price,size,id", "two columns 'price'"),
        ("time,price,id", "no column 'size'"),
        ("when,price,qty,id", "no column 'size', 'time'.*it has 'when', 'price', 'qty', 'id'"),
        ("time;price;size;id", "Declare delimiter = ';'"),
        (r"time	price	size	id", r"Declare delimiter = '\\t'"),
        ("Instrument X,,,\nexported,,,\n\n" + HEADER, "The header is line 4: declare skip_lines = 3"),
        ("sep=,\n" + HEADER, "The header is line 2: declare skip_lines = 1"),
        (ROWS[0], "declare header = false"),
        ('"time,price,size,id', "header .line 1. cannot be read: a quotation mark is not closed"),
        ("x" * 5000, "no column"),
    ],
)
def test_a_header_that_is_not_as_declared_is_an_error_that_names_it(header: str, says: str) -> None:
    for content in (f"{header}\n{ROWS[1]}\n", f"\ufeff{header}\n"):
        with pytest.raises(FormatError, match=says) as refused:
            read(form(), content)
        assert len(str(refused.value)) < 500
    with pytest.raises(FormatError, match=says):
        pushed(form(), f"{header}\n{ROWS[1]}\n")


def test_columns_that_the_format_does_not_use_are_named(tmp_path: Path) -> None:
    """Also twice: nothing is read from them."""
    path = tmp_path / "t.csv"
    path.write_text(f"note,{HEADER},note,,x\n" + "".join(f"a,{row},b,,c\n" for row in ROWS))
    found = read_file(form(), path)
    assert (len(found.records), found.bad) == (60, [])
    assert found.notices == ["3 columns that the format does not use: 'note', 'note', 'x'"]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_columns_may_stand_in_any_order(order: list[int]) -> None:
    content = "\n".join(",".join(line.split(",")[at] for at in order) for line in TEXT.split()) + "\n"
    assert read(form(), content).records == read(form(), TEXT).records


def test_an_index_beyond_the_rows_is_missing_in_each() -> None:
    """Though the field is optional, and there are words for no value."""
    bars = """
    container = "csv"
    header = false
    null = [""]
    [[records]]
    kind = "bar"
    venue = "T"
    symbol = "S"
    interval = "1m"
    time = { field = 0, format = "epoch-s" }
    fields = { open = 1, high = 1, low = 1, close = 1, volume = 2 }
    """
    rows = "1709632800,1\n1709632860,1\n"
    assert read(bars, rows).refused == [(1, "missing_field"), (2, "missing_field")]
    assert len(read(bars, rows.replace(",1", ",1,")).records) == 2


def test_an_index_beyond_the_header_is_an_error() -> None:
    with pytest.raises(FormatError, match="4 columns"):
        read(form().replace('price = "price"', "price = 7"), TEXT)


@given(st.integers(0, 59), st.sampled_from(["cut", "more", "comma", "all"]))
def test_a_row_of_another_width_is_malformed(at: int, how: str) -> None:
    rows = list(ROWS)
    changed = {
        "cut": rows[at].rpartition(",")[0],
        "more": f"{rows[at]},x",
        "comma": rows[at].replace(",1", ",1,0", 1),
    }
    rows[at] = changed.get(how, "x")
    if how == "more" and at == 0:
        rows[at] += "y"
    found = read(form(), "\n".join([HEADER, *rows, ""]))
    assert found.refused == [(at + 2, "type")]
    assert len(found.records) == 59
    bare = form("header = false")
    for number, name in enumerate(HEADER.split(",")):
        bare = bare.replace(f'"{name}"', str(number))
    if at:
        assert [line for line, _ in read(bare, "\n".join([*rows, ""])).refused] == [at + 1]


def test_rows_may_all_end_with_a_delimiter_or_be_ragged() -> None:
    ended = "\n".join([HEADER, *(f"{row}," for row in ROWS), ""])
    assert read(form(), ended).records == read(form(), TEXT).records
    ragged = f"{HEADER}\n{ROWS[0]},x,y\n{ROWS[1].rpartition(',')[0]}\n2024-03-05T10:02:00Z,1\n"
    assert read(form("ragged = true"), ragged).refused == [(4, "missing_field")]
    assert read(form(), ragged).refused == [(2, "type"), (3, "type"), (4, "type")]


@given(st.integers(0, 59), st.integers(0, 30), st.integers(1, 3))
def test_a_stray_quotation_mark_costs_one_line_at_most(at: int, place: int, lines: int) -> None:
    rows = list(ROWS)
    rows[at] = f'{rows[at][:place]}"{rows[at][place:]}'
    found = read(form(f"max_field_lines = {lines}"), "\n".join([HEADER, *rows, ""]))
    assert [line for line, _ in found.refused] in ([], [at + 2])
    kept = {each.ts_event for each in found.records}
    assert kept >= {each.ts_event for n, each in enumerate(read(form(), TEXT).records) if n != at}
    if found.bad:
        assert len(found.records) == 59


CELLS = st.text("ab\",;'\n\r \u00e9", max_size=6)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12))
def test_quoted_fields_over_lines_are_read_as_csv_writes_them(notes: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["note", "id", "time", "price", "size"])
    for before, after in notes:
        writer.writerow([before, after, "2024-03-05T10:00:00Z", "1", "1"])
    found = read(form("max_field_lines = 20"), out.getvalue())
    assert found.bad == []
    assert [each.id for each in found.trades] == [after.strip() for _, after in notes]
    broken = [any(end in cell for cell in each for end in "\n\r") for each in notes]
    strict = read(form(), out.getvalue())
    assert len(strict.records) >= broken.count(False)
    assert len(strict.bad) >= broken.count(True)


ENCODINGS = ["utf-8-sig", "utf-16", "utf-32"]
NAMED = with_symbols(TRADES, "id")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_byte_order_mark_says_the_encoding(encoding: str) -> None:
    text = ONE.replace(",0\n", ",Zürich\n")
    (trade,) = read(NAMED, text.encode(encoding)).records
    assert trade.symbol == "Zürich"
    (again,) = read(f'encoding = "latin-1"\n{NAMED}', text.encode(encoding)).records
    assert again == trade


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-le", "utf-16-be", "gb18030"])
def test_other_encodings_are_declared(encoding: str) -> None:
    text = ONE.replace(",0\n", ",Zürich\n").encode(encoding)
    (trade,) = read(f'encoding = "{encoding}"\n{NAMED}', text).records
    assert trade.symbol == "Zürich"


@pytest.mark.parametrize(
    ("encoding", "says"), [("utf-16-le", "looks like utf-16-le"), ("utf-16-be", "utf-16-be")]
)
def test_utf_16_without_a_mark_is_named(encoding: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        read(form(), TEXT.encode(encoding))


@given(st.integers(0, 59), st.binary(min_size=1, max_size=4))
def test_what_cannot_be_decoded_costs_its_line(at: int, junk: bytes) -> None:
    junk = bytes(byte | 0x80 for byte in junk) + b"\xff"
    rows = [row.encode() for row in ROWS]
    rows[at] = rows[at][:15] + junk + rows[at][15:]
    found = read(form(), b"\n".join([HEADER.encode(), *rows, b""]))
    assert found.refused == [(at + 2, "encoding")]
    assert len(found.records) == 59
    assert "the line is not utf-8" in found.bad[0][2]


@pytest.mark.parametrize("encoding", ["utf-99", "hex", "rot13", "zlib", "undefined"])
def test_an_encoding_that_is_none_is_refused(encoding: str) -> None:
    with pytest.raises(FormatError, match="encoding"):
        declared(form(f'encoding = "{encoding}"'))


def test_line_ends_of_any_kind() -> None:
    for end in ("\n", "\r\n", "\r"):
        assert read(form(), TEXT.replace("\n", end)).records == read(form(), TEXT).records
        assert read(form(), TEXT.replace("\n", end).rstrip()).records == read(form(), TEXT).records


def test_lines_before_the_header_are_skipped() -> None:
    assert read(form("skip_lines = 2"), f"a\nb,c\n{TEXT}").records == read(form(), TEXT).records
    with pytest.raises(FormatError, match="skip_lines"):
        declared(form("skip_lines = -1"))


MAGIC = {
    "xz": lzma.compress(b"x"),
    "bzip2": bz2.compress(b"x"),
    "7z": b"7z\xbc\xaf\x27\x1c\0\4",
    "parquet": b"PAR1\x15\x04",
    "lz4": b"\x04\x22\x4d\x18d",
    "an archive in an archive": b"",
    "a tar archive": b"",
}


@pytest.mark.parametrize("kind", sorted(MAGIC))
def test_known_files_that_are_not_read_are_named(tmp_path: Path, kind: str) -> None:
    path, content = tmp_path / "data.bin", io.BytesIO(MAGIC[kind])
    if kind == "a tar archive":
        with tarfile.open(fileobj=content, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("t.csv"))
    if kind == "an archive in an archive":
        inner = io.BytesIO()
        zipfile.ZipFile(inner, "w").close()
        with zipfile.ZipFile(content, "w") as outer:
            outer.writestr("inner.zip", inner.getvalue())
    path.write_bytes(content.getvalue())
    with pytest.raises(CorruptFile, match=f"{kind}"):
        list(texts(path))
    found = read_file(form(), path)
    assert [(line, reason) for line, reason, _ in found.bad] == [(0, "type")]


@pytest.mark.parametrize("symbol", ["PK", "PKG", "PKX", "PKR/USD", "BZh9", "PAR1", "Rar!", "7z", "ARROW1"])
def test_a_ticker_is_no_container(tmp_path: Path, symbol: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{symbol},2024-03-05T14:30:00Z,181.25,100\n{symbol},2024-03-05T14:31:00Z,181.30,100\n")
    text = """
    container = "csv"
    header = false
    [[records]]
    kind = "trade"
    venue = "T"
    time = { field = 1, format = "iso" }
    fields = { symbol = 0, price = 2, size = 3 }
    """
    assert [each.symbol for each in read_file(text, path).records] == [symbol, symbol]


@pytest.mark.parametrize(
    "pack",
    [gzip.compress, zstd.compress, lambda text: b"\x50\x2a\x4d\x18\1\0\0\0x" + zstd.compress(text)],
)
def test_members_may_be_packed_themselves(tmp_path: Path, pack: object) -> None:
    packed = pack(TEXT.encode())  # type: ignore[operator]  # bytes to bytes
    alone, inside = tmp_path / "t", tmp_path / "t.zip"
    alone.write_bytes(packed)
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("t.csv", packed)
    assert read_file(form(), alone).records == read_file(form(), inside).records == read(form(), TEXT).records


def archived(folder: Path, members: Mapping[str, str | bytes]) -> Path:
    path = folder / "t.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_each_member_of_an_archive_has_its_header(tmp_path: Path) -> None:
    other = "\n".join(",".join(reversed(line.split(","))) for line in TEXT.split())
    path = archived(tmp_path, {"a.csv": TEXT, "__MACOSX/._a.csv": "\0", ".DS_Store": "\0", "b.csv": other})
    found = read_file(form(), path)
    assert (len(found.records), found.bad) == (120, [])
    assert [each.seq for each in found.records] == list(range(1, 121))
    assert found.notices == ["2 files of the archive are skipped: __MACOSX/._a.csv, .DS_Store"]


def test_a_member_without_the_header_is_an_error_before_the_first_record(tmp_path: Path) -> None:
    path = archived(tmp_path, {"a.csv": TEXT, "README.txt": "Terms\n"})
    with pytest.raises(FormatError, match=r"README.txt.* column 'id'"):
        next(iter(read_file(form(), path).records))
    found = read_file(form('members = "*.csv"'), path)
    assert len(found.records) == 60
    assert found.notices == ["1 files of the archive are skipped: README.txt"]


def test_messages_show_little_of_a_long_line() -> None:
    long = "9" * 100_000
    for line in (f"{long},1,1,1", f'"{long}', long, f"2024-03-05T10:00Z,{long},1,1"):
        content = f"{HEADER}\n{line}\n"
        found = read(form(), content)
        assert len(found.bad) == 1
        assert len(found.bad[0][2]) <= MAX_MESSAGE
        assert found.bad[0][2].count("9") <= 200
    lines = 'container = "jsonl"\n' + TRADES.replace('container = "csv"\n', "")
    for content in (f'{{"time":"{long}","price":1,"size":1}}\n', f'{{"x":"{long}"\n', f"{long}\n"):
        found = read(lines, content)
        assert len(found.bad) == 1
        assert found.bad[0][2].count("9") <= 200


def test_date_and_time_in_two_members() -> None:
    bars = BARS.replace(
        '{ field = "time", format = "iso" }', '{ field = ["date", "clock"], format = "%Y.%m.%d %H:%M" }'
    )
    lines = bars.replace('container = "csv"', 'container = "jsonl"')
    row = '{"date":"2024.03.05","clock":"10:00","open":1,"high":1,"low":1,"close":1,"volume":0}\n'
    assert [bar.ts_event for bar in read(lines, row).bars] == [1_709_632_800_000_000_000]
    assert read(lines, row.replace("clock", "x")).refused == [(1, "missing_field")]
    assert pushed(bars, "date,clock,open,high,low,close,volume\n2024.03.05,10:01,1,2,1,2,1\n").usable == 1
    with pytest.raises(FormatError, match=r"time.field: missing"):
        declared(bars.replace('["date", "clock"]', "[]"))


def test_check_looks_at_the_file(tmp_path: Path) -> None:
    path, made = tmp_path / "t.csv", tmp_path / "t.toml"
    made.write_text(f'description = "made up"\n{TRADES}')
    path.write_text(TEXT.replace("size", "qty"))
    wrong = [each for each in ReplayConnector(file=str(path), format=str(made)).check() if not each.ok]
    assert [(each.key, "no column 'size'" in each.message) for each in wrong] == [("file", True)]
    path.write_text(TEXT)
    assert all(each.ok for each in ReplayConnector(file=str(path), format=str(made)).check())


@given(st.integers(0, 60), st.sampled_from([gzip.compress, zstd.compress]), st.booleans())
def test_what_precedes_a_damage_is_read(lost: int, pack: object, inside: bool) -> None:
    """Also of a file that is so short that its beginning is damaged."""
    packed = pack(TEXT.encode())  # type: ignore[operator]  # bytes to bytes
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        path.write_bytes(packed[: len(packed) - lost])
        if inside:
            path = archived(Path(folder), {"t.csv": path.read_bytes()})
        found = read_file(form(), path)
    assert [line for line, _ in found.refused if not line] == [0] * (lost > 0)
    assert found.records == read(form(), TEXT).records[: len(found.records)]
    if pack is gzip.compress and lost < 12:
        assert len(found.records) >= 50


def test_a_line_without_end_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lines, "MAX_LINE", 100)
    for length in (99, 100, 101, 200, 1000):
        rows = [ROWS[0], "x" * length, ROWS[1], ""]
        found = read(form(), "\n".join([HEADER, *rows]))
        assert found.refused == [(3, "type" if length < 100 else "oversize")]
        assert len(found.records) == 2


def test_a_line_without_a_readable_time_is_as_old_as_the_record_before_it() -> None:
    rows = [*ROWS[:20], "x", *ROWS[20:40], '"', ""]
    found = read(form(), "\n".join([HEADER, *rows]))
    times = [each.ts_event for each in read(form(), TEXT).records]
    assert found.places == [("T:S", times[19]), ("T:S", times[39])]
