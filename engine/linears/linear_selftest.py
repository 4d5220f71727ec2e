"""Finds the fastest correct way for linear layers, by measuring on this machine.

What is fastest depends on the CPU, the shape and the number of rows. A weight is held in one layout, so one
way serves all numbers of rows, each of which weighs the same: a decoded token, a question and a prefill count
relative to their own time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from statistics import geometric_mean

import torch
from torch.nn.functional import linear

from engine.device import out_of_memory
from engine.linears.products import Way, build
from engine.measurement_cache import Memory
from engine.stopwatch import Measure, Stopwatch

log = logging.getLogger(__name__)

ROWS = (1, 4, 16, 64, 256)
"""The measured row counts: a token, a question or six, a prefill; as many as the time allows."""
REPEATS = 5
BUDGET_S = 0.1
"""For the calls of one shape, the uncounted one included. A model has about five shapes."""
LARGEST = 1 << 20
"""Weights of more elements are measured by a part of their rows: the time for each is the same."""
EDGE = 0.05
"""What another way must gain over the first one: less is noise."""
MAX_LOSS = 2.0
"""A way that takes twice as long at some row count is bad there; more may be a hiccup of the machine."""
STOPWATCH = Stopwatch(REPEATS, REPEATS, BUDGET_S)
_RECALLED_ROWS = 16
"""A remembered way is not measured, but still has to agree with float64."""
_CHECKED = 8
_MARGIN = 4
"""Of the rounding errors' estimate: the largest of many lies four standard deviations out."""


def choose(times: Mapping[Way, Sequence[float]]) -> Way:
    """The way whose ``times``, taken at the same row counts for all, are closest to the best ones.

    At each row count a way's loss is its time over the best way's, at most `MAX_LOSS`; the least geometric
    mean of them wins. The first way stays unless another gains `EDGE`. There must be one.
    """
    best = [min(taken) for taken in zip(*times.values(), strict=True)]
    losses = {
        way: geometric_mean([min(MAX_LOSS, t / least) for t, least in zip(taken, best, strict=True)])
        for way, taken in times.items()
    }
    first, least = next(iter(losses)), min(losses, key=losses.__getitem__)
    return least if losses[least] <= (1 - EDGE) * losses[first] else first


@dataclass(frozen=True)
class Layers:
    """Linear layers that get the same input: their weights [out, in] and biases [out]."""

    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]

    @property
    def shape(self) -> tuple[object, ...]:
        """What their times depend on."""
        outs = tuple(weight.shape[0] for weight in self.weights)
        biased = any(bias is not None for bias in self.biases)
        return outs, self.weights[0].shape[1], self.weights[0].dtype, biased, torch.get_num_threads()

    def cut(self, elements: int) -> Layers:
        """Their first outputs, in proportion, so that the weights have about ``elements`` or fewer."""
        share = min(1.0, elements / sum(weight.numel() for weight in self.weights))
        counts = [max(1, round(share * weight.shape[0])) for weight in self.weights]
        return Layers(
            [weight[:count] for weight, count in zip(self.weights, counts, strict=True)],
            [None if b is None else b[:count] for b, count in zip(self.biases, counts, strict=True)],
        )


