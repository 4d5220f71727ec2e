"""A drawn tape as the lines that a model reads: compact ones, or others as the daemon writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from daemon.engine.example_turns import example_turns
from engine.model.chat_format import PromptFormat
from engine.model.terse import Lines, named_lines
from ingest.compact import Anchor
from ingest.tokens import Tokeniser
from tapes.rules import Levels
from tapes.worked_examples import bars_of_levels

_NANO = 9


class Shown(NamedTuple):
    """A tape's frozen prefix, the tokens of each bar's line, and how a level is written as a price."""

    frozen: tuple[int, ...]
    lines: list[list[int]]
    price: Callable[[int], str]


class Reading(NamedTuple):
    """How a tape is shown: its ``lines``, and how many worked ``examples`` go before them."""

    lines: Lines = "compact"
    examples: int = 0

    @property
    def name(self) -> str:
        """As a calibration names it."""
        return named_lines(self.lines, self.examples)


def shown(
    prompt: PromptFormat,
    tokeniser: Tokeniser,
    reading: Reading,
    x: Levels,
    tape: int,
    header: str,
    questions: list[str],
) -> Shown:
    """One of the tapes ``x``; ``header``: the line of its anchor."""
    lines = reading.lines
    if lines == "compact":
        fields = np.stack([x.open[tape], x.high[tape], x.low[tape], x.close[tape], x.volume[tape]], 1)
        frozen = prompt.frozen(header, questions)
        return Shown(frozen, tokeniser.compact(fields), lambda level: f"{level:03d}")
    anchor = anchor_of_header(header)
    bars, spec = bars_of_levels(x, tape, anchor)
    made = tokeniser.lines(bars, replace(spec, form=lines))
    turns = example_turns(prompt, reading.examples, lines)
    frozen = prompt.frozen(None, questions, lines=lines, turns=turns)
    return Shown(frozen, made, lambda level: anchor.printed(f"{level:03d}"))


def anchor_of_header(header: str) -> Anchor:
    """The anchor that has this line."""
    _, reference, _, unit, _, volume, *_ = header.split()
    decimals = max(len(number.partition(".")[2]) for number in (reference, unit))
    return Anchor.of(reference, unit, volume, decimals, max(decimals, _NANO))
