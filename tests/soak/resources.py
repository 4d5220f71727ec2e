"""What a process holds, by /proc: memory, descriptors, threads, shared memory."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from metrics.shm import PREFIX, ROOT

MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """``memory``: anonymous bytes in RAM. ``descriptors``: by what they are of, without numbers."""

    memory: int
    threads: int
    descriptors: Counter[str]


def held(pid: int) -> Held:
    """What process ``pid`` holds now. Raises FileNotFoundError when it is gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status), re.search(r"Threads:\s+(\d+)", status)
    if found[0] is None or found[1] is None:  # a zombie has no memory
        raise FileNotFoundError(f"process {pid} has ended")
    return Held(int(found[0][1]) * 1024, int(found[1][1]), _descriptors(pid))


def _descriptors(pid: int) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds[re.sub(r"[\d\[\]]+|-[0-9a-f]{8}", "", os.readlink(entry))] += 1
        except FileNotFoundError:  # closed meanwhile
            continue
    return kinds


def shared_memory(pids: Sequence[int]) -> list[str]:
    """Names of the shared memory that these processes created and nobody removed."""
    return [path.name for pid in pids for path in ROOT.glob(f"*{PREFIX}{pid}-*")]


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes a second, by Theil and Sen: the median of all slopes between samples (s, bytes)."""
    times, sizes = np.array(samples, float).T
    first, second = np.triu_indices(len(samples), 1)
    return float(np.median((sizes[second] - sizes[first]) / (times[second] - times[first])))
