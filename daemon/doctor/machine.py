"""The machine: versions, CPUs, GPUs and their driver, memory, shared memory, open files, and the clock."""

import ctypes
import os
import platform
import resource
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

from daemon.config.schema import Config
from daemon.doctor.diagnosis import Diagnosis, fine, of_outcome, skipped
from engine.free_memory import available_bytes
from ingest.record import WORDS
from metrics.shm import ROOT
from support.plugins import installed

PACKAGES = ("foretick", "torch", "transformers", "numpy", "numba", "msgspec", "pyzmq", "aiokafka", "uvicorn")
GPUS = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,memory.used,temperature.gpu",
    "--format=csv,noheader",
)
MIN_AVAILABLE, MIN_SHARED = 1 << 30, 32 << 20
MAX_CLOCK_ERROR_S = 0.1
OTHER_FILES = 384
"""Connections that do not listen to events, and the daemon's own files."""
_TIMEX_BYTES, _MAX_ERROR_AT, _UNSYNCHRONISED = 208, 24, 5
"""Of the kernel's `struct timex`: its size, where `maxerror` stands (us), and TIME_ERROR."""

Run = Callable[[Sequence[str]], str]
"""The standard output of a program. Raises OSError, subprocess.SubprocessError."""


@dataclass(frozen=True)
class Machine:
    """``cpus``: that this process may use; ``load``: of the last minute; sizes in bytes.

    ``shared``: free bytes of shared memory, None without any. ``gpus``: the lines of `GPUS`, None where no
    driver answers. ``clock_error_s``: the kernel's own bound, infinite while nothing synchronises it, None if
    it is unknown.
    """

    versions: Mapping[str, str]
    cpus: int
    load: float
    available: int
    shared: int | None
    max_files: int
    gpus: tuple[str, ...] | None
    cuda: bool
    clock_error_s: float | None


def run_program(command: Sequence[str]) -> str:
    """See `Run`; at most ten seconds."""
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def read_machine(run: Run = run_program) -> Machine:
    """The machine as this process sees it."""
    try:
        gpus: tuple[str, ...] | None = tuple(run(GPUS).splitlines())
    except (OSError, subprocess.SubprocessError):
        gpus = None
    packages = {name: version(name) for name in PACKAGES}
    packages |= {f"plug-in {each.package}": each.version for each in installed()}
    return Machine(
        {"system": platform.platform(), "python": platform.python_version(), **packages},
        len(os.sched_getaffinity(0)),
        os.getloadavg()[0],
        available_bytes(torch.device("cpu")),
        shutil.disk_usage(ROOT).free if ROOT.is_dir() else None,
        resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        gpus,
        torch.cuda.is_available(),
        _clock_error_s(),
    )


def judge_machine(machine: Machine, config: Config, running: bool) -> Iterator[Diagnosis]:
    """Whether it can carry this configuration; ``running``: a daemon already has its memory."""
    yield fine("versions", ", ".join(f"{name} {number}" for name, number in machine.versions.items()))
    seen = f"{machine.cpus} CPUs, load {machine.load:.1f}"
    step = "find what else computes here (`top`), or give the daemon CPUs of its own"
    yield of_outcome("machine.cpus", machine.load < 2 * machine.cpus, seen, step, "operations.md#cores")
    seen, step = f"{_mib(machine.available)} available", "lower pool.blocks or pool.host_blocks"
    enough = machine.available >= MIN_AVAILABLE
    yield of_outcome("machine.memory", enough, seen, step, "operations.md#sizing-the-pool")
    yield _shared(machine, config, running)
    wanted = config.http.max_listeners + OTHER_FILES
    seen = f"at most {machine.max_files} open files; http.max_listeners needs {wanted}"
    enough = machine.max_files < 0 or machine.max_files >= wanted  # below 0: no limit
    yield of_outcome(
        "machine.files", enough, seen, "raise LimitNOFILE of the unit, or lower http.max_listeners"
    )
    yield _gpu(machine, config)
    yield _clock(machine)


def _shared(machine: Machine, config: Config, running: bool) -> Diagnosis:
    check, step = "machine.shm", "give /dev/shm more room (`--shm-size`), or lower source.ring_capacity"
    ring = 8 * config.source.ring_capacity * (WORDS + 1)
    # a new engine gets a new ring while the old one's is still mapped
    needed = (1 if running else 2) * ring + MIN_SHARED
    if machine.shared is None or (machine.shared < ring and not running):
        return Diagnosis(check, "problem", f"no room in {ROOT} for a ring of {_mib(ring)}", step)
    seen = f"{_mib(machine.shared)} free, {_mib(needed)} needed for the ring, the next one and metrics"
    return of_outcome(check, machine.shared >= needed, seen, step)


def _gpu(machine: Machine, config: Config) -> Diagnosis:
    devices = {each.device for each in (config.model, *config.models)}
    check, device = "machine.gpu", next(each for each in ("cuda", "auto", "cpu") if each in devices)
    if not machine.gpus:
        seen = "nvidia-smi does not answer" if machine.gpus is None else "nvidia-smi lists none"
        step = 'install the driver, or set model.device = "cpu"'
        return Diagnosis(check, "problem", seen, step) if device == "cuda" else fine(check, seen)
    step = "install a PyTorch of this driver's CUDA; `python -c 'import torch; torch.cuda.init()'` says why"
    if machine.cuda or device == "cpu":
        return fine(check, "; ".join(machine.gpus))
    seen = f"{'; '.join(machine.gpus)}: PyTorch cannot use it"
    return Diagnosis(check, "problem" if device == "cuda" else "warning", seen, step)


def _clock(machine: Machine) -> Diagnosis:
    check, error_s = "machine.clock", machine.clock_error_s
    if error_s is None:
        return skipped(check, "the kernel does not say whether the clock is synchronised")
    bound = "nothing synchronises it" if error_s == float("inf") else f"at most {error_s * 1e3:.1f} ms wrong"
    seen = f"{bound}, says the kernel"
    step = "look at chrony or systemd-timesyncd: ages, late records and deadlines are by this clock"
    return of_outcome(check, error_s <= MAX_CLOCK_ERROR_S, seen, step)


def _clock_error_s() -> float | None:
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # all zero: it reads, and sets nothing
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):  # a system without it
        return None
    (error_us,) = struct.unpack_from("l", timex, _MAX_ERROR_AT)
    return None if state < 0 else float("inf") if state == _UNSYNCHRONISED else error_us / 1e6


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
