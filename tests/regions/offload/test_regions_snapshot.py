"""Snapshot files: complete or absent, and refused with a message when anything is wrong."""

from __future__ import annotations

import errno
import os
import random
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import pytest
import torch

from regions.allocator import Run
from regions.kv_tensors import KVPool, LayerShape
from regions.offload.snapshot_format import (
    MAGIC,
    ForeignSnapshot,
    Identity,
    Snapshot,
    SnapshotError,
    SnapshotHeader,
    write_snapshot,
)
from regions.tape import LiveRecord, Retention, Tape
from support.durable_file import create
from tests.kit.flushes import noted_flushes
from tests.regions.numbered import FROZEN, append, prompt_of, read, tape_of

RECORDS = [[10 * i + j for j in range(7)] for i in range(4)]
LIVE = [*RECORDS[2], *RECORDS[3]]


def pool(dtype: torch.dtype = torch.float32, blocks: int = 40) -> KVPool:
    return KVPool([LayerShape(2, 3, 5), LayerShape(1, 2, 2)], blocks, block_size=4, dtype=dtype)


def identity(memory: KVPool, **other: Any) -> Identity:
    mine = Identity.of(memory, model="m@1", tokenizer="t", frozen=[0] * FROZEN)
    return msgspec.structs.replace(mine, **other)


def full_tape(memory: KVPool) -> Tape:
    """Two records evicted, several frames, the oldest token in the middle of a block."""
    tape = tape_of(memory, Retention(20), frame_limit=30)
    for record in RECORDS:
        append(memory, tape, record)
    return tape


def written(path: Path, memory: KVPool, **more: Any) -> Tape:
    tape = full_tape(memory)
    header = SnapshotHeader("t", identity(memory), 4, tape.state, 12345, b"the owner's")
    write_snapshot(path, header, memory, tape.live_ranges, **more)
    return tape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_snapshot_contains_the_session(tmp_path: Path, dtype: torch.dtype) -> None:
    """State, its owner's and KV, bit by bit, in the pool's own dtype; no other user may read the file."""
    memory, path = pool(dtype), tmp_path / "t.kv"
    tape = written(path, memory)
    snapshot = Snapshot.open(path)
    header = snapshot.header
    assert (header.session, header.owner, header.created_ns) == ("t", b"the owner's", 12345)
    assert header.state == tape.state
    assert header.state.records == tuple(LiveRecord(record, 0) for record in RECORDS[2:])
    assert (header.state.version, header.state.evicted_tokens) == (4, 14)
    assert len({s.origin for s in header.state.stretches}) > 1
    other = pool(dtype)
    target = prompt_of(other, [0] * 3 + [7] * 14)  # ends elsewhere in its blocks
    slot = target.extents[0].slot + 3
    snapshot.load(other, [(slot, 5), (slot + 5, 9)])
    assert read(other, [target.extents[0]._replace(slot=slot, length=14)]) == LIVE
    with pytest.raises(SnapshotError, match="has 14 tokens"):
        snapshot.load(other, [(slot, 5)])
    again = msgspec.structs.replace(header, created_ns=12346)  # of as many tokens
    write_snapshot(path, again, memory, tape.live_ranges)
    with pytest.raises(SnapshotError, match="was replaced"):
        snapshot.load(other, [(slot, 5), (slot + 5, 9)])
    assert [p.name for p in tmp_path.iterdir()] == ["t.kv"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tape.release()
    target.release()


def test_any_flipped_byte_is_refused(tmp_path: Path) -> None:
    """The first 200 bytes and 200 others; nothing of the file reaches the pool."""
    memory, path = pool(), tmp_path / "t.kv"
    written(path, memory).release()
    sound = path.read_bytes()
    rng = random.Random(1)
    for at in [*range(200), *rng.sample(range(200, len(sound)), 200), len(sound) - 1]:
        raw = bytearray(sound)
        raw[at] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        with pytest.raises(SnapshotError, match=r"t\.kv (is|has)"):
            Snapshot.open(path)
    path.write_bytes(sound)
    Snapshot.open(path)


def test_an_incomplete_file_is_refused(tmp_path: Path) -> None:
    """Cut anywhere, or with extra bytes at the end."""
    memory, path = pool(), tmp_path / "t.kv"
    written(path, memory).release()
    sound = path.read_bytes()
    rng = random.Random(2)
    for size in [0, 1, 27, 28, 29, len(sound) - 1, *rng.sample(range(len(sound)), 30)]:
        path.write_bytes(sound[:size])
        with pytest.raises(SnapshotError, match="is incomplete"):
            Snapshot.open(path)
    path.write_bytes(sound + b"\0")
    with pytest.raises(SnapshotError, match="is incomplete"):
        Snapshot.open(path)
    path.unlink()
    with pytest.raises(SnapshotError, match="No such file"):
        Snapshot.open(path)
    path.write_bytes(b"x" * 1000)
    with pytest.raises(SnapshotError, match="is no snapshot"):
        Snapshot.open(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "m@2"),
        ("tokenizer", "other"),
        ("frozen", "other"),
        ("dtype", "bfloat16"),
        ("layers", ((2, 3, 5), (1, 2, 3))),
    ],
)
def test_a_foreign_file_is_refused_by_what_differs(tmp_path: Path, field: str, value: object) -> None:
    memory, path = pool(), tmp_path / "t.kv"
    written(path, memory).release()
    with pytest.raises(ForeignSnapshot, match=f"its {field} is"):
        Snapshot.open(path).expect(identity(memory, **{field: value}))


