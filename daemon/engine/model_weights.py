"""How much memory a model's weights take, read from the heads of its files before it is loaded."""

import json
import math
from pathlib import Path

_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By `model.dtype`."""
_LONGEST = 100_000_000
"""Of a file's head, as the format has it (safetensors, "Format")."""


def weight_bytes(directory: Path, dtype: str) -> int:
    """Bytes of all tensors in ``directory`` once they have this ``dtype``; "auto": as they are stored.

    Files of other formats than safetensors count as they are; one that cannot be read counts 0, and loading
    says why.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return sum(each.stat().st_size for each in directory.glob("*.bin"))
    return sum(_of_file(each, _NUMBER_BYTES.get(dtype)) for each in files)


def _of_file(path: Path, number_bytes: int | None) -> int:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(min(length, _LONGEST)))
        tensors = [each for name, each in head.items() if name != "__metadata__"]
        if number_bytes is not None:
            return sum(math.prod(each["shape"]) * number_bytes for each in tensors)
        return sum(each["data_offsets"][1] - each["data_offsets"][0] for each in tensors)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
        return 0
