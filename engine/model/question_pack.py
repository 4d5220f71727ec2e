"""A question pack: what one question of a desk's own adds to a terse model, in one safetensors file.

It has the question's tokens, low-rank changes of the layers' matrices for the rows that these tokens are, and
rows of the head for its answers; and in the file's metadata, what the question is, which model it is for, its
calibrations and its card. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from support.durable_file import replacing

MAX_TOKENS = 16
"""Tokens of one question."""
TOKEN, ANSWERS = "token", "answers"
"""Names of tensors: embeddings [tokens, width], and rows of the head [choices and NONE, width]. A change of a
matrix [outputs, inputs] is NAME.b @ NAME.a, by the matrix's name in a checkpoint."""
_KEY = "foretick"
_HEX = 16
_LONGEST_HEAD = 16 << 20

Array = npt.NDArray[np.float32]


class PackError(ValueError):
    """The file is no question pack, or not a whole one; the message names it and says why."""


class PackHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a pack says of itself.

    ``choices``: as the question is asked; ``answers``: their tokens, and that of ``none`` last. ``base``:
    revision of the model it is for. ``question``: the file it was taught from. ``calibrations``: as of
    `flash.confidence`. ``card``: what was measured. ``digest``: of the tensors.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
    text: str
    choices: tuple[str, ...]
    none: str
    answers: tuple[int, ...]
    base: str
    lines: str
    window_bars: int
    question: dict[str, Any]
    calibrations: tuple[dict[str, Any], ...]
    card: dict[str, Any]
    digest: str
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ValueError(f"its version is {self.version} instead of 1")
        if len(self.choices) < 2 or len(self.answers) != len(self.choices) + 1:
            raise ValueError("it needs two choices or more, and a token for each and for none")

    @property
    def revision(self) -> str:
        """A fingerprint of the pack, 16 hex digits."""
        return blake2b(msgspec.json.encode(self, order="sorted"), digest_size=_HEX // 2).hexdigest()


@dataclass(frozen=True)
class QuestionPack:
    """A whole pack; tensors by name."""

    head: PackHead
    tensors: Mapping[str, Array]

    @property
    def tokens(self) -> int:
        """How many tokens ask the question."""
        return len(self.tensors[TOKEN])


def digest_of(tensors: Mapping[str, Array]) -> str:
    """A fingerprint of tensors, 32 hex digits."""
    digest = blake2b(digest_size=_HEX)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def write_pack(path: Path, pack: QuestionPack) -> None:
    """Write the file, whole or not at all."""
    from safetensors.numpy import save  # the gateway reads heads only

    head = msgspec.json.encode(pack.head, order="sorted").decode()
    # a daemon that is another user reads it, too
    with replacing(path, opened=lambda temporary: temporary.open("xb")) as file:
        file.write(save(dict(pack.tensors), {_KEY: head}))


def read_pack(path: Path) -> QuestionPack:
    """Read a file. Raises PackError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    head = read_head(path)
    try:
        tensors = load(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise PackError(f"{path} is cut or broken: {error}") from error
    if digest_of(tensors) != head.digest:
        raise PackError(f"{path} is broken: its weights are not those that were written")
    if not {TOKEN, ANSWERS} <= tensors.keys() or not 1 <= len(tensors[TOKEN]) <= MAX_TOKENS:
        raise PackError(f"{path} is no question pack: it needs 1 to {MAX_TOKENS} tokens, and its answers")
    return QuestionPack(head, tensors)


def read_head(path: Path) -> PackHead:
    """What a file says of itself. Raises PackError."""
    try:
        about = path.stat()
    except OSError as error:
        raise PackError(f"cannot read the question pack {path}: {error.strerror}") from error
    if not S_ISREG(about.st_mode):  # to open a pipe would wait for its writer
        raise PackError(f"cannot read the question pack {path}: no regular file")
    return _known_head(path, about.st_ino, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=64)
def _known_head(path: Path, _inode: int, _mtime_ns: int, _size: int) -> PackHead:
    return _head(path)


def _head(path: Path) -> PackHead:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            said = file.read(min(length, _LONGEST_HEAD))
    except OSError as error:
        raise PackError(f"cannot read the question pack {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(msgspec.json.decode(said)["__metadata__"][_KEY], type=PackHead)
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # msgspec's are ValueErrors
        raise PackError(f"{path} is no question pack, or a cut one: {error!r}") from error


def located(pack: str) -> tuple[Path, str]:
    """File and revision of ``FILE@REVISION``; the revision is "" where only a file is named."""
    path, at, revision = pack.rpartition("@")
    if at and len(revision) == _HEX and set(revision) <= set("0123456789abcdef"):
        return Path(path), revision
    return Path(pack), ""


def pinned(pack: str) -> str:
    """``FILE@REVISION`` of a file, or the same again. Raises PackError where the file is another by now."""
    path, revision = located(pack)
    found = read_head(path).revision
    if revision not in ("", found):
        raise _other(path, found, revision)
    return f"{path}@{found}"


def read_pinned(pack: str) -> QuestionPack:
    """Read the pack of ``FILE@REVISION``. Raises PackError, also where the file is another by now."""
    path, revision = located(pack)
    found = read_pack(path)
    if found.head.revision != revision:
        raise _other(path, found.head.revision, revision)
    return found


def _other(path: Path, found: str, revision: str) -> PackError:
    return PackError(f"{path} is another question pack by now: {found}, not {revision}")
