"""Saved runs of any kind: which section of the page they belong to, and their tables."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench import engine_report, report, scheduler_report
from bench.engine_result import EngineReport
from bench.scheduler_result import SchedulerReport


class _Kind(msgspec.Struct):
    kind: str = "stream"


def tables_of(json_file: Path) -> tuple[str, str]:
    """(section of the page, tables in Markdown). Raises msgspec.DecodeError for another file."""
    data = json_file.read_bytes()
    kind = msgspec.json.decode(data, type=_Kind).kind
    if kind == "scheduler":
        return "scheduler", scheduler_report.render(msgspec.json.decode(data, type=SchedulerReport))
    if kind == "engine":
        return "engine", engine_report.render(msgspec.json.decode(data, type=EngineReport))
    return "results", report.render(msgspec.json.decode(data, type=report.Report))
