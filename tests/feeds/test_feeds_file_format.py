"""Declared formats: the built-in ones load, and a wrong declaration names its key."""

from pathlib import Path

import pytest

from feeds.file_format import FormatError, load_format, names

GOOD = """
description = "made up"
container = "csv"
[[records]]
kind = "trade"
venue = "V"
symbol = "S"
time = { field = "when", format = "epoch-ms" }
fields = { price = "p", size = "q" }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "made.toml"
    path.write_text(text)
    return path


def test_shipped_formats_load() -> None:
    shipped = ["binance_capture", "btc_perp_bars", "databento", "histdata_quotes", "sp500_bars"]
    assert names() == [*shipped, "tardis_trades"]
    for name in names():
        assert load_format(name).description


def test_a_file_of_ones_own_loads(tmp_path: Path) -> None:
    form = load_format(write(tmp_path, GOOD))
    assert form.records[0].fields == {"price": "p", "size": "q"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('venue = "V"', 'venu = "V"', "venu"),
        ('venue = "V"', "", r"records\[0\].venue: missing"),
        ('kind = "trade"', 'kind = "option"', r"records\[0\].kind"),
        ('kind = "trade"', 'kind = "bar"\ninterval = "1m"', r"fields.price: a bar has no such field"),
        ('price = "p", ', "", r"records\[0\].fields.price: missing"),
        ('price = "p"', 'prize = "p"', "fields.prize"),
        ('price = "p"', "price = 1.5", "fields"),
        ('price = "p"', "price = [1]", "fields"),
        ('container = "csv"', 'container = "csv"\nheader = false', "column name needs a header"),
        ('container = "csv"', 'container = "xlsx"', "container"),
        (
            'venue = "V"',
            'venue = "V"\nfloat_decimals = { price = 2 }',
            r"records\[0\].float_decimals: a csv file holds no binary floats",
        ),
        (
            'venue = "V"',
            'venue = "V"\nfloat_decimals = { price = 10 }',
            r"records\[0\].float_decimals.price: must be 0 to 9",
        ),
        ('container = "csv"', 'container = "csv"\ndelimiter = ";;"', "delimiter"),
        (
            '"epoch-ms"',
            '"unix"',
            r"0\].time: format: 'unix' leaves the unit open; declare one of epoch-s",
        ),
        ('"epoch-ms"', '"day"', r"'day' leaves the unit open; declare one of .*day-ms"),
        (', format = "epoch-ms"', "", r"records\[0\].time: format: '' leaves the unit open"),
        ('"epoch-ms"', '"sunrise"', r"records\[0\].time: 'sunrise'"),
        ('"epoch-ms"', '"epoch-ms", date = "%Y"', r"records\[0\].time.date: only day-s"),
        (
            'venue = "V"',
            'venue = "V"\nimplied_decimals = 19',
            r"0\].implied_decimals: must be 0 to 18",
        ),
        ('venue = "V"', 'venue = "V"\neach = "$"', r"records\[0\].each: a csv file has no arrays"),
        (
            'container = "csv"',
            'container = "csv"\nreceive = { separator = ":" }',
            "receive: only a jsonl-capture",
        ),
        (
            'container = "csv"',
            'container = "csv"\npassed_over = { other = { field = "x" } }',
            "passed_over.other",
        ),
        ('"epoch-ms"', '"iso", zone = "Mars/Olympus"', r"records\[0\].time: 'Mars/Olympus'"),
        (
            '"epoch-ms"',
            '"epoch-ms", zone = "Europe/Berlin"',
            r"records\[0\].time.zone: epoch-ms counts in UTC",
        ),
        ('"epoch-ms"', '"iso", zone = "EST"', r"records\[0\].time: 'EST' is not the same everywhere"),
        ('"epoch-ms"', '"iso", zones = { EST = "UTC-05:00" }', r"records\[0\].time.zones: only a pattern"),
        ('"epoch-ms"', '"%Y-%m-%d"', r"records\[0\].time: '%Y-%m-%d' has no time of the day"),
        (
            'field = "when", format = "epoch-ms"',
            'format = "receive"',
            r"records\[0\].time.format: only a jsonl-capture",
        ),
        ('field = "when", ', "", r"records\[0\].time.field: missing"),
        ('venue = "V"', 'venue = "V"\ninterval = "1m"', r"records\[0\].interval"),
        (
            'kind = "trade"',
            'kind = "bar"\ninterval = "1w"',
            r"expected a duration.*records\[0\].interval|records\[...\].interval",
        ),
        ('venue = "V"', 'venue = "V"\nrounded = ["volume"]', r"records\[0\].rounded: volume"),
        ("[[records]]", "[[records]", "made.toml"),
    ],
)
def test_a_wrong_declaration_names_its_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(FormatError, match=says):
        load_format(write(tmp_path, GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("receive", "says"),
    [
        ('{ format = "iso" }', r"receive.format: 'iso' is not one of epoch-s"),
        ('{ separator = "" }', r"receive.separator: missing"),
    ],
)
def test_a_receive_time_is_a_count_and_ends(tmp_path: Path, receive: str, says: str) -> None:
    text = GOOD.replace('"csv"', f'"jsonl-capture"\nreceive = {receive}')
    with pytest.raises(FormatError, match=says):
        load_format(write(tmp_path, text))


def test_a_column_index_needs_columns(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="needs a csv"):
        load_format(write(tmp_path, GOOD.replace('"csv"', '"jsonl"').replace('price = "p"', "price = 1")))


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(FormatError, match="binance_capture, btc_perp_bars"):
        load_format("nasdaq")


@pytest.mark.parametrize("text", ["a = " + "[" * 2000, "a = " + "{b = " * 2000])
def test_a_format_that_is_nested_too_deeply_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(FormatError, match="nested too deeply"):
        load_format(str(tmp_path / "deep.toml"))
