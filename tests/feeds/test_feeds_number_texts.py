"""Numbers as files write them, against `Decimal`."""

from decimal import Decimal, localcontext

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.file_format import FormatError
from tests.feeds.declared import declared, exact, pushed, read

FORM = """
container = "csv"
delimiter = "|"
header = false
{notation}
[[records]]
kind = "trade"
venue = "T"
symbol = "S"
{more}
time = {{ field = 0, format = "epoch-s" }}
fields = {{ price = 1, size = 2 }}
"""
PRICES = st.decimals("0.000000000001", "100000000", places=12)
SEPARATORS = st.sampled_from([",", ".", "'", " ", "_", "\u2019", ""])


def form(notation: str = "", more: str = "") -> str:
    return FORM.format(notation=notation, more=more)


def row(price: str, size: str = "1") -> str:
    return f"1709632800|{price}|{size}\n"


def grouped(number: Decimal, thousands: str, decimal: str) -> str:
    whole, _, fraction = f"{number:,f}".partition(".")
    return whole.replace(",", thousands) + (decimal + fraction if fraction else "")


@given(PRICES, SEPARATORS, st.sampled_from(".,"), st.booleans())
def test_declared_notation_is_read_exactly(
    number: Decimal, thousands: str, decimal: str, normal: bool
) -> None:
    if thousands == decimal:
        return
    number = number.normalize() if normal else number
    notation = f'decimal = "{decimal}"\nthousands = "{thousands}"'
    found = read(form(notation), row(grouped(number, thousands, decimal)))
    assert [exact(each.price) for each in found.trades] == [number]
    assert found.bad == []


@given(PRICES, st.sampled_from(["e", "E"]), st.integers(-6, 6), st.sampled_from(["", "+"]))
def test_exponents_need_no_declaration(number: Decimal, mark: str, shift: int, sign: str) -> None:
    text = f"{sign}{number.scaleb(-shift):f}{mark}{shift:+03}"
    found = read(form(), row(text))
    assert [exact(each.price) for each in found.trades] == [number]
    comma = read(form('decimal = ","'), row(text.replace(".", ",")))
    assert [exact(each.price) for each in comma.trades] == [number]


@pytest.mark.parametrize(
    ("text", "value"), [(".5", "0.5"), ("1.", "1"), ("+1", "1"), ("7.12e-05", "0.0000712"), ("1E3", "1000")]
)
def test_short_forms_are_numbers(text: str, value: str) -> None:
    assert exact(read(form(), row(text)).trades[0].price) == Decimal(value)


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        ('thousands = ","', "1,23"),
        ('thousands = ","', "1,2345"),
        ('thousands = ","', "1,234,"),
        ('thousands = ","', ",234"),
        ('thousands = ","', "1.234,5"),
        ('decimal = ","', "1.5"),
        ('decimal = ","\nthousands = "."', "1,5.0"),
        ('decimal = ","\nthousands = "."', "1.5"),
        ("", "1,5"),
        ("", "1_000"),
        ("", "١٢"),
        ("", "nan"),
        ("", "0x10"),
        ("", "1e"),
        ("", "1e400"),
        ("", "9" * 5000),
    ],
)
def test_what_is_no_number_in_this_notation_is_malformed(notation: str, text: str) -> None:
    found = read(form(notation), row(text))
    assert found.refused == [(1, "price")]
    assert found.records == []
    assert len(found.bad[0][2]) < 250


@given(st.integers(1, 10**22), st.integers(0, 18))
@example(10100000000000, 8)
def test_implied_decimals_shift_the_text(digits: int, places: int) -> None:
    """Before any limit: the number as it stands may be far beyond them."""
    found = read(form(more=f"implied_decimals = {places}"), row(str(digits)))
    value = Decimal(digits).scaleb(-places)
    if value <= 10**15:
        assert [exact(each.price) for each in found.trades] == [value]
    else:
        assert found.refused == [(1, "price")]


@given(st.decimals("0", "1e15", places=9), st.decimals("1e-9", "1e6", places=9))
@example(Decimal("0.000000001"), Decimal("1e-9"))
def test_sizes_are_multiplied_exactly(size: Decimal, times: Decimal) -> None:
    """And prices are not."""
    found = read(form(more=f"multiplier = '{times:f}'"), row("3.5", f"{size:f}"))
    with localcontext(prec=60):
        product = size * times
        sizes = [(exact(each.price), exact(each.size)) for each in found.trades]
    if product <= 10**15:
        assert sizes == [(Decimal("3.5"), product)]
    else:
        assert found.refused == [(1, "size")]


@given(st.decimals("-1000000", "1000000", places=6), st.sampled_from(["", "signed = 'size'"]))
def test_a_sign_may_be_the_side(size: Decimal, more: str) -> None:
    found = read(form(more=more), row("1", f"{size:f}"))
    if not more:
        negative = size < 0
        assert found.refused == ([(1, "size")] if negative else [])
        assert [each.side for each in found.trades] == ([] if negative else ["unknown"])
        return
    (trade,) = found.trades
    assert exact(trade.size) == abs(size)
    assert trade.side == ("sell" if size < 0 else "buy" if size > 0 else "unknown")


