"""Labelled tapes to evaluate on: generated ones, or windows of a recorded file; and what a model answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from daemon.ring_numbers import price_scale_for, prices_of, ring_values
from feeds.decimals import decimals_of
from feeds.file_format import load_format
from feeds.market_data import AnyRecord, Bar
from feeds.recorded_file import read_records
from flash.question import EXACT_VALUE
from ingest.bar_kernel import Bars
from ingest.bars import BarBuilder, BarPolicy, Feeds
from ingest.compact import HIGHEST, Anchor, CompactSpec
from ingest.record import RecordWriter
from tapes.generate import EVALUATION, Ranges, generate
from tapes.real_bars import anchor_of, bars_of, levels_of
from tapes.rules import RULES, UNDEFINED, Floats, Ints, Levels, Rule
from tapes.worked_examples import minutes
from training.baseline import fitted_guess, shapes, simple_guess
from training.batches import Layout, Vocabulary, draw_headers, pack
from training.model import TapeModel
from training.tokenizer import QUESTIONS

Placement = Literal["terse", "numbered"]
_SECOND = 10**9
TAPES = 8
"""In a batch."""
_STRETCH = 4
"""A stretch of a file, in lengths of a window's bars."""


_COLUMNS = ("logits", "label", "before", "margin", "guess", "tape", "right")
"""Of `Answers`, by answer."""


class Drawn(NamedTuple):
    """Tapes, token ids of their headers [tapes, tokens], and ``name`` [tapes], equal where they overlap."""

    levels: Levels
    header: Ints
    name: Ints


class Source(Protocol):
    """Where labelled tapes come from."""

    @property
    def described(self) -> dict[str, str | int | float]:
        """What a calibration file says of it."""

    def batches(self, vocabulary: Vocabulary, bars: int, window: int) -> Iterator[Drawn]:
        """Tapes of ``bars`` bars for a reader of ``window``, as many as there are."""


@dataclass(frozen=True)
class Generated:
    """Generated tapes; without end."""

    seed: int = 1
    ranges: Ranges = EVALUATION

    @property
    def described(self) -> dict[str, str | int | float]:
        """Seed and ranges."""
        return {"tape": "generated", "seed": self.seed, "ranges": repr(self.ranges)}

    def batches(self, vocabulary: Vocabulary, bars: int, window: int) -> Iterator[Drawn]:
        """Every batch has a seed of its own; training's seeds are shorter, so none is met again."""
        return (self.batch(vocabulary, bars, window, number) for number in count())

    def batch(self, vocabulary: Vocabulary, bars: int, window: int, number: int) -> Drawn:
        """The batch of this number."""
        rng = np.random.default_rng([990_001, self.seed, bars, window, number])
        x = generate(rng, TAPES, bars, self.ranges, window)
        header, percent = draw_headers(rng, vocabulary, x.percent)
        levels = Levels(x.open, x.high, x.low, x.close, x.volume, percent, window, minutes(bars))
        return Drawn(levels, header, number * TAPES + np.arange(TAPES))