@pytest.mark.parametrize("dtype", ["flo/t16", "nn"])
def test_a_dtype_that_is_none_here_is_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """As that of a file of another version of PyTorch."""
    memory, path = pool(torch.float32), tmp_path / "t.kv"
    tape = full_tape(memory)
    header = SnapshotHeader("t", identity(memory, dtype=dtype), 4, tape.state, 12345, b"")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, dtype, torch.float32, raising=False)
        write_snapshot(path, header, memory, tape.live_ranges)
    with pytest.raises(ForeignSnapshot, match="its dtype"):
        Snapshot.open(path)


def test_the_frozen_prefix_is_part_of_the_identity() -> None:
    memory = pool()
    of = [Identity.of(memory, model="m", tokenizer="t", frozen=f) for f in ([1, 2], [1, 2], [2, 1], [12])]
    assert of[0] == of[1]
    assert len(set(of)) == 3


@pytest.mark.parametrize("version", [0, 1, 2, 255])
def test_an_older_or_newer_format_is_refused(tmp_path: Path, version: int) -> None:
    memory, path = pool(), tmp_path / "t.kv"
    written(path, memory).release()
    raw = bytearray(path.read_bytes())
    raw[len(MAGIC) : len(MAGIC) + 4] = version.to_bytes(4, sys.byteorder)
    path.write_bytes(raw)
    with pytest.raises(ForeignSnapshot, match=f"version {version}"):
        Snapshot.open(path)


class FullDisk:
    """A file on a disk that is full after ``room`` bytes, or refuses at ``fails``."""

    def __init__(self, file: BinaryIO, room: int, fails: str = "") -> None:
        self._file, self._room, self._fails = file, room, fails

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def flush(self) -> None:
        if self._fails == "flush":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._fails == "close":
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("room", "fails"), [(0, ""), (10, ""), (600, ""), (1400, ""), (10**9, "flush"), (10**9, "close")]
)
def test_a_full_disk_loses_nothing_but_the_snapshot(tmp_path: Path, room: int, fails: str) -> None:
    """No temporary file stays, the older snapshot is still there and sound, and so is the session."""
    memory, path = pool(), tmp_path / "t.kv"
    tape = written(path, memory)
    before = path.read_bytes()
    assert len(before) > 1400
    append(memory, tape, [1, 2, 3])
    header = SnapshotHeader("t", identity(memory), 4, tape.state, 0)

    def opened(temporary: Path) -> BinaryIO:
        return cast(BinaryIO, FullDisk(create(temporary), room, fails))

    with pytest.raises(SnapshotError, match=r"No space left|Input/output error"):
        write_snapshot(path, header, memory, tape.live_ranges, opened=opened)
    assert [p.name for p in tmp_path.iterdir()] == ["t.kv"]
    assert path.read_bytes() == before
    assert read(memory, tape.extents)[FROZEN:] == [*LIVE, 1, 2, 3]
    tape.release()


def test_a_write_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of the file, rename, fsync of the directory: a power cut leaves the old or the new file whole."""
    steps = noted_flushes(monkeypatch)
    written(tmp_path / "t.kv", pool()).release()
    assert steps == ["file", "rename", "directory"]


def test_a_window_without_tokens_is_not_written(tmp_path: Path) -> None:
    memory = pool()
    tape = tape_of(memory, Retention(20))
    with pytest.raises(ValueError, match="no KV"):
        write_snapshot(tmp_path / "t", SnapshotHeader("t", identity(memory), 4, tape.state, 0), memory, [])
    tape.release()


class Nowhere:
    """KV that is never loaded."""

    released = False

    def load(self, blocks: list[Run]) -> None:
        raise AssertionError("not to be loaded")

    def keep(self, blocks: int) -> None: ...

    def release(self) -> None:
        self.released = True


def test_only_a_new_tape_takes_a_stored_window_that_fits() -> None:
    """Not one that has records, not positions above the frame limit, not a window with a hole."""
    memory = pool()
    state = (old := full_tape(memory)).state
    with pytest.raises(ValueError, match="window"):
        old.resume(state, Nowhere())
    tape = tape_of(memory, Retention(20), frame_limit=30)
    holed = msgspec.structs.replace(state, stretches=state.stretches[1:])
    with pytest.raises(ValueError, match="token 14"):
        tape.resume(holed, Nowhere())
    short = msgspec.structs.replace(state, records=state.records[1:])
    with pytest.raises(ValueError, match="have different lengths"):
        tape.resume(short, Nowhere())
    narrow = tape_of(memory, Retention(10), frame_limit=16)
    with pytest.raises(ValueError, match=r"frame limit is 16"):
        narrow.resume(state, Nowhere())
    stored = Nowhere()
    tape.resume(state, stored)
    assert (tape.version, tape.live_tokens, tape.window) == (4, 14, LIVE)
    tape.release()
    assert stored.released
    narrow.release()
    old.release()
