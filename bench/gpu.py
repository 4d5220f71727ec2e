"""Figures that need a GPU. Weights are random; with small sizes the same code runs on a CPU."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise, product
from math import inf
from statistics import median
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.engine.contenders import append, read_together
from bench.engine.floor import Floors, causal
from bench.engine.rates import MachineRates, seconds
from bench.figures import FLOORS, Figure, Goal, Setting, latency
from bench.run import MeasurementFailed, SuiteRun, timed
from engine.attention.base import LayerCall
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.attention.triton import TritonAttention
from engine.device import resolve_device
from engine.engine import Engine
from engine.graphs.runner import CudaCapture
from engine.model.architectures import ModelError
from engine.model.loaded import LoadedModel
from engine.model.loading import prepare
from lab.profile.cost_model import by_size, file_name, ladder_for, model_of
from lab.profile.timing import Ladder, Samples
from lab.profile.timing import measure as measure_costs
from regions.extents import Extent, Placement
from regions.tape import Retention
from scheduler.costs import CostModel
from scheduler.costs import save as save_profile

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 18,  # the curves end far below it
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_BLOCK = 16
_ATTENTION_REPEATS = 7
_ASKING, _CURVES = "Questions", "Recompute and swap"


@dataclass(frozen=True)
class GpuPlan:
    """What one run measures. Sizes in tokens; ``repeats``: of a question, ``answer``: tokens decoded.

    ``eager_repeats``: of a question without captured passes, for comparison; these take longest.
    """

    name: str
    shape: dict[str, Any]
    context: int = 15_000
    update: int = 990
    question: int = 40
    answer: int = 32
    repeats: int = 100
    eager_repeats: int = 5
    standing: int = 25
    curve: Sequence[int] = tuple(1024 << i for i in range(6))
    attention_rows: Sequence[int] = (1, 40)
    chunk: int = 2048
    read_bytes: int = 2 << 30
    matrix: int = 8192

    @property
    def ladder(self) -> Ladder:
        """Sizes of the cost profile: all of them, without a time limit."""
        ladder = ladder_for(max(self.curve), self.chunk, quick=False)
        return replace(ladder, prefills=tuple(self.curve), repeats=2, patience_s=inf)

    @property
    def blocks(self) -> int:
        """Most blocks in use at a time."""
        tape = self.context + self.update + self.standing * (self.question + 16) + self.answer
        return max(-(-tape // _BLOCK), self.ladder.blocks(_BLOCK)) + 64


FULL = GpuPlan("Llama-3.1-8B shape, random weights", LLAMA_8B)
QUICK = GpuPlan(
    "tiny", TINY, context=300, update=40, question=8, answer=4, repeats=3, standing=5, curve=(64, 128, 256),
    chunk=128, read_bytes=1 << 20, matrix=128,
)  # fmt: skip


def random_model(shape: dict[str, Any], device: str) -> LoadedModel:
    """A Llama of ``shape`` with random weights, made on its device: bf16 on a GPU, fp32 elsewhere."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**shape), attn_implementation="eager", dtype=dtype
        )
    return prepare(model, None, name="random")


class Bench:
    """One engine, and a tape to fill up to the plan's context."""

    def __init__(self, plan: GpuPlan, device: str) -> None:
        self.plan = plan
        self.loaded = random_model(plan.shape, device)
        self.engine = Engine(
            self.loaded, blocks=plan.blocks, block_size=_BLOCK, frame_limit=1 << 17, eager=False
        )
        self._random = torch.Generator().manual_seed(3)
        self.tape = self.engine.open_tape("gpu", self.tokens(64), Retention(plan.context + plan.update))

    def tokens(self, n: int) -> list[int]:
        """``n`` random token ids."""
        high = int(self.loaded.model.config.vocab_size)
        return torch.randint(3, high, (n,), generator=self._random).tolist()

    def ingest(self) -> Iterator[tuple[int, int, float]]:
        """Fill the tape by updates; returns (tokens, context before, seconds) of each."""
        while (before := self.tape.live_tokens) < self.plan.context:
            record = self.tokens(min(self.plan.update, self.plan.context - before))
            yield len(record), before, seconds(partial(read_together, self.engine, [self.tape], [[record]]))

    def ask(self, questions: int) -> tuple[int, list[int]]:
        """ns of a pass over ``questions`` questions, an answer token each; then of each further token."""
        prompts = [self.tokens(self.plan.question) for _ in range(questions)]
        times = [time.perf_counter_ns()]
        forks = [self.tape.fork() for _ in prompts]
        token = append(self.engine, forks, prompts)[0].token
        times.append(time.perf_counter_ns())
        for _ in range(self.plan.answer if questions == 1 else 0):
            token = append(self.engine, forks, [[token]])[0].token
            times.append(time.perf_counter_ns())
        for fork in forks:
            fork.release()
        first, *steps = (after - before for before, after in pairwise(times))
        return first, steps


