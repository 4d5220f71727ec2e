"""Available memory is the least of the machine's and of every control group's, by both of their versions."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.free_memory import available_bytes

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
