"""Plain decoders, whose layers run compiled: a whole pass in one call where attention is compiled as well.

Llama and its relatives differ in little (biases, norms of queries and keys), so for them the layers are
compiled (`engine.compiled.layers`), with weights packed once. Any other architecture runs as transformers'
own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import LayerCall
from engine.attention.cpu_kernel.backend import KV_KINDS, CpuKernelAttention
from engine.attention.cpu_kernel.flash import worker
from engine.attention.cpu_kernel.scratch import CALL
from engine.attention.metadata import AttentionMetadata
from engine.compiled.layers import AFTER, ATTENTION, BEFORE, LAYER, PASS, PASS_FIELDS, STEPS, forward
from engine.compiled.packed_products import CODED, FLOATS, HALF, PANEL
from engine.cpu import team

_ALONE_OPERATIONS = 1 << 21
"""Multiplications that one thread does in less time than it takes to wake others."""
_ROWS_EACH = 64
"""Rows of a thread from which on rows are split, not weights: they stay in its own cache."""
_FIRST_ANGLES = 1024
"""Positions whose angles are computed at load."""
_AT = {name: number for number, name in enumerate(LAYER.names or ())}
"""The word of each field."""
_STRANGE = (PASS.names or ()).index("strange")

Pools = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [kv_heads, slots, dim]."""
Rotary: TypeAlias = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines [1, positions, dim] of positions [1, positions], in the type of its first argument, as of
transformers' rotary modules."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights, held by ``arrays``, as the 64-bit ``words`` of a `LAYER`.

    ``size``: of its matrices; ``dtype``: of their inputs; ``joint``, ``mixed``: widths of scratch rows.
    """

    words: npt.NDArray[np.int64]
    arrays: tuple[Any, ...]
    size: int
    dtype: torch.dtype
    joint: int
    mixed: int
    heads: int
    kv_heads: int
    dim: int
    scale: float

    @property
    def kinds(self) -> frozenset[int]:
        """Of its matrices."""
        names = ("queries_kind", "out_kind", "gates_kind", "down_kind")
        return frozenset(int(self.words[_AT[name]]) for name in names)


@dataclass(frozen=True)
class CompiledDecoder:
    """A whole model; ``head``: its last norm and logits, as a layer's queries.

    ``embedding``: None where the head's panels are the embedding as well.
    """

    embedding: torch.Tensor | None
    rotary: Rotary
    layers: tuple[Layer, ...]
    head: Layer
    vocabulary: int

    in_float32 = True

    @property
    def described(self) -> str:
        """By whose code layers run."""
        bits = {CODED[kind] for layer in self.layers for kind in layer.kinds if kind in CODED}
        weights = " and ".join(f"int{each}" for each in sorted(bits))
        dtype = "bfloat16" if self.pairs else "float32"
        return f"compiled layers in {dtype}{f' with weights in {weights}' if bits else ''}"

    @property
    def bytes(self) -> int:
        """Memory of the packed weights."""
        return sum(array.nbytes for each in (*self.layers, self.head) for array in each.arrays)

    @property
    def width(self) -> int:
        """Of a state."""
        return int(self.head.words[_AT["inputs"]])

    @property
    def table(self) -> tuple[int, int, int]:
        """Address, kind and number of what states begin as."""
        if self.embedding is None:
            address, kind = (int(self.head.words[_AT[name]]) for name in ("queries", "queries_kind"))
            return address, kind, self.vocabulary
        kind = HALF if self.embedding.dtype == torch.bfloat16 else FLOATS
        return self.embedding.data_ptr(), kind, len(self.embedding)

    @property
    def quantised(self) -> bool:
        """Whether its weights are codes."""
        return not CODED.keys().isdisjoint(self.layers[0].kinds)

    @property
    def pairs(self) -> bool:
        """Whether products take inputs rounded to bfloat16."""
        return any(layer.dtype == torch.bfloat16 for layer in self.layers)

    @cached_property
    def words(self) -> npt.NDArray[np.int64]:
        """`LAYER` [layers + 2] as `PASS` has them: of the layers, the head and once more the last layer."""
        made = np.stack([each.words for each in (*self.layers, self.head, self.layers[-1])])
        made[:, :PASS_FIELDS] = 0
        return made

    @cached_property
    def angles(self) -> Angles:
        """Of its positions."""
        return Angles(self.rotary)

    @torch.inference_mode()
    def forward(
        self, context: Any, tokens: torch.Tensor, keep: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """As `LoadedModel.forward`. Raises IndexError for a token that is not in the vocabulary."""
        slots = context.slots
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop)
        pools = list(zip(context.pool.keys, context.pool.values, strict=True))
        run = Pass(self, tokens, positions, slots, pools, keep, trims=context.last is not None)
        if isinstance(context.attention, CpuKernelAttention):
            return run.whole(context, context.attention)
        return run.by_layer(context)


class Angles:
    """Cosines and sines [positions, half] as ``rotary``, the model's own module, computes them.

    Those of all positions so far are kept, unless they depend on the longest one.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        kind = str(getattr(rotary, "rope_type", "default"))
        self._kept = "dynamic" not in kind and kind != "longrope"
        self._tables = self._computed(torch.arange(_FIRST_ANGLES))

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tables, and the row of each of ``positions``."""
        if not self._kept:
            return *self._computed(positions), torch.arange(len(positions))
        most = int(positions.max()) + 1
        if most > len(self._tables[0]):
            self._tables = self._computed(torch.arange(2 * most))
        return *self._tables, positions

    def _computed(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(torch.empty(0), positions[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


class Pass:
    """One pass over ``tokens`` [rows]: the arguments of its layers, and buffers that these share.

    ``positions``, ``slots``: int64 [rows]; ``kept``: int64, the rows whose logits are read; ``trims``: the
    last layer is for them alone.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pools: Pools,
        kept: torch.Tensor,
        trims: bool,
    ) -> None:
        self._decoder, self._pools, self._kept, self._trims = decoder, pools, len(kept), trims
        first, rows, width = decoder.layers[0], len(tokens), padded(decoder.width)
        self._rows, self._threads = rows, team.threads()
        cos, sin, positions = decoder.angles.at(positions)
        self._query = torch.empty(first.heads, rows, first.dim)
        self._kept_query = torch.empty(first.heads, self._kept if trims else 0, first.dim)
        self._own = torch.empty(2, first.kv_heads, rows, first.dim)
        self._attended = torch.empty(rows, first.heads, first.dim, dtype=first.dtype)
        self._logits = torch.empty(self._kept, decoder.head.joint)
        states, kept_states = torch.empty(rows, width), torch.empty(self._kept, width)
        joint, mixed = torch.empty(rows, first.joint), torch.empty(rows, first.mixed)
        normed = torch.empty(self._threads, rows, width)
        words, count = decoder.words.copy(), len(decoder.layers)
        self._words = words
        _put(
            words, hidden=states, normed=normed, rows=rows, joint=joint, cos=cos, sin=sin, angles=len(cos),
            half=cos.shape[1], positions=positions, slots=slots, query=self._query, key=self._own[0],
            value=self._own[1], attended=self._attended, mixed=mixed, pool_head=pools[0][0].stride(0),
            pool_kind=KV_KINDS[pools[0][0].dtype],
        )  # fmt: skip
        words[:count, _AT["keys"]] = [keys.data_ptr() for keys, _ in pools]
        words[:count, _AT["values"]] = [values.data_ptr() for _, values in pools]
        _put(words[count:], hidden=kept_states, rows=self._kept)
        _put(words[count], joint=self._logits)
        _put(words[count + 1], query=self._kept_query)
        embedding, kind, vocabulary = decoder.table
        self._arguments = {
            "layers": count, "arguments": words.ctypes.data, "tokens": tokens.data_ptr(),
            "embedding": embedding, "embedding_kind": kind, "vocabulary": vocabulary,
            "kept": kept.data_ptr(), "trims": int(trims),
        }  # fmt: skip
        self._held = tokens, positions, cos, sin, slots, kept, states, kept_states, joint, mixed, normed

    def whole(self, context: Any, attention: CpuKernelAttention) -> torch.Tensor:
        """The logits of the rows kept, [kept, vocabulary], in one compiled call."""
        layers, count = self._decoder.layers, len(self._decoder.layers)
        prepared = [attention.prepare(self._call(0, context, self._query, context.metadata), self._attended)]
        records = np.repeat(prepared[0].record, count)
        for name in ("keys", "values"):
            records[name] = self._words[:count, _AT[name]]
        if self._trims and self._kept:
            own = context.metadata.only(context.last.rows)
            call = self._call(count - 1, context, self._kept_query, own)
            prepared.append(attention.prepare(call, self._attended[: self._kept]))
            records[-1:] = prepared[-1].record
        threads = self._team(count * (self._rows * layers[0].size + prepared[0].operations))
        attention.lend(records, prepared, threads)
        self._arguments |= {
            "worker": worker().address, "calls": records.ctypes.data, "call_bytes": CALL.itemsize
        }  # fmt: skip
        self._run(0, self._end, threads)
        return self._read()

    def by_layer(self, context: Any) -> torch.Tensor:
        """As `whole`, for any attention backend: each layer calls it between two compiled calls."""
        for number, layer in enumerate(self._decoder.layers):
            first, threads = STEPS * number, self._team(self._rows * layer.size)
            self._run(first + BEFORE, first + ATTENTION, threads)
            if first + ATTENTION == self._end:
                return self._read()
            call = self._call(number, context, self._query, context.metadata)
            if self._trims and number == len(self._decoder.layers) - 1:
                call = context.last.reduced(call, torch.tensor(context.last.rows))
            output = context.attention(call).transpose(0, 1)
            self._attended[: len(output)] = output
            self._run(first + AFTER, first + STEPS, threads)
        self._run(self._end - 1, self._end, self._team(self._kept * self._decoder.head.size))
        return self._read()

    @property
    def _end(self) -> int:
        """The step before which the pass ends: where no row is read, when keys and values are written."""
        whole = STEPS * len(self._decoder.layers) + 1
        return whole if self._kept or not self._trims else whole - STEPS

    def _call(self, number: int, context: Any, query: torch.Tensor, metadata: AttentionMetadata) -> LayerCall:
        keys, values = self._pools[number]
        scale, rotation = self._decoder.layers[number].scale, context.rotations[number]
        own, new = self._own
        return LayerCall(query, own, new, keys, values, scale, None, None, metadata, rotation)

    def _team(self, operations: int) -> int:
        """As many threads as help."""
        return 1 if operations < _ALONE_OPERATIONS else team.threads()

    def _run(self, first: int, stop: int, threads: int) -> None:
        """Run steps ``first`` to ``stop`` (exclusive)."""
        barrier, number, count = team.functions() if threads > 1 else (0, 0, 0)
        _put(self._words, barrier=barrier, thread_number=number, thread_count=count)
        for words, rows in ((self._words[:-2], self._rows), (self._words[-2:], self._kept)):
            _put(words, by_rows=int(threads == 1 or rows >= _ROWS_EACH * threads))
        arguments = self._arguments | {"first": first, "stop": stop}
        run = np.array([arguments.get(name, 0) for name in PASS.names or ()])
        team.run(forward(), run.ctypes.data, threads)
        if run[_STRANGE]:
            raise IndexError(f"a token is not one of {arguments['vocabulary']}")

    def _read(self) -> torch.Tensor:
        return self._logits[:, : self._decoder.vocabulary]


def padded(width: int) -> int:
    """``width`` in whole panels."""
    return -(-width // PANEL) * PANEL


def _put(words: npt.NDArray[np.int64], **arguments: torch.Tensor | int) -> None:
    """Set fields of `LAYER`s, by name, to numbers or addresses."""
    words[..., [_AT[name] for name in arguments]] = [
        value if isinstance(value, int) else value.data_ptr() for value in arguments.values()
    ]
