"""What one pass can answer: several sessions, standing questions on one tape, sharers of a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from bench.engine.contenders import KeptCache, Regions, Reply, append, ask_together, engine_for, model_of
from bench.engine.floor import Floors, LimitsProbe, causal
from bench.engine.questions import agree, in_turn
from bench.engine.scenario import Records, Size, make_scenario
from bench.figures import Figure, Goal, median_ratio, quantiles
from bench.run import SuiteRun, timed
from engine.attention.base import Attention, LayerCall
from engine.attention.cpu import CpuAttention
from engine.model.prompt import PromptFormat
from flash.questions import PAPER_SIX
from regions.tape import Retention, Tape

Ask = Callable[[], list[Reply]]


class Stopwatch:
    """An attention backend that adds up the time spent in another one, ns."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self.ns = 0

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """As the other."""
        output, ns = timed(self._attention, call)
        self.ns += ns
        return output

    def lap(self, ask: Ask, _: Any) -> tuple[list[Reply], int]:
        """The result of ``ask``, and the ns of attention in it."""
        self.ns = 0
        return ask(), self.ns


class Readers(NamedTuple):
    """What ``rows`` rows read: ``shared`` tokens, and each reader's ``own``; half of its new rows count."""

    name: str
    readers: int
    rows: int
    shared: int
    own: float


class Medians(NamedTuple):
    """Over ``n`` rounds, ms: one pass, another way, and the median ratio of pairs (other over one pass)."""

    n: int
    one_pass: float
    other: float
    gain: float

    @classmethod
    def of(cls, one_pass: list[int], other: list[int]) -> Medians:
        """From samples in ns."""
        ours, theirs = (quantiles(ns, 0.5)[0] / 1e6 for ns in (one_pass, other))
        return cls(len(one_pass), ours, theirs, median_ratio(other, one_pass))


class Compared(NamedTuple):
    """One pass against one pass per reader, the attention in both, and kept caches one by one."""

    of: Readers
    passes: Medians
    attention: Medians
    kept: Medians | None


def figures(found: Compared, floors: Floors, goals: Mapping[str, Goal]) -> Iterator[Figure]:
    """Ours, the other ways and the floor, and what limits it. ``goals``: limits that judge the ratios."""
    of, passes, attention, kept = found
    figure = partial(Figure, setting={"": of.name, "rows": of.rows, "context": of.shared + round(of.own)})

    def versus(name: str, against: str, each: Medians, goal: Goal | None = None) -> Figure:
        of_pairs = partial(figure, name, each.one_pass, "ms", against=against, reference=each.other)
        return of_pairs(paired=1 / each.gain, goal=goal, n=each.n)

    yield versus("one pass", "in turn", passes)
    if kept is not None:
        yield versus("one pass", "kept caches one by one", kept, goals.get("one pass over kept caches"))
    floor = floors.of_pass(of.rows, of.shared, of.own, of.readers)
    yield figure("one pass", passes.one_pass, "ms", against="floor", reference=floor)
    yield versus("attention in one pass", "in turn", attention)
    yield figure("gain of one pass", passes.gain, goal=goals.get("gain of one pass"))
    yield figure("gain of a pass at the floor", passes.other / floor)
    yield figure("gain in attention", attention.gain, goal=goals.get("gain in attention"))
    of_attention = floors.attention(of.rows, of.shared, of.own, of.readers)
    for name, part in (("attention", of_attention), ("linear layers", floors.linear(of.rows))):
        yield figure(f"{name}: arithmetic", part.arithmetic_ms, "ms", "Floors")
        yield figure(f"{name}: reading", part.reading_ms, "ms", "Floors")


