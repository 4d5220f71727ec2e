"""Question and ingest latency on the paper's scenario, ours next to two references, on the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.engine.contenders import EIGHTY_SHAPE, Dense, KeptCache, Regions, Reply, engine_for, load
from bench.engine.floor import Floors, LimitsProbe, causal
from bench.engine.scenario import PAPER, Records, Scenario, Size, make_scenario
from bench.figures import Figure, Goal, Setting, latency, quantiles, slope_per_1k
from bench.run import MeasurementFailed, SuiteRun, timed
from engine.model.prompt import PromptFormat
from regions.tape import Retention

TIE = 1e-3
"""Logit gap below which two fp32 computations may order the best two tokens either way."""


class Disagreement(MeasurementFailed):
    """Two contenders that read the same tokens gave different answers."""


Goals = Mapping[str, float]
"""At most, of ours over the kept cache: `question`, `reading`, `slope`; `growth`: over attention's floor;
`dense`: over dense at the longest context."""


@dataclass(frozen=True)
class QuestionsPlan:
    """One model and its share of the scenario. ``shape``: arguments of `embedded_directory`."""

    name: str
    shape: dict[str, Any]
    goals: Goals
    size: Size = PAPER
    repeats: int = 10
    """Questions at each context; the table by context has their median."""
    dense_rounds: tuple[int, ...] = (0, 7, 14)
    """Rounds (from 0) with the dense reference, which runs once in each."""


_GOALS = {"question": 1.0, "reading": 1.0, "slope": 1.0}
EMBEDDED = QuestionsPlan("embedded", {}, _GOALS | {"question": 1.3})
EIGHTY = QuestionsPlan("80m", EIGHTY_SHAPE, _GOALS | {"dense": 1 / 20}, repeats=5)
ENGINE = replace(EIGHTY, goals=_GOALS | {"question": 0.65, "reading": 0.6, "growth": 1.5})
_QUICK: dict[str, Any] = {"size": Size(20, 3, 11), "repeats": 3, "dense_rounds": (0, 2)}


def stream(run: SuiteRun) -> Iterator[Figure]:
    """*Attention Once* section 4.1: 100 bars, then 15 times 55 bars and a question of one answer token,
    asked of a fork; taking and dropping the fork is inside the time. fp32. *Kept cache*: the unmodified
    transformers model (`sdpa`) with a `DynamicCache` that reads the same updates and is cropped back
    after each question. *Dense*: the same model over the whole context, nothing kept, at three contexts,
    once each. Ways are timed in turn; a median's ratio is that of the pairs. All must give the same
    answer token (a logit gap below 0.001 is a tie), or the run fails.
    """
    for plan in (EMBEDDED, EIGHTY):
        if plan.name in run.models:
            run.say(f"questions, {plan.name} model ...")
            yield from race(replace(plan, **_QUICK) if run.quick else plan, run.threads)


def engine(run: SuiteRun) -> Iterator[Figure]:
    """The scenario of `foretick bench stream`, beside its floors: the arithmetic of a pass at the rate of
    a large matrix product, or reading its weights and KV at that of a large copy, whichever takes longer,
    both rates measured in this part. Floors count every layer for every row.
    """
    limits = LimitsProbe.of(run)
    yield from race(replace(ENGINE, shape={}, **_QUICK) if run.quick else ENGINE, run.threads, limits)


def race(plan: QuestionsPlan, threads: int, limits: LimitsProbe | None = None) -> Iterator[Figure]:
    """The scenario with one model, next to floors where there are ``limits``. Raises Disagreement."""
    loaded, plain = load(plan.shape, threads)
    scenario = make_scenario(PromptFormat.of(loaded.tokenizer), plan.size)
    frozen = scenario.frozen
    ours = Regions(engine_for(loaded, scenario.tokens), frozen, Retention(scenario.tokens - len(frozen)))
    race = Race(scenario, ours, KeptCache(plain, frozen), Dense(plain, frozen))
    if limits is not None:
        limits.look()
    for number, update in enumerate(scenario.updates):
        race.round(update, plan.repeats, with_dense=number in plan.dense_rounds)
    if limits is not None:
        limits.look()
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    floors = limits.floors(loaded) if limits else None
    yield from race.figures(f"{plan.name}, {parameters / 1e6:.1f} million parameters", plan.goals, floors)
    yield from limits.figures() if limits else ()


@dataclass(frozen=True)
class ContextPoint:
    """One context: medians of a question, and of the preceding update of ``update`` tokens; ms."""

    context: int
    ours: float
    kept: float
    dense: float | None
    update: int
    reading: tuple[float, float]
    """Ours and the kept cache's."""


