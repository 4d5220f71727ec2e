"""The revision of a model: a fingerprint of a checkpoint's files.

KV stored under one revision is not read under another, and every answer names it.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

SAMPLE = 4096
"""Bytes read at the beginning, middle and end of each tensor; training changes every part of a tensor."""
CALIBRATION = "calibration.json"
"""The calibration in a model's directory; fitted for its revision, so no part of it."""
TEXTS = frozenset({".json", ".jinja", ".model", ".txt"})
"""Suffixes of configuration, chat template and tokenizer files."""


def revision_of(path: Path) -> str:
    """A fingerprint of configuration, tokenizer and weights in directory ``path``, 16 hex digits."""
    digest = blake2b(digest_size=8)
    for file in sorted(path.iterdir()):
        if file.suffix == ".safetensors":
            digest.update(str(file.stat().st_size).encode())
            with file.open("rb") as stream:
                for piece in _samples(stream):
                    digest.update(piece)
        elif file.suffix in TEXTS and file.name != CALIBRATION:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _samples(stream: BinaryIO) -> Iterator[bytes]:
    """The header of a safetensors file, and samples of each of its tensors."""
    size = int.from_bytes(stream.read(8), "little")
    header = stream.read(size)
    yield header
    for name, tensor in json.loads(header).items():
        if name == "__metadata__":
            continue
        start, stop = tensor["data_offsets"]
        for at in (start, (start + stop) // 2, max(start, stop - SAMPLE)):
            stream.seek(8 + size + at)
            yield stream.read(min(SAMPLE, stop - at))
