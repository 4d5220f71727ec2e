"""Compiled decoding of JSON and msgpack records; what it does not take is left to `feeds.codec`.

It takes a plain record with the members of `feeds.market_data` in any order: strings of printable ASCII
without escapes, integers that are not negative, decimal text and JSON numbers without a sign or an exponent,
up to 9.2e9 and nine decimals. It never takes what `feeds.codec` refuses, and reads what it takes to the same
values. All else, right or wrong, is left alone: members that are unknown or come twice, signs, exponents,
escapes, other characters, implausible values.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from support.numba_kernel import inlined_kernel, kernel

Bytes = npt.NDArray[np.uint8]

JSON, MSGPACK = 0, 1
TRADE, QUOTE, BAR = 1, 2, 3
UNKNOWN, BUY, SELL = 0, 1, 2
"""Values of the columns ``kind`` and ``side``."""

# Members by number; the values of a record that is being read stand in an array at these places.
_TYPE, _VENUE, _SYMBOL, _TS_EVENT, _TS_RECV, _SEQ, _CLOCK, _UNIT, _SIDE, _ID, _INTERVAL = range(11)
_PRICE, _SIZE, _BID, _ASK, _BID_SIZE, _ASK_SIZE, _OPEN, _HIGH, _LOW, _CLOSE, _VOLUME = range(11, 22)
_VENUE_END, _SYMBOL_END, _ID_END, _SEEN = 22, 23, 24, 25
_PLACES = 26


def _word(text: str) -> int:
    return int.from_bytes(text.encode(), "little")


def _bits(*members: int) -> int:
    return sum(1 << member for member in members)


# Names and values of enumerations as little-endian words; no two that are compared share one.
_N_TYPE, _N_VENUE, _N_SYMBOL, _N_SEQ = _word("type"), _word("venue"), _word("symbol"), _word("seq")
_N_TS_EVENT, _N_TS_RECV, _N_CLOCK = _word("ts_event"), _word("ts_recv"), _word("clock")
_N_PRICE, _N_SIZE, _N_UNIT, _N_SIDE, _N_ID = (_word(n) for n in ("price", "size", "unit", "side", "id"))
_N_BID, _N_ASK, _N_BID_SIZE, _N_ASK_SIZE = (_word(n) for n in ("bid", "ask", "bid_size", "ask_size"))
_N_OPEN, _N_HIGH, _N_LOW, _N_CLOSE = (_word(n) for n in ("open", "high", "low", "close"))
_N_VOLUME, _N_INTERVAL, _N_INTERVAL_2 = _word("volume"), _word("interval"), _word("_ns")
_V_TRADE, _V_QUOTE, _V_BAR = _word("trade"), _word("quote"), _word("bar")
_V_EXCHANGE, _V_RECEIVE = _word("exchange"), _word("receive")
_V_BUY, _V_SELL, _V_UNKNOWN = _word("buy"), _word("sell"), _word("unknown")
_V_BASE, _V_QUOTE_UNIT, _V_SHARES, _V_LOTS = (_word(n) for n in ("base", "quote", "shares", "lots"))
_V_CONTRACTS, _V_CONTRACTS_2 = _word("contract"), _word("s")

_COMMON = _bits(_TYPE, _VENUE, _SYMBOL, _TS_EVENT, _TS_RECV)
_NEEDS_TRADE = _COMMON | _bits(_PRICE, _SIZE)
_NEEDS_QUOTE = _COMMON | _bits(_BID, _ASK)
_NEEDS_BAR = _COMMON | _bits(_OPEN, _HIGH, _LOW, _CLOSE, _VOLUME, _INTERVAL)

_YEAR_1990, _YEAR_2100 = 631_152_000 * 10**9, 4_102_444_800 * 10**9
_LIMIT = 9_200_000_000 * 10**9
_MAX_INTERVAL, _MAX_NAME = 1 << 62, 64
FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


def _crc_table() -> npt.NDArray[np.uint32]:
    """What the CRC-32 of `zlib` makes of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0xEDB88320), np.uint32(0)) ^ (table >> 1)
    return table


_CRC = _crc_table()


