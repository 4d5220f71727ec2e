"""Snapshots: a session in a file, with its records, its stream position and the KV of its window.

The layout: a fixed prefix (magic, format version, lengths), a msgpack header and its checksum, the KV of the
live slots by layer (all keys, then all values, ``[kv_heads, tokens, dim]``, oldest token first, in the pool's
dtype and the machine's byte order), and the KV's checksum. A file is replaced whole, and the whole file is
checked before any of it reaches the pool.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from regions.allocator import Run
from regions.extents import SlotRange
from regions.kv_tensors import KVPool
from regions.offload.kv_store import StoredBlocks, StoredLost
from regions.sliding import TapeState
from support.durable_file import create, replacing

log = logging.getLogger(__name__)

MAGIC = b"FTICKKV\n"
FORMAT = 7
_PREFIX = struct.Struct("<8sIQQ")  # magic, format version, bytes of the header, bytes of the KV
_DIGEST = 32
_CHUNK = 1 << 20


class SnapshotError(StoredLost):
    """A snapshot that cannot be written, read or trusted; the message says why."""


class ForeignSnapshot(SnapshotError):
    """A snapshot of another model, session, setting or format."""


class Identity(msgspec.Struct, frozen=True):
    """What KV depends on apart from the session's records; a file of another identity is refused as foreign.

    ``layers``: (kv_heads, key_dim, value_dim) of each. ``frozen``: digest of the frozen prefix's tokens.
    """

    model: str
    tokenizer: str
    frozen: str
    dtype: str
    layers: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, pool: KVPool, *, model: str, tokenizer: str, frozen: Sequence[int]) -> Identity:
        """Identity of sessions in ``pool`` after ``frozen`` tokens; ``model``, ``tokenizer``: revisions."""
        layers = tuple((layer.kv_heads, layer.key_dim, layer.value_dim) for layer in pool.layers)
        dtype = str(pool.dtype).removeprefix("torch.")
        return cls(model, tokenizer, "", dtype, layers).behind(frozen)

    def behind(self, frozen: Sequence[int]) -> Identity:
        """The same behind other ``frozen`` tokens."""
        digest = blake2b(msgspec.msgpack.encode(list(frozen)), digest_size=16).hexdigest()
        return msgspec.structs.replace(self, frozen=digest)


class SnapshotHeader(msgspec.Struct, frozen=True):
    """A snapshot without its KV. ``owner``: what its owner keeps with it. ``created_ns``: wall clock."""

    session: str
    identity: Identity
    block_size: int
    state: TapeState
    created_ns: int
    owner: bytes = b""


def write_snapshot(
    path: Path,
    header: SnapshotHeader,
    pool: KVPool,
    ranges: Sequence[SlotRange],
    *,
    opened: Callable[[Path], BinaryIO] = create,
) -> bytes:
    """Write ``header`` and the KV of ``ranges`` (the live slots, oldest first); returns the file's seal.

    Raises SnapshotError, leaving no temporary file, when writing fails, and ValueError when there are no
    slots.
    """
    if not ranges:
        raise ValueError(f"session {header.session} has no KV to write")
    try:
        with replacing(path, opened=opened) as file:
            seal = _write(file, header, pool, ranges)
    except OSError as error:
        raise SnapshotError(f"{path} could not be written: {error.strerror or error}") from error
    return seal


def read_header(path: Path) -> SnapshotHeader:
    """The header of a file, whose KV is not checked. Raises as `Snapshot.open`."""
    try:
        with path.open("rb") as file:
            return _head(file, path)[0]
    except OSError as error:
        raise SnapshotError(f"{path} could not be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class Snapshot:
    """A file that was read completely and checked.

    ``seal``: the header's checksum, which tells files of the same name apart.
    """

    path: Path
    header: SnapshotHeader
    seal: bytes

    @classmethod
    def open(cls, path: Path) -> Snapshot:
        """Check the whole file. Raises SnapshotError: incomplete, damaged; ForeignSnapshot: other format."""
        try:
            with path.open("rb") as file:
                header, seal, kv_size = _check(file, path)
        except OSError as error:
            raise SnapshotError(f"{path} could not be read: {error.strerror or error}") from error
        if not isinstance(getattr(torch, header.identity.dtype, None), torch.dtype):
            raise ForeignSnapshot(f"{path} is foreign: its dtype is {header.identity.dtype}")
        if sum(_sizes(header)) != kv_size:
            raise SnapshotError(f"{path} is damaged: its KV is not that of {header.state.tokens} tokens")
        return cls(path, header, seal)

    def expect(self, identity: Identity) -> None:
        """Raise ForeignSnapshot unless it has this identity."""
        for field in Identity.__struct_fields__:
            theirs, mine = getattr(self.header.identity, field), getattr(identity, field)
            if theirs != mine:
                raise ForeignSnapshot(f"{self.path} is foreign: its {field} is {theirs}, not {mine}")

    def load_blocks(self, pool: KVPool, blocks: Sequence[Run], skip: int = 0) -> None:
        """As `load`, to whole ``blocks`` behind their first ``skip`` slots."""
        size, left = pool.block_size, self.header.state.tokens
        ranges: list[SlotRange] = []
        for start, stop in blocks:
            count = min(left, (stop - start) * size - skip)
            ranges.append((start * size + skip, count))
            left, skip = left - count, 0
        self.load(pool, ranges)

    def load(self, pool: KVPool, ranges: Sequence[SlotRange]) -> None:
        """Copy the KV to ``ranges`` of ``pool``: one slot for each token, oldest first.

        Raises SnapshotError when the file cannot be read any more, or is another one by now.
        """
        tokens = self.header.state.tokens
        if sum(count for _, count in ranges) != tokens:
            raise SnapshotError(f"{self.path} has {tokens} tokens, which do not fit the slots")
        try:
            with self.path.open("rb") as file:
                if _head(file, self.path)[1] != self.seal:
                    raise SnapshotError(f"{self.path} was replaced since it was checked")
                for target, size in zip(_tensors(pool), _sizes(self.header), strict=True):
                    raw = bytearray(file.read(size))
                    if len(raw) != size:
                        raise SnapshotError(f"{self.path} became shorter while it was read")
                    source = torch.frombuffer(raw, dtype=pool.dtype).view(len(target), tokens, -1)
                    before = 0
                    for slot, count in ranges:
                        target[:, slot : slot + count] = source[:, before : before + count].to(pool.device)
                        before += count
        except OSError as error:
            raise SnapshotError(f"{self.path} could not be read: {error.strerror or error}") from error


class Restoring(StoredBlocks):
    """The KV of a snapshot that is kept, for a tape that begins with it."""

    def __init__(self, pool: KVPool, snapshot: Snapshot) -> None:
        self._pool, self._snapshot = pool, snapshot

    def load(self, blocks: Sequence[Run]) -> None:
        """See `StoredBlocks.load`; raises SnapshotError."""
        self._snapshot.load_blocks(self._pool, blocks)


class DiskCopy(StoredBlocks):
    """One session's KV in a file, which `release` removes.

    ``skip``: dead slots at the start of its first block when it was written.
    """

    def __init__(self, pool: KVPool, path: Path, identity: Identity, seal: bytes, skip: int) -> None:
        self._pool, self._path, self._identity = pool, path, identity
        self._seal, self._skip = seal, skip

    def load(self, blocks: Sequence[Run]) -> None:
        """See `StoredBlocks.load`; raises SnapshotError."""
        snapshot = Snapshot.open(self._path)
        snapshot.expect(self._identity)
        if snapshot.seal != self._seal:
            raise SnapshotError(f"{self._path} is not the file that was written: it was replaced")
        snapshot.load_blocks(self._pool, blocks, self._skip)

    def release(self) -> None:
        """Remove the file."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s could not be removed: %s", self._path, error)


