"""k-LPM next to FCFS and LPM over request rates: simulated, and on a real engine with a tiny model.

Under LPM the users of `regulars` who ask once can starve, which the paper's bound on k-LPM rules out.
Histories begin alike by chance, as real ones do: the paper finds their overlap negligible, and LPM's ties
near random for it (section 5.2). Where no two histories share a token, LPM's ties go to the oldest, and it is
k-LPM (`tests/lab/test_lab_theory_regular.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from operator import attrgetter
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bench.engine.contenders import embedded
from bench.figures import Figure, Goal, Setting, over_better, quantiles
from bench.run import SuiteRun, spread
from bench.scheduler.replay import profile, replay
from engine.model.loaded import LoadedModel
from lab.simulation.inputs import Input, merged
from lab.simulation.run import Setup, paper_limits, simulate
from lab.simulation.tokens import Segments
from lab.simulation.workload import Library
from scheduler.costs import CostModel
from scheduler.costs import load as profile_named
from scheduler.curves import CostCurve
from scheduler.policies import Ordering

POLICIES = ("fcfs", "lpm", "klpm", "klpm-adaptive")
FIXED = POLICIES[:3]
"""Those whose order does not depend on what was measured: of 200 requests the bandit sees three epochs."""
_PROFILE = "h200-saturation"
_BLOCK = 16
_POOL = 30
"""Prompts."""
_K = 2
_PER_USER = 4
_REGULARS = 60
"""Users who ask repeatedly: more than the cache holds at a time."""
_OFTEN = 0.6
"""Share of the questions that are theirs."""
ALIKE = 8
"""Tokens at the beginning of a history that others may have, too, each one of two: less than a block."""


@dataclass(frozen=True)
class Shape:
    """Tokens of the base prompt, of a user's history, and of a document; the latter two as (least, most)."""

    base: int
    history: tuple[int, int]
    document: tuple[int, int]

    @property
    def mean(self) -> float:
        """Mean tokens of a prompt."""
        return self.base + (sum(self.history) + sum(self.document)) / 2


PAPER = Shape(256, (4096, 7168), (512, 1024))
TINY = Shape(16, (256, 448), (32, 64))


@dataclass(frozen=True)
class PrefixCase:
    """One run; its rate is a ``part`` of what the device computes without reuse.

    ``alike``: tokens at the beginning of a history that others may have, too.
    """

    load: str
    shape: Shape
    part: float
    qps: float
    policy: str
    seed: int
    requests: int
    batch_tokens: int | None = None  # the paper's
    alike: int = ALIKE

    @property
    def setup(self) -> Setup:
        """Of pool and scheduler."""
        pool, own = int(_POOL * self.shape.mean), {}
        if (
            batch := self.batch_tokens
        ):  # the paper's batching in passes that a CPU runs in a fraction of a second
            own = dict.fromkeys(("max_batch_tokens", "chunk_min", "chunk_max"), batch)
        return Setup(
            pool,
            block_size=_BLOCK,
            ordering=Ordering(self.policy, _K),
            limits=paper_limits(**own, eviction="recompute", max_prompt_tokens=pool)
            if own
            else paper_limits(),
            prefix_cache=True,
            seed=self.seed,
        )


class PrefixRow(NamedTuple):
    """One run; TTFT in seconds.

    ``reused``, ``computed``: tokens found in the prefix cache, and tokens computed, over the prompts' tokens.
    ``pace``: what its passes took over what the profile says of them; None: they took that.
    """

    case: PrefixCase
    p50_s: float
    p99_s: float
    reused: float
    computed: float
    pace: float | None = None


