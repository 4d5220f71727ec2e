"""What `foretick bench engine` found, as plain data: rendering it needs no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from bench.engine_floor import Limits, Shape
from bench.figures import Latency
from bench.machine import Machine
from bench.questions_result import Questions


class Together(msgspec.Struct, frozen=True):
    """Readers answered in one pass, against the same readers one after the other.

    ``rows``: of the whole pass. ``shared_tokens``: context that all of them read, ``own_tokens``: that each
    has for itself, its own new rows counted by half. ``gain``: in turn over together, ``kept_ratio``:
    together over the kept caches one by one, both medians over rounds.
    """

    name: str
    readers: int
    rows: int
    shared_tokens: int
    own_tokens: float
    together: Latency
    in_turn: Latency
    gain: float
    attention_together: Latency
    attention_in_turn: Latency
    attention_gain: float
    kept: Latency | None = None
    kept_ratio: float | None = None


class Window(msgspec.Struct, frozen=True):
    """A tape at its retention limit beside one that has just grown to that length and stays.

    ``ratio``: sliding over grown, median over pairs. ``extents``: what a reader of the sliding tape sees
    after each update, the frozen prefix included. ``dense``: the unmodified model over the window sent again.
    """

    records: int
    updates: int
    bars_an_update: int
    question_tokens: int
    frozen_tokens: int
    grown_tokens: int
    sliding_tokens: int
    evicted_tokens: int
    frame_limit: int
    grown_extents: int
    extents: list[int]
    sliding: Latency
    grown: Latency
    ratio: float
    dense: Latency
    reading: Latency
    """Reading an update while the tape slides."""


class Operation(msgspec.Struct, frozen=True):
    """Microseconds of one call, the median, at each of the report's context lengths."""

    name: str
    us: list[float]


class Bookkeeping(msgspec.Struct, frozen=True):
    """What costs metadata only. ``contexts``: tokens, shortest first."""

    contexts: list[int]
    operations: list[Operation]


class Refresh(msgspec.Struct, frozen=True):
    """An `exact` session's window prefilled anew in the background, through the real scheduler.

    ``alone_ms``: one whole refresh without questions. ``batch_ms``: the longest of its batches, which a
    question may have to wait for. ``idle``, ``during``: a question's latency without and with a refresh.
    """

    window_tokens: int
    chunk_tokens: int
    alone_ms: float
    batch_ms: float
    idle: Latency
    during: Latency
    refreshes: int


class EngineReport(msgspec.Struct, frozen=True):
    """One run of `foretick bench engine`; parts that were not asked for are empty."""

    command: str
    started: str
    threads: int
    machine: Machine
    shape: Shape
    limits: Limits
    kind: Literal["engine"] = "engine"
    load_at_end: float = 0.0
    questions: Questions | None = None
    sessions: Together | None = None
    window: Window | None = None
    standing: list[Together] = []
    prefix: Together | None = None
    refresh: Refresh | None = None
    bookkeeping: Bookkeeping | None = None