def _write(file: BinaryIO, header: SnapshotHeader, pool: KVPool, ranges: Sequence[SlotRange]) -> bytes:
    packed = msgspec.msgpack.encode(header)
    prefix = _PREFIX.pack(MAGIC, FORMAT, len(packed), sum(_sizes(header)))
    seal = _digest(prefix + packed)
    file.write(prefix + packed + seal)
    kv = blake2b(seal, digest_size=_DIGEST)
    for tensor in _tensors(pool):
        # joined on the host, because the device may be out of memory
        live = torch.cat([tensor[:, slot : slot + count].cpu() for slot, count in ranges], 1)
        raw = live.view(torch.uint8).numpy().data.cast("B")  # bytes: numpy has no bfloat16
        kv.update(raw)
        file.write(raw)
    file.write(kv.digest())
    return seal


def _check(file: BinaryIO, path: Path) -> tuple[SnapshotHeader, bytes, int]:
    """(header, seal, bytes of the KV), after checking lengths and checksums."""
    header, seal, kv_size = _head(file, path)
    kv = blake2b(seal, digest_size=_DIGEST)
    remaining = kv_size
    while chunk := file.read(min(remaining, _CHUNK)):
        kv.update(chunk)
        remaining -= len(chunk)
    if file.read() != kv.digest():
        raise SnapshotError(f"{path} is damaged: the checksum of its KV is wrong")
    return header, seal, kv_size


def _head(file: BinaryIO, path: Path) -> tuple[SnapshotHeader, bytes, int]:
    """(header, seal, bytes of the KV, which follow), after checking lengths and the header's checksum."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise SnapshotError(f"{path} is incomplete: it ends after {len(prefix)} bytes")
    magic, version, header_size, kv_size = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise SnapshotError(f"{path} is no snapshot")
    if version != FORMAT:
        raise ForeignSnapshot(f"{path} has format version {version}; this program reads {FORMAT}")
    expected = _PREFIX.size + header_size + _DIGEST + kv_size + _DIGEST
    if size != expected:
        raise SnapshotError(f"{path} is incomplete: it has {size} bytes of {expected}")
    packed, seal = file.read(header_size), file.read(_DIGEST)
    if seal != _digest(prefix + packed):
        raise SnapshotError(f"{path} is damaged: the checksum of its header is wrong")
    try:
        header = msgspec.msgpack.decode(packed, type=SnapshotHeader)
    # a string that is not UTF-8, deep nesting
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{path} has a header that cannot be read: {error}") from error
    return header, seal, kv_size


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST).digest()


def _tensors(pool: KVPool) -> Iterator[torch.Tensor]:
    """Keys and values in the order of the file."""
    for keys, values in zip(pool.keys, pool.values, strict=True):
        yield keys
        yield values


def _sizes(header: SnapshotHeader) -> Iterator[int]:
    """Bytes of each tensor in the order of the file."""
    element = torch.empty(0, dtype=getattr(torch, header.identity.dtype)).element_size()
    for kv_heads, *dims in header.identity.layers:
        yield from (prod((kv_heads, dim, header.state.tokens, element)) for dim in dims)
