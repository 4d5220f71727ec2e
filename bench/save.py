"""What a run found, in a file. It needs nothing but msgspec: `bench.gpu` runs where little is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


def save(json_file: Path, found: Any) -> None:
    """Write a report or a profile, indented for reading."""
    json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
