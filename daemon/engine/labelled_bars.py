"""A session's closed bars as a rule reads them, and what waits for a label, as it is saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from flash.late_labels import WaitingAnswer
from ingest.compact import CompactSpec
from ingest.plane import TapeRecord
from ingest.volumes import Volume
from tapes.real_bars import bars_of, label_ahead
from tapes.rules import UNDEFINED, Rule

_MINUTE, _DAY = 60 * 10**9, 24 * 60


class ClosedBar(NamedTuple):
    """Times in ns, prices in units of the session's `price_scale`, the volume as in `ingest.volumes`."""

    ts_open: int
    ts_last_event: int
    open: int
    high: int
    low: int
    close: int
    volume_high: int
    volume: int
    volume_low: int

    @classmethod
    def of(cls, record: TapeRecord) -> ClosedBar:
        """The bar of a record."""
        b = record.bar
        prices = b.open, b.high, b.low, b.close
        return cls(b.ts_open, record.ts_last_event, *prices, b.volume_high, b.volume, b.volume_low)


class WaitingVersion(NamedTuple):
    """``bars``: how many the session had with it, of which it shows the last ``shown``."""

    version: int
    bars: int
    shown: int


class RuleLabelState(msgspec.Struct, frozen=True):
    """What a session waits for: versions by question, and their answers.

    ``newest``: its newest bars; ``bars``: how many it had; ``split``: of which before the last split or roll.
    """

    newest: tuple[ClosedBar, ...]
    bars: int
    split: int
    versions: dict[str, tuple[WaitingVersion, ...]]
    answers: tuple[WaitingAnswer, ...]


def label_of(rule: Rule, around: Sequence[ClosedBar], spec: CompactSpec) -> int:
    """The label of the bar before the last ``rule.horizon``; UNDEFINED where there are too few before it."""
    window = len(around) - rule.horizon
    if window < rule.bars:
        return UNDEFINED
    bars = bars_of((*each[1:6], Volume(*each[6:]).exact) for each in around)
    minute = np.array([[each.ts_open // _MINUTE % _DAY for each in around]], np.int64)
    return label_ahead(rule, bars, spec, window, minute)
