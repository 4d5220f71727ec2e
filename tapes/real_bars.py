"""Real bars as levels, so that the rules label them."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ingest.bar_kernel import BAR, Bars
from ingest.compact import Anchor, CompactSpec, anchor_for, fields_of, typical_volume
from ingest.volumes import Volume, put_volume
from tapes.rules import Ints, Levels, Rule


def levels_of(bars: Bars, anchor: Anchor, window: int = 0) -> Levels:
    """One tape, [1, bars], as compact lines print it around ``anchor``.

    Raises ValueError when a price leaves the levels.
    """
    opened, high, low, close, volume = (column[None] for column in fields_of(bars, anchor).T)
    at = bars["ts_last_event"].astype(np.int64)[None]
    return Levels(opened, high, low, close, volume, np.array([anchor.percent]), window, at=at)


def anchor_of(bars: Bars, spec: CompactSpec) -> Anchor:
    """The anchor that suits all these bars; with their typical volume."""
    volumes = typical_volume(np.stack([bars[name] for name in ("v_high", "v", "v_low")], axis=1))
    return anchor_for(int(bars["l"].min()), int(bars["h"].max()), volumes, spec)


def label_ahead(
    rule: Rule, bars: Bars, spec: CompactSpec, window: int = 0, minute: Ints | None = None
) -> int:
    """The label of the bar behind which the last ``rule.horizon`` of ``bars`` came; UNDEFINED without one.

    The anchor suits all of them: a label may know what came, and what is shown to a model has its own.
    """
    levels = levels_of(bars, anchor_of(bars, spec), window)
    return int(rule.label(replace(levels, minute=minute)).value[0, -1 - rule.horizon])


def bars_of(rows: Iterable[tuple[int, ...]]) -> Bars:
    """BAR [n] of (event time in ns, open, high, low, close, volume).

    Prices are in units of the session's `price_scale`, volumes in 1e-18.
    """
    given = list(rows)
    bars = np.zeros(len(given), BAR)
    for bar, (*values, volume) in zip(bars, given, strict=True):
        for name, value in zip(("ts_last_event", "o", "h", "l", "c"), values, strict=True):
            bar[name] = value
        put_volume(bar, Volume.of(volume))
    return bars
