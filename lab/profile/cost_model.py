"""Fits a cost model to the times that `lab.profile.timing` measures, and shows both in a table."""

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import numpy as np
from msgspec.structs import replace

from engine.engine import Engine
from lab.profile.curve_fit import Point, error_of, fit
from lab.profile.timing import Ladder, Sample, Samples, Span
from scheduler.costs import CostModel
from scheduler.curves import CostCurve

KNOTS = 8
"""Most knots of a curve above 0."""
FLAT = 1.5
"""A pass shorter than this many floors says too little about the compute time of its rows."""
PAUSES = (0.005, 0.02, 0.1, 0.3, 1.0)
"""Seconds without a pass."""
ROUNDS = 4
"""How often curve and context cost are fitted in turn."""


def ladder_for(limit: int, chunk: int, *, quick: bool) -> Ladder:
    """Sizes up to ``limit`` tokens in passes of ``chunk``, and passes of several rows to test the model."""
    if quick:
        limit, chunk = min(limit, 256), min(chunk, 64)
    powers = [1 << i for i in range(limit.bit_length())]
    passes = sorted({*(p for p in powers if p <= chunk), min(chunk, limit)})
    prefills = [p for p in powers if p >= 16] or [limit]
    far, near, part = prefills[-1] // 4, prefills[-1] // 8, max(1, min(chunk, limit) // 4)
    few = max(1, part // 4)
    batches: tuple[tuple[Span, ...], ...] = (
        ((far, few),),
        ((near, part), (0, part)),
        ((0, part), (far, 1), (near, 1)),
        ((far, few), (near, few)),
        ((far, part), (near, part), (0, part), (0, part)),
        ((0, few),) * 4,
        ((near, 1),) * 4,
        ((near, few),) * 8,
    )
    return Ladder(
        chunk,
        tuple(passes),
        tuple(prefills),
        batches,
        pauses=PAUSES[:1] if quick else PAUSES,
        repeats=2 if quick else 3,
    )


def model_of(samples: Samples, engine: Engine, chunk: int, device: str, source: str) -> CostModel:
    """The cost model fitted to measurements in passes of ``chunk`` tokens, with its errors.

    Passes come first: the floor is the time of one token, and the intercept of the larger passes is the fixed
    cost. The rest of each pass and prefill is the rows' own: computing, and reading the context, which passes
    of other shapes reveal. Curve and context cost depend on each other, so they are fitted in turn.
    """
    floor = median(seconds for n, seconds in samples.passes if n == 1)
    pass_s = _intercept(samples.passes, floor)
    swap_out, out_error = fit([Point.whole(*p) for p in samples.swap_out], KNOTS, through_zero=False)
    swap_in, in_error = fit([Point.whole(*p) for p in samples.swap_in], KNOTS, through_zero=False)
    model = CostModel(
        device=device,
        model=engine.model.name,
        block_size=engine.pool.block_size,
        source=source,
        pass_tokens=chunk,
        pass_s=pass_s,
        floor_s=max(floor, pass_s),  # on a CPU a pass of one token can be faster than any other
        recompute=CostCurve((0.0, 1.0), (0.0, 0.0)),
        swap_out=swap_out,
        swap_in=swap_in,
        errors={"swap_out": out_error, "swap_in": in_error},
    )
    telling = _telling((*samples.passes, *samples.prefills), floor)
    for _ in range(ROUNDS if samples.batches else 1):
        rows = [Point(n, max(0.0, s - model.overhead_s(n)), s) for n, s in telling]
        curve, error = fit(rows, KNOTS, through_zero=True)
        errors = model.errors | {"recompute": error}
        model = with_rows(replace(model, recompute=curve, errors=errors), samples.batches)
    if not samples.batches:
        return model
    off: list[float] = []
    for excluded in dict.fromkeys(spans for spans, _ in samples.batches):
        refitted = with_rows(model, [batch for batch in samples.batches if batch[0] != excluded])
        found = [seconds for spans, seconds in samples.batches if spans == excluded]
        off += [abs(refitted.batch_ns(excluded) / 1e9 / seconds - 1) for seconds in found]
    return replace(model, errors=model.errors | {"batch": error_of(off)})


def waking(paused: Sequence[tuple[float, float]]) -> CostCurve:
    """What a pass takes longer after a pause, from (seconds of the pause, seconds of the pass)."""
    found: dict[float, list[float]] = {}
    for pause, seconds in paused:
        found.setdefault(pause, []).append(seconds)
    pauses = sorted(found)
    longer = [max(0.0, median(found[pause]) - median(found[0.0])) for pause in pauses]
    rising = np.maximum.accumulate(longer).tolist()
    # as long again changes nothing
    return CostCurve((*pauses, 2 * pauses[-1]), (*rising, rising[-1]))


def with_rows(model: CostModel, batches: Sequence[tuple[tuple[Span, ...], float]]) -> CostModel:
    """The model with the `row_s` and `context_s` that best fit ``batches``: spans and seconds.

    Least squares of relative errors, both at least 0. Passes near the floor say nothing about costs above it.
    """
    telling = [(spans, seconds) for spans, seconds in batches if seconds > FLAT * model.floor_s]
    if not telling:
        return replace(model, row_s=0.0, context_s=0.0)
    bare = replace(model, row_s=0.0, context_s=0.0, floor_s=model.pass_s)
    seconds = np.array([s for _, s in telling])
    rest = 1 - np.array([bare.batch_ns(spans) / 1e9 for spans, _ in telling]) / seconds
    columns = np.array([(len(spans) - 1, sum(c for c, _ in spans)) for spans, _ in telling], float)
    columns /= seconds[:, None]
    best, least = np.zeros(2), float(rest @ rest)
    for free in ([0], [1], [0, 1]):
        found = np.zeros(2)
        found[free] = np.linalg.lstsq(columns[:, free], rest, rcond=None)[0]
        off = float(np.sum((columns @ found - rest) ** 2))
        if off < least and (found >= 0).all():
            best, least = found, off
    return replace(model, row_s=float(best[0]), context_s=float(best[1]))


def _telling(samples: Iterable[Sample], floor: float) -> list[Sample]:
    """The sizes above all those that take about the floor; at least the largest."""
    sizes = by_size(samples)
    flat = [n for n, seconds in sizes.items() if median(seconds) <= FLAT * floor]
    chosen = [n for n in sizes if n > max(flat, default=0)] or [max(sizes)]
    return [(n, s) for n in chosen for s in sizes[n]]


def _intercept(passes: Sequence[Sample], floor: float) -> float:
    """Seconds at no tokens of the line that best fits ``passes`` above the floor.

    Small passes count too, so that noise of the large ones does not tilt the line. Candidates: intercepts up
    to `FLAT` floors, through each of the sizes.
    """
    sizes = by_size(passes)
    n, seconds = np.array([(size, median(found)) for size, found in sizes.items()], float).T
    height = np.linspace(0.0, FLAT * floor, 61)[:, None, None]
    slope = np.maximum(0.0, seconds[:, None] - height) / n[:, None]
    off = np.abs(np.maximum(floor, height + slope * n) / seconds - 1).mean(axis=2)
    return float(height[off.min(axis=1).argmin(), 0, 0])


def by_size(samples: Iterable[Sample]) -> dict[int, list[float]]:
    """Seconds by size, ascending."""
    sizes: dict[int, list[float]] = {}
    for n, seconds in samples:
        sizes.setdefault(n, []).append(seconds)
    return dict(sorted(sizes.items()))


def table(model: CostModel, samples: Samples) -> str:
    """Table of measured and predicted times, and the errors."""
    lines = [f"{'':<24}{'measured, ms':>14}{'predicted, ms':>15}"]
    lines += [f"{name:<24}{1e3 * took:>14.3f}{ns / 1e6:>15.3f}" for name, took, ns in _rows(model, samples)]
    if model.waking is not None:
        for pause, longer in zip(model.waking.x[1:-1], model.waking.y[1:], strict=False):
            lines.append(f"after {pause * 1e3:g} ms without a pass: {longer * 1e3:.3f} ms longer")
    if model.answer_s:
        host = f"host: {model.step_s * 1e3:.3f} ms a pass, {model.answer_s * 1e3:.3f} ms an answer"
        lines.append(f"{host}, {model.record_s * 1e6:.1f} us a record")
    lines.append("error on samples left out of the fit: median, worst")
    lines += [f"{name:<24}{e.median:>14.1%}{e.worst:>15.1%}" for name, e in model.errors.items()]
    return "\n".join(lines)


def _rows(model: CostModel, samples: Samples) -> Iterator[tuple[str, float, int]]:
    for n, seconds in by_size(samples.passes).items():
        yield f"pass, {n} tokens", median(seconds), model.batch_ns([(0, n)])
    for n, seconds in by_size(samples.prefills).items():
        yield f"recompute, {n} tokens", median(seconds), model.recompute_ns(n)
    for n, seconds in by_size(samples.swap_out).items():
        yield f"swap out, {n} blocks", median(seconds), model.swap_out_ns(n)
    for n, seconds in by_size(samples.swap_in).items():
        yield f"swap in, {n} blocks", median(seconds), model.swap_in_ns(n)
    for number, spans in enumerate(dict.fromkeys(spans for spans, _ in samples.batches), start=1):
        found = median(seconds for other, seconds in samples.batches if other == spans)
        yield f"batch {number}, {len(spans)} rows", found, model.batch_ns(spans)


def file_name(device: str) -> str:
    """The device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"
