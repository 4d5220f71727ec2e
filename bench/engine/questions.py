"""Question and ingest latency on the paper's scenario, ours next to two references and floors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import linear_regression
from typing import Any, NamedTuple

from bench.engine.contenders import EIGHTY_SHAPE, Dense, KeptCache, Regions, Reply, agree, engine_for, load
from bench.engine.floor import Floors, causal
from bench.engine.rates import MachineRates
from bench.engine.scenario import PAPER, Records, Scenario, Size, make_scenario
from bench.figures import FLOORS, Figure, Goal, Setting, latency, quantiles
from bench.run import SuiteRun, Turns, timed
from regions.tape import Retention


@dataclass(frozen=True)
class QuestionsPlan:
    """One model and its share of the scenario. ``shape``: arguments of `embedded_directory`.

    ``goals``: of ours over the kept cache (`question`, `reading`, `slope`), over attention's floor
    (`growth`), and over dense at the longest context (`dense`). ``repeats``: questions at each context, whose
    median the table by context has; ``dense_rounds``: those (from 0) with the dense reference, once in each.
    """

    name: str
    shape: dict[str, Any]
    goals: Mapping[str, float]
    repeats: int = 10
    size: Size = PAPER
    dense_rounds: tuple[int, ...] = (0, 7, 14)


EMBEDDED = QuestionsPlan("embedded", {}, {"question": 0.4, "reading": 1.0, "slope": 1.0})
EIGHTY = QuestionsPlan(
    "80m",
    EIGHTY_SHAPE,
    {"question": 0.65, "reading": 0.6, "slope": 1.0, "growth": 1.4, "dense": 1 / 20},
    repeats=5,
)
_quick = partial(replace, size=Size(20, 3, 11), repeats=3, dense_rounds=(0, 2))


def measure(run: SuiteRun) -> Iterator[Figure]:
    """*Attention Once* section 4.1: 100 bars, then 15 times 55 bars and a question of one answer token,
    asked of a fork; taking and dropping the fork is inside the time. fp32. *Kept cache*: the unmodified
    transformers model (`sdpa`) with a `DynamicCache` that reads the same updates and is cropped back
    after each question. *Dense*: the same model over the whole context, nothing kept, at three contexts,
    once each. Ways are timed in turn; a median's ratio is that of the pairs. All must give the same
    answer token (a logit gap below 0.001 is a tie), or the run fails. *Floor*: the arithmetic of a pass at
    the rate of the fastest large product of any library here, or reading its weights and KV at that of the
    fastest read of memory, whichever takes longer, all rates measured in this part. Floors count every layer
    for every row.
    """
    rates = MachineRates.of(run)
    for plan in (EMBEDDED, EIGHTY):
        if plan.name in run.models:
            run.say(f"questions, {plan.name} model ...")
            yield from race(_quick(plan) if run.quick else plan, run.threads, rates)
    yield from rates.figures()


def race(plan: QuestionsPlan, threads: int, rates: MachineRates) -> Iterator[Figure]:
    """The scenario with one model. Raises Disagreement."""
    loaded, plain = load(plan.shape, threads)
    scenario = make_scenario(loaded, plan.size)
    frozen = scenario.frozen
    ours = Regions(engine_for(loaded, scenario.tokens), frozen, Retention(scenario.tokens - len(frozen)))
    race = Race(scenario, ours, KeptCache(plain, frozen), Dense(plain, frozen))
    rates.look()
    for number, update in enumerate(scenario.updates):
        race.round(update, plan.repeats, with_dense=number in plan.dense_rounds)
    rates.look()
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    name = f"{plan.name}, {parameters / 1e6:.1f} million parameters"
    yield from race.figures(name, plan.goals, Floors.of(loaded, rates))


class ContextPoint(NamedTuple):
    """One context: medians of a question, and of the preceding update of ``update`` tokens; ms.

    ``asked`` and ``reading``: ours and the kept cache's.
    """

    context: int
    asked: list[float]
    dense: float | None
    update: int
    reading: list[float]


class Race:
    """Feeds the contenders in turn and keeps their times, ns."""

    def __init__(self, scenario: Scenario, ours: Regions, kept: KeptCache, dense: Dense) -> None:
        self._scenario, self._dense = scenario, dense
        self._context = len(scenario.frozen) + sum(map(len, scenario.first))
        self._ask, self._ingest = Turns(ours.ask, kept.ask), Turns(ours.ingest, kept.ingest)
        self._points: list[ContextPoint] = []
        self._agreed: list[bool] = []
        self._difference = 0.0
        for contender in (ours, kept):  # includes one-time set-up
            contender.ingest(scenario.first)
            contender.ask(scenario.question)
        dense.ingest(scenario.first)

    def round(self, update: Records, repeats: int, *, with_dense: bool) -> None:
        """One update and its questions."""
        before, question = self._context, self._scenario.question
        self._context += sum(map(len, update))
        self._dense.ingest(update)
        self._ingest(update)
        for _ in range(repeats):
            replies = self._ask(question)
            self._compare(*replies)
        dense_ms = None
        if with_dense:
            reply, ns = timed(self._dense.ask, question)
            dense_ms = ns / 1e6
            self._compare(replies[0], reply)
        asked = [quantiles(ns[-repeats:], 0.5)[0] / 1e6 for ns in self._ask.ns]
        reading = [ns[-1] / 1e6 for ns in self._ingest.ns]
        self._points.append(ContextPoint(self._context, asked, dense_ms, self._context - before, reading))

    def figures(self, model: str, goals: Mapping[str, float], floors: Floors) -> Iterator[Figure]:
        """Summaries of all rounds, then each context's question and update, next to all references."""
        points, rows = self._points, len(self._scenario.question)
        limits = {name: Goal(limit) for name, limit in goals.items()}
        about: Setting = {"model": model, "question tokens": rows, FLOORS: floors.made_of}
        figure = partial(Figure, table=model, setting=about)
        for name, turns, goal, at in (
            ("question", self._ask, limits["question"], (0.5, 0.99)),
            ("reading an update", self._ingest, limits["reading"], (0.5, 1.0)),
        ):
            ours, kept = turns.ns
            yield from latency(name, ours, about, model, "kept cache", kept, at=at, goals={0.5: goal})
        # from the medians: a few stalled samples would distort a fit of all
        contexts, floor = [p.context for p in points], floors.attention(rows, 1000)
        slope, other = (
            1000 * linear_regression(contexts, [p.asked[i] for p in points]).slope for i in range(2)
        )
        growth = partial(figure, "growth for 1,000 tokens", slope, "ms")
        yield growth(against="kept cache", reference=other, goal=limits["slope"])
        yield growth(against="attention's floor", reference=floor.ms, goal=limits.get("growth"))
        agreed = "answers equal to the reference's"
        yield figure(agreed, sum(self._agreed), against="compared", reference=float(len(self._agreed)))
        yield figure("largest difference of their logits", self._difference)
        for p in points:
            setting = {**about, "context": p.context}
            figure = partial(Figure, "question P50", p.asked[0], "ms", f"By context, {model}", setting)
            yield figure("kept cache", p.asked[1])
            if p.dense is not None:
                yield figure("dense", p.dense, goal=limits.get("dense") if p is points[-1] else None)
            yield figure("floor", floors.of_pass(rows, p.context, causal(rows)))
        for p in points:
            before, (ours_ms, kept_ms) = p.context - p.update, p.reading
            setting = {**about, "tokens read": p.update, "context before": before}
            figure = partial(Figure, "reading", ours_ms, "ms", f"Reading an update, {model}", setting)
            yield figure("kept cache", kept_ms)
            yield figure("floor", floors.of_pass(p.update, before, causal(p.update)))

    def _compare(self, ours: Reply, other: Reply) -> None:
        self._agreed.append(agree(ours, other, self._context))
        self._difference = max(self._difference, abs(ours.logit - other.logit))
