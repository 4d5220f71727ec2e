"""The figures that need a GPU: questions, standing questions, reading, swap and recompute, attention.

Needs neither data nor a model: weights are random and made on the device. With small sizes the same code
runs on a CPU, to see that it works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from statistics import median
from typing import NamedTuple

import msgspec
import torch

from bench.engine.contenders import append, read
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.gpu.attention import measure as attention_points
from bench.gpu.shapes import FULL, QUICK, Costs, Plan, random_model
from bench.run import MeasurementFailed, Run
from daemon.cli.profile import by_size, file_name, ladder_for, model_of
from engine.engine import Engine
from engine.model.architectures import ModelError
from engine.model.loading import LoadedModel, resolve_device
from engine.profile.timing import Ladder, Samples
from engine.profile.timing import measure as measure_costs
from regions.tape import Retention
from scheduler.costs import CostModel
from scheduler.costs import save as save_profile

BLOCK = 16
_ASKING, _CURVES, _ATTENTION = "Questions", "Recompute and swap", "Attention alone"


class Device(NamedTuple):
    """The hardware, and what it reaches on plain work in the same run, bytes and operations a second."""

    name: str
    copy: float
    matrix: float


class Bench:
    """One engine, its tape filled up to the plan's context."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan = plan
        self.loaded: LoadedModel = random_model(plan.shape, device)
        self.costs = Costs.of(self.loaded)
        blocks = -(-plan.pool_tokens // BLOCK)
        self.engine = Engine(self.loaded, blocks=blocks, block_size=BLOCK, frame_limit=1 << 17, eager=False)
        self._random = torch.Generator().manual_seed(3)
        self.tape = self.engine.open_tape("gpu", self.tokens(64), Retention(plan.context + plan.update))

    def tokens(self, n: int) -> list[int]:
        """``n`` random token ids."""
        high = int(self.loaded.model.config.vocab_size)
        return torch.randint(3, high, (n,), generator=self._random).tolist()

    def ingest(self) -> Iterator[tuple[int, int, float]]:
        """Fill the tape by updates: (tokens, context before, seconds) of each."""
        while (before := self.tape.live_tokens) < self.plan.context:
            record = self.tokens(min(self.plan.update, self.plan.context - before))
            yield len(record), before, timed(partial(read, self.engine, self.tape, [record]))

    def ask(self, questions: int) -> tuple[float, list[float]]:
        """Seconds of a pass over ``questions`` questions and one answer token; then of each further token."""
        prompts = [self.tokens(self.plan.question) for _ in range(questions)]
        began = time.perf_counter()
        forks = [self.tape.fork() for _ in prompts]
        token = append(self.engine, forks, prompts)[0].token
        first = time.perf_counter() - began
        steps = []
        for _ in range(self.plan.answer if questions == 1 else 0):
            began = time.perf_counter()
            token = append(self.engine, forks, [[token]])[0].token
            steps.append(time.perf_counter() - began)
        for fork in forks:
            fork.release()
        return first, steps


def timed(work: Callable[[], object]) -> float:
    """Seconds, the device's queue drained before and after."""
    drain()
    began = time.perf_counter()
    work()
    drain()
    return time.perf_counter() - began


def drain() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """The quickest of several runs after one that does not count."""
    work()
    return min(timed(work) for _ in range(repeats))


def describe(plan: Plan, device: str, dtype: torch.dtype) -> Device:
    """The device and its two ceilings."""
    source = torch.ones(plan.copy_bytes, dtype=torch.uint8, device=device)
    copy = 2 * plan.copy_bytes / best(partial(torch.empty_like(source).copy_, source))
    a, b = torch.randn(2, plan.matrix, plan.matrix, device=device, dtype=dtype)
    rate = 2 * plan.matrix**3 / best(partial(torch.matmul, a, b))
    return Device(torch.cuda.get_device_name() if device.startswith("cuda") else "CPU", copy, rate)


def questions(bench: Bench, how: str, repeats: int, device: Device) -> Iterator[Figure]:
    """Single questions and the tokens behind them; then all standing questions in one pass."""
    plan = bench.plan
    for _ in range(3):  # compile, capture
        bench.ask(1)
    bench.ask(plan.standing)
    bench.ask(plan.standing)
    first, steps = [], []
    for _ in range(repeats):
        one, tokens = bench.ask(1)
        first.append(round(one * 1e9))
        steps += [round(token * 1e9) for token in tokens]
    many = sorted(bench.ask(plan.standing)[0] for _ in range(max(3, repeats // 10)))
    floor_ms = 1e3 * bench.costs.memory_floor_s(plan.context, device.copy)
    setting: Setting = {
        "context": plan.context, "question tokens": plan.question, "passes": how,
        "attention": type(bench.engine.attention).__name__,
    }  # fmt: skip
    for name, samples, goal in (("question", first, Goal(1.3)), ("token", steps, None)):
        for figure in latency(name, samples, setting, _ASKING):
            if figure.name.endswith("P50"):
                figure = msgspec.structs.replace(
                    figure, against="memory floor", reference=floor_ms, goal=goal
                )
            yield figure
    all_ms, one_ms = 1e3 * many[len(many) // 2], quantiles(first, 0.5)[0] / 1e6
    name = f"{plan.standing} standing questions"
    yield Figure(name, all_ms, "ms", _ASKING, setting, "one", one_ms, goal=Goal(3.0))


def ladder(plan: Plan) -> Ladder:
    """The sizes of the cost model's curves, all of them however long they take."""
    sizes = ladder_for(max(plan.curve), plan.chunk, quick=False)
    return replace(sizes, prefills=tuple(plan.curve), repeats=2, patience_s=inf)


def measure(run: Run) -> Iterator[Figure]:
    """Random weights. *Memory floor*: bytes of weights and KV over the bandwidth of a large copy; *matrix
    floor*: arithmetic over the rate of a large matrix product; both measured in the same run.
    """
    try:
        device = resolve_device(run.device)
    except ModelError as error:
        raise MeasurementFailed(str(error)) from None
    plan = QUICK if run.quick else FULL
    run.say("weights ...")
    bench = Bench(plan, device)
    found = describe(plan, device, bench.loaded.dtype)
    yield Figure("large copy, read and written", found.copy / 1e9, "GB/s", "", {"device": found.name})
    yield Figure("large matrix product", found.matrix / 1e12, "TFLOP/s", "", {"device": found.name})
    run.say("ingest ...")
    yield ingested(bench, list(bench.ingest())[1:], found)  # the first compiles
    run.say("questions ...")
    yield from questions(bench, "captured" if bench.engine.graphs else "eager", plan.repeats, found)
    if bench.engine.graphs:
        bench.engine.graphs = None
        yield from questions(bench, "eager", plan.eager_repeats, found)
    bench.tape.release()
    run.say("recompute and swap ...")
    samples = measure_costs(bench.engine, ladder(plan))
    source = f"measured: foretick bench gpu, {datetime.now(UTC).isoformat(' ', 'minutes')}"
    profile = msgspec.structs.replace(
        model_of(samples, bench.engine, plan.chunk, found.name, source), model=plan.name
    )
    if run.profiles is not None:
        save_profile(profile, run.profiles / file_name(found.name))
    yield from curves(samples, profile)
    run.say("attention ...")
    for rows, context, rate in attention_points(bench.engine, plan):
        goal = Goal(0.75, "at least") if context == 16384 else None
        setting: Setting = {"rows": rows, "context": context}
        yield Figure("KV read", rate, "GB/s", _ATTENTION, setting, "a copy", found.copy / 1e9, goal=goal)


def ingested(bench: Bench, updates: Sequence[tuple[int, int, float]], device: Device) -> Figure:
    """Tokens a second of all updates (tokens, context before, seconds), beside the matrix floor's."""
    tokens = sum(rows for rows, _, _ in updates)
    floor = sum(bench.costs.matrix_floor_s(rows, before, device.matrix) for rows, before, _ in updates)
    rate, best = tokens / sum(seconds for *_, seconds in updates), tokens / floor
    goal = Goal(0.6, "at least")
    return Figure("reading", rate, "tokens/s", _ASKING, {}, "matrix floor", best, goal=goal)


def curves(samples: Samples, profile: CostModel) -> Iterator[Figure]:
    """Medians of recompute and swap by tokens, and the cost model's errors on them."""
    curves = (
        ("recompute", samples.prefills, 1),
        ("swap out", samples.swap_out, BLOCK),
        ("swap in", samples.swap_in, BLOCK),
    )
    for name, measured, each in curves:
        for n, seconds in by_size(measured).items():
            setting: Setting = {"tokens": n * each}
            yield Figure(name, 1e3 * median(seconds), "ms", _CURVES, setting, samples=list(seconds))
    for name, error in profile.errors.items():
        yield Figure("median error", error.median, "share", "Cost model", {"of": name})
        yield Figure("worst error", error.worst, "share", "Cost model", {"of": name})
