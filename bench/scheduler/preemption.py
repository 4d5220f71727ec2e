"""Swapping or recomputing a preempted prompt, by its length: what is predicted, and what each takes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.engine.contenders import model_of
from bench.figures import Figure, Goal, Setting
from bench.run import SuiteRun, timed
from daemon.engine.cost_probe import BUDGET_NS, LARGEST_TRANSFER, measured_costs
from engine.device import in_own_thread
from engine.engine import Engine
from engine.measurement_cache import Memory
from engine.model.loaded import LoadedModel
from lab.profile.cost_model import by_size
from lab.profile.timing import Ladder, Samples
from lab.profile.timing import measure as measure_lengths
from regions.allocator import Run
from regions.kv_tensors import KVPool
from regions.offload.copies import Copies, DirectCopies, Done
from scheduler.costs import CostModel

_BLOCK, _PASS = 16, 1024


def measure(run: SuiteRun) -> Iterator[Figure]:
    """The costs that a daemon with a host tier measures as it starts, beside what prompts of each length then
    take: to be computed again, or to be moved to the host tier and back. *By cost* is the way that the
    scheduler chooses by these predictions (*Stream2LLM* section 4.3); its references are to do always the one
    or the other. The sums are over one prompt of each length. The slow bus is a fake: each of its transfers
    ends 8 ms late and, both ways together, takes half as long as computing as much again. Short prompts are
    quicker computed there, long ones moved.
    """
    loaded, _ = model_of(run)
    lengths = run.sized((16, 32, 64, 128, 256, 512, 1024, 2048, 4096), (16, 64))
    lengths = tuple(n for n in lengths if n < loaded.max_positions)
    costs, took_ns, samples = in_own_thread(lambda: _measured(loaded, lengths, run.sized(5, 2)))
    yield Figure(
        "measuring at the start", took_ns / 1e6, "ms", "At the start", goal=Goal(BUDGET_NS / 1e6, of="ours")
    )
    yield from _figures(costs, samples, lengths, "")
    middle = lengths[len(lengths) * 2 // 3]
    bus = _SlowBus(0.008, median(by_size(samples.prefills)[middle]) / middle * _BLOCK / 4)
    costs, _, samples = in_own_thread(lambda: _measured(loaded, lengths, run.sized(5, 2), bus))
    yield from _figures(costs, samples, lengths, ", slow bus")


def _figures(costs: CostModel, samples: Samples, lengths: Sequence[int], where: str) -> Iterator[Figure]:
    prefills, out, back = (by_size(each) for each in (samples.prefills, samples.swap_out, samples.swap_in))
    sums = dict.fromkeys(("by cost", "always swap", "always recompute"), 0.0)
    for n in lengths:
        blocks, setting = -(-n // _BLOCK), Setting(tokens=n)
        took = {
            "recompute": median(prefills[n]) * 1e3,
            "swap": (median(out[blocks]) + median(back[blocks])) * 1e3,
        }
        predicted = {"recompute": costs.recompute_ns(n) / 1e6, "swap": costs.swap_ns(blocks) / 1e6}
        chosen = "swap" if predicted["swap"] < predicted["recompute"] else "recompute"
        for way, ms in took.items():
            yield Figure(f"{way}, predicted", predicted[way], "ms", f"Curves{where}", setting, "measured", ms)
            choice = setting | {"chosen": chosen}
            yield Figure("by cost", took[chosen], "ms", f"Choice{where}", choice, f"always {way}", ms)
            sums[f"always {way}"] += ms
        sums["by cost"] += took[chosen]
    for way in ("always swap", "always recompute"):
        yield Figure("sum by cost", sums["by cost"], "ms", f"Sums{where}", {}, way, sums[way], goal=Goal(1.0))


@dataclass(frozen=True)
class _SlowBus:
    """`Copies` in host memory whose transfers take longer: seconds of each, and of each block."""

    transfer_s: float
    block_s: float

    def __call__(self, target: KVPool, to: Sequence[Run], source: KVPool, blocks: Sequence[Run]) -> Done:
        done = DirectCopies()(target, to, source, blocks)
        seconds = self.transfer_s + self.block_s * sum(run.blocks for run in blocks)
        time.sleep(seconds)
        return Done(done.took_ns + round(seconds * 1e9))


def _measured(
    loaded: LoadedModel, lengths: Sequence[int], repeats: int, copies: Copies | None = None
) -> tuple[CostModel, int, Samples]:
    """The costs as a daemon's first start measures them, the ns which that took, and each length's times."""
    ladder = Ladder(_PASS, (1,), tuple(lengths), repeats=repeats)
    blocks = ladder.blocks(_BLOCK) + LARGEST_TRANSFER
    engine = Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)
    samples = measure_lengths(engine, ladder, copies)
    with TemporaryDirectory() as directory:
        memory = Memory(lambda: Path(directory))
        costs, took_ns = timed(
            lambda: measured_costs(engine, _PASS, LARGEST_TRANSFER, memory=memory, copies=copies)
        )
    return costs, took_ns, samples