def measure(run: SuiteRun) -> Iterator[Figure]:
    """P99 TTFT, median over seeds. *sessions*: four prompts share a user's history (*k-LPM* section 5.1);
    *regulars*: 60 users ask six of ten questions, the others ask once. Histories begin with eight tokens that
    others may have, too, each one of two. Rates are parts of what the engine computes without reuse, measured
    first, with the scheduler's own time. *Over the better*: of FCFS and LPM, on the same requests, geometric
    mean over seeds and two standard errors to either side. *Computed*: tokens over the prompts' tokens.
    *Pace*: time in passes over what the profile says of them.
    """
    loaded, processes = embedded(run), run.sized(2, 0)
    sizes = run.sized((24, 200, (0.8, 1.2, 1.6)), (1, 4, (50.0,)))
    batch_tokens = run.sized(512, 64)
    here = profile(loaded, batch_tokens, 1024, quick=run.quick)
    here = slower(here, _slowness(loaded, here, batch_tokens, run.sized(60, 4)))
    cases = _cases(TINY, here, sizes, FIXED, batch=batch_tokens)
    predicted = spread(partial(_simulate, here), cases, processes)
    real = _real(cases, loaded, here, run.say)
    yield from figures(real, "On the engine, embedded model")
    yield from figures(predicted, "The engine's load, simulated under the profile measured here")


def simulated(run: SuiteRun) -> Iterator[Figure]:
    """As the part before, on the paper's prompts (*k-LPM* section 5.1) under the profile of an H200. The last
    table has the same requests where no two users' histories have a token in common: there LPM's ties, which
    the paper supposes to be random, go to the oldest request, and LPM is k-LPM.
    """
    costs, processes = profile_named(_PROFILE), run.sized(2, 0)
    sizes = run.sized((16, 1200, (0.8, 1.0, 1.2, 1.5)), (1, 24, (1.2,)))
    seeds, requests, _ = sizes
    cases = _cases(PAPER, costs, sizes, POLICIES)
    apart = _cases(PAPER, costs, (seeds, requests, (1.2,)), FIXED, alike=0)
    yield from figures(spread(partial(_simulate, costs), cases, processes), f"Simulated, {_PROFILE}")
    rows = spread(partial(_simulate, costs), apart, processes)
    yield from figures(rows, "Histories without a common token", judged=False)


def slower(costs: CostModel, by: float) -> CostModel:
    """The profile of a device whose passes take ``by`` times as long."""
    curve = costs.recompute
    return replace(
        costs,
        pass_s=costs.pass_s * by,
        floor_s=costs.floor_s * by,
        row_s=costs.row_s * by,
        context_s=costs.context_s * by,
        recompute=CostCurve(curve.x, tuple(seconds * by for seconds in curve.y)),
    )


def figures(rows: Sequence[PrefixRow], where: str, *, judged: bool = True) -> Iterator[Figure]:
    """By load and rate: P99 of each policy, and k-LPM's over the better of FCFS and LPM."""
    rows, key = sorted(rows, key=lambda row: row.case.seed), attrgetter("case.load", "case.part", "case.qps")
    for (load, part, qps), same in groupby(sorted(rows, key=key), key):
        runs = list(same)
        by = {policy: [row for row in runs if row.case.policy == policy] for policy in POLICIES}
        by = {policy: of for policy, of in by.items() if of}
        setting: Setting = {"k": _K, "load": load, "rate": part, "a second": round(qps, 1)}
        figure = partial(Figure, setting=setting, n=len(by["klpm"]))
        p99 = {policy: [row.p99_s for row in of] for policy, of in by.items()}
        for policy in by:
            yield figure(f"{policy} P99", median(p99[policy]), "s", where, samples=p99[policy])
        for policy in [each for each in by if each.startswith("klpm")]:
            over, low, high = over_better(p99[policy], [p99["fcfs"], p99["lpm"]])
            goal = Goal(1.0, of="ours") if judged and policy == "klpm" else None
            yield figure(f"{policy} over the better", over, table=where, goal=goal, low=low, high=high)
        for policy, of in by.items():
            yield from _counted(of, policy, partial(figure, table=f"{where}: medians, reuse and work"))


def _counted(rows: Sequence[PrefixRow], policy: str, figure: Callable[..., Figure]) -> Iterator[Figure]:
    """What does not depend on the machine's speed, and its pace; medians over the runs of a policy."""
    p50 = [row.p50_s for row in rows]
    yield figure(f"{policy} P50", median(p50), "s", samples=p50)
    yield figure(f"{policy} reused", median(row.reused for row in rows), "share")
    yield figure(f"{policy} computed", median(row.computed for row in rows), "share")
    if paces := [row.pace for row in rows if row.pace is not None]:
        yield figure(f"{policy} pace", median(paces), samples=paces)


