"""What a durable write does, in order."""

import os
import stat
from pathlib import Path

import pytest


def noted_flushes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on: "file" and "directory" for each fsync, "rename" for each rename over another file."""
    steps: list[str] = []
    fsync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        steps.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return steps
