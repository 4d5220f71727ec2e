"""Records that a file gives as columns have the outcome of the same records, message by message."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.config.schema import AliasConfig, ContinuousConfig, ContractConfig, SymbolsConfig
from daemon.config.symbols import NO_NAMES, Names, SymbolRoute
from daemon.gateway import record_decoder
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.record_decoder import RecordDecoder, RingTurns
from daemon.protocol import NameStream
from feeds.columns.record_columns import ColumnBatch
from feeds.file_format import load_format
from feeds.market_data import DeadLetter
from feeds.payloads.payload_decoder import WireDecoder
from feeds.replay_source import ReplaySource
from feeds.source import Incoming
from feeds.timestamps import Instant
from ingest.record import RECORD, REFUSAL
from ingest.ring import Ring
from metrics.store import MetricStore
from tests.kit import SECOND, START

FORM = """
description = "made up"
container = "parquet"
[[records]]
kind = "trade"
venue = "V"
time = { field = "time", format = "iso" }
fields = { symbol = "s", price = "price", size = "size", id = "id", side = "side" }
side_values = { b = "buy", s = "sell" }
"""


class Messages(ReplaySource):
    """Gives message by message what comes as columns."""

    async def batches(self) -> AsyncGenerator[Sequence[Incoming], None]:
        async for batch in super().batches():
            yield list(batch)


class Columns(ReplaySource):
    """Counts what comes as columns."""

    counted = 0

    async def batches(self) -> AsyncGenerator[Sequence[Incoming], None]:
        async for batch in super().batches():
            self.counted += len(batch) if isinstance(batch, ColumnBatch) else 0
            yield batch


NAMES = Names(
    SymbolsConfig(
        alias=(AliasConfig("V:AAA", ("V:OLD",), until=Instant(START + 20 * SECOND)),),
        continuous=(
            ContinuousConfig(
                "V:BBB",
                (
                    ContractConfig("V:C1", Instant(START + 5 * SECOND)),
                    ContractConfig("V:OLD", Instant(START + 25 * SECOND)),
                ),
            ),
            ContinuousConfig("V:UNREAD", (ContractConfig("V:ZZZ", Instant(START + 9 * SECOND)),)),
        ),
    )
)


def outcome(source: ReplaySource, price_scale: int, keeps: bool, called: Names = NO_NAMES) -> tuple[Any, ...]:
    """What is in the ring, counts, offsets, and the originals that are kept."""
    ring, tracker, refused = Ring.create(4096), OffsetTracker(), list[DeadLetter]()
    store = MetricStore.local({"session": ["a", "b", "c"], "source": ["file"], "sink": []})
    routes = {
        "V:AAA": SymbolRoute(0, ("a",)),
        "V:BBB": SymbolRoute(1, ("b", "c"), price_scale),
    }
    order = RingTurns()
    order.originals.want(keeps)
    limits = {"payloads": WireDecoder(1 << 20), "max_ahead_ns": 3600 * SECOND, "names": called}
    decoder = RecordDecoder(source, ring, routes, tracker, store, refused.append, **limits, order=order)
    try:
        asyncio.run(decoder.run())
        out = np.zeros(4096, RECORD)
        records = out[: ring.pop(out)].copy()
        records["ts_ring"] = 0
        names = ("foretick_records_unknown_symbol_total", "foretick_records_total")
        counts = [store.value(names[0]), store.value(names[1], source="file")]
        counts += [store.value("foretick_records_unopened_total", reason="outside")]
        stream = NameStream("file", "t.parquet", 0, reread=False)
        kept = [order.originals.find(stream, offset) for offset in records["offset"].tolist()]
        lost = [kind for kind, each in zip(records["kind"].tolist(), kept, strict=True) if each is None]
        assert set(lost) <= {REFUSAL} or not keeps
        return records.tolist(), counts, refused, tracker.to_commit(), tracker.outstanding(), kept
    finally:
        ring.close()
        ring.unlink()


ROW = st.tuples(
    st.sampled_from(["AAA", "AAA", "BBB", "ZZZ", "a b", "OLD", "C1"]),
    st.integers(-1, 10**6),
    st.sampled_from("bsx"),
    st.integers(-1, 2),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=60),
    st.sampled_from([9, 9, 12]),
    st.booleans(),
    st.sampled_from([NO_NAMES, NAMES, NAMES]),
)
def test_columns_have_the_outcome_of_messages(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], price_scale: int, keeps: bool, called: Names
) -> None:
    """Unknown symbols, refused rows, times that go back, and a scale that columns do not have among them."""
    folder = tmp_path_factory.mktemp("columns")
    form = folder / "form.toml"
    form.write_text(FORM)
    times = START + np.cumsum([step for *_, step in rows]) * SECOND
    made = pa.table(
        {
            "time": pa.array(times, pa.timestamp("ns", "UTC")),
            "s": [symbol for symbol, *_ in rows],
            "price": pa.array([Decimal(units).scaleb(-2) for _, units, *_ in rows], pa.decimal128(20, 2)),
            "size": list(range(len(rows))),
            "id": [f"id{n}" for n in range(len(rows))],
            "side": [side for *_, side, _ in rows],
        }
    )
    pq.write_table(made, folder / "t.parquet")
    found = []
    for kind in (Messages, Columns):
        source = kind(
            "file", folder / "t.parquet", load_format(form), 0, clock_ns=lambda: START + 100 * SECOND
        )
        asyncio.run(source.start())
        with patch.object(record_decoder, "FEW", 1):  # short runs are columns, too
            found.append(outcome(source, price_scale, keeps, called))
    assert found[0] == found[1]


def test_it_is_columns_that_are_compared(tmp_path: Path) -> None:
    (tmp_path / "form.toml").write_text(FORM)
    count = 3000
    made = pa.table(
        {
            "time": pa.array(range(START, START + count), pa.timestamp("ns", "UTC")),
            "s": ["AAA", "BBB", "ZZZ"] * 1000,
            "price": list(range(1, count + 1)),
            "size": [1] * count,
            "id": [""] * count,
            "side": ["b"] * count,
        }
    )
    pq.write_table(made, tmp_path / "t.parquet")
    source = Columns("file", tmp_path / "t.parquet", load_format(tmp_path / "form.toml"), 0)
    asyncio.run(source.start())
    records, counts, *_ = outcome(source, 9, False)
    assert (len(records), counts, source.counted) == (2000, [1000, 3000, 0], 3000)
