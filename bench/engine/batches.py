"""What can be answered in one pass: several sessions, standing questions on one tape, sharers of a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from bench.engine import models
from bench.engine.contenders import KeptCache, Regions, Reply, append, ask_together, engine_for
from bench.engine.floor import causal
from bench.engine.scenario import Records, Size, make_scenario
from bench.engine.together import Compared, Goals, Readers, Stopwatch, compare, figures
from bench.figures import Figure, Goal
from bench.run import Run
from engine.attention.cpu import CpuAttention
from engine.model.loading import LoadedModel
from engine.model.prompt import PromptFormat
from flash.questions import PAPER_SIX
from regions.tape import Retention, Tape

Case = tuple[Readers, Goals, Callable[[], Compared]]
_READ_BARS = 55
"""Bars of one pass while a context is read that is not itself measured."""


@dataclass(frozen=True)
class Plan:
    """How many readers and how long their contexts; ``repeats``: rounds of all ways in turn."""

    sessions: int = 8
    session_bars: int = 155
    standing: tuple[int, ...] = (6, 25)
    standing_bars: int = 480
    sharers: int = 16
    sharer_bars: int = 5
    prefix_bars: int = 236
    repeats: int = 5


QUICK = Plan(3, 12, (2, 4), 30, 3, 2, 12, repeats=2)
_GAINS = {6: 2.5, 25: 5.0}
"""Goals for so many standing questions."""


def sessions(run: Run) -> Iterator[Figure]:
    """Sessions with nothing in common but the prompt's first tokens, a question each: one pass, one pass
    each in turn, and kept caches one by one.
    """
    plan, prompt, loaded = _begin(run)
    plain = models.of(run)[1]
    bench = _Bench(loaded, prompt.frozen, [_bars(prompt, plan.session_bars, s) for s in range(plan.sessions)])
    tapes, engine = bench.tapes, bench.engine
    question = prompt.question(PAPER_SIX[0].text)
    caches = [KeptCache.copied(plain, engine.pool, tape) for tape in tapes]
    of = bench.readers(f"{len(tapes)} sessions, a question each", tapes, [question] * len(tapes))

    def measured() -> Compared:
        return compare(
            of,
            bench.stopwatch,
            lambda: ask_together(engine, tapes, [question] * len(tapes)),
            lambda: [ask_together(engine, [tape], [question])[0] for tape in tapes],
            plan.repeats,
            lambda: [cache.ask(question) for cache in caches],
        )

    yield from bounded(run, [(of, Goals(kept=Goal(0.6)), measured)])


def standing(run: Run) -> Iterator[Figure]:
    """Whole questions on one tape, and one further token of each answer: one pass against one each. Every
    row multiplies every key and weight itself either way; a pass only saves reading the same bytes again
    and what each pass costs besides.
    """
    plan, prompt, loaded = _begin(run)
    bench = _Bench(loaded, prompt.frozen, [_bars(prompt, plan.standing_bars, 0)], readers=max(plan.standing))
    cases: list[Case] = []
    for n in plan.standing:
        tapes, questions = bench.tapes * n, [prompt.question(text) for text in standing_texts(n)]
        goals = Goals(gain=Goal(_GAINS[n], "at least", "ours") if n in _GAINS else None)
        cases.append(bench.whole(f"{n} questions on one tape", tapes, questions, plan.repeats, goals))
        name = f"{n} answers on one tape, a token each"
        cases.append(bench.decode(name, tapes, questions, plan.repeats, goals))
    yield from bounded(run, cases)


def prefix(run: Run) -> Iterator[Figure]:
    """One further token of an answer each, behind one long prefix: one pass against one each."""
    plan, prompt, loaded = _begin(run)
    frozen = (*prompt.frozen, *chain.from_iterable(_bars(prompt, plan.prefix_bars, 0)))
    bench = _Bench(loaded, frozen, [_bars(prompt, plan.sharer_bars, 1 + s) for s in range(plan.sharers)])
    questions = [prompt.question(PAPER_SIX[0].text)] * plan.sharers
    name = f"{plan.sharers} sessions behind one frozen prefix, a token each"
    goals = Goals(attention=Goal(5.0, "at least", "ours"))
    yield from bounded(run, [bench.decode(name, bench.tapes, questions, plan.repeats, goals)])


def bounded(run: Run, cases: Sequence[Case]) -> Iterator[Figure]:
    """Measure each case between two looks at the machine's own rates, from which the floors follow."""
    limits = models.probe(run)
    limits.look()
    found = [(of, goals, measured()) for of, goals, measured in cases]
    limits.look()
    for of, goals, compared in found:
        yield from figures(of, limits.floors(models.of(run)[0]), compared, goals)
    yield from limits.figures()


