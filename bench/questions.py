"""Question and ingest latency on the paper's scenario, ours beside the two references, on the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.contenders import Contender, Dense, KeptCache, Regions, Reply, engine_for
from bench.figures import latency, median_ratio
from bench.questions_result import Disagreement, Point, Questions
from bench.scenario import PAPER, Records, Scenario, Size, make_scenario
from engine.model.embedded import embedded_directory
from engine.model.loading import LoadedModel, load_model
from engine.model.prompt import PromptFormat
from regions.tape import Retention

TIE = 1e-3
"""A logit gap within which two fp32 computations may order the best two tokens either way."""


@dataclass(frozen=True)
class Plan:
    """One model and how much of the scenario it runs. ``shape``: arguments of `embedded_directory`.

    ``repeats``: questions at each context, the median of which stands in the table by context.
    ``dense_rounds``: rounds (from 0) at which the dense reference runs, once each; None is all of them.
    """

    name: str
    shape: dict[str, Any]
    size: Size = PAPER
    repeats: int = 10
    dense_rounds: tuple[int, ...] | None = None


EMBEDDED = Plan("embedded", {}, dense_rounds=(0, 7, 14))
EIGHTY = Plan(
    "80m",
    {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "vocabulary": 4096},
    repeats=5,
    dense_rounds=(0, 7, 14),
)


def run(plan: Plan, threads: int) -> Questions:
    """Measure one model with so many torch threads. Raises Disagreement."""
    torch.set_num_threads(threads)
    return race(plan, *load(plan.shape))


def load(shape: dict[str, Any]) -> tuple[LoadedModel, Any]:
    """One model twice: over regions, and as transformers runs it. ``shape``: of `embedded_directory`."""
    path = embedded_directory(**shape)
    loaded = load_model(path, dtype="float32", device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return loaded, plain


def race(plan: Plan, loaded: LoadedModel, plain: Any) -> Questions:
    """The scenario with models that are loaded. Raises Disagreement."""
    scenario = make_scenario(PromptFormat.of(loaded.tokenizer), plan.size)
    frozen = scenario.frozen
    ours = Regions(engine_for(loaded, scenario.tokens), frozen, Retention(scenario.tokens - len(frozen)))
    race = Race(scenario, ours, KeptCache(plain, frozen), Dense(plain, frozen))
    rounds = range(plan.size.rounds) if plan.dense_rounds is None else plan.dense_rounds
    for number, update in enumerate(scenario.updates):
        race.round(update, plan.repeats, with_dense=number in rounds)
    return race.result(plan.name, sum(parameter.numel() for parameter in plain.parameters()))


class Race:
    """Feeds the contenders in turn and keeps their times, ns."""

    def __init__(self, scenario: Scenario, ours: Contender, kept: Contender, dense: Contender) -> None:
        self._scenario = scenario
        self._ours, self._kept, self._dense = ours, kept, dense
        self._context = len(scenario.frozen)
        self._ask: tuple[list[int], list[int]] = ([], [])
        self._ingest: tuple[list[int], list[int]] = ([], [])
        self._points: list[Point] = []
        self._agreed = self._compared = 0
        self._difference = 0.0
        self._read(scenario.first)
        for contender in (ours, kept):  # the first call of each pays for set-up that no later one does
            contender.ask(scenario.question)

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
        ours, kept = (latency(times[-repeats:]).p50_ms for times in self._ask)
        ingest = [ns / 1e6 for ns in read]
        self._points.append(Point(self._context, ours, kept, dense_ms, self._context - before, *ingest))

    def result(self, model: str, parameters: int) -> Questions:
        """Summaries of all rounds."""
        scenario = self._scenario
        bars = [len(line) for update in scenario.updates for line in update]
        return Questions(
            model=model,
            parameters=parameters,
            question_tokens=len(scenario.question),
            bar_tokens=sum(bars) / len(bars),
            bars_an_update=len(scenario.updates[0]),
            ours=latency(self._ask[0]),
            kept=latency(self._ask[1]),
            ratio_kept=median_ratio(*self._ask),
            ratio_dense=[p.ours_ms / p.dense_ms for p in self._points if p.dense_ms is not None],
            ingest_ours=latency(self._ingest[0]),
            ingest_kept=latency(self._ingest[1]),
            ingest_ratio=median_ratio(*self._ingest),
            agreed=self._agreed,
            compared=self._compared,
            largest_logit_difference=self._difference,
            points=self._points,
        )

    def _read(self, records: Records) -> list[int]:
        """Everybody reads; the times of the two that compute."""
        self._context += sum(len(line) for line in records)
        self._dense.ingest(records)
        read = in_turn([self._ours.ingest, self._kept.ingest], records, len(self._points))
        return [ns for _, ns in read]

    def _compare(self, ours: Reply, other: Reply) -> None:
        self._compared += 1
        self._agreed += agree(ours, other, self._context)
        self._difference = max(self._difference, abs(ours.logit - other.logit))


def agree(ours: Reply, other: Reply, context: int) -> bool:
    """Whether both give the same answer token; False is a tie. Raises Disagreement otherwise."""
    if ours.token == other.token:
        return True
    if max(ours.gap, other.gap) > TIE:
        raise Disagreement(f"at {context} tokens we answer {ours}, the reference {other}")
    return False  # neither a disagreement nor an agreement to count


def timed(work: Callable[[Any], Any], argument: Sequence[Any]) -> tuple[Any, int]:
    """The result and the ns it took."""
    began = time.perf_counter_ns()
    result = work(argument)
    return result, time.perf_counter_ns() - began


def in_turn(
    works: Sequence[Callable[[Any], Any]], argument: Sequence[Any], turn: int
) -> list[tuple[Any, int]]:
    """All of ``works`` one after the other, in the order given or, on odd turns, reversed; as given again."""
    order = list(range(len(works)))[:: -1 if turn % 2 else 1]
    results = {i: timed(works[i], argument) for i in order}
    return [results[i] for i in range(len(works))]
