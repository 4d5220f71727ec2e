"""Records that are in no bar, as lines of the tape: headlines, states of trading, corporate actions, books.

Where the row of one stands among the bars depends on the order of the records alone (`ingest.bar_kernel`):
its time closes bars as that of a trade does, and then its row follows at once. Its line is its time and what
it says: `0931,text,Fed raises rates by 25 bp`, `0931,halt`, `0931,split,10`, and of a book the best levels
and the imbalance, `0931,book,100.01x200,100.02x150,0.14`. A line of a symbol among several begins with that,
as those of bars do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingest.bar_kernel import AS_FLAG, AS_LINE, EVENT, IGNORED, Bars
from ingest.lines import LineSpec, decimal, line_of, time_text
from ingest.record import ACTION, ASKS, BIDS, BOOK, STATUS, TEXT
from ingest.tokens import Encode
from metrics.catalogue import EVENTS, Treatment

_CODES: dict[Treatment, int] = {"line": AS_LINE, "flag": AS_FLAG, "ignore": IGNORED}
STATES = ("halt", "resume", "auction", "close", "open")
"""In the order of their codes, from 1."""
ACTIONS = ("split", "dividend", "symbol_change")
"""The same of what changes a symbol's prices or name."""
_NANO = 9
_IMBALANCE_DECIMALS = 2


def events_code(treatments: Mapping[str, Treatment]) -> int:
    """One number that has what is done about each kind of `EVENTS`; for kinds not named, a line."""
    return sum(_CODES[treatments.get(name, "line")] << (2 * n) for n, name in enumerate(EVENTS))


def words_of(row: Any) -> int:
    """The number of the text that an event has; 0: none."""
    return 0 if row["n_ticks"] == BOOK else int(row["c"])


def words_in(rows: Bars) -> list[int]:
    """The numbers of all texts of BAR [n]."""
    events = rows[(rows["flags"] & np.uint32(EVENT)) != 0]
    return [number for number in map(words_of, events) if number]


def event_line(row: Any, spec: LineSpec, words: str) -> str:
    """The line of one element of a BAR array that is an event; ``words``: its text."""
    fields = [spec.symbols[int(row["leg"])]] if spec.symbols else []
    fields.append(time_text(int(row["ts_open"]), int(row["interval"]), dates=spec.dates))
    which = int(row["v_high"])
    match int(row["n_ticks"]):
        case kind if kind == TEXT:
            fields += ["text", words]
        case kind if kind == STATUS:
            fields += [STATES[which - 1], *([words] if words else [])]
        case kind if kind == ACTION:
            amount = int(row["o"])
            said = [words] if words else [_plain(amount, _NANO)]
            fields += [ACTIONS[which - 1].replace("_", " "), *said]
        case _:
            scale = _NANO + int(row["v_low"])
            sides = (("o", "l", which & BIDS), ("h", "c", which & ASKS))
            fields.append("book")
            fields += [_level(row, price, size, spec, scale) if there else "" for price, size, there in sides]
            fields.append(decimal(int(row["v"]), _IMBALANCE_DECIMALS, _NANO))
    return line_of(fields, spec.form)


def event_tokens(row: Any, spec: LineSpec, words: str, encode: Encode, most: int) -> Sequence[int]:
    """The tokens of its line, ``words`` cut so that they add at most ``most``."""
    without = len(encode(event_line(row, spec, "")))
    while True:
        tokens = encode(event_line(row, spec, words))
        beyond = len(tokens) - without - most
        if beyond <= 0 or not words:
            return tokens
        kept = len(words) * most // (most + beyond)
        words = words[: min(kept, len(words) - 1)].rstrip()


def _level(row: Any, price: str, size: str, spec: LineSpec, size_scale: int) -> str:
    at = decimal(int(row[price]), spec.price_decimals, spec.price_scale)
    return f"{at}x{_plain(int(row[size]), size_scale)}"


def _plain(value: int, scale: int) -> str:
    """A number of 10^-``scale`` with as many decimals as it has."""
    text = decimal(value, scale, scale)
    return text.rstrip("0").rstrip(".") if "." in text else text
