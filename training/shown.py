"""A drawn tape as the lines that a model reads: compact ones, decimal ones as the daemon writes, or words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from engine.model.chat_format import PromptFormat
from ingest.bar_kernel import BAR, Bars
from ingest.compact import CENTRE, CODES_PER_DECADE, Anchor
from ingest.lines import MINUTE_NS, LineSpec, clock_text, decimal
from ingest.tokens import Tokeniser
from ingest.volumes import SCALE, Volume, put_volume, volume_of
from tapes.rules import Ints, Levels

Lines = Literal["compact", "decimal", "words"]
OPENED = 1_767_346_200 * 10**9
"""When the first bar of a tape opened, ns: 2026-01-02T09:30:00Z."""
OPENED_MINUTE = 9 * 60 + 30
"""Of the day, of the same."""
_VOLUME_DECIMALS = 3
_NANO = 9


class Shown(NamedTuple):
    """A tape's frozen prefix, the tokens of each bar's line, and how a level is written as a price."""

    frozen: tuple[int, ...]
    lines: list[list[int]]
    price: Callable[[int], str]


def shown(
    prompt: PromptFormat,
    tokeniser: Tokeniser,
    lines: Lines,
    x: Levels,
    tape: int,
    header: str,
    questions: list[str],
) -> Shown:
    """One of the tapes ``x``, in these ``lines``; ``header``: the line of its anchor."""
    if lines == "compact":
        fields = np.stack([x.open[tape], x.high[tape], x.low[tape], x.close[tape], x.volume[tape]], 1)
        frozen = prompt.frozen(header, questions)
        return Shown(frozen, tokeniser.compact(fields), lambda level: f"{level:03d}")
    bars, spec = bars_of_levels(x, tape, header)
    made = tokeniser.lines(bars, spec) if lines == "decimal" else _in_words(prompt, bars, spec)
    frozen = prompt.frozen(None, questions)
    anchor = _anchor(header)
    return Shown(frozen, made, lambda level: anchor.printed(f"{level:03d}"))


def bars_of_levels(x: Levels, tape: int, header: str) -> tuple[Bars, LineSpec]:
    """A tape's bars, BAR [bars], with the prices and volumes that its levels and codes stand for."""
    anchor = _anchor(header)
    made = np.zeros(len(x.close[tape]), BAR)
    made["ts_open"] = OPENED + MINUTE_NS * np.arange(len(made))
    made["interval"] = MINUTE_NS
    for name, levels in zip("ohlc", (x.open, x.high, x.low, x.close), strict=True):
        made[name] = anchor.price(levels[tape])
    codes = x.volume[tape]
    traded = anchor.volume / 10**SCALE * 10.0 ** ((codes - CENTRE) / CODES_PER_DECADE)
    for bar, exact in zip(made, np.where(codes > 0, traded, 0.0).tolist(), strict=True):
        put_volume(bar, Volume.of(round(exact * 10**_NANO) * 10 ** (SCALE - _NANO)))
    return made, LineSpec(anchor.price_decimals, _VOLUME_DECIMALS, price_scale=anchor.price_scale)


def minutes(bars: int) -> Ints:
    """The minute of the day at which each bar of a tape opens, as decimal lines print it: [1, bars]."""
    return ((OPENED_MINUTE + np.arange(bars)) % (24 * 60))[None]


def _anchor(header: str) -> Anchor:
    """The anchor that has this line."""
    _, reference, _, unit, _, volume, *_ = header.split()
    decimals = max(len(number.partition(".")[2]) for number in (reference, unit))
    return Anchor.of(reference, unit, volume, decimals, max(decimals, _NANO))


def _price(value: int, spec: LineSpec) -> str:
    return decimal(value, spec.price_decimals, spec.price_scale)


def _in_words(prompt: PromptFormat, bars: Bars, spec: LineSpec) -> list[list[int]]:
    """Each number behind its name."""
    found = []
    for bar in bars:
        clock = clock_text(int(bar["ts_open"]), MINUTE_NS)
        prices = [f"{name} {_price(int(bar[name[0]]), spec)}" for name in ("open", "high", "low", "close")]
        volume = decimal(volume_of(bar).exact, spec.volume_decimals, SCALE)
        text = f"{clock[:2]}:{clock[2:]} {', '.join(prices)}, volume {volume}\n"
        found.append(prompt.encode(text))
    return found
