"""What a process holds is counted, and a slope is the slope."""

import mmap
import os
import threading
from pathlib import Path

import pytest

from metrics.shm import SharedBlock
from tests.soak.resources import MIB, held, shared_memory, slope


def test_threads_descriptors_and_memory_are_counted(tmp_path: Path) -> None:
    before, done = held(os.getpid()), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with (tmp_path / "file").open("wb"):
        block = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE)  # new: not what was freed before and kept
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        after = held(os.getpid())
    assert after.threads == before.threads + 1
    assert after.descriptors.total() == before.descriptors.total() + 1
    assert after.memory > before.memory + len(block) / 2
    block.close()
    done.set()
    thread.join()


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
