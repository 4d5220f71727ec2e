"""What columns mean, by their names and their values."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from feeds.file_format import NEEDED, NUMBERS, Kind, Ref
from feeds.market_data import Side
from feeds.proposals.sample import Row
from feeds.source import YEAR_1990, YEAR_2100
from feeds.timestamps import EPOCH_UNITS, time_parser

NAMES: Mapping[str, str] = {
    "time": "tsevent eventtime exchangetime transacttime tradetime timestamp time datetime ts date T E at "
    "when updatedat createdat t",
    "price": "price tradeprice lastprice last px rate p",
    "size": "size qty quantity amount lastsize tradesize sz volume vol q v",
    "bid": "bid bidprice bestbid bidpx b",
    "ask": "ask askprice bestask offer offerprice askpx a",
    "bid_size": "bidsize bidqty bidvolume bidsz bestbidsize B",
    "ask_size": "asksize askqty askvolume asksz offersize bestasksize A",
    "open": "open openprice opening o",
    "high": "high highprice max h",
    "low": "low lowprice min l",
    "close": "close closeprice closing last c",
    "volume": "volume vol basevolume qty quantity v",
    "symbol": "symbol sym ticker instrument instid productid pair market contract isin s",
    "venue": "venue exchange exch mic source",
    "side": "side takerside aggressor aggressorside direction S m",
    "id": "tradeid id execid t i",
}
"""Names of columns for each field, the likeliest first; single characters as they stand."""
_SIDES: Mapping[str, Side] = {
    "buy": "buy", "b": "buy", "bid": "buy", "1": "buy", "bought": "buy",
    "sell": "sell", "s": "sell", "ask": "sell", "2": "sell", "sold": "sell", "a": "sell",
    "unknown": "unknown", "": "unknown", "n": "unknown",
}  # fmt: skip
_MAKER = {"true": "sell", "false": "buy"}
"""Of a member that says whether the buyer was the maker."""
_KINDS: tuple[Kind, ...] = ("bar", "quote", "trade")
"""Those that are looked for, the ones with more fields first."""
PATTERNS = (
    "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%d %H:%M:%S", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d %H:%M", "%Y.%m.%d %H:%M:%S",
    "%Y.%m.%d %H:%M", "%Y%m%d %H%M%S%f", "%Y%m%d %H%M%S", "%Y%m%d %H:%M:%S", "%Y%m%d-%H:%M:%S.%f",
    "%d.%m.%Y %H:%M:%S.%f", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d/%m/%Y %H:%M:%S", "%d/%m/%Y %H:%M",
    "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %H:%M", "%m/%d/%Y %I:%M:%S %p", "%d-%b-%Y %H:%M:%S",
)  # fmt: skip
"""Patterns that are tried where times are neither counted nor ISO 8601."""
_FLOAT_DECIMALS = 9


class TimeColumn(NamedTuple):
    """Where times are and how they are written. ``others``: patterns that read them, too."""

    refs: tuple[Ref, ...]
    format: str
    others: tuple[str, ...] = ()
    has_zone: bool = True
    is_float: bool = False


@dataclass(frozen=True)
class Fields:
    """The fields of one kind of record: where each is."""

    kind: Kind
    time: TimeColumn
    fields: Mapping[str, Ref]
    side_values: Mapping[str, Side]
    float_decimals: Mapping[str, int]
    decimal: Literal[".", ","] = "."


def fields_of(rows: Sequence[Row]) -> Fields | None:
    """The record that rows hold; None where they are of no kind that is known."""
    columns = _columns(rows)
    comma = _writes_commas(columns)
    decimal: Literal[".", ","] = "," if comma else "."
    is_number = _number_test(decimal)

    def find(field: str, test: Callable[[Sequence[Any]], bool]) -> Ref | None:
        taken = set(found.values()) | set(time.refs if time else ())
        return _find(field, columns, test, taken)

    found: dict[str, Ref] = {}
    time = _time(columns)
    if time is None:
        return None
    kind: Kind | None = None
    for each in _KINDS:
        found = {}
        for field in NUMBERS[each]:
            if (ref := find(field, is_number)) is not None:
                found[field] = ref
        if all(field in found for field in NEEDED[each]):
            kind = each
            break
    if kind is None:
        kind, found = _by_position(rows, columns, time, decimal)
    if kind is None:
        return None
    numbers = dict(found)
    for field in ("symbol", "venue"):
        if (ref := find(field, _is_names)) is not None:
            found[field] = ref
    if "symbol" not in found and (ref := _names_by_position(columns)) is not None:
        found["symbol"] = ref
    sides: Mapping[str, Side] = {}
    if kind == "trade":
        if (ref := find("side", lambda values: bool(_sides(values)))) is not None:
            found["side"], sides = ref, _sides(columns[ref])
        if (ref := find("id", _is_distinct)) is not None:
            found["id"] = ref
    floats = {field: _decimals(columns[ref]) for field, ref in numbers.items() if _has_floats(columns[ref])}
    if time.is_float:
        floats["time"] = _decimals(columns[time.refs[0]])
    return Fields(kind, time, found, sides, floats, decimal)


def _by_position(
    rows: Sequence[Row], columns: Mapping[Ref, Sequence[Any]], time: TimeColumn, point: str
) -> tuple[Kind | None, dict[str, Ref]]:
    """Of cells without names: four prices with the second highest, a bid below an ask, or price and size."""
    numbers = [
        ref
        for ref, values in columns.items()
        if isinstance(ref, int) and ref not in time.refs and _number_test(point)(values)
    ]

    def always(test: Callable[..., bool], refs: Sequence[Ref]) -> bool:
        cells = [[_decimal(str(row.get(ref) or ""), point) for ref in refs] for row in rows]
        return all(test(*each) for each in cells if None not in each)

    for at in range(len(numbers) - 3):
        four = numbers[at : at + 4]
        if always(lambda o, h, low, c: low <= min(o, c) <= max(o, c) <= h and low > 0, four):
            names = ("open", "high", "low", "close", "volume")
            return "bar", dict(zip(names, numbers[at:], strict=False))
    if len(numbers) < 2:
        return None, {}
    if always(lambda bid, ask: 0 < bid <= ask < bid * Decimal("1.1"), numbers[:2]):
        return "quote", dict(zip(("bid", "ask"), numbers, strict=False))
    return "trade", dict(zip(("price", "size"), numbers, strict=False))


def _names_by_position(columns: Mapping[Ref, Sequence[Any]]) -> Ref | None:
    """Of cells without names, the first that has only few names."""
    for ref, values in columns.items():
        few = 10 * len(set(values)) <= len(values) + 9
        if isinstance(ref, int) and few and _is_names(values) and not _sides(values):
            return ref
    return None


def _columns(rows: Sequence[Row]) -> dict[Ref, list[Any]]:
    """The values of columns that most rows have."""
    found: dict[Ref, list[Any]] = {}
    for row in rows:
        for ref, value in row.items():
            if value is not None and value != "":
                found.setdefault(ref, []).append(value)
    return {ref: values for ref, values in found.items() if 2 * len(values) >= len(rows)}


def _find(
    field: str, columns: Mapping[Ref, Sequence[Any]], test: Callable[[Sequence[Any]], bool], taken: set[Ref]
) -> Ref | None:
    """The column with the likeliest name whose values pass."""
    for name in NAMES[field].split():
        for ref, values in columns.items():
            if ref not in taken and _is_named(ref, name) and test(values):
                return ref
    return None


def _is_named(ref: Ref, name: str) -> bool:
    last = str(ref).rpartition(".")[2]
    if len(name) == 1:
        return last == name
    return re.sub(r"[^a-z0-9]", "", last.lower()) == name


def _writes_commas(columns: Mapping[Ref, Sequence[Any]]) -> bool:
    texts = [each for values in columns.values() for each in values[:50] if isinstance(each, str)]
    commas = sum(bool(re.fullmatch(r"-?\d+,\d+", each)) for each in texts)
    points = sum(bool(re.fullmatch(r"-?\d+\.\d+", each)) for each in texts)
    return commas > points


def _number_test(decimal: str) -> Callable[[Sequence[Any]], bool]:
    def is_number(values: Sequence[Any]) -> bool:
        return all(isinstance(each, float) or _decimal(each, decimal) is not None for each in values)

    return is_number


def _decimal(text: str, point: str = ".") -> Decimal | None:
    try:
        found = Decimal(text.replace(point, ".") if point != "." else text)
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def _is_names(values: Sequence[Any]) -> bool:
    """Few texts that are not all numbers."""
    texts = {each for each in values if isinstance(each, str)}
    return (
        len(texts) > 0
        and any(_decimal(each) is None for each in texts)
        and all(len(each) <= 64 and " " not in each for each in texts)
    )


def _is_distinct(values: Sequence[Any]) -> bool:
    return len(set(values)) * 10 >= 9 * len(values) and not any(isinstance(each, float) for each in values)


def _sides(values: Sequence[Any]) -> Mapping[str, Side]:
    """The words of a column, if all of them mean sides."""
    words = {str(each) for each in values}
    if words <= _MAKER.keys():
        return {word: _MAKER[word] for word in sorted(_MAKER)}  # type: ignore[misc]  # Sides
    found = {word: _SIDES[word.lower()] for word in sorted(words) if word.lower() in _SIDES}
    return found if len(found) == len(words) else {}


def _has_floats(values: Sequence[Any]) -> bool:
    return any(isinstance(each, float) for each in values)


def _decimals(values: Sequence[Any]) -> int:
    """The fewest decimals that all floats are near to."""
    return max(
        next((n for n in range(_FLOAT_DECIMALS) if float(round(each, n)) == each), _FLOAT_DECIMALS)
        for each in values
        if isinstance(each, float)
    )


# Times.


def _time(columns: Mapping[Ref, Sequence[Any]]) -> TimeColumn | None:
    by_name = [ref for name in NAMES["time"].split() for ref in columns if _is_named(ref, name)]
    for ref in by_name:
        if (found := _as_time((ref,), [_shown(each) for each in columns[ref]])) is not None:
            return found._replace(is_float=_has_floats(columns[ref]))

    def named(part: str) -> Ref | None:
        return next((ref for ref in columns if _is_named(ref, part)), None)

    pairs = [(named("date"), named("time") or named("clock")), *pairwise(columns)]
    singles = [(ref,) for ref in columns if ref not in by_name and not _has_floats(columns[ref])]
    for refs in (*pairs[:1], *singles, *pairs[1:]):
        if None in refs or any(_has_floats(columns[ref]) for ref in refs if ref is not None):
            continue
        known = tuple(ref for ref in refs if ref is not None)
        texts = [" ".join(map(str, each)) for each in zip(*(columns[ref] for ref in known), strict=False)]
        if (found := _as_time(known, texts)) is not None and not _may_be_number(found, texts):
            return found
    return None


def _may_be_number(time: TimeColumn, texts: Sequence[str]) -> bool:
    """Whether what has no name of a time counts seconds, as many numbers do."""
    return time.format == "epoch-s" or any(len(each) < len("20240305 1000") for each in texts)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _as_time(refs: tuple[Ref, ...], texts: Sequence[str]) -> TimeColumn | None:
    counted = [_decimal(each) for each in texts]
    if all(each is not None and each > 0 for each in counted):
        for unit, ns in EPOCH_UNITS.items():
            if all(YEAR_1990 <= each * ns < YEAR_2100 for each in counted if each is not None):
                return TimeColumn(refs, unit)
    spans = {each: span for each in ("iso", *PATTERNS) if (span := _span(each, texts)) is not None}
    if not spans:
        return None
    fitting = sorted(spans, key=lambda each: spans[each])  # days and months that are swapped lie far apart
    has_zone = fitting[0] == "iso" and all(re.search(r"(Z|[+-]\d\d(:?\d\d)?)$", each) for each in texts)
    others = [each for each in fitting[1:] if spans[each] != spans[fitting[0]]]
    return TimeColumn(refs, fitting[0], tuple(others) if fitting[0] != "iso" else (), has_zone)


def _span(pattern: str, texts: Sequence[str]) -> int | None:
    """From the first of the times to the last, ns; None where the pattern does not read all of them."""
    parse = time_parser(pattern)
    try:
        times = [parse(each).ns for each in texts]
    except (ValueError, OverflowError):
        return None
    return max(times) - min(times) if min(times) >= YEAR_1990 and max(times) < YEAR_2100 else None


def usual_gap(times: Sequence[int]) -> int:
    """The gap, ns, that most times have to the one before; 0 for fewer than two."""
    gaps = Counter(b - a for a, b in pairwise(times) if b > a)
    return max(gaps, key=lambda gap: gaps[gap]) if gaps else 0