@inlined_kernel
def _pack(data: Bytes, start: int, end: int) -> Any:
    """Up to eight bytes as a little-endian word."""
    word = np.int64(0)
    for i in range(start, min(end, start + 8)):
        word |= np.int64(data[i]) << np.int64(8 * (i - start))
    return word


@kernel
def _member(data: Bytes, start: int, end: int) -> int:
    """The number of the member that has this name; -1 for another."""
    length = end - start
    word = _pack(data, start, end)
    found = -1
    if length > 8:
        if length == 11 and word == _N_INTERVAL and _pack(data, start + 8, end) == _N_INTERVAL_2:
            found = _INTERVAL
    elif word == _N_TYPE:
        found = _TYPE
    elif word == _N_VENUE:
        found = _VENUE
    elif word == _N_SYMBOL:
        found = _SYMBOL
    elif word == _N_TS_EVENT:
        found = _TS_EVENT
    elif word == _N_TS_RECV:
        found = _TS_RECV
    elif word == _N_SEQ:
        found = _SEQ
    elif word == _N_PRICE:
        found = _PRICE
    elif word == _N_SIZE:
        found = _SIZE
    elif word == _N_SIDE:
        found = _SIDE
    elif word == _N_ID:
        found = _ID
    elif word == _N_UNIT:
        found = _UNIT
    elif word == _N_CLOCK:
        found = _CLOCK
    elif word == _N_BID:
        found = _BID
    elif word == _N_ASK:
        found = _ASK
    elif word == _N_BID_SIZE:
        found = _BID_SIZE
    elif word == _N_ASK_SIZE:
        found = _ASK_SIZE
    elif word == _N_OPEN:
        found = _OPEN
    elif word == _N_HIGH:
        found = _HIGH
    elif word == _N_LOW:
        found = _LOW
    elif word == _N_CLOSE:
        found = _CLOSE
    elif word == _N_VOLUME:
        found = _VOLUME
    return found


@inlined_kernel
def read_decimal(data: Bytes, start: int, end: int) -> Any:
    """Decimal text in units of 1e-9; -1 unless it is digits, or digits, a point and one to nine digits."""
    value = np.int64(0)
    i = start
    while i < end and 48 <= data[i] <= 57:
        value = value * 10 + np.int64(data[i] - 48)
        i += 1
    if not 1 <= i - start <= 10:
        return -1
    places = 0
    if i < end:
        if data[i] != 46:  # a point
            return -1
        i += 1
        places = end - i
        if not 1 <= places <= 9:
            return -1
    if value > 9_200_000_000:
        return -1
    fraction = np.int64(0)
    while i < end:
        if not 48 <= data[i] <= 57:
            return -1
        fraction = fraction * 10 + np.int64(data[i] - 48)
        i += 1
    for _ in range(places, 9):
        fraction *= 10
    value = value * 1_000_000_000 + fraction
    return value if value <= _LIMIT else -1


@kernel
def _put_text(values: Any, member: int, data: Bytes, start: int, end: int) -> Any:
    """Note a member's text; False for one that this kernel does not take."""
    length = end - start
    if member >= _PRICE:
        values[member] = read_decimal(data, start, end)
        return values[member] >= 0
    if member in (_VENUE, _SYMBOL):
        values[member] = start
        values[_VENUE_END if member == _VENUE else _SYMBOL_END] = end
        if not 1 <= length <= _MAX_NAME:
            return False
        plain = True
        for i in range(start, end):
            plain &= data[i] != 32 and data[i] != 58  # neither a blank nor a colon
        return plain
    if member == _ID:
        values[_ID], values[_ID_END] = start, end
        return True
    if length > 9:
        return False
    word = _pack(data, start, end)
    code = -1
    if member == _UNIT:
        if length == 9:
            if word == _V_CONTRACTS and _pack(data, start + 8, end) == _V_CONTRACTS_2:
                code = 0
        elif word in (_V_BASE, _V_QUOTE_UNIT, _V_SHARES, _V_LOTS):
            code = 0
    elif length <= 8:
        if member == _TYPE:
            if word == _V_TRADE:
                code = TRADE
            elif word == _V_QUOTE:
                code = QUOTE
            elif word == _V_BAR:
                code = BAR
        elif member == _SIDE:
            if word == _V_UNKNOWN:
                code = UNKNOWN
            elif word == _V_BUY:
                code = BUY
            elif word == _V_SELL:
                code = SELL
        elif member == _CLOCK:
            if word == _V_EXCHANGE:
                code = 0
            elif word == _V_RECEIVE:
                code = 1
    values[member] = code
    return code >= 0


