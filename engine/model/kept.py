"""The codes of a GGUF file's weights, as they are: a file beside the expanded ones in a model's directory.

It is in the form of safetensors, with another suffix than those that transformers reads.
The kinds of GGUF that have a scale, and perhaps an offset, for 32 inputs are kept exactly. Matrices of other
quantised kinds (K-quants) get codes of 8 bits, so that a model's matrices are all codes or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.compiled.packed_products import GROUP
from engine.model.loaded import Layers, Weights
from engine.model.quantised import EMBEDDING, HEAD, Quantised, is_matrix, quantised
from engine.model.revision import CODES

_PARTS = ("codes", "scales", "offsets")
_FORMS = {"Q4_0": (4, 8), "Q4_1": (4, None), "Q5_0": (5, 16), "Q5_1": (5, None), "Q8_0": (8, 128)}
"""Bits of a code, and the code of 0; None: a block says what its code 0 is."""
_FLOATS = ("F32", "F16", "BF16")
_ON_GPU: dict[Weights, Weights] = {"int8": "torchao-int8", "int4": "torchao-int4", "fp8": "torchao-fp8"}


def held_as(
    path: Path, weights: Weights, layers: Layers, dtype: str, device: str, adapter: Path | None = None
) -> Weights:
    """How the weights of the model in directory ``path`` are held where ``weights`` is asked for.

    An ``adapter`` changes them, so a file's own codes are not theirs any longer.
    """
    if device != "cpu":
        return {"auto": "float", **_ON_GPU}.get(weights, weights)
    if weights != "auto":
        return weights
    reads = layers in ("auto", "compiled") and dtype != "float16" and adapter is None
    return "gguf" if reads and (path / CODES).is_file() else "float"


def codes_of(
    path: Path | None, tensors: Mapping[str, torch.Tensor], weights: Weights
) -> dict[str, Quantised]:
    """The quantised matrices among ``tensors``, by name: of the file in ``path``, or rounded now; or none.

    Raises OSError or SafetensorError for a file that cannot be read, ValueError as `quantised`.
    """
    if weights == "float":
        return {}
    if weights != "gguf":
        return quantised(tensors, weights)
    assert path is not None, "only a directory has codes"
    found = _read(path / CODES)
    if tensors[EMBEDDING].data_ptr() == tensors[HEAD].data_ptr():
        found[EMBEDDING] = found[HEAD]
    return found


def _read(file: Path) -> dict[str, Quantised]:
    with safe_open(file, "pt") as opened:
        parts = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # no mapping
    found = {}
    for name in [key.removesuffix(".scales") for key in parts if key.endswith(".scales")]:
        codes, scales, offsets = (parts[f"{name}.{part}"] for part in _PARTS)
        bits = 8 * codes.shape[1] // (GROUP * scales.shape[1])
        if bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), 1)
        found[name] = Quantised(codes, scales, offsets, bits)
    return found


def keep(reader: Any, names: Mapping[str, str], model: Any, directory: Path) -> str:
    """Write the codes of a plain decoder's matrices into ``directory``; returns of what kinds, in words.

    ``reader``: of the GGUF file; ``names``: transformers' by those of the file; ``model``: transformers',
    whose expanded weights the codes are judged by. A file whose matrices are floats is left alone, and ""
    is returned.
    """
    state, head = model.state_dict(), int(model.model.layers[0].self_attn.head_dim)
    stored = {names[each.name]: each for each in reader.tensors if each.name in names}
    stored.setdefault(HEAD, stored.get(EMBEDDING))
    kinds = {name: stored[name].tensor_type.name for name in state if is_matrix(name)}
    if all(kind in _FLOATS for kind in kinds.values()):
        return ""
    written: dict[str, torch.Tensor] = {}
    ways: Counter[str] = Counter()
    for name, kind in kinds.items():
        found = _exact(kind, stored[name].data, state[name], head)
        ways[f"{kind} as it is" if found else f"{kind} rounded to 8 bits"] += 1
        found = found or Quantised.of(state[name], 8)
        codes = found.codes
        if found.bits == 4:
            low, high = codes.chunk(2, 1)
            codes = low | high << 4
        parts = (codes, found.scales, found.offsets)
        written |= {f"{name}.{part}": each.contiguous() for part, each in zip(_PARTS, parts, strict=True)}
    save_file(written, directory / CODES)
    return ", ".join(f"{count} matrices {way}" for way, count in ways.items())


def _exact(kind: str, data: Any, expected: torch.Tensor, head: int) -> Quantised | None:
    """The codes of a tensor's blocks [outputs, bytes], in the order of rows that makes them ``expected``."""
    if kind not in _FORMS or expected.shape[1] % GROUP:
        return None
    found = blocks(kind, np.asarray(data))
    if not found.offsets.isfinite().all():
        return None
    for each in (found, found.joined(lambda part: _straight(part, head))):
        if torch.equal(each.expanded().to(expected.dtype), expected):
            return each
    return None


def _straight(rows: torch.Tensor, head: int) -> torch.Tensor:
    """Rows of heads whose rotated pairs are neighbours, as llama.cpp has them, as halves."""
    if len(rows) % head:
        return rows
    return torch.unflatten(rows, 0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)


def blocks(kind: str, data: Any) -> Quantised:
    """The codes of blocks of a ``kind`` of GGUF: uint8 [outputs, bytes] of rows of whole blocks."""
    bits, zero = _FORMS[kind]
    heads = 2 if zero is not None else 4
    size = heads + GROUP * bits // 8
    raw = data.reshape(len(data), -1, size)
    floats = np.ascontiguousarray(raw[..., :heads]).view(np.float16)
    scales = floats[..., 0]
    if bits == 8:
        codes = raw[..., 2:] ^ 128  # signed bytes from -128 on
    else:
        nibbles = raw[..., -GROUP // 2 :]
        codes = np.concatenate((nibbles & 15, nibbles >> 4), -1)
        if bits == 5:
            codes |= np.unpackbits(raw[..., heads : heads + 4], axis=-1, bitorder="little") << 4
    offsets = floats[..., 1] if zero is None else scales * np.float16(-zero)
    return Quantised(
        torch.from_numpy(codes.reshape(len(data), -1)),
        torch.from_numpy(scales.copy()),
        torch.from_numpy(offsets.copy()),
        4 if bits == 4 else 8,
    )
