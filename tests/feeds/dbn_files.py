"""Files of Databento's DBN, written with its own encoder."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import databento_dbn as dbn

DATASET = "GLBX.MDP3"


@dataclass
class _Interval:
    start_date: datetime.date
    end_date: datetime.date
    symbol: str


@dataclass
class _Mapping:
    raw_symbol: str
    intervals: list[_Interval]


Names = Mapping[str, Sequence[tuple[str, str, int]]]
"""By symbol: first day, day after the last, number of the instrument."""
ACME: Names = {"ACME": [("2024-03-01", "2024-04-01", 7)]}


def metadata(names: Names = ACME, schema: str = "trades", **options: Any) -> bytes:
    day = datetime.date.fromisoformat
    made = [
        _Mapping(s, [_Interval(day(a), day(b), str(n)) for a, b, n in spans]) for s, spans in names.items()
    ]
    header: dict[str, Any] = {"stype_in": dbn.SType.RAW_SYMBOL, "stype_out": dbn.SType.INSTRUMENT_ID}
    header |= {"dataset": DATASET, "start": 0, "schema": dbn.Schema(schema), "symbols": list(names)}
    return bytes(dbn.Metadata(**header, mappings=made, **options).encode())


def trade(
    ts: int, price: int, size: int, *, number: int = 7, side: str = "A", action: str = "T", sequence: int = 0,
    recv: int | None = None,
) -> bytes:  # fmt: skip
    """``price`` in units of 1e-9."""
    made = dbn.TradeMsg(
        1, number, ts, price, size, dbn.Action(action), dbn.Side(side), 0, ts + 5 if recv is None else recv,
        sequence=sequence,
    )  # fmt: skip
    return bytes(made)


def bar(ts: int, prices: Sequence[int], volume: int, *, number: int = 7) -> bytes:
    """A bar of a minute; ``prices``: open, high, low, close in units of 1e-9."""
    return bytes(dbn.OHLCVMsg(dbn.RType.OHLCV_1M, 1, number, ts, *prices, volume))
