"""Whether the pool and the host tier fit in memory, before either is allocated."""

from collections.abc import Callable
from decimal import Decimal
from math import ceil
from pathlib import Path

import torch

from daemon.config.schema import PoolConfig
from daemon.engine.model_weights import weight_bytes
from engine.free_memory import available_bytes
from engine.model.loaded import LoadedModel
from feeds.connector import SettingError
from regions.kv_tensors import KVPool

SHARE = 0.95
"""Of what is available, the pool's: the rest is for passes and for what others take meanwhile."""

HOST_SHARE = 1 / 8
"""Of the memory that all pools and a spare engine leave, the host tier's by default."""
HOST = torch.device("cpu")

Available = Callable[[torch.device], int]
Room = Callable[[int], str]
"""Says what a number of blocks is enough for."""


def check_weights(directory: Path, dtype: str, device: str, available: Available = available_bytes) -> None:
    """Raise SettingError where a model's weights do not fit in the memory of ``device``."""
    where = torch.device(device)
    need, free = weight_bytes(directory, dtype), available(where)
    if need > SHARE * free:
        raise SettingError(
            "model.path",
            f"the weights of {directory.name} need {shown_bytes(need)} {_where(where)}, but "
            f"{shown_bytes(max(0, free))} are available, of which {SHARE:.0%} may be used",
        )


class SharedMemory:
    """What several models may still set aside: what is available once all are loaded, less what they took.

    A pool takes its memory as it is written, so what the first one sets aside is not seen missing yet.
    """

    def __init__(self, available: Available = available_bytes) -> None:
        self._available = available
        self._free: dict[torch.device, int] = {}

    def __call__(self, device: torch.device) -> int:
        """Bytes on ``device``, as the models so far leave them."""
        return self._free.setdefault(device, self._available(device))

    def take(self, settings: PoolConfig, blocks: int, loaded: LoadedModel) -> None:
        """A model has a pool of ``blocks``, and the host tier that its ``settings`` ask for."""
        each = KVPool.block_bytes(loaded.layers, settings.block_size, loaded.kv_dtype)
        for device, number in ((loaded.device, blocks), (HOST, asked_host_blocks(settings))):
            self._free[device] = self(device) - number * each


def check_memory(
    settings: PoolConfig,
    blocks: int,
    loaded: LoadedModel,
    available: Available = available_bytes,
    room: Room = lambda blocks: "",
) -> None:
    """Raise SettingError where ``blocks`` of the pool, or a host tier of a given size, do not fit in memory.

    The message says what they need, what there is, the most that fits, and what there is ``room`` for then.
    """
    each = KVPool.block_bytes(loaded.layers, settings.block_size, loaded.kv_dtype)
    device, asked = loaded.device, asked_host_blocks(settings)
    free = available(device)
    sized = "" if settings.blocks else " (pool.blocks = 0 sizes the pool from the sessions)"
    _check(settings.size_key, blocks, each, free, device, sized, room)
    if asked:
        rest = available(HOST)
        if device.type == "cpu":  # both are of the same memory
            rest -= blocks * each
        _check("pool.host_blocks", asked, each, rest, HOST, "", lambda blocks: "")


def fitting_blocks(settings: PoolConfig, loaded: LoadedModel, available: Available = available_bytes) -> int:
    """The most blocks of the pool that `check_memory` lets pass."""
    each = KVPool.block_bytes(loaded.layers, settings.block_size, loaded.kv_dtype)
    fit = int(SHARE * available(loaded.device)) // each
    return fit - asked_host_blocks(settings) if loaded.device.type == "cpu" else fit


def blocks_of_memory(settings: PoolConfig, loaded: LoadedModel, free: int, taken: int) -> int:
    """Blocks of the pool in the `pool.memory` of ``settings``.

    ``free``: bytes that are available; ``taken``: those that a pass, a host tier and a spare engine take of
    them. Raises SettingError where the rest is too small.
    """
    each = KVPool.block_bytes(loaded.layers, settings.block_size, loaded.kv_dtype)
    left = max(0, free - taken)
    asked = int(settings.memory if settings.memory >= 1 else settings.memory * left)
    leaves = (
        f"{shown_bytes(max(0, free))} are available {_where(loaded.device)} besides the weights, of which "
        f"passes, host tier and spare engine take {shown_bytes(taken)}"
    )
    if asked > SHARE * left:
        why = f"{leaves}: set at most {int(SHARE * left):,}, or a share of at most {SHARE}"
        raise SettingError("pool.memory", f"{shown_bytes(asked)} are more than there is room for: {why}")
    if asked < each:
        why = f"are less than a block of {settings.block_size} tokens, which takes {shown_bytes(each)}"
        raise SettingError("pool.memory", f"{shown_bytes(asked)} {why} ({leaves})")
    return asked // each


def asked_host_blocks(settings: PoolConfig) -> int:
    """Blocks of the host tier that must fit; 0 for `auto`."""
    return 0 if settings.host_blocks == "auto" else settings.host_blocks


def host_blocks(settings: PoolConfig, blocks: int, cell_budget: float, each: int, left: float) -> int:
    """Blocks of the host tier beside a pool of ``blocks``, of ``each`` bytes: as ``settings`` ask for it.

    By default at most what requests may hold in the pool, its ``cell_budget``, and at most `HOST_SHARE` of
    the bytes ``left`` by all pools and a spare engine.
    """
    if settings.host_blocks != "auto":
        return settings.host_blocks
    return min(unbounded_host_blocks(blocks, cell_budget), max(0, int(HOST_SHARE * left)) // each)


def unbounded_host_blocks(blocks: int, cell_budget: float) -> int:
    """Blocks of the default host tier where memory is not short."""
    return ceil(blocks * cell_budget)


def _check(key: str, blocks: int, each: int, free: int, device: torch.device, sized: str, room: Room) -> None:
    if blocks * each <= SHARE * free:
        return
    most = max(0, int(SHARE * free)) // each
    raise SettingError(
        key,
        f"{shown(blocks)} blocks{sized} need {shown_bytes(blocks * each)} {_where(device)}, {each:,} bytes "
        f"each, but {shown_bytes(max(0, free))} are available, of which {SHARE:.0%} may be used: at most "
        f"{most:,} fit{room(most)}",
    )


def _where(device: torch.device) -> str:
    return "on the GPU" if device.type == "cuda" else "in memory"


def shown(number: int) -> str:
    """Return a number with its thousands, or its first digits and power of ten where it is absurd."""
    # Python writes no integer of more than 4,300 digits
    return f"{number:,}" if number < 10**18 else f"{Decimal(number):.2e}"


def shown_bytes(number: int) -> str:
    """Return bytes exactly, and in GiB where a person can read that."""
    exact = f"{shown(number)} bytes"
    return exact if number >= 1 << 60 else f"{exact} ({number / 2**30:,.2f} GiB)"