@kernel
def _put_integer(values: Any, member: int, value: Any) -> bool:
    """Note a member's integer, 0 to 9.2e18; False for one that this kernel does not take."""
    values[member] = value
    return member >= _PRICE or member in (_TS_EVENT, _TS_RECV, _SEQ, _INTERVAL)


@inlined_kernel
def blank(data: Bytes, i: int, end: int) -> int:
    """The first place from ``i`` that is not JSON's white space."""
    while i < end and (data[i] == 32 or data[i] == 10 or data[i] == 13 or data[i] == 9):
        i += 1
    return i


@inlined_kernel
def string_end(data: Bytes, i: int, end: int) -> int:
    """Where a string that begins at ``i`` ends; -1 for an escape or anything but printable ASCII."""
    while i < end:
        byte = data[i]
        if byte == 34:
            return i
        if byte < 32 or byte > 126 or byte == 92:
            return -1
        i += 1
    return -1


@inlined_kernel
def text_end(data: Bytes, i: int, end: int) -> int:
    """As `string_end`, of text beyond ASCII, too: whether that is UTF-8 is not looked at."""
    while i < end:
        byte = data[i]
        if byte == 34:
            return i
        if byte < 32 or byte == 127 or byte == 92:
            return -1
        i += 1
    return -1


@kernel
def _number_end(data: Bytes, i: int, end: int) -> int:
    """Where a JSON number that begins at ``i`` ends; -1 for one that begins with superfluous zeros.

    A sign or an exponent ends it too; what follows is then no separator.
    """
    if i + 1 < end and data[i] == 48 and 48 <= data[i + 1] <= 57:
        return -1
    while i < end and (48 <= data[i] <= 57 or data[i] == 46):
        i += 1
    return i


@kernel
def _read_json(values: Any, data: Bytes, start: int, end: int) -> bool:
    """Read one object into ``values``."""
    i = blank(data, start, end)
    if i >= end or data[i] != 123:
        return False
    i = blank(data, i + 1, end)
    while i < end and data[i] == 34:
        stop = string_end(data, i + 1, end)
        if stop < 0:
            return False
        member = _member(data, i + 1, stop)
        if member < 0 or (values[_SEEN] >> member) & 1:
            return False
        values[_SEEN] |= np.int64(1) << np.int64(member)
        i = blank(data, stop + 1, end)
        if i >= end or data[i] != 58:
            return False
        i = blank(data, i + 1, end)
        if i >= end:
            return False
        if data[i] == 34:
            stop = string_end(data, i + 1, end)
            if stop < 0 or not _put_text(values, member, data, i + 1, stop):
                return False
            i = stop + 1
        elif member >= _PRICE:
            stop = _number_end(data, i, end)
            if stop < 0:
                return False
            values[member] = read_decimal(data, i, stop)
            if values[member] < 0:
                return False
            i = stop
        else:
            first, value = i, np.uint64(0)
            while i < end and 48 <= data[i] <= 57 and i - first < 19:
                value = value * np.uint64(10) + np.uint64(data[i] - 48)
                i += 1
            if i == first or (data[first] == 48 and i - first > 1) or value > np.uint64(_LIMIT):
                return False
            if not _put_integer(values, member, np.int64(value)):
                return False
        i = blank(data, i, end)
        if i >= end:
            return False
        if data[i] == 125:
            return blank(data, i + 1, end) == end
        if data[i] != 44:
            return False
        i = blank(data, i + 1, end)
    return False


@inlined_kernel
def big_endian(data: Bytes, start: int, length: int) -> Any:
    """The unsigned number in some bytes."""
    value = np.uint64(0)
    for i in range(start, start + length):
        value = (value << np.uint64(8)) | np.uint64(data[i])
    return value