def compare(
    of: Readers, stopwatch: Stopwatch, together: Ask, one_by_one: Ask, repeats: int, kept: Ask | None = None
) -> Compared:
    """Ask in all ways in turn, ``repeats`` times after one unmeasured round. Raises Disagreement."""
    ways = [partial(stopwatch.lap, ask) for ask in (together, one_by_one, kept) if ask is not None]
    passes: list[list[int]] = [[] for _ in ways]
    attention: list[list[int]] = [[] for _ in ways]
    for turn in range(-1, repeats):
        taken = in_turn(ways, (), turn)
        for way, ((replies, in_attention), took) in enumerate(taken):
            for ours, other in zip(taken[0][0][0], replies, strict=True):
                agree(ours, other, of.shared + int(of.own))
            if turn >= 0:
                passes[way].append(took)
                attention[way].append(in_attention)
    caches = Medians.of(passes[0], passes[2]) if kept else None
    return Compared(of, Medians.of(*passes[:2]), Medians.of(*attention[:2]), caches)


Judged = tuple[Compared, Mapping[str, Goal]]
_READ_BARS = 55
"""Bars per pass while reading a context whose reading is not measured."""


@dataclass(frozen=True)
class BatchesPlan:
    """Number of readers and length of their contexts; ``repeats``: rounds of all ways in turn."""

    sessions: int = 8
    session_bars: int = 155
    standing: tuple[int, ...] = (6, 25)
    standing_bars: int = 480
    sharers: int = 16
    sharer_bars: int = 5
    prefix_bars: int = 236
    repeats: int = 5


QUICK = BatchesPlan(3, 12, (2, 4), 30, 3, 2, 12, repeats=2)
_GAINS = {6: 2.5, 25: 5.0}
"""Goals for this many standing questions."""


def sessions(run: SuiteRun) -> Iterator[Figure]:
    """Sessions with nothing in common but the prompt's first tokens, a question each: one pass, one pass
    each in turn, and kept caches one by one.
    """
    plan = QUICK if run.quick else BatchesPlan()
    bench = _Bench(run, plan.repeats, plan.sessions, plan.session_bars)
    question = bench.prompt.question(PAPER_SIX[0].text)
    caches = [KeptCache.copied(model_of(run)[1], bench.engine.pool, tape) for tape in bench.tapes]
    found = bench.whole(
        f"{plan.sessions} sessions, a question each",
        bench.tapes,
        [question] * plan.sessions,
        lambda: [cache.ask(question) for cache in caches],
    )
    yield from bench.figures((found, {"one pass over kept caches": Goal(0.6)}))


def standing(run: SuiteRun) -> Iterator[Figure]:
    """Whole questions on one tape, and one further token of each answer: one pass against one each. Every
    row multiplies every key and weight itself either way; a pass only saves reading the same bytes again
    and what each pass costs besides.
    """
    plan = QUICK if run.quick else BatchesPlan()
    bench = _Bench(run, plan.repeats, 1, plan.standing_bars, readers=max(plan.standing))
    found: list[Judged] = []
    for n in plan.standing:
        tapes, questions = bench.tapes * n, [bench.prompt.question(text) for text in standing_texts(n)]
        goals = {"gain of one pass": Goal(_GAINS[n], "at least", "ours")} if n in _GAINS else {}
        found.append((bench.whole(f"{n} questions on one tape", tapes, questions), goals))
        name = f"{n} answers on one tape, a token each"
        found.append((bench.decode(name, tapes, questions), goals))
    yield from bench.figures(*found)


def prefix(run: SuiteRun) -> Iterator[Figure]:
    """One further token of an answer each, behind one long prefix: one pass against one each."""
    plan = QUICK if run.quick else BatchesPlan()
    bench = _Bench(run, plan.repeats, plan.sharers, plan.sharer_bars, prefix_bars=plan.prefix_bars)
    questions = [bench.prompt.question(PAPER_SIX[0].text)] * plan.sharers
    name = f"{plan.sharers} sessions behind one frozen prefix, a token each"
    found = bench.decode(name, bench.tapes, questions)
    yield from bench.figures((found, {"gain in attention": Goal(5.0, "at least", "ours")}))


