"""CPUs of the gateway and of the engine: how they are shared out, refusals, and what the kernel says."""

import subprocess
import sys

import pytest

from daemon.config.schema import Config, ModelConfig, ProcessConfig
from daemon.cores import Cores, cores_of
from daemon.engine.process import SPIN, spin_briefly
from feeds.connector import SettingError


def config(threads: int = 0, *, reserve: bool = True, mode: str = "two") -> Config:
    process = ProcessConfig(mode=mode, reserve_core=reserve)  # type: ignore[arg-type]  # one of the two
    return Config(model=ModelConfig(threads=threads), process=process)


def test_the_gateway_gets_the_first_cpu_and_the_engine_the_others() -> None:
    found = cores_of(config(threads=4), {9, 3, 5, 4, 7})
    assert found == Cores(frozenset({3}), frozenset({4, 5, 7, 9}))
    assert str(found) == "gateway on CPU 3, engine on CPU 4-5,7,9"


@pytest.mark.parametrize("shared", [config(reserve=False), config(mode="inproc")])
def test_without_a_reserved_core_or_in_one_process_all_cpus_are_shared(shared: Config) -> None:
    assert cores_of(shared, {0}) is None


@pytest.mark.parametrize(
    ("threads", "cpus", "key", "says"),
    [
        (0, set(), "process.reserve_core", "cannot bind"),
        (0, {6}, "process.reserve_core", "CPU 6 only"),
        (3, {0, 1, 2}, "model.threads", "the 2 CPUs"),
    ],
)
def test_too_few_cpus_are_refused_by_key(threads: int, cpus: set[int], key: str, says: str) -> None:
    with pytest.raises(SettingError, match=says) as refused:
        cores_of(config(threads), cpus)
    assert refused.value.key == key


def test_every_thread_is_pinned_and_later_ones_inherit_it() -> None:
    code = """
import os, threading
from daemon.cores import pin, usable
def cpus(): return {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
end = threading.Event()
earlier = threading.Thread(target=end.wait); earlier.start()
first = min(usable())
pin({first})
later = threading.Thread(target=end.wait); later.start()
assert len(os.listdir("/proc/self/task")) > 2
assert cpus() == {(first,)}, cpus()
end.set()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_engine_process_is_pinned_before_it_loads_torch() -> None:
    code = "import sys, daemon.engine.process, daemon.engine.spec; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_torch_takes_no_more_threads_than_the_process_has_cpus() -> None:
    code = """
import os, torch
from daemon.cores import pin, usable
from engine.device import use_threads
torch.set_num_threads(3)
pin({min(usable())})
use_threads(0)
assert torch.get_num_threads() == 1
use_threads(2)
assert torch.get_num_threads() == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("own", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_openmp_spins_briefly_unless_the_operator_says_otherwise(own: str) -> None:
    environment = {"PATH": "/bin"}
    spin_briefly(environment)
    assert environment == {"PATH": "/bin", **SPIN}
    theirs = {own: "1"}
    spin_briefly(theirs)
    assert theirs == {own: "1"}
