"""What a process holds is counted, and a slope is the slope."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metrics.shm import SharedBlock
from tests.soak.resources import MIB, held, shared_memory, slope

CHILD = """
import mmap, sys, threading
print(flush=True), sys.stdin.readline()
threading.Thread(target=threading.Event().wait, daemon=True).start()
file, block = open(sys.argv[1], "wb"), mmap.mmap(-1, int(sys.argv[2]), flags=mmap.MAP_PRIVATE)
for page in range(0, len(block), mmap.PAGESIZE):
    block[page] = 1
print(flush=True), sys.stdin.readline()
"""


def test_threads_descriptors_and_memory_are_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "file"), str(32 * MIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = held(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = held(child.pid)
    assert after.threads == before.threads + 1
    assert after.descriptors.total() == before.descriptors.total() + 1
    assert after.memory > before.memory + 16 * MIB


def test_shared_memory_that_is_left_is_found() -> None:
    block = SharedBlock.create(4096)
    assert block.name in shared_memory([os.getpid()])
    block.unlink()
    block.close()
    assert block.name not in shared_memory([os.getpid()])


def test_the_slope_is_that_of_most_samples() -> None:
    line = [(float(t), 100 + 3 * t) for t in range(20)]
    assert slope(line) == pytest.approx(3)
    assert slope([*line[:10], (10.0, 10_000), *line[11:]]) == pytest.approx(3)