@kernel
def _text_length(data: Bytes, i: int, end: int) -> Any:
    """Where the text of a msgpack string at ``i`` begins and ends; (0, -1) for anything else."""
    begin: Any = 0
    length: Any = -1
    if i < end and 0xA0 <= data[i] <= 0xBF:
        begin, length = i + 1, np.int64(data[i]) - 0xA0
    elif i + 1 < end and data[i] == 0xD9:
        begin, length = i + 2, np.int64(data[i + 1])
    if length < 0 or begin + length > end:
        return 0, -1
    for k in range(begin, begin + length):
        if data[k] < 32 or data[k] > 126:
            return 0, -1
    return begin, begin + length


@kernel
def _read_msgpack(values: Any, data: Bytes, start: int, end: int) -> bool:
    """Read one map of up to 15 members into ``values``."""
    if start >= end or not 0x80 <= data[start] <= 0x8F:
        return False
    i = start + 1
    for _ in range(np.int64(data[start]) - 0x80):
        begin, stop = _text_length(data, i, end)
        if stop < 0:
            return False
        member = _member(data, begin, stop)
        if member < 0 or (values[_SEEN] >> member) & 1:
            return False
        values[_SEEN] |= np.int64(1) << np.int64(member)
        i = stop
        if i >= end:
            return False
        first = data[i]
        width: Any = -1
        if first <= 0x7F:
            value, width = np.uint64(first), 0
        elif 0xCC <= first <= 0xCF or 0xD0 <= first <= 0xD3:
            signed = first >= 0xD0
            width = 1 << (np.int64(first) - (0xD0 if signed else 0xCC))
            if i + 1 + width > end or (signed and data[i + 1] > 0x7F):
                return False
            value = big_endian(data, i + 1, width)
        if width >= 0:
            if value > np.uint64(_LIMIT) or not _put_integer(values, member, np.int64(value)):
                return False
            i += 1 + width
        else:
            begin, stop = _text_length(data, i, end)
            if stop < 0 or not _put_text(values, member, data, begin, stop):
                return False
            i = stop
    return i == end


@kernel
def _price(value: int) -> bool:
    return value > 0


@kernel
def _time(value: int) -> bool:
    return _YEAR_1990 <= value < _YEAR_2100


@kernel
def _plausible(values: Any) -> Any:
    """Whether a record has all of its kind's members, with values that `feeds.codec` accepts."""
    if not (_time(values[_TS_EVENT]) and _time(values[_TS_RECV])):
        return False
    seen, kind = values[_SEEN], values[_TYPE]
    if kind == TRADE:
        return seen & _NEEDS_TRADE == _NEEDS_TRADE and _price(values[_PRICE])
    if kind == QUOTE:
        return seen & _NEEDS_QUOTE == _NEEDS_QUOTE and _price(values[_BID]) and _price(values[_ASK])
    if seen & _NEEDS_BAR != _NEEDS_BAR or not (_price(values[_LOW]) and _price(values[_HIGH])):
        return False
    low, high = values[_LOW], values[_HIGH]
    inside = low <= values[_OPEN] <= high and low <= values[_CLOSE] <= high
    return inside and 0 < values[_INTERVAL] < _MAX_INTERVAL


@inlined_kernel
def name_hash(data: Bytes, start: int, end: int, state: Any) -> Any:
    """FNV-1a over some bytes, continued from ``state``."""
    for i in range(start, end):
        state = (state ^ np.uint64(data[i])) * _FNV_PRIME
    return state


@kernel
def _token(data: Bytes, start: int, end: int) -> Any:
    """The CRC-32 of a text, 1 where that is 0; 0 of an empty one."""
    if start >= end:
        return np.uint32(0)
    state = np.uint32(0xFFFFFFFF)
    for i in range(start, end):
        state = _CRC[(state ^ np.uint32(data[i])) & np.uint32(0xFF)] ^ (state >> np.uint32(8))
    state = ~state
    return state if state != 0 else np.uint32(1)


@inlined_kernel
def same(data: Bytes, start: int, end: int, names: Bytes, at: int) -> bool:
    """Whether some bytes are those at ``at`` in others."""
    is_same = True
    for i in range(start, end):
        is_same &= data[i] == names[at + i - start]
    return is_same


