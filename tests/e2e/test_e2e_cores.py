"""`process.reserve_core` as the kernel sees it: the CPUs of every thread of both processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.cores import usable
from tests.kit.daemon import Daemon
from tests.kit.kafka import free_ports

CONFIG = """
[[sessions]]
name = "aaa"
symbol = "V:AAA"
retention_tokens = 256
[query]
endpoint = "tcp://127.0.0.1:{port}"
[process]
reserve_core = true
"""


def cpus_of(pid: int) -> set[str]:
    """`Cpus_allowed_list` of all threads."""
    found = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        listed = re.search(r"^Cpus_allowed_list:\t(.*)$", status.read_text(), re.MULTILINE)
        assert listed is not None
        found.add(listed[1])
    return found


def cpus(listed: str) -> set[int]:
    """1-3,5 as numbers."""
    runs = (part.partition("-") for part in listed.split(","))
    return {cpu for first, _, last in runs for cpu in range(int(first), int(last or first) + 1)}


@pytest.mark.skipif(len(usable()) < 2, reason="needs two CPUs")
async def test_the_gateway_has_a_core_of_its_own(tmp_path: Path) -> None:
    first, *others = sorted(usable())
    with Daemon(tmp_path, CONFIG.format(port=free_ports(1)[0])) as daemon:
        await daemon.ready()
        engine = daemon.engine()
        assert engine is not None
        (of_engine,) = cpus_of(engine)
        assert cpus(of_engine) == set(others)
        assert cpus_of(daemon.pid) == {str(first)}
        assert f"gateway on CPU {first}, engine on CPU {of_engine}" in daemon.log
        assert daemon.terminate(60) == 0


def test_with_one_cpu_the_daemon_does_not_start(tmp_path: Path) -> None:
    only = min(usable())
    file = tmp_path / "foretick.toml"
    file.write_text(CONFIG.format(port=free_ports(1)[0]))
    code = f"import os; os.sched_setaffinity(0, {{{only}}}); from daemon.cli.main import main; main()"
    for name in ("run", "check"):
        done = subprocess.run(
            [sys.executable, "-c", code, name, "--config", str(file)],
            capture_output=True, text=True, timeout=120, env=os.environ | {"FORETICK_HTTP__PORT": "0"},
        )  # fmt: skip
        assert done.returncode == 2
        assert f"process.reserve_core: gateway and engine need a CPU each, but there is CPU {only} only" in (
            done.stdout + done.stderr
        )
