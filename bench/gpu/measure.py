"""The figures that need a GPU, in one command of a few minutes: `foretick bench gpu`, `python -m bench.gpu`.

Every time stands beside a floor measured in the same run: bytes over the bandwidth of a large copy,
arithmetic over the rate of a large matrix product. Needs neither data nor a model: weights are random and
made on the device. ``--quick`` runs the same code on a tiny model, on a CPU too, to see that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path

import msgspec
import torch

from bench.figures import latency
from bench.gpu_attention import measure as attention_points
from bench.gpu_result import AttentionPoint, Device, GpuReport, Question, render
from bench.gpu_shapes import FULL, QUICK, Costs, Plan, random_model
from bench.save import save
from daemon.cli.profile import file_name, ladder_for, model_of
from engine.engine import Engine
from engine.model.loading import LoadedModel, resolve_device
from engine.profile.timing import Ladder
from engine.profile.timing import measure as measure_costs
from engine.step import Chunk
from regions.tape import Retention, Tape
from scheduler.costs import save as save_profile

BLOCK = 16


class Bench:
    """One engine, its tape filled up to the plan's context."""

    def __init__(self, plan: Plan, device: str, *, eager: bool) -> None:
        self.plan = plan
        self.loaded: LoadedModel = random_model(plan.shape, device)
        self.costs = Costs.of(self.loaded)
        self.engine = self._engine(eager=eager)
        self._random = torch.Generator().manual_seed(3)
        self.tape: Tape | None = None

    def _engine(self, *, eager: bool) -> Engine:
        return Engine(
            self.loaded,
            blocks=-(-self.plan.pool_tokens // BLOCK),
            block_size=BLOCK,
            frame_limit=1 << 17,
            eager=eager,
        )

    def tokens(self, n: int) -> list[int]:
        """``n`` random token ids."""
        high = int(self.loaded.model.config.vocab_size)
        return torch.randint(3, high, (n,), generator=self._random).tolist()

    def ingest(self) -> Iterator[tuple[int, int, float]]:
        """Fill the tape by updates: (tokens, context before, seconds) of each."""
        plan = self.plan
        tape = self.engine.open_tape("gpu", self.tokens(64), Retention(plan.context + plan.update))
        while tape.live_tokens < plan.context:
            record = self.tokens(min(plan.update, plan.context - tape.live_tokens))
            before = tape.live_tokens
            assert tape.acquire(len(record))
            seconds = timed(partial(self.engine.execute, [Chunk(tape, record, sample=False)]))
            tape.commit([len(record)])
            yield len(record), before, seconds
        self.tape = tape

    def ask(self, questions: int) -> tuple[float, list[float]]:
        """Seconds of a pass over ``questions`` questions and one answer token; then of each further token."""
        assert self.tape is not None
        prompts = [self.tokens(self.plan.question) for _ in range(questions)]
        began = time.perf_counter()
        forks = [self.tape.fork() for _ in prompts]
        for fork, prompt in zip(forks, prompts, strict=True):
            assert fork.acquire(len(prompt))
        chosen = self.engine.execute([Chunk(f, p) for f, p in zip(forks, prompts, strict=True)])
        first = time.perf_counter() - began
        steps = []
        token = chosen[0].token if chosen[0] else 0
        for _ in range(self.plan.answer if questions == 1 else 0):
            began = time.perf_counter()
            assert forks[0].acquire(1)
            (choice,) = self.engine.execute([Chunk(forks[0], [token])])
            steps.append(time.perf_counter() - began)
            token = choice.token if choice else 0
        for fork in forks:
            fork.release()
        return first, steps

    def close(self) -> None:
        """Give the tape's memory back."""
        if self.tape is not None:
            self.tape.release()
            self.tape = None


def timed(work: Callable[[], object]) -> float:
    """Seconds, the device's queue drained before and after."""
    settle()
    began = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - began


def settle() -> None:
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
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return Device(name, str(torch.__version__), copy / 1e9, rate / 1e12)


def questions(bench: Bench, how: str, repeats: int, device: Device) -> tuple[Question, float]:
    """Latency of single questions; and of all standing questions in one pass over one question."""
    plan, costs = bench.plan, bench.costs
    for _ in range(3):  # compile, record
        bench.ask(1)
    bench.ask(plan.standing)
    bench.ask(plan.standing)
    first, steps = [], []
    for _ in range(repeats):
        one, tokens = bench.ask(1)
        first.append(round(one * 1e9))
        steps += [round(token * 1e9) for token in tokens]
    many = sorted(bench.ask(plan.standing)[0] for _ in range(max(3, repeats // 10)))
    ask, decode = latency(first), latency(steps)
    floor_ms = 1e3 * costs.memory_floor_s(plan.context, device.copy_gb_s * 1e9)
    found = Question(how, ask, decode, ask.p50_ms / floor_ms, decode.p50_ms / floor_ms)
    return found, 1e3 * many[len(many) // 2] / ask.p50_ms


def ladder(plan: Plan) -> Ladder:
    """The sizes of the cost model's curves, all of them however long they take."""
    sizes = ladder_for(max(plan.curve), plan.chunk, quick=False)
    return replace(sizes, prefills=tuple(plan.curve), repeats=2, patience_s=inf)


def measure(plan: Plan, device: str, say: Callable[[str], None]) -> GpuReport:
    """All figures."""
    began = time.perf_counter()
    started = datetime.now(UTC).isoformat(" ", "minutes")
    say("weights ...")
    bench = Bench(plan, device, eager=False)
    found = describe(plan, device, bench.loaded.dtype)
    say("ingest ...")
    updates = list(bench.ingest())[1:]  # the first compiles
    floors = [
        bench.costs.matrix_floor_s(rows, context, found.matrix_tflop_s * 1e12) for rows, context, _ in updates
    ]
    spent = sum(seconds for _, _, seconds in updates)
    say("questions ...")
    asked = [questions(bench, "recorded" if bench.engine.graphs else "eager", plan.repeats, found)]
    if bench.engine.graphs:
        bench.engine.graphs = None
        asked.append(questions(bench, "eager", plan.eager_repeats, found))
    bench.close()
    say("recompute and swap ...")
    samples = measure_costs(bench.engine, ladder(plan))
    source = f"measured: {command(sys.argv[1:])}, {started}"
    profile = model_of(samples, bench.engine, plan.chunk, found.name, source)
    say("attention ...")
    points = [
        AttentionPoint(rows, context, gb_s, gb_s / found.copy_gb_s)
        for rows, context, gb_s in attention_points(bench.engine, plan)
    ]
    return GpuReport(
        command(sys.argv[1:]),
        started,
        found,
        plan.name,
        plan.context,
        plan.question,
        type(bench.engine.attention).__name__,
        [question for question, _ in asked],
        plan.standing,
        asked[0][1],
        sum(rows for rows, _, _ in updates) / spent,
        sum(floors) / spent,
        samples,
        msgspec.structs.replace(profile, model=plan.name),
        points,
        time.perf_counter() - began,
    )


def command(arguments: Sequence[str]) -> str:
    """The command again, from the program's arguments, whichever way it was started."""
    options = arguments[2:] if list(arguments[:2]) == ["bench", "gpu"] else arguments
    return " ".join(["foretick", "bench", "gpu", *options])


def run(*, quick: bool, device: str, json_file: Path | None, profiles: Path | None) -> str:
    """Measure, save, and return the tables."""
    plan = QUICK if quick else FULL
    report = measure(plan, resolve_device(device), lambda text: print(text, file=sys.stderr))
    if json_file is not None:
        save(json_file, report)
    if profiles is not None:
        save_profile(report.profile, profiles / file_name(report.device.name))
    return render(report)


def main() -> None:
    """`python -m bench.gpu`: needs no more than torch, triton, transformers and msgspec."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profiles", type=Path)
    found = parser.parse_args()
    print(run(quick=found.quick, device=found.device, json_file=found.json, profiles=found.profiles))


if __name__ == "__main__":
    main()