@kernel
def _index(data: Bytes, values: Any, names: Bytes, ends: Any, table: Any) -> int:
    """The index of the key VENUE:SYMBOL among ``names``; -1 for another. ``table``: open addressing."""
    venue, venue_end, symbol, symbol_end = (
        values[_VENUE], values[_VENUE_END], values[_SYMBOL], values[_SYMBOL_END]
    )  # fmt: skip
    state = name_hash(data, venue, venue_end, FNV_START)
    state = (state ^ np.uint64(58)) * _FNV_PRIME
    state = name_hash(data, symbol, symbol_end, state)
    mask = np.uint64(len(table) - 1)
    slot = state & mask
    length = venue_end - venue + 1 + symbol_end - symbol
    while table[slot] >= 0:
        index = table[slot]
        start = ends[index - 1] if index > 0 else 0
        if ends[index] - start == length and names[start + venue_end - venue] == 58:
            after = start + venue_end - venue + 1
            if same(data, venue, venue_end, names, start) and same(data, symbol, symbol_end, names, after):
                return int(index)
        slot = (slot + np.uint64(1)) & mask
    return -1


@kernel
def fill_table(names: Bytes, ends: Any, table: Any) -> None:
    """Enter the keys, ``names`` up to each of ``ends``, into ``table`` [2^k], which holds -1 everywhere."""
    mask = np.uint64(len(table) - 1)
    start = 0
    for index in range(len(ends)):
        slot = name_hash(names, start, ends[index], FNV_START) & mask
        while table[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        table[slot] = index
        start = ends[index]


@kernel
def decode(
    data: Bytes, ends: Any, encodings: Bytes, names: Bytes, name_ends: Any, table: Any, out: Any
) -> None:
    """Decode the payloads, ``data`` up to each of ``ends``, into ``out`` [n]; sets ``taken`` to 0 or 1."""
    values = np.zeros(_PLACES, np.int64)
    start = 0
    for n in range(len(ends)):
        end = ends[n]
        values[:] = 0
        if encodings[n] == JSON:
            taken = _read_json(values, data, start, end)
        else:
            taken = encodings[n] == MSGPACK and _read_msgpack(values, data, start, end)
        row = out[n]
        row["taken"], row["kind"], row["received"], row["key"] = 0, 0, 0, -1
        row["ts_event"] = 0
        if taken and _plausible(values):
            row["taken"] = 1
            row["key"] = _index(data, values, names, name_ends, table)
            row["received"] = values[_CLOCK]
            row["ts_event"] = values[_TS_EVENT]
            row["ts_recv"] = values[_TS_RECV]
            row["seq"] = values[_SEQ]
            row["token"] = 0
            kind = values[_TYPE]
            row["kind"] = kind
            if kind == TRADE:
                row["a"], row["b"] = values[_PRICE], values[_SIZE]
                row["c"], row["d"], row["e"], row["x"] = 0, 0, 0, values[_SIDE]
                row["token"] = _token(data, values[_ID], values[_ID_END])
            elif kind == QUOTE:
                row["a"], row["b"] = values[_BID], values[_ASK]
                row["c"], row["d"] = values[_BID_SIZE], values[_ASK_SIZE]
                row["e"], row["x"] = 0, 0
            else:
                row["a"], row["b"], row["c"] = values[_OPEN], values[_HIGH], values[_LOW]
                row["d"], row["e"], row["x"] = values[_CLOSE], values[_VOLUME], values[_INTERVAL]
        start = end


@kernel
def tokens_of_texts(data: Bytes, starts: Any, ends: Any, out: Any) -> None:
    """Tokens [n] of ids: the texts in ``data`` from each of ``starts`` to each of ``ends``."""
    for n in range(len(ends)):
        out[n] = _token(data, starts[n], ends[n])


@kernel
def tokens_of_numbers(numbers: Any, out: Any) -> None:
    """Tokens [n] of ids that are written in decimal digits; they are not negative."""
    digits = np.zeros(20, np.uint8)
    for n in range(len(numbers)):
        number, start = numbers[n], 20
        while start == 20 or number > 0:
            start -= 1
            digits[start] = 48 + number % 10
            number //= 10
        out[n] = _token(digits, start, 20)