@pytest.mark.parametrize("zero", ["0", "-0", "0.0", "-0.000", "0e5"])
def test_a_size_of_zero_has_no_side(zero: str) -> None:
    (trade,) = read(form(more="signed = 'size'"), row("1", zero)).trades
    assert (trade.size, trade.side) == (0, "unknown")


NULLS = """
container = "{container}"
null = ["", "NA", "null"]
[[records]]
kind = "bar"
venue = "T"
symbol = "S"
interval = "1m"
time = {{ field = "t", format = "epoch-s" }}
fields = {{ open = "o", high = "o", low = "o", close = "o", volume = "v" }}
"""


@pytest.mark.parametrize("word", ["", "NA", "null"])
def test_words_for_no_value(word: str) -> None:
    """In an optional field it is absent, in a needed one missing."""
    found = read(
        NULLS.format(container="csv"), f"t,o,v\n1709632800,1,{word}\n1709632860,{word},1\n{word},1,1\n"
    )
    assert [(bar.open, bar.volume) for bar in found.bars] == [(10**18, 0)]
    assert found.refused == [(3, "missing_field"), (4, "missing_field")]
    plain = read(
        NULLS.format(container="csv").replace('"", "NA", "null"', ""), f"t,o,v\n1709632800,1,{word}\n"
    )
    assert plain.refused == [(2, "size")]


def test_null_of_json_is_such_a_word_where_there_are_any() -> None:
    text = '{"t":1709632800,"o":1,"v":null}\n{"t":1709632860,"o":null,"v":1}\n{"t":1709632920,"o":1}\n'
    found = read(NULLS.format(container="jsonl"), text)
    assert [bar.volume for bar in found.bars] == [0]
    assert found.refused == [(2, "missing_field"), (3, "missing_field")]
    strict = read(NULLS.format(container="jsonl").replace('"", "NA", "null"', ""), text)
    assert strict.refused == [(1, "missing_field"), (2, "missing_field"), (3, "missing_field")]


JSON = """
container = "jsonl"
decimal = ","
thousands = "."
[[records]]
kind = "trade"
venue = "T"
symbol = "S"
time = { field = "t", format = "epoch-ms" }
fields = { price = "p", size = "q", id = "id" }
"""


def test_numbers_of_json_have_a_point_whatever_is_declared() -> None:
    text = (
        '{"t":1709632800000,"p":1234.5,"q":"1.234,5","id":7}\n'
        '{"t":1709632800001,"p":7.12e-05,"q":1e3,"id":"8"}\n'
    )
    found = read(JSON, text)
    assert [(exact(each.price), exact(each.size), each.id) for each in found.trades] == [
        (Decimal("1234.5"), Decimal("1234.5"), "7"),
        (Decimal("0.0000712"), Decimal(1000), "8"),
    ]
    body = pushed(JSON, text)
    assert (body.usable, body.errors) == (2, [])


def test_an_integer_without_end_is_refused() -> None:
    found = read(
        JSON, f'{{"t":1709632800000,"p":{"1" * 4000},"q":"1"}}\n{{"t":1709632800000,"p":1,"q":"1"}}\n'
    )
    assert found.refused == [(1, "type")]
    assert len(found.records) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (form('decimal = ";"'), "decimal: must be one of"),
        (form('thousands = "0"'), "thousands: must be empty or one of"),
        (form('thousands = ",,"'), "thousands: must be empty or one of"),
        (form('thousands = "."'), "thousands: '.' already is the decimal point"),
        (form('decimal = ","\nthousands = ","'), "thousands: ',' already is the decimal point"),
        (form(more="implied_decimals = 19"), "implied_decimals: must be 0 to 18"),
        (form(more="multiplier = '0'"), "multiplier: must be above 0"),
        (form(more="multiplier = 'x'"), "multiplier: 'x' is not"),
        (form(more="signed = 'price'"), "signed"),
        (
            form(more="signed = 'size'").replace("size = 2", "size = 2, side = 3"),
            "signed: the side is already found",
        ),
        (
            NULLS.format(container="csv").replace("interval", "signed = 'size'\ninterval"),
            "signed: only trades",
        ),
        (form('null = "NA"'), "null"),
    ],
)
def test_a_contradiction_is_refused_when_it_is_declared(text: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        declared(text)


def test_counts_of_time_are_numbers_of_the_same_notation() -> None:
    found = read(
        form('decimal = ","\nthousands = "."'), "1.709.632.800,25|1|1\n1709632800,5|1|1\n1709632800.5|1|1\n"
    )
    assert [each.ts_event for each in found.records] == [1_709_632_800_250_000_000, 1_709_632_800_500_000_000]
    assert found.refused == [(3, "timestamp_unit")]
