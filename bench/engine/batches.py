"""What one pass can answer: several sessions, standing questions on one tape, sharers of a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import NamedTuple

import torch

from bench.engine.contenders import (
    KeptCache,
    Regions,
    Reply,
    agree,
    append,
    ask_together,
    embedded,
    engine_for,
    model_of,
)
from bench.engine.floor import Floors, causal
from bench.engine.rates import MachineRates
from bench.engine.scenario import Records, Size, make_scenario, synthetic_bars
from bench.figures import FLOORS, Figure, Goal, Setting, median_ratio, quantiles
from bench.run import SuiteRun, Turns, timed
from engine.attention.base import Attention, LayerCall
from engine.engine import default_attention
from engine.model.chat_format import PromptFormat
from engine.model.loaded import LoadedModel
from flash.question import PAPER_SIX
from ingest.compact import CompactEncoder, CompactSpec
from ingest.tokens import Tokeniser
from regions.tape import Retention, Tape

Ask = Callable[[], list[Reply]]
Questions = Sequence[Sequence[int]]
Goals = Mapping[str, Goal]
_OVER_KEPT = "kept caches one by one"


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

    def lap(self, ask: Ask) -> tuple[list[Reply], int]:
        """The result of ``ask``, and the ns of attention in it."""
        self.ns = 0
        return ask(), self.ns


class Readers(NamedTuple):
    """What ``rows`` rows read: each reader's ``own`` tokens, with half of its new rows, and ``shared``."""

    name: str
    readers: int
    rows: int
    own: float
    shared: int = 0


class Compared(NamedTuple):
    """ns of each way's passes and of the attention in them: in one pass, in turn and, if any, kept caches."""

    of: Readers
    passes: list[list[int]]
    attention: list[list[int]]


def compare(of: Readers, stopwatch: Stopwatch, ways: Sequence[Ask], repeats: int) -> Compared:
    """Ask in all ways in turn, ``repeats`` times after one unmeasured round. Raises Disagreement."""
    turns = Turns(*(partial(stopwatch.lap, ask) for ask in ways))
    attention: list[list[int]] = []
    for _ in range(repeats + 1):
        together, *others = laps = turns()
        for replies, _ in others:
            for ours, other in zip(together[0], replies, strict=True):
                agree(ours, other, of.shared + int(of.own))
        attention.append([ns for _, ns in laps])
    return Compared(of, [ns[1:] for ns in turns.ns], [list(ns) for ns in zip(*attention[1:], strict=True)])


def figures(found: Compared, floors: Floors, goals: Goals) -> Iterator[Figure]:
    """One pass over the other ways and over its floor, and what limits it."""
    of, passes, attention = found
    context = of.shared + round(of.own)
    setting: Setting = {"": of.name, "rows": of.rows, "context": context, FLOORS: floors.made_of}
    figure = partial(Figure, setting=setting)

    def versus(name: str, ns: Sequence[list[int]], way: int, against: str) -> Figure:
        ours, other = (quantiles(ns[i], 0.5)[0] / 1e6 for i in (0, way))
        compared = partial(figure, name, ours, "ms", against=against, reference=other, n=len(ns[0]))
        return compared(paired=median_ratio(ns[0], ns[way]), goal=goals.get(against))

    yield (in_turn := versus("one pass", passes, 1, "in turn"))
    if len(passes) > 2:
        yield versus("one pass", passes, 2, _OVER_KEPT)
    floor = floors.of_pass(of.rows, of.shared, of.own, of.readers)
    yield figure("one pass", in_turn.ours, "ms", against="floor", reference=floor)
    yield versus("attention in one pass", attention, 1, "in turn")
    gains = (
        ("gain of one pass", median_ratio(passes[1], passes[0])),
        ("gain of a pass at the floor", quantiles(passes[1], 0.5)[0] / 1e6 / floor),
        ("gain in attention", median_ratio(attention[1], attention[0])),
    )
    for name, gain in gains:
        yield figure(name, gain, goal=goals.get(name))
    of_attention = floors.attention(of.rows, of.shared, of.own, of.readers)
    for name, part in (("attention", of_attention), ("linear layers", floors.linear(of.rows))):
        yield figure(f"{name}: arithmetic", part.arithmetic_ms, "ms", "Floors")
        yield figure(f"{name}: reading", part.reading_ms, "ms", "Floors")


_GAINS = {6: 2.5, 25: 5.0}
"""Goals for this many standing questions."""


