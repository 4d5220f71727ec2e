"""The instruments file: how fine a symbol's prices and sizes are, where the venue says so."""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from daemon.config.errors import ConfigError
from daemon.config.schema import Config
from feeds.decimals import decimals_of, parse_fixed

KEY = "symbols.instruments_file"
_Decimals = Annotated[int, Meta(ge=0, le=18)] | None


class Instrument(msgspec.Struct, frozen=True):
    """What the file says of a symbol; None and "" where it says nothing. Sizes of steps are decimal text."""

    symbol: Annotated[str, Meta(pattern=r"^[^:\s]+:\S+$", max_length=128)]
    tick_size: str = ""
    price_decimals: _Decimals = None
    lot_size: str = ""
    volume_decimals: _Decimals = None
    signed: bool | None = None

    @property
    def decimals(self) -> int | None:
        """Of a printed price. Raises ValueError for a step that is no number."""
        return _decimals(self.price_decimals, self.tick_size)

    @property
    def settings(self) -> dict[str, int | bool]:
        """Of its session, beside the decimals of prices. Raises ValueError."""
        found = {"volume_decimals": _decimals(self.volume_decimals, self.lot_size), "signed": self.signed}
        return {name: value for name, value in found.items() if value is not None}


def instruments_of(config: Config) -> dict[str, Instrument]:
    """Those of the configured file; none without one. Raises ConfigError."""
    path = config.symbols.instruments_file
    return read_instruments(path) if path else {}


def read_instruments(path: str) -> dict[str, Instrument]:
    """By VENUE:SYMBOL; of several lines of a symbol the last one counts. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        rows = _json_rows(text) if text.lstrip()[:1] in ("[", "{") else csv.DictReader(io.StringIO(text))
        return {each.symbol: each for each in map(_instrument, rows)}
    except OSError as error:
        raise ConfigError.of(KEY, f"cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise ConfigError.of(KEY, f"{path}: {error}") from None


def _json_rows(text: str) -> Iterable[object]:
    rows = msgspec.json.decode(text)
    if isinstance(rows, Mapping):  # by symbol
        return [
            {"symbol": symbol, **row} if isinstance(row, Mapping) else row for symbol, row in rows.items()
        ]
    return [rows] if not isinstance(rows, list) else rows


def _instrument(row: object) -> Instrument:
    if isinstance(row, Mapping):
        known = {name: row.get(name) for name in Instrument.__struct_fields__}
        for name in ("tick_size", "lot_size"):
            if isinstance(step := known[name], int | float) and not isinstance(step, bool):
                known[name] = repr(step)
        row = {name: value for name, value in known.items() if value not in (None, "")}
    try:
        found = msgspec.convert(row, Instrument, strict=False)
        assert found.decimals is None or found.settings is not None  # the steps are numbers
    except ValueError as error:
        raise ValueError(f"{row}: {error}") from None
    return found


def _decimals(given: int | None, step: str) -> int | None:
    if given is not None or not step:
        return given
    if (size := parse_fixed(step)) <= 0:
        raise ValueError(f"a step must be above 0, not {step}")
    return decimals_of(size)
