"""Early exit at the ready position: how often, and how often with the answer that a forward pass gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from bench.engine.contenders import Regions, engine_for, model_of
from bench.engine.scenario import PAPER, Size, make_scenario
from bench.figures import Figure, Setting
from bench.run import SuiteRun
from engine.model.chat_format import PromptFormat
from flash.question import PAPER_SIX
from flash.ready import ReadyAnswer, exits
from regions.tape import Retention

TAUS = (2.0, 4.0, 8.0)
"""Logit gaps to exceed; the paper's first."""


class Case(NamedTuple):
    """One question at one version. ``choices``: first tokens; ``token``: that of a forward pass."""

    ready: ReadyAnswer
    choices: Sequence[int]
    token: int


def measure(run: SuiteRun) -> Iterator[Figure]:
    """*Attention Once* section 3.9.4 on the paper's scenario: the questions with choices at every data
    version, each answered by a forward pass and, where the logit gap exceeds tau, from the ready position,
    which has read no question. The models of this suite are untrained, so the figures show the mechanism, not
    a gain.
    """
    loaded, _ = model_of(run)
    scenario = make_scenario(loaded, run.sized(PAPER, Size(12, 3, 5)))
    engine = engine_for(loaded, scenario.tokens)
    regions = Regions(engine, scenario.frozen, Retention(scenario.tokens - len(scenario.frozen)))
    prompt = PromptFormat.of(loaded.tokenizer)
    asked = [
        (prompt.question(each.text), prompt.choices(each.text, each.choices))
        for each in PAPER_SIX
        if each.choices
    ]
    cases = []
    for version, records in enumerate((scenario.first, *scenario.updates), 1):
        regions.ingest(records)
        reply = regions.ask(prompt.ready())
        ready = ReadyAnswer(version, reply.token, reply.gap)
        cases += [Case(ready, choices, regions.ask(tokens, choices).token) for tokens, choices in asked]
    yield from figures(cases)


def figures(cases: Sequence[Case]) -> Iterator[Figure]:
    """Shares by tau: of the asks that exit, and of the exits that agree with the forward pass."""
    for tau in TAUS:
        setting: Setting = {"tau": tau, "asks": len(cases)}
        figure = partial(Figure, setting=setting)
        exited = [case for case in cases if exits(case.ready, case.ready.version, case.choices, tau)]
        yield figure("early exits", len(exited) / len(cases), "share")
        agreed = sum(case.ready.token == case.token for case in exited)
        if exited:
            yield figure("early exits with the computed answer", agreed / len(exited), "share of exits")