def sessions(run: SuiteRun) -> Iterator[Figure]:
    """Sessions with nothing in common but the prompt's first tokens, a question each: one pass, one pass
    each in turn, and kept caches one by one.
    """
    n, bars = run.sized((8, 155), (3, 12))
    bench = _Bench(run, n, bars)
    question = bench.prompt.question(PAPER_SIX[0].text)
    caches = [KeptCache.copied(bench.plain, bench.engine.pool, tape) for tape in bench.tapes]
    name, goals = f"{n} sessions, a question each", {_OVER_KEPT: Goal(0.25)}
    bench.whole(name, [question] * n, goals, lambda: [cache.ask(question) for cache in caches])
    yield from bench.figures()


def standing(run: SuiteRun) -> Iterator[Figure]:
    """Whole questions on one tape, and one further token of each answer: one pass against one each. Every
    row multiplies every key and weight itself either way; a pass only saves reading the same bytes again
    and the fixed cost of each pass. Then both placements (`flash.placement`): these questions of a window
    of 64 bars, in full, or numbered in the frozen prefix and asked by number, against one in the same
    placement.
    """
    numbers = run.sized((6, 25), (2, 4))
    bench = _Bench(run, 1, run.sized(480, 30), readers=max(numbers))
    for n in numbers:
        questions = [bench.prompt.question(text) for text in standing_texts(n)]
        goals = {"gain of one pass": Goal(_GAINS[n], "at least", "ours")} if n in _GAINS else {}
        bench.whole(f"{n} questions on one tape", questions, goals)
        bench.decode(f"{n} answers on one tape, a token each", questions, goals)
    yield from bench.figures()
    yield from placements(run, "80m" if not run.quick else "embedded", model_of(run)[0])
    if not run.quick:
        yield from placements(run, "embedded", embedded(run))


_PLACED = {6: 1.5, 25: 3.0}
"""Goals for this many terse or numbered questions: a multiple of the time of one."""


def placements(run: SuiteRun, model: str, loaded: LoadedModel) -> Iterator[Figure]:
    """Questions of one version in one pass, in both placements, all in turn."""
    numbers, bars = run.sized((1, 6, 25, 100), (1, 2, 4)), run.sized(64, 6)
    prompt = PromptFormat.of(loaded.tokenizer, described=loaded.described, end_ids=loaded.end_ids)
    header, window = _window(loaded, prompt, bars)
    cases: list[tuple[str, int, tuple[int, ...], list[list[int]]]] = []
    for n in numbers:
        texts = standing_texts(n)
        if prompt.terse is not None:  # it knows fewer questions than that
            texts = list(islice(cycle(prompt.terse.questions), n))
        numbered = [prompt.numbered(number) for number in range(1, n + 1)]
        cases.append(("ephemeral", n, prompt.frozen(header), list(map(prompt.question, texts))))
        cases.append(("frozen", n, prompt.frozen(header, texts), numbered))
    tokens = sum(len(frozen) for *_, frozen, _ in cases) + len(cases) * sum(map(len, window))
    engine = engine_for(loaded, tokens, readers=max(numbers))
    ways: list[Callable[[], list[Reply]]] = []
    for placement, n, frozen, questions in cases:
        regions = Regions(engine, frozen, Retention(sum(map(len, window))), f"{placement} {n}")
        regions.fill(window)
        ways.append(partial(ask_together, engine, [regions.tape] * n, questions))
    turns = Turns(*ways)
    turns()
    turns.clear()
    for _ in range(run.sized(7, 2)):
        turns()
    times = {case[:2]: ns for case, ns in zip(cases, turns.ns, strict=True)}
    for placement, n, frozen, questions in cases:
        one, ns = times[placement, 1], times[placement, n]
        ours, alone = (quantiles(each, 0.5)[0] / 1e6 for each in (ns, one))
        limit = _PLACED.get(n) if placement == "frozen" or prompt.terse is not None else None
        yield Figure(
            "one version's answers P50",
            ours,
            "ms",
            f"Placements, {model}",
            {"placement": placement, "questions": n, "rows": sum(map(len, questions)), "frozen": len(frozen)},
            "one question",
            alone,
            paired=median_ratio(ns, one),
            goal=None if limit is None else Goal(limit),
            n=len(ns),
        )


def _window(loaded: LoadedModel, prompt: PromptFormat, bars: int) -> tuple[str | None, Records]:
    """Bars in the lines that the model reads best, and their header."""
    if prompt.lines == "decimal":
        return None, make_scenario(loaded, Size(bars, 0, 0)).first
    header, window = "", list[list[int]]()
    for piece in CompactEncoder(Tokeniser(prompt.encode), CompactSpec(2)).encode(synthetic_bars(bars, 7)):
        if piece.restart is not None:
            header = piece.restart.anchor.header
            window = [list(tokens) for tokens, _ in piece.restart.window]
        window += piece.lines
    return header, window


