"""Measures a configured model on its device, with the host beside it, and writes the cost profile."""

from pathlib import Path

from msgspec.structs import replace

from daemon.config.schema import Config
from daemon.engine.build import load
from engine.device import device_name, use_threads
from engine.engine import Engine
from engine.step import OutOfMemory
from feeds.connector import SettingError
from lab.plan.host_probe import with_host
from lab.profile.cost_model import file_name, ladder_for, model_of, table, waking
from lab.profile.timing import measure
from scheduler.costs import save


def profile(config: Config, out: Path | None, *, quick: bool) -> str:
    """Measure the configured model on its device, write the profile, and return the table.

    The file is ``out``, by default named after the device in ``profiles``. Raises SettingError naming the key
    at fault, and OSError when the file cannot be written.
    """
    use_threads(config.model.threads)
    loaded, _ = load(config)
    size, chunk = config.pool.block_size, config.scheduler.max_batch_tokens
    limit = min(config.pool.frame_limit, loaded.max_positions)
    ladder = ladder_for(limit, chunk, quick=quick)
    try:
        engine = Engine(loaded, blocks=ladder.blocks(size), block_size=size, frame_limit=limit)
        samples = measure(engine, ladder)
    except (OutOfMemory, MemoryError, RuntimeError) as error:
        raise SettingError(
            "pool.frame_limit", f"{ladder.tokens} tokens cannot be measured here: {error}"
        ) from error
    name = device_name(loaded.device)
    source = f"measured: foretick profile{' --quick' if quick else ''}"
    model = replace(model_of(samples, engine, ladder.chunk, name, source), waking=waking(samples.paused))
    if not quick:
        model = with_host(model, config)
    target = out or Path("profiles") / file_name(name)
    save(model, target)
    return f"{table(model, samples)}\nwrote {target}"
