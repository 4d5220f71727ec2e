"""Remembers what was measured on this machine: one small file for each question, in the cache directory.

The CPU and the question name the file; one that other code wrote, or that cannot be read, counts as none and
is replaced. Where nothing can be written, every start measures.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from engine.cpu.cpu_identity import cpu_features, cpu_name
from support import numba_kernel
from support.directories import cache_home
from support.durable_file import replacing

log = logging.getLogger(__name__)

Found = TypeVar("Found")
Question = Mapping[str, str]
"""What was measured, in words."""
_LONGEST_BYTES = 1 << 16


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's content. ``question``: with the CPU; ``code``: what measured it."""

    question: dict[str, str]
    code: str
    found: msgspec.Raw


@cache
def code() -> str:
    """Return the version of all code that measured times depend on."""
    libraries = (f"{name} {version(name)}" for name in ("torch", "transformers", "numba"))
    return ", ".join([numba_kernel.fingerprint(), *libraries])


def _directory() -> Path:
    return cache_home() / "measured"


@dataclass(frozen=True)
class Memory:
    """Measurements by question, in files of ``directory``."""

    directory: Callable[[], Path] = field(default=_directory)

    def path(self, question: Question) -> Path:
        """Return the file of a question, asked on this CPU with torch's present number of threads."""
        words = msgspec.json.encode(_here(question), order="sorted")
        return self.directory() / f"{blake2b(words, digest_size=12).hexdigest()}.json"

    def recall(self, question: Question, kind: type[Found]) -> Found | None:
        """Return what was found for ``question``, or None if it has to be measured."""
        path = self.path(question)
        try:
            with path.open("rb") as file:
                entry = msgspec.json.decode(file.read(_LONGEST_BYTES), type=_Entry)
            if entry.question != _here(question) or entry.code != code():
                return None
            return msgspec.json.decode(entry.found, type=kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.info("%s cannot be used, so it is measured again: %s", path, str(error)[:200])
            return None

    def remember(self, question: Question, found: object) -> None:
        """Keep ``found``; a failure costs the next start a measurement, and is logged."""
        entry = _Entry(_here(question), code(), msgspec.Raw(msgspec.json.encode(found)))
        path = self.path(question)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(msgspec.json.format(msgspec.json.encode(entry), indent=1))
        except OSError as error:
            log.info("a measurement cannot be kept, so every start measures: %s", error)


def _here(question: Question) -> dict[str, str]:
    """``question``, asked on this CPU."""
    threads = str(torch.get_num_threads())
    return {**question, "cpu": cpu_name(), "features": cpu_features(), "threads": threads}