class Race:
    """Feeds the contenders in turn and keeps their times, ns."""

    def __init__(self, scenario: Scenario, ours: Regions, kept: KeptCache, dense: Dense) -> None:
        self._scenario = scenario
        self._ours, self._kept, self._dense = ours, kept, dense
        self._context = len(scenario.frozen)
        self._ask: tuple[list[int], list[int]] = ([], [])
        self._ingest: tuple[list[int], list[int]] = ([], [])
        self._points: list[ContextPoint] = []
        self._agreed = self._compared = 0
        self._difference = 0.0
        self._read(scenario.first)
        for ask in (ours.ask, kept.ask):  # the first call of each includes one-time set-up
            ask(scenario.question)

    def round(self, update: Records, repeats: int, *, with_dense: bool) -> None:
        """One update and its questions."""
        before = self._context
        read = self._read(update)
        for times, ns in zip(self._ingest, read, strict=True):
            times.append(ns)
        question = self._scenario.question
        for turn in range(repeats):
            asked = in_turn([self._ours.ask, self._kept.ask], question, turn)
            for times, (_, ns) in zip(self._ask, asked, strict=True):
                times.append(ns)
            self._compare(asked[0][0], asked[1][0])
        dense_ms = None
        if with_dense:
            reply, ns = timed(self._dense.ask, question)
            dense_ms = ns / 1e6
            self._compare(asked[0][0], reply)
        ours, kept = (quantiles(times[-repeats:], 0.5)[0] / 1e6 for times in self._ask)
        reading = (read[0] / 1e6, read[1] / 1e6)
        self._points.append(
            ContextPoint(self._context, ours, kept, dense_ms, self._context - before, reading)
        )

    def figures(self, model: str, goals: Goals, floors: Floors | None = None) -> Iterator[Figure]:
        """Summaries of all rounds, then each context's question and update, next to all references."""
        points, rows = self._points, len(self._scenario.question)
        about: Setting = {"model": model, "question tokens": rows}
        figure = partial(Figure, table=model, setting=about)
        for name, (ours_ns, kept_ns), limit, at in (
            ("question", self._ask, goals["question"], (0.5, 0.99)),
            ("reading an update", self._ingest, goals["reading"], (0.5, 1.0)),
        ):
            goal = {0.5: Goal(limit)}
            yield from latency(name, ours_ns, about, model, "kept cache", kept_ns, at=at, goals=goal)
        yield from self._growth(figure, goals, floors)
        compared = float(self._compared)
        yield figure("answers equal to the reference's", self._agreed, against="compared", reference=compared)
        yield figure("largest difference of their logits", self._difference)
        for p in points:
            setting = {**about, "context": p.context}
            figure = partial(Figure, "question P50", p.ours, "ms", f"By context, {model}", setting)
            yield figure("kept cache", p.kept)
            if p.dense is not None:
                yield figure("dense", p.dense, goal=_goal(goals, "dense") if p is points[-1] else None)
            if floors is not None:
                yield figure("floor", floors.of_pass(rows, p.context, causal(rows)))
        for p in points:
            before, (ours, kept) = p.context - p.update, p.reading
            setting = {**about, "tokens read": p.update, "context before": before}
            figure = partial(Figure, "reading", ours, "ms", f"Reading an update, {model}", setting)
            yield figure("kept cache", kept)
            if floors is not None:
                yield figure("floor", floors.of_pass(p.update, before, causal(p.update)))

    def _growth(self, figure: Callable[..., Figure], goals: Goals, floors: Floors | None) -> Iterator[Figure]:
        """Growth with the context, from the medians: a few stalled samples would distort a fit of all."""
        contexts, name = [p.context for p in self._points], "growth for 1,000 tokens"
        ours = slope_per_1k(contexts, [p.ours for p in self._points])
        kept = slope_per_1k(contexts, [p.kept for p in self._points])
        yield figure(name, ours, "ms", against="kept cache", reference=kept, goal=_goal(goals, "slope"))
        if floors is not None:
            floor = floors.attention(len(self._scenario.question), 1000)
            goal = _goal(goals, "growth")
            yield figure(name, ours, "ms", against="attention's floor", reference=floor.ms, goal=goal)
            name, of = "growth of attention's floor, arithmetic", floor.arithmetic_ms
            yield figure(name, of, "ms", against="reading", reference=floor.reading_ms)

    def _read(self, records: Records) -> list[int]:
        """All contenders read; returns the times of the two that compute."""
        self._context += sum(map(len, records))
        self._dense.ingest(records)
        read = in_turn([self._ours.ingest, self._kept.ingest], records, len(self._points))
        return [ns for _, ns in read]

    def _compare(self, ours: Reply, other: Reply) -> None:
        self._compared += 1
        self._agreed += agree(ours, other, self._context)
        self._difference = max(self._difference, abs(ours.logit - other.logit))


def _goal(goals: Goals, name: str) -> Goal | None:
    return Goal(goals[name]) if name in goals else None


def agree(ours: Reply, other: Reply, context: int) -> bool:
    """Whether both give the same answer token; False for a tie. Raises Disagreement otherwise."""
    if ours.token == other.token:
        return True
    if max(ours.gap, other.gap) > TIE:
        raise Disagreement(f"at {context} tokens we answer {ours}, the reference {other}")
    return False  # a tie: neither agreement nor disagreement


def in_turn(
    works: Sequence[Callable[[Any], Any]], argument: Sequence[Any], turn: int
) -> list[tuple[Any, int]]:
    """Run all ``works`` in order or, on odd turns, reversed; returns results in the given order."""
    results = {i: timed(works[i], argument) for i in range(len(works))[:: -1 if turn % 2 else 1]}
    return [results[i] for i in range(len(works))]