def measure(run: SuiteRun) -> Iterator[Figure]:
    """Random weights. *Memory floor*: bytes of weights and KV over the rate of the fastest read of memory.
    *Floor* of reading and of standing questions: arithmetic over the rate of a large matrix product, or
    bytes, whichever takes longer. Both rates are measured in the same run. Questions of 40 tokens are so much
    arithmetic that 25 of them cannot take less than seven times one's memory floor on an H200.
    """
    try:
        device = resolve_device(run.device)
    except ModelError as error:
        raise MeasurementFailed(str(error)) from None
    plan = QUICK if run.quick else FULL
    run.say("weights ...")
    bench = Bench(plan, device)
    rates = MachineRates(plan.matrix, plan.read_bytes, dtypes=[bench.loaded.dtype], device=device)
    rates.look()
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    yield from rates.figures()
    floors = Floors.of(bench.loaded, rates)
    run.say("ingest ...")
    updates = list(bench.ingest())[1:]  # the first compiles
    tokens = sum(rows for rows, _, _ in updates)
    rate = tokens / sum(took for *_, took in updates)
    best = 1e3 * tokens / sum(floors.of_pass(rows, before, causal(rows)) for rows, before, _ in updates)
    about: Setting = {FLOORS: floors.made_of, "device": name}
    yield Figure("reading", rate, "tokens/s", _ASKING, about, "floor", best, goal=Goal(0.6, "at least"))
    run.say("questions ...")
    yield from questions(bench, "captured" if bench.engine.graphs else "eager", plan.repeats, floors)
    if graphs := bench.engine.graphs:
        bench.engine.graphs = None
        yield from questions(bench, "eager", plan.eager_repeats, floors)
        bench.engine.graphs = graphs
    bench.tape.release()
    run.say("recompute and swap ...")
    samples = measure_costs(bench.engine, plan.ladder)
    source = f"measured: foretick bench gpu, {datetime.now(UTC).isoformat(' ', 'minutes')}"
    costs = model_of(samples, bench.engine, plan.chunk, name, source)
    profile = msgspec.structs.replace(costs, model=plan.name)
    if run.profiles is not None:
        save_profile(profile, run.profiles / file_name(name))
    yield from curves(samples, profile)
    run.say("attention ...")
    figure = partial(Figure, "KV read", unit="GB/s", table="Attention alone", against="memory read")
    for rows, context in product(plan.attention_rows, plan.curve):
        if context + rows <= bench.engine.pool.total_blocks * _BLOCK:
            rate, goal = bandwidth(bench.engine, rows, context), Goal(0.75, "at least")
            at: Setting = {"rows": rows, "context": context}
            goal_here = goal if context == 16384 else None
            yield figure(rate, setting=at, reference=floors.read.a_second / 1e9, goal=goal_here)


def questions(bench: Bench, how: str, repeats: int, floors: Floors) -> Iterator[Figure]:
    """Single questions and the tokens after them; then all standing questions in one pass."""
    plan = bench.plan
    for asked in (1, 1, 1, plan.standing, plan.standing):  # compile, capture
        bench.ask(asked)
    times = [bench.ask(1) for _ in range(repeats)]
    first, steps = [one for one, _ in times], [step for _, steps in times for step in steps]
    many = [bench.ask(plan.standing)[0] for _ in range(max(3, repeats // 10))]
    floor_ms = floors.memory_ms(plan.context)
    setting: Setting = {
        "context": plan.context, "question tokens": plan.question, "passes": how,
        "attention": type(bench.engine.attention).__name__, FLOORS: floors.made_of,
    }  # fmt: skip
    for name, samples, goal in (("question", first, Goal(1.3)), ("token", steps, None)):
        p50, p99 = latency(name, samples, setting, _ASKING)
        yield msgspec.structs.replace(p50, against="memory floor", reference=floor_ms, goal=goal)
        yield p99
    name, rows = f"{plan.standing} standing questions", plan.standing * plan.question
    floor_ms = floors.of_pass(rows, plan.context, causal(plan.question), plan.standing)
    yield Figure(name, median(many) / 1e6, "ms", _ASKING, setting, "floor", floor_ms, goal=Goal(1.5))


def curves(samples: Samples, profile: CostModel) -> Iterator[Figure]:
    """Medians of recompute and swap by tokens, and the cost model's errors on them."""
    swaps = ("swap out", samples.swap_out, _BLOCK), ("swap in", samples.swap_in, _BLOCK)
    for name, measured, each in (("recompute", samples.prefills, 1), *swaps):
        for n, times in by_size(measured).items():
            setting: Setting = {"tokens": n * each}
            yield Figure(name, 1e3 * median(times), "ms", _CURVES, setting, samples=list(times))
    for name, error in profile.errors.items():
        yield Figure("median error", error.median, "share", "Cost model", {"of": name})


@torch.inference_mode()
def bandwidth(engine: Engine, rows: int, context: int) -> float:
    """GB/s of KV read for ``rows`` of one reader of ``context`` tokens, median.

    All layers' pools are read in turn, so that no device cache holds what is read next.
    """
    model, pool = engine.model, engine.pool
    heads = int(model.model.config.num_attention_heads)
    placement = Placement((Extent(0, context, 0, 0),), ((context, rows),), context, 0)
    metadata = AttentionMetadata([PackedRows(0, rows, placement)], model.device)
    calls, read = [], 0
    for keys, values, rotation in zip(pool.keys, pool.values, model.rotations, strict=True):
        keys.normal_()
        values.normal_()
        width, new = keys.shape[-1], slice(context, context + rows)
        query = torch.randn(heads, rows, width, dtype=model.dtype, device=model.device)
        own = keys[:, new], values[:, new]
        calls.append(LayerCall(query, *own, keys, values, width**-0.5, None, None, metadata, rotation))
        read += context * keys.shape[0] * (width + values.shape[-1]) * keys.element_size()
    return read / _seconds(engine, calls) / 1e9


def _seconds(engine: Engine, calls: list[LayerCall]) -> float:
    """Run all calls back to back; on a GPU they are replayed from a graph and timed by its own clock."""

    def run() -> torch.Tensor:
        for call in calls:
            output = engine.attention(call)
        return output

    run()
    if engine.model.device.type != "cuda":
        return median(timed(run)[1] / 1e9 for _ in range(_ATTENTION_REPEATS))
    if isinstance(engine.attention, TritonAttention):
        engine.attention.prepare(calls[0].metadata)
        run = CudaCapture()(run)
    times = []
    for _ in range(_ATTENTION_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1e3)
    return median(times)
