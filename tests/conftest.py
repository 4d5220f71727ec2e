"""Fixtures shared by the whole suite."""

import faulthandler
import gc
import os
import socket
import time
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from hypothesis import HealthCheck, settings

from regions.pool_metadata import BlockPool
from tests.kit import programs
from tests.kit.examples import limit_examples
from tests.kit.sampling import SEED, choose_seed, split

pytest_plugins = ["tests.kit.fixtures"]

# For PyTorch, here and in every process that a test starts: models this small gain nothing by more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that others use, too, is slow at times.
settings.register_profile("foretick", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("foretick")

ROOT = Path(__file__).parent

LONGEST = (
    *("chaos", "e2e", "transactions", "others", "soak", "weights", "training", "bench", "docs"),
    *("daemon", "engine", "feeds"),
)
"""Packages of tests, the slowest first."""
MAX_WORKERS = 8
"""Each imports PyTorch."""


def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores: many tests wait. Daemons that others start need their share, too."""
    return min(len(os.sched_getaffinity(0)) + 1, MAX_WORKERS)


LEFT_OPEN = (
    r"ignore:.*(AIOKafkaConnection|_SelectorTransport|socket\.socket)"
    ":pytest.PytestUnraisableExceptionWarning"
)
"""aiokafka 0.14 leaves some connections to the garbage collector when a broker ends while they open."""

MAX_EXAMPLES = 50
"""Of a property, at most, unless tests that take long are asked for."""


def is_drawn(config: pytest.Config) -> bool:
    """Whether cases are drawn: as told, or where no case, word or mark in particular is asked for."""
    if config.getoption("drawn", False):
        return True
    named = config.option.keyword or any("::" in each for each in config.args)
    return bool(config.option.markexpr == "not long" and not named)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make rescale` draw."""
    parser.addoption("--drawn", action="store_true", help="draw cases of slow tests, though tests are named")


def pytest_report_header() -> str:
    """Tell how the same cases are drawn again."""
    return f"slow tests: some of their cases, drawn by {SEED}={os.environ[SEED]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take a module at a time: the longest come first, so that no worker ends late."""
    packages = {name: turn for turn, name in enumerate(LONGEST)}
    for item in items:
        if item.get_closest_marker("kafka") or "kafka" in item.path.name:
            item.add_marker(pytest.mark.filterwarnings(LEFT_OPEN))
    if config.option.markexpr == "not long":
        limit_examples(items, MAX_EXAMPLES)
    if is_drawn(config):
        items[:], left = split(items, os.environ[SEED])
        config.hook.pytest_deselected(items=left)
    items.sort(key=lambda item: packages.get(item.path.relative_to(ROOT).parts[0], len(packages)))


STUCK_S = 120
"""A test that is this much past its timeout swallowed it, in a task or outside Python."""
_stderr = os.dup(2) if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Before tests capture it."""


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End this process if the test gets stuck: xdist names it, and the other tests go on."""
    own = item.get_closest_marker("timeout")
    limit = float(own.args[0] if own else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + STUCK_S, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


_pools: list[ref[BlockPool]] = []
"""The pools made in this process: the product keeps no register for its tests."""


def pytest_configure() -> None:
    """Note every pool that is made, let no program start that no test asked for, and draw cases."""
    programs.guard()
    choose_seed()
    plain = BlockPool.__init__

    def noted(pool: BlockPool, *arguments: Any, **options: Any) -> None:
        _pools.append(ref(pool))
        plain(pool, *arguments, **options)

    BlockPool.__init__ = noted  # type: ignore[method-assign]  # wrapped, so that none is missed


_states = count()
"""Numbers of the directories: pytest's own way to number them lists all of them for each."""


@pytest.fixture(autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test's own: none of its daemons goes on from the snapshots of another's."""
    directory = tmp_path_factory.mktemp(f"state{next(_states)}", numbered=False)
    monkeypatch.setenv("STATE_DIRECTORY", str(directory))
    return directory


def pytest_sessionstart(session: pytest.Session) -> None:
    """Send what pytest-rerunfailures asks for at once.

    A worker says and asks something of each test in two packets, and the second one waited 40 ms for the
    acknowledgement of the first (Nagle's algorithm against delayed acknowledgements).
    """
    if found := getattr(getattr(session.config, "failures_db", None), "sock", None):
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_finish() -> None:
    """Take what imports made out of the collector's lists: collections are quicker without it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def connections_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """They are collected within the test that left them."""
    yield
    if request.node.get_closest_marker("kafka"):
        gc.collect()


@pytest.fixture(autouse=True)
def every_block_is_accounted_for() -> Iterator[None]:
    """After every test each pool's counts, owners and free list agree."""
    yield
    _pools[:] = [pool for pool in _pools if pool() is not None]
    for pool in _pools:
        _audit(pool)


def _audit(pool: ref[BlockPool]) -> None:
    """A pool that fails gets a moment: a worker may be ending, and garbage may wait for collection."""
    for _ in range(30):
        try:
            if (alive := pool()) is not None:
                alive.check_integrity()
            return
        except AssertionError as error:
            failed = str(error)
        del alive
        gc.collect()
        time.sleep(0.1)
    pytest.fail(failed)