@dataclass(frozen=True)
class SelfTest:
    """Chooses ways, and remembers them: equal shapes get the same way in all models of a process.

    ``memory``: also in later processes on this machine.
    """

    measure: Measure = STOPWATCH
    budget_s: float = BUDGET_S
    memory: Memory | None = None
    _known: dict[tuple[object, ...], Way] = field(default_factory=dict)

    def fastest(self, layers: Layers, ways: Sequence[Way], fallback: Way) -> Way:
        """The best of ``ways`` that is as exact as its dtype allows; ``fallback`` when none is."""
        key = (*layers.shape, *ways)
        if key not in self._known:
            memory = self.memory if len(ways) > 1 else None
            way = None if memory is None else self._recalled(memory, layers, ways)
            if way is None:
                way = self._choose(layers, ways, fallback)
                if memory is not None:
                    memory.remember(_question(layers, ways), str(way))
            self._known[key] = way
        return self._known[key]

    def _recalled(self, memory: Memory, layers: Layers, ways: Sequence[Way]) -> Way | None:
        """The way that an earlier process chose, if it is right."""
        name = memory.recall(_question(layers, ways), str)
        way = next((each for each in ways if str(each) == name), None)
        if way is None or (run := _running(way, part := layers.cut(LARGEST))) is None:
            return None
        example = _example(part, _RECALLED_ROWS)
        return way if example.agrees(run(example.rows)) else None

    def _choose(self, layers: Layers, ways: Sequence[Way], fallback: Way) -> Way:
        times = self._race(layers.cut(LARGEST), ways)
        for way, taken in times.items():
            log.debug("%s: %s us by %s", layers.shape, [round(1e6 * each) for each in taken], way)
        return choose(times) if times else fallback

    def _race(self, layers: Layers, ways: Sequence[Way]) -> dict[Way, list[float]]:
        """Seconds of the correct ways at each of the row counts that the budget allows."""
        running = {way: run for way in ways if (run := _running(way, layers))}
        times: dict[Way, list[float]] = {way: [] for way in running}
        spent = last = 0.0
        for number, rows in enumerate(ROWS):
            # a row costs at most as much as in the step before
            if not times or (number and spent + last * rows / ROWS[number - 1] > self.budget_s):
                break
            example = _example(layers, rows)
            times = {way: times[way] for way in times if example.agrees(running[way](example.rows))}
            seconds = self.measure([partial(running[way], example.rows) for way in times])
            for taken, second in zip(times.values(), seconds, strict=True):
                taken.append(second)
            last = (REPEATS + 1) * sum(seconds)
            spent += last
        return times


def _question(layers: Layers, ways: Sequence[Way]) -> dict[str, str]:
    outs, width, dtype, biased, _ = layers.shape
    shape = f"{outs} x {width} in {dtype}, {'with' if biased else 'without'} biases"
    return {"about": "linear layers", "shape": shape, "ways": ", ".join(map(str, ways))}


Run = Callable[[torch.Tensor], list[torch.Tensor]]


def _running(way: Way, layers: Layers) -> Run | None:
    """All layers' outputs for an input, each read once; None where this CPU has no such product."""
    try:
        forwards = [part.forward for part in build(way, layers.weights, layers.biases)]
        forwards[0](layers.weights[0].new_ones(1, 1, layers.weights[0].shape[1]))
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return None
    # the columns of a joint product lie apart: reading them belongs to its time
    return lambda rows: [forward(rows).neg() for forward in forwards]


@dataclass(frozen=True)
class _Example:
    """An input, what `_running` makes of every ``step``-th row of it, and the roundoff of these sums."""

    rows: torch.Tensor
    step: int
    expected: list[torch.Tensor]
    unit: float

    def agrees(self, outputs: list[torch.Tensor]) -> bool:
        """Whether ``outputs`` are within rounding errors; NaN are not."""
        return all(
            float((output[:, :: self.step].double() - expected).abs().max())
            <= _MARGIN * self.unit * float(expected.abs().max())
            for output, expected in zip(outputs, self.expected, strict=True)
        )


def _example(layers: Layers, rows: int) -> _Example:
    """Random input [1, rows, in], always equal, and products with it in float64."""
    dtype, width = layers.weights[0].dtype, layers.weights[0].shape[1]
    example = torch.randn(1, rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
    step = max(1, rows // _CHECKED)
    checked = example[:, ::step].double()
    expected = [
        -linear(checked, weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(layers.weights, layers.biases, strict=True)
    ]
    u, u32 = (torch.finfo(each).eps / 2 for each in (dtype, torch.float32))
    return _Example(example, step, expected, u32 * sqrt(width) + u)
