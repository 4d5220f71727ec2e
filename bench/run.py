"""Runs the parts of a suite one after the other and keeps each with its own command, commit and time."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench import machine
from bench.figures import Figure, Part, Suite
from bench.suites import SUITES, Spec


@dataclass(frozen=True)
class Run:
    """How the parts are to be measured. ``quick``: in small sizes, to see that it works.

    ``say`` tells what is under way; ``models``: those of the stream suite's questions; ``device`` and
    ``profiles`` (a directory for the cost profile): of the GPU suite.
    """

    threads: int = 2
    quick: bool = False
    say: Callable[[str], None] = print
    models: tuple[str, ...] = ("embedded", "80m")
    device: str = "cuda"
    profiles: Path | None = None


Measure = Callable[[Run], Iterator[Figure]]


def run(name: str, command: str, run: Run, parts: Collection[str] = (), json_file: Path | None = None) -> Suite:
    """Measure ``parts`` (all when empty) of a suite.

    Each goes into ``json_file`` as soon as it is there, beside what the file has of other parts.
    """
    specs = SUITES[name]
    found = Suite(name)
    for spec in specs:
        if parts and spec.name not in parts:
            continue
        run.say(f"{spec.name} ...")
        part = measure(spec, command, run)
        found = found.with_part(part, [each.name for each in specs])
        if json_file is not None:
            kept = read(json_file) if json_file.exists() else Suite(name)
            save(json_file, kept.with_part(part, [each.name for each in specs]))
    return found


def measure(spec: Spec, command: str, run: Run) -> Part:
    """One part."""
    started, began, load = datetime.now(UTC), time.monotonic(), os.getloadavg()[0]
    module, _, function = spec.measure.partition(":")
    work: Measure = getattr(importlib.import_module(module), function)
    figures = list(work(run))
    return Part(
        spec.name,
        command,
        machine.commit(),
        started.isoformat(" ", "minutes"),
        round(time.monotonic() - began, 1),
        run.threads,
        machine.describe(),
        (round(load, 2), round(os.getloadavg()[0], 2)),
        figures,
    )


def read(json_file: Path) -> Suite:
    """A saved suite. Raises msgspec.DecodeError for another file."""
    return msgspec.json.decode(json_file.read_bytes(), type=Suite)


def save(json_file: Path, suite: Suite) -> None:
    """A figure a line: files stay short, and a new run shows as the lines it changed."""
    lines = []
    for part in suite.parts:
        head = msgspec.json.encode(msgspec.structs.replace(part, figures=[])).decode()
        figures = ",\n".join(msgspec.json.encode(figure).decode() for figure in part.figures)
        lines.append(f"{head.removesuffix(']}')}\n{figures}\n]}}")
    json_file.write_text(f'{{"suite":"{suite.suite}","parts":[\n' + ",\n".join(lines) + "\n]}\n")
