"""A tape at its retention limit: 256 bars stay, 55 enter and leave between questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from bench.engine.contenders import Dense, Regions, engine_for, model_of
from bench.engine.questions import in_turn
from bench.engine.scenario import Records, Size, make_scenario
from bench.figures import Figure, Goal, Setting, latency
from bench.run import SuiteRun, timed
from engine.model.prompt import PromptFormat
from regions.tape import Retention


@dataclass(frozen=True)
class WindowPlan:
    """``frame_limit``: the daemon's default, so that position frames change during the run."""

    records: int = 256
    updates: int = 10
    bars: int = 55
    frame_limit: int = 8192
    repeats: int = 4
    dense: int = 2


QUICK = WindowPlan(12, updates=6, bars=5, frame_limit=400, repeats=2, dense=1)


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Questions on a tape whose oldest bars go as new ones come, beside one that has just grown to that
    length and stays. *Dense*: the unmodified model over the same window sent again as a prompt.
    """
    plan = QUICK if run.quick else WindowPlan()
    loaded, plain = model_of(run)
    scenario = make_scenario(
        PromptFormat.of(loaded.tokenizer), Size(plan.records, plan.updates, plan.bars), seed=7
    )
    window = sum(map(len, scenario.first))
    largest = max(len(bar) for part in (scenario.first, *scenario.updates) for bar in part)
    retention = Retention(plan.records * largest, plan.records)
    # two windows, and a block or two of the eviction; one reader at a time
    engine = engine_for(loaded, 3 * retention.tokens, frame_limit=plan.frame_limit)
    grown, sliding = (Regions(engine, scenario.frozen, retention) for _ in range(2))
    for regions in (grown, sliding):
        for start in range(0, plan.records, plan.bars):
            regions.ingest(scenario.first[start : start + plan.bars])
        regions.ask(scenario.question)
    kept: Records = list(scenario.first)
    reading: list[int] = []
    extents: list[int] = []
    asked: tuple[list[int], list[int]] = ([], [])
    for update in scenario.updates:
        reading.append(timed(sliding.ingest, update)[1])
        kept = [*kept, *update][-plan.records :]
        extents.append(len(sliding.tape.extents))
        for turn in range(plan.repeats):
            taken = in_turn([sliding.ask, grown.ask], scenario.question, turn)
            for times, (_, ns) in zip(asked, taken, strict=True):
                times.append(ns)
    dense = Dense(plain, scenario.frozen)
    dense.ingest(kept)
    setting: Setting = {
        "bars": plan.records, "bars in and out": plan.bars, "times": plan.updates,
        "tokens evicted": sliding.tape.evicted_tokens, "positions a frame": plan.frame_limit,
    }  # fmt: skip
    same = (setting, "", "as long, just grown")
    yield from latency("question", asked[0], *same, asked[1], goals={0.5: Goal(1.0)})
    repeated = [timed(dense.ask, scenario.question)[1] for _ in range(plan.dense)]
    yield from latency("question", asked[0], setting, "", "dense", repeated, at=(0.5,), paired=False)
    yield from latency("reading an update", reading, setting, at=(0.5,))
    figure = partial(Figure, setting=setting, against="as long, just grown")
    yield figure("tokens seen", sliding.tape.live_tokens, reference=window)
    yield figure("extents seen, most", max(extents), reference=len(grown.tape.extents))