@dataclass(frozen=True)
class Stretch:
    """Windows of bars, each around an anchor of its own; ``described``: see `Source`.

    ``shown``: how many of a window's first bars choose its anchor, as those that a session knows do; 0 for
    all of them. Bars from the first that leaves the levels on have the time 0, and no meaning.
    """

    everything: Bars
    spec: CompactSpec
    described: dict[str, str | int | float]
    shown: int = 0

    def batches(self, vocabulary: Vocabulary, bars: int, window: int) -> Iterator[Drawn]:
        """Windows in an order that is drawn once; those with headers of equal length go together.

        Windows of one stretch of the file share bars and are one tape; none reaches into the next stretch.
        """
        stretch = _STRETCH * bars
        starts = np.arange(0, max(len(self.everything) - bars + 1, 0), max(window // 4, 1))
        starts = np.random.default_rng(0).permutation(starts[starts % stretch + bars <= stretch])
        for drawn in self.windows(vocabulary, starts, bars, window):
            yield drawn._replace(name=drawn.name // stretch)

    def windows(self, vocabulary: Vocabulary, starts: Ints, bars: int, window: int) -> Iterator[Drawn]:
        """Those that begin at these bars, by which they are named; headers of equal length go together."""
        waiting: dict[int, list[tuple[Levels, list[int], int]]] = {}
        for start in starts.tolist():
            part = self.everything[start : start + bars]
            anchor = anchor_of(part[: self.shown or bars], self.spec)
            header = vocabulary.encode(anchor.header)
            group = waiting.setdefault(len(header), [])
            group.append((levels_of(_inside(part, anchor), anchor, window), header, start))
            if len(group) == TAPES:
                yield together(waiting.pop(len(header)), window)
        for group in waiting.values():
            yield together(group, window)

    def part(self, begin: float, end: float) -> Stretch:
        """The bars between two shares of all, in time order."""
        first, last = (round(share * len(self.everything)) for share in (begin, end))
        return replace(self, everything=self.everything[first:last])


def _inside(bars: Bars, anchor: Anchor) -> Bars:
    """The bars; from the first that leaves the levels on, copies of the last before it, with the time 0."""
    left = np.flatnonzero((bars["l"] < anchor.price(0)) | (bars["h"] > anchor.price(HIGHEST)))
    if len(left):
        bars = bars.copy()
        bars[left[0] :] = bars[left[0] - 1]
        bars["ts_last_event"][left[0] :] = 0
    return bars


@dataclass(frozen=True)
class Recorded:
    """Windows of a file's bars, one bar further each, each around an anchor of its own."""

    path: Path
    form: str
    interval_ns: int = 60 * _SECOND

    @property
    def described(self) -> dict[str, str | int | float]:
        """The file's name and format."""
        return {"tape": self.path.name, "format": self.form}

    def batches(self, vocabulary: Vocabulary, bars: int, window: int) -> Iterator[Drawn]:
        """See `Stretch`."""
        yield from self.stretch().batches(vocabulary, bars, window)

    def stretch(self) -> Stretch:
        """All of the file."""
        return Stretch(*self.bars(), self.described)

    def symbols(self) -> frozenset[str]:
        """Of its records, with and without the venue."""
        return frozenset(name for each in self._records() for name in (each.symbol, each.key))

    def bars(self) -> tuple[Bars, CompactSpec]:
        """All bars, and how their prices are written. Ticks become bars of ``interval_ns``."""
        spec = self._spec()
        ready, built = [], []
        feeds = Feeds((0,), BarPolicy(self.interval_ns), price_scale=spec.price_scale)
        builder, writer = BarBuilder([feeds]), RecordWriter(4096)
        for record in self._records():
            made = ring_values(record, spec.price_scale)
            if isinstance(record, Bar):
                ready.append((record.ts_event, *made.values[:4], int(record.volume)))
            else:
                times, finer = (record.ts_event, record.ts_recv), (made.price_finer, made.size_finer)
                writer.add(made.kind, 0, *times, made.values, price_finer=finer[0], size_finer=finer[1])
            if len(writer) == writer.capacity:
                built.append(builder.update(writer.records, 0))
                writer.clear()
        if ready:
            return bars_of(ready), spec
        return np.concatenate([*built, builder.update(writer.records, 0), builder.flush()]), spec

    def _records(self) -> Iterator[AnyRecord]:
        records = read_records(self.path, load_format(self.form))
        return (each for each in records if isinstance(each, AnyRecord))

    def _spec(self) -> CompactSpec:
        decimals = highest = 0
        for record in self._records():
            prices = prices_of(record)
            decimals, highest = max(decimals, *map(decimals_of, prices)), max(highest, *prices)
        return CompactSpec(decimals, price_scale=price_scale_for(decimals, highest))


def together(group: Sequence[tuple[Levels, Sequence[int] | Ints, int]], window: int) -> Drawn:
    """Windows as one batch: levels, header and the name of each; headers are of equal length."""

    def column(name: str) -> Ints:
        return np.concatenate([getattr(levels, name) for levels, _, _ in group])

    opened, high, low, close, volume = map(column, ("open", "high", "low", "close", "volume"))
    shown_at = minutes(close.shape[1])
    at = None if group[0][0].at is None else column("at")
    levels = Levels(opened, high, low, close, volume, column("percent"), window, shown_at, at)
    return Drawn(levels, np.array([header for _, header, _ in group]), np.array([name for *_, name in group]))


@dataclass(frozen=True)
class Answers:
    """A model's answers to one question, [answers]; for a question with a number only ``right``.

    ``logits`` [answers, choices + 1] are those of the choices and of NONE. ``before`` is the label one bar
    before, ``guess`` the plain guess, ``tape`` tells independent tapes apart.
    """

    name: str
    choices: tuple[str, ...]
    logits: Floats
    label: Ints
    before: Ints
    margin: Floats
    guess: Ints
    tape: Ints
    right: npt.NDArray[np.bool_]

    @property
    def defined(self) -> Answers:
        """Those that have a right choice."""
        kept = self.label != UNDEFINED
        return Answers(self.name, self.choices, **{name: getattr(self, name)[kept] for name in _COLUMNS})


@dataclass(frozen=True)
class Setting:
    """How questions are asked: placement, and how many windows of bars were read (1: a fresh one)."""

    placement: Placement = "terse"
    windows: int = 1
    window: int = 64

    @property
    def numbered(self) -> bool:
        """Questions are asked by number."""
        return self.placement == "numbered"

    @property
    def name(self) -> str:
        """As it is shown."""
        read = ("fresh", "one window later", "two windows later")[min(self.windows, 3) - 1]
        if self.windows > 3:
            read = f"{self.windows - 1} windows later"
        return f"{self.placement}, {read}"


class Read(NamedTuple):
    """What a model answers to one question on several tapes, each at some bars.

    ``tape`` and ``bar`` [answers] are indices. ``chosen`` [answers, choices + 1] are the logits of the
    choices and of NONE; of a number [answers, 0]. ``right`` is of a number only.
    """

    question: int
    tape: Ints
    bar: Ints
    chosen: Floats
    right: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Asked:
    """The questions of an evaluation, in order: those with rules, then perhaps `exact_value`."""

    rules: tuple[Rule, ...] = RULES
    exact: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Of all questions."""
        return (*(rule.name for rule in self.rules), *([EXACT_VALUE.name] if self.exact else []))

    @property
    def texts(self) -> tuple[str, ...]:
        """As they are asked."""
        return (*(rule.text for rule in self.rules), *([EXACT_VALUE.text] if self.exact else []))

    @property
    def in_time(self) -> bool:
        """Questions are asked in time order, where they have labels: about what comes next, or by hand."""
        return any(rule.horizon or rule.partial for rule in self.rules)

    def rule(self, question: int) -> Rule | None:
        """Of a question by its index; None of `exact_value`."""
        return self.rules[question] if question < len(self.rules) else None


class Reader(Protocol):
    """A model that answers questions about tapes."""

    @property
    def asked(self) -> Asked:
        """What it is asked."""

    @property
    def lines(self) -> str:
        """The line schema that it reads."""

    @property
    def cuts(self) -> int:
        """At how many bars of a tape it is asked."""

    def read(
        self, drawn: Drawn, setting: Setting, cuts: Ints, wanted: Ints, rng: np.random.Generator
    ) -> Iterator[Read]:
        """Answer the questions ``wanted`` with each of ``cuts`` as the last bar."""


@dataclass(frozen=True)
class Packed:
    """The tape model: a tape is read once for all questions at all its bars, as a sliding session does it."""

    model: TapeModel
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    cuts: int = 16
    asked: Asked = field(default_factory=Asked, init=False)
    lines: str = field(default="compact", init=False)

    def read(
        self, drawn: Drawn, setting: Setting, cuts: Ints, wanted: Ints, rng: np.random.Generator
    ) -> Iterator[Read]:
        """See `Reader`. Numbered questions are drawn, 6 to all of them in any order."""
        tapes, bars = drawn.levels.close.shape
        order = np.tile(wanted, (tapes, 1))
        if setting.numbered:
            everything = np.tile(np.arange(len(QUESTIONS)), (tapes, 1))
            order = rng.permuted(everything, axis=1)[:, : int(rng.integers(6, len(QUESTIONS) + 1))]
        layout = Layout(setting.window, bars, len(cuts), tapes, 0, setting.numbered)
        batch = pack(rng, self.vocabulary, layout, drawn.levels, drawn.header, cuts, order)
        with torch.no_grad():
            logits = self.model(batch).logits.numpy()
        queries, at = batch.queries, batch.bar[batch.queries.rows]
        for question in wanted.tolist():
            tape, query = np.nonzero(queries.kind == question)
            own = logits[tape, query].astype(np.float64)
            rule = self.asked.rule(question)
            if rule is None:
                right = own.argmax(-1) == queries.target[tape, query]
                yield Read(question, tape, at[query], own[:, :0], right)
            else:
                choices = self.vocabulary.choices[question][: len(rule.choices)]
                yield Read(question, tape, at[query], own[:, [*choices, self.vocabulary.none]])


def collect(
    reader: Reader,
    source: Source,
    setting: Setting,
    labels: int,
    max_tapes: int = 20_000,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Answers]:
    """Ask all questions until each has ``labels`` labels, or the source ends, or ``tapes`` tapes are read.

    Questions are asked at bars of the second half of a tape's last window.
    """
    bars = setting.window * setting.windows
    last = np.arange(bars - setting.window // 2, bars)
    asked = reader.asked
    found: list[list[dict[str, Any]]] = [[] for _ in asked.names]
    have = np.zeros(len(asked.names), np.int64)
    read = 0
    for number, drawn in enumerate(source.batches(Vocabulary(), bars, setting.window)):
        if read >= max_tapes or have.min() >= labels:
            break
        rng = np.random.default_rng([7, number])
        at = np.sort(rng.choice(last, min(reader.cuts, len(last)), replace=False))
        for part in reader.read(drawn, setting, at, np.flatnonzero(have < labels), rng):
            if len(part.tape):
                labelled = _labelled(part, asked.rule(part.question), drawn)
                found[part.question].append(labelled)
                have[part.question] += int((labelled["label"] != UNDEFINED).sum())
        read += len(drawn.levels.close)
        progress(float(np.minimum(have, labels).sum() / (labels * len(have))))
    return [
        _gathered(name, asked.rule(question), parts)
        for question, (name, parts) in enumerate(zip(asked.names, found, strict=True))
        if parts
    ]


def _gathered(name: str, rule: Rule | None, parts: Sequence[dict[str, Any]]) -> Answers:
    """The answers to one question. The plain guess of a desk's own one is fitted here."""
    columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
    shape = columns.pop("shape", None)
    if shape is not None:
        columns["guess"] = fitted_guess(shape, columns["label"], columns["tape"])
    return Answers(name, rule.choices if rule is not None else (), **columns)


def _labelled(part: Read, rule: Rule | None, drawn: Drawn) -> dict[str, Any]:
    """The fields of `Answers` but name and choices; ``shape`` in place of a guess that is still unfitted."""
    tape, bar, x = part.tape, part.bar, drawn.levels
    if rule is None:
        assert part.right is not None
        blank = np.zeros(len(tape), np.int64)
        labels = {"label": blank, "before": blank, "margin": blank.astype(np.float64), "guess": blank}
        right = part.right
    else:
        label = rule.label(x)
        value = label.value.astype(np.int64)
        guess = simple_guess(rule.name, x) if rule in RULES else None
        labels = {
            "label": value[tape, bar],
            "before": value[tape, bar - 1],
            "margin": label.margin[tape, bar],
            **({"shape": shapes(x)[tape, bar]} if guess is None else {"guess": guess[tape, bar]}),
        }
        right = part.chosen[:, :-1].argmax(-1) == labels["label"]
    return {"tape": drawn.name[tape], "logits": part.chosen, "right": right, **labels}


def joined(parts: Sequence[Sequence[Answers]]) -> list[Answers]:
    """Answers of several collections as one, by question; their tapes stay apart."""
    found: dict[str, list[Answers]] = {}
    for number, part in enumerate(parts):
        for each in part:
            found.setdefault(each.name, []).append(replace(each, tape=each.tape * len(parts) + number))
    return [
        Answers(
            name,
            group[0].choices,
            **{column: np.concatenate([getattr(each, column) for each in group]) for column in _COLUMNS},
        )
        for name, group in found.items()
    ]