def standing_texts(n: int) -> list[str]:
    """``n`` different questions of about the same length: the paper's six, then one per further span."""
    further = (
        f"Is the close of the newest bar above the average close of the last {span} bars shown here?"
        for span in range(2, 2 + max(0, n - len(PAPER_SIX)))
    )
    return [*(question.text for question in PAPER_SIX), *further][:n]


class _Bench:
    """One engine with a stopwatch, and ``n`` tapes of equal length behind one prefix.

    Measures the machine's own rates, which give the floors, before and after everything else.
    """

    def __init__(
        self, run: SuiteRun, repeats: int, tapes: int, bars: int, *, prefix_bars: int = 0, readers: int = 0
    ) -> None:
        self._repeats = repeats
        self._loaded, _ = model_of(run)
        self.prompt = PromptFormat.of(self._loaded.tokenizer)
        first = 1 if prefix_bars else 0
        shared = self._bars(prefix_bars, 0) if prefix_bars else []
        frozen = (*self.prompt.frozen, *chain.from_iterable(shared))
        self._frozen = len(frozen)
        records = [self._bars(bars, first + i) for i in range(tapes)]
        sizes = [sum(map(len, each)) for each in records]
        self._stopwatch = Stopwatch(CpuAttention())
        self.engine = engine_for(
            self._loaded, len(frozen) + sum(sizes), readers=max(readers, tapes), attention=self._stopwatch
        )
        self.tapes: list[Tape] = []
        for each, tokens in zip(records, sizes, strict=True):
            regions = Regions(self.engine, frozen, Retention(tokens))
            for start in range(0, bars, _READ_BARS):
                regions.ingest(each[start : start + _READ_BARS])
            self.tapes.append(regions.tape)
        self._limits = LimitsProbe.of(run)
        self._limits.look()

    def _bars(self, n: int, seed: int) -> Records:
        return make_scenario(self.prompt, Size(n, 0, 0), seed).first

    def _readers(self, name: str, tapes: Sequence[Tape], rows: int, own: float) -> Readers:
        """What readers of ``tapes`` see: a tape with one reader is its own, a tape of all is shared."""
        tape, alone = tapes[0].live_tokens, len(self.tapes) > 1
        shared, own = (self._frozen, own + tape) if alone else (self._frozen + tape, own)
        return Readers(name, len(tapes), rows, shared, own)

    def whole(
        self, name: str, tapes: Sequence[Tape], questions: Sequence[Sequence[int]], kept: Ask | None = None
    ) -> Compared:
        """Whole questions."""
        rows = sum(map(len, questions))
        return compare(
            self._readers(name, tapes, rows, causal(round(rows / len(questions)))),
            self._stopwatch,
            lambda: ask_together(self.engine, tapes, questions),
            lambda: [
                ask_together(self.engine, [tape], [question])[0]
                for tape, question in zip(tapes, questions, strict=True)
            ],
            self._repeats,
            kept,
        )

    def decode(self, name: str, tapes: Sequence[Tape], questions: Sequence[Sequence[int]]) -> Compared:
        """The pass after the question's: one row per reader. The row is dropped again, which is O(1)."""
        n = len(tapes)
        forks = [tape.fork() for tape in tapes]
        tokens = [[reply.token] for reply in append(self.engine, forks, questions)]

        def step(first: int, last: int) -> list[Reply]:
            replies = append(self.engine, forks[first:last], tokens[first:last])
            for fork in forks[first:last]:
                fork.keep(fork.length - 1)
            return replies

        of = self._readers(name, tapes, n, sum(map(len, questions)) / n + 1)
        together, one_by_one = lambda: step(0, n), lambda: [step(i, i + 1)[0] for i in range(n)]
        found = compare(of, self._stopwatch, together, one_by_one, self._repeats)
        for fork in forks:
            fork.release()
        return found

    def figures(self, *found: Judged) -> Iterator[Figure]:
        """All figures, by the same floors; then the rates behind them."""
        self._limits.look()
        floors = self._limits.floors(self._loaded)
        for compared, goals in found:
            yield from figures(compared, floors, goals)
        yield from self._limits.figures()
