"""One rank of the tensor-parallel test: the test runs `main` in a process for each rank.

The directory has the models, one folder each, and the group's file store. Every rank writes the results of
`scenario` for each model, and its output to a log.
"""

import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from engine.engine import Engine
from engine.model.canary import check
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from regions.tape import Retention
from tests.kit.engine import append, ask_together, tokens


def scenario(loaded: LoadedModel) -> list[torch.Tensor]:
    """Logits of appends, evictions over several frames, and batches of forks of several versions."""
    engine = Engine(loaded, blocks=64, block_size=4, frame_limit=80)
    rng = random.Random(4)
    tape = engine.open_tape("tape", tokens(rng, 9), Retention(40, 6))
    logits, forks = [], []
    for i in range(24):
        logits.append(append(engine, tape, tokens(rng, rng.randrange(4, 9))))
        forks.append(tape.fork())
        if i % 4 == 3:
            logits += ask_together(engine, [(fork, tokens(rng, 3)) for fork in forks])
            for fork in forks:
                fork.release()
            forks.clear()
    assert tape.evicted_tokens > 80
    tape.release()
    return logits


def weight_bytes(model: Any) -> int:
    """Bytes of the storages behind the model's parameters, each counted once."""
    storages = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def main(rank: int, ranks: int, directory: Path) -> None:
    with (directory / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    for path in sorted(p for p in directory.iterdir() if p.is_dir()):
        loaded = load_model(path, tensor_parallel=True)
        check(loaded)
        found = {
            "logits": scenario(loaded),
            "kv_heads": loaded.layers[0].kv_heads,
            "bytes": weight_bytes(loaded.model),
        }
        torch.save(found, directory / f"{path.name}.{rank}.pt")
    distributed.destroy_process_group()
