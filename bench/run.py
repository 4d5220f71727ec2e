"""Runs the parts of a suite one after the other and saves each with its own command, commit and time."""

import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import msgspec

from bench.figures import Figure, Machine, Part, Suite
from bench.suites import SUITES
from engine.cpu.cpu_identity import cpu_features, cpu_name

_PACKAGES = ("torch", "transformers", "numpy", "numba", "aiokafka", "pyzmq", "uvloop")

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class SuiteRun:
    """How to measure the parts. ``quick``: small sizes, which check that it runs.

    ``say`` reports progress; ``models``: of the stream suite's questions; ``device`` and ``profiles`` (a
    directory for the cost profile): of the GPU suite. Of the peers: ``vllm`` and ``llama``, the Python of
    their environments; ``model``, the directory or GGUF file of a released one; ``dtypes``; ``seed`` of
    their order.
    """

    threads: int = 2
    quick: bool = False
    say: Callable[[str], None] = print
    models: tuple[str, ...] = ("embedded", "80m")
    device: str = "cuda"
    profiles: Path | None = None
    vllm: Path | None = None
    llama: Path | None = None
    model: Path | None = None
    dtypes: Sequence[str] = ("float32", "bfloat16")
    seed: int = 1

    def sized(self, full: T, quick: T) -> T:
        """The sizes to measure with."""
        return quick if self.quick else full


class MeasurementFailed(RuntimeError):
    """A measurement is invalid or could not be made: there are no figures."""


def run(
    name: str, command: str, run: SuiteRun, parts: Collection[str] = (), json_file: Path | None = None
) -> Suite:
    """Measure ``parts`` (all when empty) of a suite.

    Each is saved to ``json_file`` as soon as it is done; the other parts in it stay. Raises
    MeasurementFailed.
    """
    found = Suite(name)
    for each in [part for part in SUITES[name] if not parts or part in parts]:
        run.say(f"{each} ...")
        part = measure(name, each, command, run)
        found = found.with_part(part, list(SUITES[name]))
        if json_file is not None:
            kept = read(json_file) if json_file.exists() else Suite(name)
            save(json_file, kept.with_part(part, list(SUITES[name])))
    return found


def measure(suite: str, name: str, command: str, run: SuiteRun) -> Part:
    """Measure one part; its function's docstring becomes the text of its page."""
    started, load = datetime.now(UTC), os.getloadavg()[0]
    where, title = SUITES[suite][name]
    work: Callable[[SuiteRun], Iterator[Figure]] = resolve_name(where)
    figures, ns = timed(lambda: list(work(run)))
    about, loads = " ".join((work.__doc__ or "").split()), (round(load, 2), round(os.getloadavg()[0], 2))
    return Part(
        name, title, about, command, _commit(), started.isoformat(" ", "minutes"), round(ns / 1e9, 1),
        run.threads, _machine(), loads, figures,
    )  # fmt: skip


def timed(work: Callable[..., T], *arguments: object) -> tuple[T, int]:
    """The result of ``work`` for ``arguments``, and the ns it took."""
    began = time.perf_counter_ns()
    result = work(*arguments)
    return result, time.perf_counter_ns() - began


class Turns:
    """Ways to do the same thing, timed in turn: in order, then reversed. ``ns``: of each way's calls."""

    def __init__(self, *ways: Callable[..., T]) -> None:
        self._ways = ways
        self.ns: list[list[int]] = [[] for _ in ways]

    def __call__(self, *arguments: object) -> list[Any]:
        """Run every way once; returns their results in the given order."""
        results: dict[int, Any] = {}
        for i in range(len(self._ways))[:: -1 if len(self.ns[0]) % 2 else 1]:
            results[i], ns = timed(self._ways[i], *arguments)
            self.ns[i].append(ns)
        return [results[i] for i in range(len(self._ways))]


def spread(work: Callable[[T], R], cases: Sequence[T], processes: int) -> list[R]:
    """Run ``work`` on each of the independent ``cases``; with 0 processes, all in this one."""
    if not processes:
        return [work(case) for case in cases]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, cases))


def read(json_file: Path) -> Suite:
    """Read a saved suite. Raises msgspec.DecodeError for another file."""
    return msgspec.json.decode(json_file.read_bytes(), type=Suite)


def save(json_file: Path, suite: Suite) -> None:
    """Write a suite with one figure per line: files stay short, and a new run shows as changed lines."""
    lines = []
    for part in suite.parts:
        head = msgspec.json.encode(msgspec.structs.replace(part, figures=[])).decode()
        figures = ",\n".join(msgspec.json.encode(figure).decode() for figure in part.figures)
        lines.append(f"{head.removesuffix(']}')}\n{figures}\n]}}")
    json_file.write_text(f'{{"suite":"{suite.suite}","parts":[\n' + ",\n".join(lines) + "\n]}\n")


_VECTORS = ("neon", "sve", "avx2", "avx512f", "avx512bf16", "amx-bf16")


def _machine() -> Machine:
    """The machine that runs the benchmark; virtual ones name many kinds of CPU alike, so with its vectors."""
    packages = {name: found for name in _PACKAGES if (found := _version(name))}
    had = set(cpu_features().split())
    processor = f"{cpu_name()} ({', '.join(each for each in _VECTORS if each in had) or 'no vectors'})"
    return Machine(processor, len(os.sched_getaffinity(0)), platform.python_version(), packages)


def _commit() -> str:
    """The checkout's commit, with "-dirty" if anything but docs/ was changed; else the package's version."""

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(Path(__file__).parent), *arguments)
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
        return git("describe", "--always") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return _version("foretick") or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