def _slowness(loaded: LoadedModel, costs: CostModel, batch_tokens: int, prompts: int) -> float:
    """What an engine with its scheduler takes for prompts that all wait, over what the profile says."""
    case = PrefixCase("apart", TINY, 1.0, 1.0, "fcfs", 0, prompts, batch_tokens)
    library = Library()
    waiting = (
        Input(0, number, "open", Segments([library.document(round(TINY.mean))]), True)
        for number in range(prompts)
    )
    done = replay(waiting, case.setup, loaded, costs)
    return done.span_ns / done.predicted_ns


def _real(
    cases: Sequence[PrefixCase], loaded: LoadedModel, costs: CostModel, say: Callable[[str], None]
) -> list[PrefixRow]:
    """Runs on the engine. Runs that are compared alternate: the machine's speed changes within minutes."""
    rows: list[PrefixRow] = []
    requests = attrgetter("load", "part", "seed")  # everything but the policy determines a run's requests
    for (load, part, seed), same in groupby(sorted(cases, key=requests), requests):
        policies = list(same)
        first = seed % len(policies)  # alternating, so that the same conditions hold for each
        for case in policies[first:] + policies[:first]:
            say(f"engine, {load} at {part:g}, {case.policy}, seed {seed} ...")
            done = replay(inputs(case), case.setup, loaded, costs)
            counts = done.reused_tokens, done.computed_tokens
            pace = done.passes_ns / done.predicted_ns
            rows.append(_row(case, done.ttft_ns, done.prompt_tokens, counts, pace))
    return rows


def inputs(case: PrefixCase) -> Iterator[Input]:
    """The prompts of a run, equal for every policy."""
    rng, chance, library = Random(case.seed), Random(~case.seed), Library()
    base = library.document(case.shape.base)
    if case.load == "sessions":  # each user equally often, shuffled
        order = [number // _PER_USER for number in range(case.requests)]
        rng.shuffle(order)
    else:  # one of the regulars, or a new user
        users = range(_REGULARS, _REGULARS + case.requests)
        order = [rng.randrange(_REGULARS) if rng.random() < _OFTEN else user for user in users]
    words = [library.document(1), library.document(1)]
    histories = {
        user: [*chance.choices(words, k=case.alike), library.document(rng.randint(*case.shape.history))]
        for user in sorted(set(order))
    }

    def arrivals() -> Iterator[list[Input]]:
        now = 0.0
        for number, user in enumerate(order):
            now += rng.expovariate(case.qps)
            document = library.document(rng.randint(*case.shape.document))
            prompt = Segments([base, *histories[user], document])
            yield [Input(round(now * 1e9), number, "open", prompt, True)]

    return merged(arrivals())


def _cases(
    shape: Shape,
    costs: CostModel,
    sizes: tuple[int, int, Sequence[float]],
    policies: Sequence[str],
    *,
    batch: int | None = None,
    alike: int = ALIKE,
) -> list[PrefixCase]:
    """``sizes``: seeds, requests, and parts of the rate that the device computes without reuse."""
    (seeds, requests, rates), qps = sizes, 1e9 / costs.recompute_ns(round(shape.mean))
    return [
        PrefixCase(load, shape, part, part * qps, policy, seed, requests, batch, alike)
        for load, part, policy, seed in product(("sessions", "regulars"), rates, policies, range(seeds))
    ]


def _simulate(costs: CostModel, case: PrefixCase) -> PrefixRow:
    result = simulate(inputs(case), case.setup, costs)
    if result.failures:
        raise RuntimeError(f"{case.policy}: requests failed: {result.failures}")
    columns = result.columns
    counts = int(columns["reused_tokens"].sum()), result.computed_tokens
    return _row(case, result.ttft_ns, int(columns["prompt_tokens"].sum()), counts)


def _row(
    case: PrefixCase,
    ttft_ns: NDArray[np.int64],
    prompt_tokens: int,
    counts: tuple[int, int],
    pace: float | None = None,
) -> PrefixRow:
    """``counts``: tokens reused and computed."""
    p50, p99 = quantiles(ttft_ns / 1e9, 0.5, 0.99)
    reused, computed = (tokens / prompt_tokens for tokens in counts)
    return PrefixRow(case, p50, p99, reused, computed, pace)
