"""Available memory is the least of the machine's, every control group's, and the process's own limits."""

import mmap
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.free_memory import available_bytes, host_bytes, own_bytes

CPU = torch.device("cpu")
GROUPS = ("", "a", "a/b")
"""The process is in the last one."""
Limits = dict[str, tuple[int | None, int, int]]
Sizes = st.integers(0, 1 << 40)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def system(folder: Path, version: int, available: int, limits: Limits) -> int:
    """Files as the kernel has them; returns what is available by them."""
    proc, groups = folder / "proc", folder / "cgroup"
    write(proc / "meminfo", f"MemTotal: 9 kB\nMemAvailable:  {available} kB\nBuffers: 7 kB\n")
    entry = "0::/a/b\n" if version == 2 else "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n"
    write(proc / "self" / "cgroup", entry)
    root = groups if version == 2 else groups / "memory"
    for group, (most, used, cached) in limits.items():
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        write(root / group / names[0], "max\n" if most is None else f"{most}\n")
        write(root / group / names[1], f"{used}\n")
        write(root / group / "memory.stat", f"anon 5\n{names[2]} {cached}\n")
    left = [max(0, most - used + cached) for most, used, cached in limits.values() if most is not None]
    return min([1024 * available, *left])


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    available=Sizes,
    version=st.sampled_from([1, 2]),
    limits=st.dictionaries(st.sampled_from(GROUPS), st.tuples(st.none() | Sizes, Sizes, Sizes)),
)
def test_the_least_limit_counts(
    tmp_path_factory: pytest.TempPathFactory, available: int, version: int, limits: Limits
) -> None:
    folder = tmp_path_factory.mktemp("system")
    expected = system(folder, version, available, limits)
    assert available_bytes(CPU, folder / "proc", folder / "cgroup") == expected


def test_without_these_files_the_machines_memory_counts(tmp_path: Path) -> None:
    found = available_bytes(CPU, tmp_path, tmp_path)
    assert found >= available_bytes(CPU) > 0


@given(
    most=st.dictionaries(st.sampled_from([resource.RLIMIT_AS, resource.RLIMIT_DATA]), Sizes),
    used=st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30)),
)
def test_limits_of_the_process_count(
    tmp_path_factory: pytest.TempPathFactory, most: dict[int, int], used: tuple[int, int]
) -> None:
    proc = tmp_path_factory.mktemp("system") / "proc"
    write(proc / "meminfo", "MemAvailable: 99999999 kB\n")
    write(
        proc / "self" / "status", f"Name:\tx\nVmSize:\t {used[0]} kB\nVmData:\t {used[1]} kB\nThreads:\t1\n"
    )
    taken = dict(zip((resource.RLIMIT_AS, resource.RLIMIT_DATA), used, strict=True))
    left = [max(0, limit - 1024 * taken[kind]) for kind, limit in most.items()]
    found = host_bytes(proc, proc / "none", lambda kind: most.get(kind, resource.RLIM_INFINITY))
    assert found == min([1024 * 99999999, *left])


def test_a_real_limit_is_what_can_be_allocated() -> None:
    """Of a process that may have 200 MB more than it has."""
    code = """
import mmap, resource
from engine.free_memory import host_bytes
from pathlib import Path
size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (size + 200_000_000, resource.RLIM_INFINITY))
room = host_bytes()
assert 190_000_000 < room <= 200_000_000, room
held = mmap.mmap(-1, room - 10_000_000)
try:
    mmap.mmap(-1, 20_000_000)
except OSError:
    pass
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_process_has_what_it_wrote_for_itself() -> None:
    before = own_bytes()
    # no memory that this process has freed before
    held = mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(held), mmap.PAGESIZE):
        held[at] = 1
    assert 49_000_000 < own_bytes() - before < 60_000_000


def test_memory_is_looked_up_without_torch() -> None:
    """As in the gateway."""
    code = "import sys, engine.free_memory; engine.free_memory.host_bytes(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
