"""Engine events, for tests that stand in for the engine."""

import time
from typing import Any

import msgspec

from daemon import protocol
from daemon.ages import Times
from feeds.market_data import Answer, Latency
from flash.question import PAPER_SIX
from ingest.record import LowWatermarks, ReadRange, stream_number
from tests.kit import START, TOPIC

ANSWER = Answer(
    session="aaa",
    symbol="V:AAA",
    question="trend",
    question_hash="h",
    text="UP",
    choice="UP",
    logit_gap=1.5,
    probability=None,
    data_version=1,
    as_of=START,
    model="m",
    model_revision="r1",
    untrained=True,
    latency=Latency(ring_wait_ns=1, bars_ns=2, tokenise_ns=3, queue_ns=4, forward_ns=5),
    reused_tokens=400,
    computed_tokens=30,
    flags=(),
    recomputed_tokens=7,
    swapped_tokens=8,
)


STREAM = protocol.NameStream("test", TOPIC, 0, True)
"""The one that the events tell of."""
NUMBER = stream_number(STREAM.source, STREAM.topic, STREAM.partition)


def inputs_below(
    low_watermark: int,
    closed: tuple[int, ...] = (),
    written: LowWatermarks = (),
    first: int | None = None,
) -> protocol.VersionInputs:
    """Records from offset ``first``, by default one record, to the one before ``low_watermark``."""
    read = ReadRange(NUMBER, low_watermark - 1 if first is None else first, low_watermark - 1)
    return protocol.VersionInputs((read,), ((NUMBER, low_watermark),), closed, written)


def answered(
    session: str,
    version: int,
    low_watermark: int,
    *,
    inputs: protocol.VersionInputs | None = None,
    times: Times | None = None,
    asked: int = len(PAPER_SIX),
    **fields: Any,
) -> protocol.Answered:
    """A standing question's answer; ``fields`` replace those of `ANSWER`."""
    symbol = f"V:{session.upper()}"
    answer = msgspec.structs.replace(
        ANSWER, **({"session": session, "symbol": symbol, "data_version": version} | fields)
    )
    return protocol.Answered(
        answer,
        inputs or inputs_below(low_watermark),
        Times(ANSWER.as_of, time.time_ns(), time.monotonic_ns()) if times is None else times,
        asked,
    )
