"""`foretick profile`: measure what prefilling and swapping take on this device, and write the cost profile.

The measuring is `engine.timing`; here is what becomes of it: the fit, the errors, the file, the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from daemon.engine_spec import SettingError
from daemon.sections import Config
from engine.engine import Engine
from engine.memory import DeviceOutOfMemory
from engine.timing import Ladder, Sample, Samples, measure
from scheduler.costs import CostModel, save
from scheduler.curves import Point, error_of, fit

KNOTS = 8
"""Most knots of a curve behind 0."""
FLAT = 1.5
"""A pass of fewer floors than this tells too little about what its rows compute."""


def ladder_for(limit: int, chunk: int, *, quick: bool) -> Ladder:
    """Sizes up to ``limit`` tokens in passes of ``chunk``, and passes of several rows to try the model on."""
    if quick:
        limit, chunk = min(limit, 256), min(chunk, 64)
    powers = [1 << i for i in range(limit.bit_length())]
    passes = sorted({*(p for p in powers if p <= chunk), min(chunk, limit)})
    prefills = [p for p in powers if p >= 16] or [limit]
    far, near, part = prefills[-1] // 4, prefills[-1] // 8, max(1, min(chunk, limit) // 4)
    batches = (
        ((near, part), (0, part)),
        ((0, part), (far, 1), (near, 1)),
        ((far, part), (near, part), (0, part), (0, part)),
        tuple((near, 1) for _ in range(4)),
    )
    return Ladder(chunk, tuple(passes), tuple(prefills), batches, repeats=2 if quick else 3)


def model_of(samples: Samples, engine: Engine, chunk: int, device: str, source: str) -> CostModel:
    """The cost model fitted to what was measured in passes of ``chunk`` tokens, with its errors.

    Passes first: their floor is that of one token, and what a pass takes beside its rows is the intercept of
    the larger ones. What remains of passes and prefills is the rows' own.
    """
    floor = median(seconds for n, seconds in samples.passes if n == 1)
    pass_s = min(_intercept(_telling(samples.passes, floor)), floor)
    telling = _telling((*samples.passes, *samples.prefills), floor)
    rows = [Point(n, s - -(-n // chunk) * pass_s, s) for n, s in telling]
    recompute, recompute_error = fit(rows, KNOTS, through_zero=True)
    swap_out, out_error = fit([Point.whole(*p) for p in samples.swap_out], KNOTS, through_zero=False)
    swap_in, in_error = fit([Point.whole(*p) for p in samples.swap_in], KNOTS, through_zero=False)
    model = CostModel(
        device=device,
        model=engine.model.name,
        block_size=engine.pool.block_size,
        source=source,
        pass_tokens=chunk,
        pass_s=pass_s,
        floor_s=floor,
        recompute=recompute,
        swap_out=swap_out,
        swap_in=swap_in,
        errors={"recompute": recompute_error, "swap_out": out_error, "swap_in": in_error},
    )
    if not samples.batches:
        return model
    off = [abs(model.batch_ns(spans) / 1e9 / seconds - 1) for spans, seconds in samples.batches]
    return msgspec.structs.replace(model, errors=model.errors | {"batch": error_of(off)})


def _telling(samples: Iterable[Sample], floor: float) -> list[Sample]:
    """The sizes above all those that usually take about the floor; at least the largest."""
    sizes = by_size(samples)
    flat = [n for n, seconds in sizes.items() if median(seconds) <= FLAT * floor]
    chosen = [n for n in sizes if n > max(flat, default=0)] or [max(sizes)]
    return [(n, s) for n in chosen for s in sizes[n]]


def _intercept(passes: Sequence[Sample]) -> float:
    """Seconds at no tokens of the line with the least squared relative errors; 0 if that is below."""
    n, seconds = np.array(passes).T
    columns = np.array([np.ones_like(n), n]).T / seconds[:, None]
    return max(0.0, float(np.linalg.lstsq(columns, np.ones(len(n)), rcond=None)[0][0]))


def by_size(samples: Iterable[Sample]) -> dict[int, list[float]]:
    """Seconds by size, ascending."""
    sizes: dict[int, list[float]] = {}
    for n, seconds in samples:
        sizes.setdefault(n, []).append(seconds)
    return dict(sorted(sizes.items()))


def table(model: CostModel, samples: Samples) -> str:
    """Measured beside predicted, and the errors."""
    lines = [f"{'':<24}{'measured, ms':>14}{'predicted, ms':>15}"]
    lines += [
        f"{name:<24}{1e3 * found:>14.3f}{told / 1e6:>15.3f}" for name, found, told in _rows(model, samples)
    ]
    lines.append("error of what was left out of the fit: median, worst")
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


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def file_name(device: str) -> str:
    """The device's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def profile(config: Config, out: Path | None, *, quick: bool) -> str:
    """Measure the configured model on its device, write the profile, and return the table.

    The file is ``out``, by default named after the device in ``profiles``. Raises SettingError naming the
    key at fault, OSError when the file cannot be written.
    """
    from daemon.engine_build import load  # what it needs is not installed everywhere the fit is wanted

    if config.model.threads:
        torch.set_num_threads(config.model.threads)
    loaded, _ = load(config)
    size, chunk = config.pool.block_size, config.scheduler.max_batch_tokens
    limit = min(config.pool.frame_limit, loaded.max_positions)
    ladder = ladder_for(limit, chunk, quick=quick)
    try:
        engine = Engine(loaded, blocks=ladder.blocks(size), block_size=size, frame_limit=limit)
        samples = measure(engine, ladder)
    except (DeviceOutOfMemory, MemoryError, RuntimeError) as error:
        raise SettingError(
            "pool.frame_limit", f"{ladder.tokens} tokens cannot be measured here: {error}"
        ) from error
    name = device_name(loaded.device)
    source = f"measured: foretick profile{' --quick' if quick else ''}"
    model = model_of(samples, engine, ladder.chunk, name, source)
    target = out or Path("profiles") / file_name(name)
    save(model, target)
    return f"{table(model, samples)}\nwrote {target}"