def _begin(run: Run) -> tuple[Plan, PromptFormat, LoadedModel]:
    loaded, _ = models.of(run)
    return QUICK if run.quick else Plan(), PromptFormat.of(loaded.tokenizer), loaded


def standing_texts(n: int) -> list[str]:
    """``n`` different questions of about the same length: the paper's six, then one for each further span."""
    further = (
        f"Is the close of the newest bar above the average close of the last {span} bars shown here?"
        for span in range(2, 2 + max(0, n - len(PAPER_SIX)))
    )
    return [*(question.text for question in PAPER_SIX), *further][:n]


def _bars(prompt: PromptFormat, n: int, seed: int) -> Records:
    return make_scenario(prompt, Size(n, 0, 0), seed).first


class _Bench:
    """One engine with a stopwatch, and a tape for each of ``records``."""

    def __init__(
        self, loaded: LoadedModel, frozen: Sequence[int], records: Sequence[Records], readers: int = 0
    ) -> None:
        self.stopwatch = Stopwatch(CpuAttention())
        self._frozen = len(frozen)
        sizes = [sum(map(len, bars)) for bars in records]
        self.engine = engine_for(
            loaded, len(frozen) + sum(sizes), readers=max(readers, len(records)), attention=self.stopwatch
        )
        self.tapes: list[Tape] = []
        for bars, tokens in zip(records, sizes, strict=True):
            regions = Regions(self.engine, frozen, Retention(tokens))
            for start in range(0, len(bars), _READ_BARS):
                regions.ingest(bars[start : start + _READ_BARS])
            self.tapes.append(regions.tape)

    def readers(
        self, name: str, tapes: Sequence[Tape], questions: Sequence[Sequence[int]], *, decode: bool = False
    ) -> Readers:
        """What readers of ``tapes`` see: a tape read by one alone is its own, one read by all is shared."""
        tape = tapes[0].live_tokens
        asked = sum(map(len, questions)) / len(questions)
        shared = self._frozen + (tape if len(self.tapes) == 1 else 0)
        own = (0 if len(self.tapes) == 1 else tape) + (asked + 1 if decode else causal(round(asked)))
        rows = len(questions) if decode else sum(map(len, questions))
        return Readers(name, len(tapes), rows, shared, own)

    def whole(
        self, name: str, tapes: Sequence[Tape], questions: Sequence[Sequence[int]], repeats: int, goals: Goals
    ) -> Case:
        """Whole questions."""
        of, pairs = self.readers(name, tapes, questions), list(zip(tapes, questions, strict=True))

        def measured() -> Compared:
            return compare(
                of,
                self.stopwatch,
                lambda: ask_together(self.engine, tapes, questions),
                lambda: [ask_together(self.engine, [tape], [question])[0] for tape, question in pairs],
                repeats,
            )

        return of, goals, measured

    def decode(
        self, name: str, tapes: Sequence[Tape], questions: Sequence[Sequence[int]], repeats: int, goals: Goals
    ) -> Case:
        """The pass after the question's: one row a reader. The row is dropped again, which is O(1)."""
        of = self.readers(name, tapes, questions, decode=True)

        def measured() -> Compared:
            forks = [tape.fork() for tape in tapes]
            tokens = [[reply.token] for reply in append(self.engine, forks, questions)]

            def step(first: int, last: int) -> list[Reply]:
                replies = append(self.engine, forks[first:last], tokens[first:last])
                for fork in forks[first:last]:
                    fork.keep(fork.length - 1)
                return replies

            n = len(forks)
            try:
                return compare(
                    of,
                    self.stopwatch,
                    lambda: step(0, n),
                    lambda: [step(i, i + 1)[0] for i in range(n)],
                    repeats,
                )
            finally:
                for fork in forks:
                    fork.release()

        return of, goals, measured
