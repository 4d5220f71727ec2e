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
CODES = "codes.bin"
"""The codes of a GGUF file's weights in a model's directory (`engine.model.kept`)."""
CALIBRATION = "calibration.json"
"""The calibration in a model's directory; fitted for its revision, so no part of it."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""An adapter's files, as peft names them."""
TEXTS = frozenset({".json", ".jinja", ".model", ".txt"})
"""Suffixes of configuration, chat template and tokenizer files."""


def revision_of(path: Path, adapter: Path | None = None, weights: str = "float") -> str:
    """A fingerprint of configuration, tokenizer and weights in directory ``path``, 16 hex digits.

    ``adapter``: the directory of one that is merged into the weights. ``weights``: how they are held
    (`engine.model.loaded.Weights`); quantised ones are another model.
    """
    digest = blake2b(b"" if weights == "float" else weights.encode(), digest_size=8)
    added = [] if adapter is None else [adapter / ADAPTER_CONFIG, adapter / ADAPTER_WEIGHTS]
    for file in (*sorted(path.iterdir()), *added):
        if file.suffix == ".safetensors" or (weights == "gguf" and file.name == CODES):
            digest.update(str(file.stat().st_size).encode())
            with file.open("rb") as stream:
                for piece in _samples(stream):
                    digest.update(piece)
        elif file.suffix in TEXTS and file.name != CALIBRATION:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def name_of(path: Path, adapter: Path | None = None) -> str:
    """The name of the model in directory ``path``, with that of its adapter."""
    return path.name if adapter is None else f"{path.name}+{adapter.name}"


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
