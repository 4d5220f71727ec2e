"""The paper's scenario as tokens: 100 bars, then 15 times 55 bars and a question (*Attention Once* 4.1).

The bars are the demo's synthetic trades through the real bar builder, line schema and tokeniser. Prices
without decimals keep a bar near the paper's 16 tokens.
"""

from dataclasses import dataclass

import numpy as np

from daemon.ring_numbers import ring_values
from engine.model.chat_format import PromptFormat
from engine.model.loaded import LoadedModel
from feeds.synthetic import Instrument, SyntheticTape
from flash.question import PAPER_SIX
from ingest.bar_kernel import Bars
from ingest.bars import BarBuilder, BarPolicy, one_each
from ingest.lines import LineSpec
from ingest.record import RecordWriter
from ingest.tokens import Tokeniser

_SECOND = 1_000_000_000
_START = 1_723_075_200 * _SECOND
_INSTRUMENT = Instrument("BENCH", "INDEX", 214_050, _SECOND, _SECOND, 12)
_LINE = LineSpec(price_decimals=0, volume_decimals=0)

Records = list[list[int]]
"""Token ids, one list per bar."""


@dataclass(frozen=True)
class Size:
    """Number of bars at first, number of updates, and bars per update before each question."""

    first: int = 100
    rounds: int = 15
    bars: int = 55

    @property
    def total(self) -> int:
        """Total number of bars."""
        return self.first + self.rounds * self.bars


PAPER = Size()


@dataclass(frozen=True)
class Scenario:
    """What every contender reads: frozen prefix, first bars, one update per round, and the question."""

    frozen: tuple[int, ...]
    first: Records
    updates: list[Records]
    question: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The longest context: everything but the question."""
        return len(self.frozen) + sum(len(bar) for part in (self.first, *self.updates) for bar in part)


def make_scenario(loaded: LoadedModel, size: Size, seed: int = 7) -> Scenario:
    """The scenario in the tokens of one model."""
    return scenario_in(PromptFormat.of(loaded.tokenizer), size, seed)


def scenario_in(prompt: PromptFormat, size: Size, seed: int = 7) -> Scenario:
    """The scenario in the tokens of one tokenizer."""
    lines = Tokeniser(prompt.encode).lines(synthetic_bars(size.total, seed), _LINE)
    rest = lines[size.first :]
    return Scenario(
        prompt.frozen(),
        lines[: size.first],
        [rest[i * size.bars : (i + 1) * size.bars] for i in range(size.rounds)],
        tuple(prompt.question(PAPER_SIX[0].text)),
    )


def synthetic_bars(n: int, seed: int) -> Bars:
    """``n`` one-second bars, BAR [n]."""
    tape = SyntheticTape(_INSTRUMENT, seed)
    builder = BarBuilder(one_each(1, BarPolicy(_SECOND)))
    writer = RecordWriter(_INSTRUMENT.trades_per_second)
    closed = []
    for second in range(n):
        writer.clear()
        for trade in tape.second(_START + second * _SECOND):
            made = ring_values(trade)
            writer.add(made.kind, 0, trade.ts_event, trade.ts_recv, made.values, size_finer=made.size_finer)
        closed.append(builder.update(writer.records, 0))
    return np.concatenate([*closed, builder.flush()])
