"""A tape at its retention limit: 256 bars stay, 55 go in and out between questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.contenders import Dense, Regions, engine_for
from bench.engine_result import Window
from bench.figures import latency, median_ratio
from bench.questions import in_turn, timed
from bench.scenario import Records, Size, make_scenario
from engine.model.loading import LoadedModel
from engine.model.prompt import PromptFormat
from regions.tape import Retention


@dataclass(frozen=True)
class Plan:
    """``frame_limit``: the daemon's default, so that position frames change during the run."""

    records: int = 256
    updates: int = 10
    bars: int = 55
    frame_limit: int = 8192
    repeats: int = 4
    dense: int = 2


def run(plan: Plan, loaded: LoadedModel, plain: Any) -> Window:
    """Ask a sliding tape and one that stays as it was when the window was full, in turn.

    The dense reference reads the last window; its answer may differ, since a sliding tape carries what its
    bars absorbed from those before them.
    """
    scenario = make_scenario(
        PromptFormat.of(loaded.tokenizer), Size(plan.records, plan.updates, plan.bars), seed=7
    )
    window = sum(map(len, scenario.first))
    largest = max(len(line) for part in (scenario.first, *scenario.updates) for line in part)
    retention = Retention(plan.records * largest, plan.records)
    # two windows, and the eviction's block or two; readers come and go one at a time
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
    return Window(
        records=plan.records,
        updates=plan.updates,
        bars_an_update=plan.bars,
        question_tokens=len(scenario.question),
        frozen_tokens=len(scenario.frozen),
        grown_tokens=window,
        sliding_tokens=sliding.tape.live_tokens,
        evicted_tokens=sliding.tape.evicted_tokens,
        frame_limit=plan.frame_limit,
        grown_extents=len(grown.tape.extents),
        extents=extents,
        sliding=latency(asked[0]),
        grown=latency(asked[1]),
        ratio=median_ratio(*asked),
        dense=latency([timed(dense.ask, scenario.question)[1] for _ in range(plan.dense)]),
        reading=latency(reading),
    )
