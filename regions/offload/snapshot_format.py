"""Snapshots: a session in a file, with its records, its stream position and the KV of its window.

The layout: a fixed prefix (magic, format version, lengths), a msgpack header and its checksum, the KV of the
live slots by layer (all keys, then all values, ``[kv_heads, tokens, dim]``, oldest token first, in the pool's
dtype and the machine's byte order), and the KV's checksum. A file is replaced whole, and the whole file is
checked before any of it reaches the pool. Files are written and read in chunks, see `Steps`.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast
from urllib.parse import quote

import msgspec
import torch

from regions.allocator import Run
from regions.extents import SlotRange
from regions.kv_codes import row_numbers
from regions.kv_tensors import KVPool
from regions.offload.kv_store import Aside, Steps, StoredBlocks, StoredLost
from regions.offload.staging import CHUNK, Staging
from regions.sliding import TapeState
from support.durable_file import create, replacing

log = logging.getLogger(__name__)

MAGIC = b"FTICKKV\n"
FORMAT = 8
_PREFIX = struct.Struct("<8sIQQ")  # magic, format version, bytes of the header, bytes of the KV
_DIGEST = 32


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
) -> None:
    """Write ``header`` and the KV of ``ranges`` (the live slots, oldest first).

    Raises SnapshotError, leaving no temporary file, when writing fails, and ValueError when there are no
    slots.
    """
    if not ranges:
        raise ValueError(f"session {header.session} has no KV to write")
    try:
        with replacing(path, opened=opened) as file:
            for _ in _writing(file, _Head.of(header), pool, ranges):
                pass
    except OSError as error:
        raise SnapshotError(f"{path} could not be written: {error.strerror or error}") from error


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
        steps = cls.opening(path)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cast(Snapshot, end.value)

    @classmethod
    def opening(cls, path: Path) -> Generator[None, None, Snapshot]:
        """As `open`, in steps."""
        try:
            with path.open("rb") as file:
                header, seal, kv_size = yield from _checking(file, path)
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

    def loading_blocks(self, pool: KVPool, blocks: Sequence[Run], skip: int = 0) -> Steps:
        """As `load` in steps, to whole ``blocks`` behind their first ``skip`` slots."""
        size, left = pool.block_size, self.header.state.tokens
        ranges: list[SlotRange] = []
        for start, stop in blocks:
            count = min(left, (stop - start) * size - skip)
            ranges.append((start * size + skip, count))
            left, skip = left - count, 0
        return self._loading(pool, ranges)

    def load(self, pool: KVPool, ranges: Sequence[SlotRange]) -> None:
        """Copy the KV to ``ranges`` of ``pool``: one slot for each token, oldest first.

        Raises SnapshotError when the file cannot be read any more, or is another one by now.
        """
        for _ in self._loading(pool, ranges):
            pass

    def _loading(self, pool: KVPool, ranges: Sequence[SlotRange]) -> Steps:
        tokens = self.header.state.tokens
        if sum(count for _, count in ranges) != tokens:
            raise SnapshotError(f"{self.path} has {tokens} tokens, which do not fit the slots")
        try:
            with self.path.open("rb") as file:
                if _head(file, self.path)[1] != self.seal:
                    raise SnapshotError(f"{self.path} was replaced since it was checked")
                for chunk in Staging(pool, ranges).write():
                    if file.readinto(chunk) != len(chunk):
                        raise SnapshotError(f"{self.path} became shorter while it was read")
                    yield
        except OSError as error:
            raise SnapshotError(f"{self.path} could not be read: {error.strerror or error}") from error


class Restoring(StoredBlocks):
    """The KV of a snapshot that is kept, for a tape that begins with it."""

    def __init__(self, pool: KVPool, snapshot: Snapshot) -> None:
        self._pool, self._snapshot = pool, snapshot

    def loading(self, blocks: Sequence[Run]) -> Steps:
        """See `StoredBlocks.loading`; raises SnapshotError."""
        return self._snapshot.loading_blocks(self._pool, blocks)


class DiskCopy(StoredBlocks):
    """One session's KV in a file that only this process reads; `release` removes it.

    ``directory``: where, on the thread that writes; it raises OSError. ``ranges``: the live slots, oldest
    first. ``aside``: takes the steps of removing the file.
    """

    def __init__(
        self,
        pool: KVPool,
        directory: Callable[[], Path],
        header: SnapshotHeader,
        ranges: Sequence[SlotRange],
        aside: Aside,
    ) -> None:
        self._pool, self._directory, self._aside = pool, directory, aside
        self._name, self._identity = f"{quote(header.session, safe='')}.kv", header.identity
        self._head, self._ranges = _Head.of(header), ranges
        self._path: Path | None = None

    def writing(self) -> Steps:
        """Write the file; raises SnapshotError. It is left only by the last step.

        It need not outlive the machine, so nothing waits for the disk to flush it.
        """
        path = Path(self._name)
        try:
            path = self._directory() / self._name
            path.unlink(missing_ok=True)
            try:
                with create(path) as file:
                    yield from _writing(file, self._head, self._pool, self._ranges)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise SnapshotError(f"{path} could not be written: {error.strerror or error}") from error
        self._path = path

    def loading(self, blocks: Sequence[Run]) -> Steps:
        """See `StoredBlocks.loading`; raises SnapshotError."""
        assert self._path is not None  # it was written
        snapshot = yield from Snapshot.opening(self._path)
        snapshot.expect(self._identity)
        if snapshot.seal != self._head.seal:
            raise SnapshotError(f"{self._path} is not the file that was written: it was replaced")
        yield from snapshot.loading_blocks(self._pool, blocks, self._ranges[0][0] % self._pool.block_size)

    def release(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._aside("out", _removing(self._path))


def _removing(path: Path) -> Steps:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)
    yield


class _Head(NamedTuple):
    """What a file begins with, and its checksum."""

    data: bytes
    seal: bytes

    @classmethod
    def of(cls, header: SnapshotHeader) -> _Head:
        packed = msgspec.msgpack.encode(header)
        data = _PREFIX.pack(MAGIC, FORMAT, len(packed), sum(_sizes(header))) + packed
        return cls(data, _digest(data))


def _writing(file: BinaryIO, head: _Head, pool: KVPool, ranges: Sequence[SlotRange]) -> Steps:
    file.write(head.data + head.seal)
    kv = blake2b(head.seal, digest_size=_DIGEST)
    for chunk in Staging(pool, ranges).read():
        kv.update(chunk)
        file.write(chunk)
        yield
    file.write(kv.digest())


def _checking(file: BinaryIO, path: Path) -> Generator[None, None, tuple[SnapshotHeader, bytes, int]]:
    """(header, seal, bytes of the KV), after checking lengths and checksums in steps."""
    header, seal, kv_size = _head(file, path)
    kv = blake2b(seal, digest_size=_DIGEST)
    remaining = kv_size
    while chunk := file.read(min(remaining, CHUNK)):
        kv.update(chunk)
        remaining -= len(chunk)
        yield
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


def _sizes(header: SnapshotHeader) -> Iterator[int]:
    """Bytes of each tensor in the order of the file."""
    dtype: torch.dtype = getattr(torch, header.identity.dtype)
    for kv_heads, *dims in header.identity.layers:
        rows = (row_numbers(dim, dtype) * dtype.itemsize for dim in dims)
        yield from (prod((kv_heads, row, header.state.tokens)) for row in rows)