def prefix(run: SuiteRun) -> Iterator[Figure]:
    """One further token of an answer each, behind one long prefix: one pass against one each."""
    n, bars, prefix_bars = run.sized((16, 5, 236), (3, 2, 12))
    bench = _Bench(run, n, bars, prefix_bars=prefix_bars)
    questions = [bench.prompt.question(PAPER_SIX[0].text)] * n
    name = f"{n} sessions behind one frozen prefix, a token each"
    bench.decode(name, questions, {"gain in attention": Goal(5.0, "at least", "ours")})
    yield from bench.figures()


def standing_texts(n: int) -> list[str]:
    """``n`` different questions of about the same length: the paper's six, then one per further span."""
    further = (
        f"Is the close of the newest bar above the average close of the last {span} bars shown here?"
        for span in range(2, 2 + max(0, n - len(PAPER_SIX)))
    )
    return [*(question.text for question in PAPER_SIX), *further][:n]


class _Bench:
    """One engine with a stopwatch, and ``n`` tapes of equal length behind one prefix.

    Questions go to one tape each, or all to the only one. The machine's own rates, which give the floors,
    are measured before and after everything else.
    """

    def __init__(self, run: SuiteRun, n: int, bars: int, *, prefix_bars: int = 0, readers: int = 0) -> None:
        self._repeats, self._found = run.sized(5, 2), list[tuple[Compared, Goals]]()
        self._loaded, self.plain = model_of(run)
        self.prompt = PromptFormat.of(self._loaded.tokenizer)
        frozen = (*self.prompt.frozen(), *chain.from_iterable(self._bars(prefix_bars, 0)))
        records = [self._bars(bars, i + bool(prefix_bars)) for i in range(n)]
        sizes = [sum(map(len, each)) for each in records]
        tokens, self._stopwatch = len(frozen) + sum(sizes), Stopwatch(default_attention(self._loaded))
        self.engine = engine_for(self._loaded, tokens, readers=max(readers, n), attention=self._stopwatch)
        regions = [Regions(self.engine, frozen, Retention(size)) for size in sizes]
        for each, own in zip(regions, records, strict=True):
            each.fill(own)
        self.tapes = [each.tape for each in regions]
        self._shared, self._own = (len(frozen), sizes[0]) if n > 1 else (tokens, 0)
        self._rates = MachineRates.of(run)
        self._rates.look()

    def whole(self, name: str, questions: Questions, goals: Goals, *kept: Ask) -> None:
        """Compare whole questions."""
        tapes, rows = self._read_by(questions), sum(map(len, questions))

        def ask(some: slice) -> list[Reply]:
            return ask_together(self.engine, tapes[some], questions[some])

        self._compare(Readers(name, len(tapes), rows, causal(round(rows / len(tapes)))), ask, goals, *kept)

    def decode(self, name: str, questions: Questions, goals: Goals) -> None:
        """Compare the passes after the questions': one row per reader, dropped again in O(1)."""
        forks = [tape.fork() for tape in self._read_by(questions)]
        tokens = [[reply.token] for reply in append(self.engine, forks, questions)]

        def step(some: slice) -> list[Reply]:
            replies = append(self.engine, forks[some], tokens[some])
            for fork in forks[some]:
                fork.keep(fork.length - 1)
            return replies

        n = len(forks)
        self._compare(Readers(name, n, n, sum(map(len, questions)) / n + 1), step, goals)
        for fork in forks:
            fork.release()

    def figures(self) -> Iterator[Figure]:
        """All figures, by the same floors; then the rates behind them."""
        self._rates.look()
        floors = Floors.of(self._loaded, self._rates)
        for compared, goals in self._found:
            yield from figures(compared, floors, goals)
        yield from self._rates.figures()

    def _compare(self, of: Readers, ask: Callable[[slice], list[Reply]], goals: Goals, *kept: Ask) -> None:
        """``ask`` all readers in one pass, and one by one; ``of``: without the tapes."""
        readers = range(of.readers)
        ways = lambda: ask(slice(len(readers))), lambda: [ask(slice(i, i + 1))[0] for i in readers], *kept
        of = of._replace(shared=self._shared, own=self._own + of.own)
        self._found.append((compare(of, self._stopwatch, ways, self._repeats), goals))

    def _read_by(self, questions: Questions) -> list[Tape]:
        return self.tapes * (len(questions) // len(self.tapes))

    def _bars(self, n: int, seed: int) -> Records:
        return make_scenario(self._loaded, Size(n, 0, 0), seed).first
