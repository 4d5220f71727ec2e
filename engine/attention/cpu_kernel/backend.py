"""The CPU backend over the compiled kernel: plans a pass once, and makes a `CALL` for each layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import LayerCall
from engine.attention.cpu_kernel.flash import worker
from engine.attention.cpu_kernel.scratch import CALL, LONG, room_floats, state_floats
from engine.attention.cpu_kernel.task_plan import Shape, TaskPlan, plan
from engine.attention.metadata import AttentionMetadata
from engine.attention.reads import Reads, reads_of
from engine.attention.rotary import FrameRotation
from engine.cpu import team
from engine.cpu.vectors import FLOAT, LANES

_LOG2_E = math.log2(math.e)
_DTYPES = (torch.float32, torch.bfloat16)
KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Numbers of `KINDS`, by the type of a pool."""
_ALONE_OPERATIONS = 1 << 22
"""Fewer take one thread a few dozen microseconds, about as long as waking others."""
_LINE = 64
"""Bytes of a cache line."""

Floats = npt.NDArray[np.float32]


def serves(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel has such heads: of whole vectors of `LANES`, in float32, bfloat16 or 8 bits."""
    return dtype in KV_KINDS and key_dim % LANES == 0 and value_dim % LANES == 0


@dataclass
class _Pass:
    """One pass for layers of one kind; ``tables``: rotations of its shifts, float [shifts, 2, half]."""

    plan: TaskPlan
    shape: Shape
    tables: dict[FrameRotation, Floats] = field(default_factory=dict)
    addresses: tuple[int, int, int, int] = field(init=False)
    """Of the plan's tasks, segments, entries and extents."""

    def __post_init__(self) -> None:
        made = self.plan
        tasks, segments, entries = (each.ctypes.data for each in (made.tasks, made.segments, made.entries))
        self.addresses = tasks, segments, entries, made.extents.ctypes.data

    def table(self, rotation: FrameRotation) -> Floats:
        """Cosines and sines for every shift, computed once per pass; nothing reads those of no shift."""
        table = self.tables.get(rotation)
        if table is None and not self.plan.shifts.any():
            table = self.tables[rotation] = np.empty((0, 2, len(rotation.inv_freq)), np.float32)
        if table is None:
            angles = self.plan.shifts[:, None] * rotation.inv_freq.numpy()
            table = np.stack((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
            self.tables[rotation] = table
        return table


@dataclass(frozen=True)
class PreparedCall:
    """One layer's call: its `CALL` in ``record`` [1], without the kernel's memory.

    ``states``: states it keeps there; ``pending``: its counters; ``operations``: its multiplications.
    ``held``: what the record points to.
    """

    record: npt.NDArray[np.void]
    states: int
    pending: int
    operations: int
    held: tuple[object, ...]


class CpuKernelAttention:
    """Region attention on a CPU in one compiled call a layer, or a part of one (`prepare`).

    `serves` says for which heads. Results do not depend on the number of threads. Not thread-safe, as its
    memory is kept.
    """

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._reads: Reads | None = None
        self._passes: dict[tuple[int | None, Shape], _Pass] = {}
        self._counters = np.zeros(0, np.int64)
        self._states, self._rooms = _aligned(0), _aligned(0)

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]. Raises ValueError for heads that are not served."""
        q_heads, rows, _ = call.query.shape
        out = torch.empty((rows, q_heads, call.new_value.shape[2]), dtype=call.query.dtype)
        prepared = self.prepare(call, out)
        threads = 1 if prepared.operations < _ALONE_OPERATIONS else team.threads()
        self.lend(prepared.record, [prepared], threads)
        team.run(worker().address, prepared.record.ctypes.data, threads)
        return out.transpose(0, 1)

    def prepare(self, call: LayerCall, out: torch.Tensor) -> PreparedCall:
        """``call`` for `worker`; it writes ``out`` [rows, q_heads, value_dim].

        Raises ValueError for heads that are not served.
        """
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        q_heads, _, key_dim = query.shape
        kv_heads, _, value_dim = call.new_value.shape
        if not serves(key_dim, value_dim, call.keys.dtype) or query.dtype not in _DTYPES:
            raise ValueError(f"heads of {key_dim} and {value_dim} in {call.keys.dtype} need another backend")
        shape = Shape(kv_heads, q_heads // kv_heads, key_dim, value_dim)
        laid = self._pass(call, shape)
        plan, table = laid.plan, laid.table(call.rotation)
        tasks, segments, entries, extents = laid.addresses
        lines = plan.block_rows * shape.groups
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        factor, cap = call.scale * _LOG2_E, 0.0
        if call.softcap is not None:
            factor, cap = 2 * factor / call.softcap, call.softcap * _LOG2_E
        record = np.zeros(1, CALL)
        record[0] = (
            *_placed(query, 1),
            query.dtype == torch.bfloat16,
            *_placed(call.keys, 1),
            *_placed(call.values, 1),
            KV_KINDS[call.keys.dtype],
            out.data_ptr(),
            value_dim * out.element_size(),
            q_heads * value_dim * out.element_size(),
            out.dtype == torch.bfloat16,
            0 if sinks is None else sinks.data_ptr(),
            *shape,
            table.shape[2],
            tasks,
            len(plan.tasks),
            segments,
            entries,
            extents,
            table.ctypes.data,
            0,
            FLOAT * _rounded(state_floats(lines, value_dim)),
            0,
            FLOAT * _rounded(room_floats(lines, key_dim, value_dim)),
            *(0, 0, 0),
            factor,
            cap,
        )
        held = query, out, sinks, laid, table
        return PreparedCall(record, plan.states, plan.blocks * kv_heads, plan.operations, held)

    def lend(self, records: npt.NDArray[np.void], prepared: Sequence[PreparedCall], threads: int) -> None:
        """Give ``records``, each made of one of ``prepared``, memory for ``threads``, until the next `lend`.

        They run one after the other.
        """
        states = max(each.states * int(each.record["state_bytes"][0]) for each in prepared)
        rooms = max(threads * int(each.record["room_bytes"][0]) for each in prepared)
        self._states, self._rooms = _grown(self._states, states // FLOAT), _grown(self._rooms, rooms // FLOAT)
        own = 2 * len(records)
        counters = own + max(each.pending for each in prepared)
        if self._counters.size < counters:
            self._counters = np.zeros(2 * counters, np.int64)
        self._counters[:counters] = 0
        first = self._counters.ctypes.data
        records["states"], records["rooms"] = self._states.ctypes.data, self._rooms.ctypes.data
        records["pending"] = first + own * LONG
        records["next_task"] = first + LONG * np.arange(0, own, 2)
        records["next_room"] = first + LONG * np.arange(1, own, 2)

    def _pass(self, call: LayerCall, shape: Shape) -> _Pass:
        if call.metadata is not self._metadata:
            self._metadata, self._reads = call.metadata, reads_of(call.metadata)
            self._passes.clear()
        key = call.window, shape
        found = self._passes.get(key)
        if found is None:
            assert self._reads is not None
            found = _Pass(plan(self._reads, call.metadata.rows, call.window, shape), shape)
            self._passes[key] = found
        return found


def _placed(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Address, and steps in bytes of the head and of the next dimension."""
    size = tensor.element_size()
    return tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(dim) * size


def _rounded(floats: int) -> int:
    """``floats`` in whole cache lines."""
    return -(-floats * FLOAT // _LINE) * _LINE // FLOAT


def _aligned(floats: int) -> Floats:
    """Memory for ``floats``, at the start of a cache line."""
    memory = np.empty(floats + _LINE // FLOAT, np.float32)
    return memory[-memory.ctypes.data % _LINE // FLOAT :]


def _grown(memory: Floats, floats: int) -> Floats:
    """``memory``, or more."""
    return memory if memory.size >= floats + _LINE // FLOAT else _aligned(floats + _LINE // FLOAT)
