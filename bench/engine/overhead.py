"""What a pass costs beside its compiled code: Python, small operators, building plans, sampling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.engine.batches import standing_texts
from bench.engine.contenders import Regions, ask_together, embedded, engine_for, model_of
from bench.engine.scenario import Size, make_scenario
from bench.figures import Figure, Goal, Setting, quantiles
from bench.run import SuiteRun
from engine.cpu import team
from engine.model.chat_format import PromptFormat
from engine.model.loaded import LoadedModel
from regions.tape import Retention

_GOALS: dict[tuple[str, int], tuple[Goal | None, Goal | None]] = {
    ("embedded size", 1): (Goal(1.0, of="ours"), None),
    ("80m", 1): (None, Goal(0.03)),
}
"""By model and questions: of the rest in ms, and of its share of a pass."""


def passes(run: SuiteRun) -> Iterator[Figure]:
    """One question, and 25 in one pass, at about 2,800 tokens: forks, pass, sampling and release. *Compiled*
    is the time inside calls of the attention kernel and of compiled layers, *rest* everything else.
    """
    models = {"embedded size": embedded(run)}
    if not run.quick:
        models["80m"] = model_of(run)[0]
    for name, loaded in models.items():
        for questions in (1, 25):
            yield from _figures(name, loaded, questions, run.sized(100, 5))


def _figures(name: str, loaded: LoadedModel, questions: int, repeats: int) -> Iterator[Figure]:
    goals = _GOALS.get((name, questions), (None, None))
    scenario = make_scenario(loaded, Size(155, 0, 0))
    prompt = PromptFormat.of(loaded.tokenizer)
    engine = engine_for(loaded, 2 * scenario.tokens, readers=questions)
    regions = Regions(engine, scenario.frozen, Retention(scenario.tokens))
    regions.fill(scenario.first)
    asked = [prompt.question(text) for text in standing_texts(questions)]
    whole, rest = list[float](), list[float]()
    for number in range(repeats + 3):
        began = time.perf_counter_ns()
        with compiled_ns() as compiled:
            ask_together(engine, [regions.tape] * questions, asked)
        took = time.perf_counter_ns() - began
        if number >= 3:
            whole.append(took)
            rest.append(took - sum(compiled))
    setting: Setting = {"model": name, "questions": questions, "context": scenario.tokens}
    pass_ms, rest_ms = (quantiles(ns, 0.5)[0] / 1e6 for ns in (whole, rest))
    yield Figure("pass P50", pass_ms, "ms", setting=setting, n=repeats)
    yield Figure("rest P50", rest_ms, "ms", setting=setting, n=repeats, goal=goals[0])
    yield Figure("rest", rest_ms, "ms", setting=setting, against="pass", reference=pass_ms, goal=goals[1])
    regions.tape.release()


@contextmanager
def compiled_ns() -> Iterator[list[int]]:
    """Collects the ns of each compiled call meanwhile."""
    found = list[int]()
    plain = team.run

    def timed(function: int, argument: int, team: int) -> None:
        began = time.perf_counter_ns()
        plain(function, argument, team)
        found.append(time.perf_counter_ns() - began)

    team.run = timed
    try:
        yield found
    finally:
        team.run = plain
