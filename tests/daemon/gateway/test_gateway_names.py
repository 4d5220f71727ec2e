"""Records of aliases and contracts, on both packing paths, against a plain Python reference."""

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.config.schema import AliasConfig, ContinuousConfig, ContractConfig, SymbolsConfig
from daemon.config.symbols import NEVER_NS, Names, SymbolRoute
from daemon.gateway import record_decoder
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.record_decoder import RecordDecoder
from daemon.gateway.sequence_gaps import Sequence as SequenceKind
from daemon.ledger import ledger
from feeds.market_data import DeadLetter
from feeds.payloads.payload_decoder import WireDecoder
from feeds.timestamps import Instant
from ingest.record import FLAG_GAP, HEARTBEAT, RECORD, REFUSAL
from ingest.ring import Ring
from metrics.store import MetricStore
from tests.kit import SECOND, START, QueueSource, incoming, trade

READ = ("V:A", "V:B", "W:C")
OTHERS = ("V:a1", "V:a2", "W:b1", "V:b2", "V:b3")


def at(second: int | None) -> Instant | None:
    return None if second is None else Instant(START + second * SECOND)


@st.composite
def mappings(draw: st.DrawFn) -> SymbolsConfig:
    """Names of symbols that are read, or not, each of one symbol at a time."""
    alias = []
    for name in draw(st.lists(st.sampled_from(OTHERS[:3]), unique=True)):
        start, end = sorted(draw(st.tuples(st.integers(0, 30), st.integers(0, 30))))
        bounds = draw(st.sampled_from([(start, end + 1), (None, end), (start, None), (None, None)]))
        symbol = draw(st.sampled_from([*READ, "V:UNREAD"]))
        alias.append(AliasConfig(symbol, (name,), *map(at, bounds)))
        if bounds[1] is not None and draw(st.booleans()):  # later it is another one's
            alias.append(AliasConfig(draw(st.sampled_from(READ)), (name,), at(bounds[1] + 2)))
    starts = sorted(draw(st.lists(st.integers(0, 30), unique=True, max_size=2)))
    contracts = tuple(
        ContractConfig(name, Instant(START + start * SECOND))
        for name, start in zip(OTHERS[3:], starts, strict=False)
    )
    continuous = (ContinuousConfig(draw(st.sampled_from(READ)), contracts),) if contracts else ()
    return SymbolsConfig(alias=tuple(alias), continuous=continuous)


def reference(symbols: SymbolsConfig, name: str, moment: int) -> str | None:
    """The symbol of a record, by looking at every table."""
    known = False
    for alias in symbols.alias:
        if name in alias.names:
            known = True
            if (alias.from_ or 0) <= moment < (alias.until or NEVER_NS):
                return alias.symbol
    for continuous in symbols.continuous:
        active = [each.symbol for each in continuous.contracts if each.from_ <= moment]
        if name in [each.symbol for each in continuous.contracts]:
            known = True
            if active[-1:] == [name]:
                return continuous.symbol
    return None if known else name


ROWS = st.lists(
    st.tuples(
        st.sampled_from([*READ, *OTHERS, "V:NOBODY"]),
        st.integers(0, 30),
        st.sampled_from(["trade", "trade", "trade", "bad", "heartbeat"]),
    ),
    max_size=60,
)


def payload(name: str, second: int, kind: str, number: int, seq: int = 0) -> bytes:
    moment = START + second * SECOND
    if kind != "heartbeat":
        made = trade(name, moment, "x" if kind == "bad" else f"{100 + number}", id=f"i{number}", seq=seq)
        return made
    venue, _, symbol = name.partition(":")
    beat = {"type": "heartbeat", "venue": venue, "symbol": symbol, "ts_event": moment, "ts_recv": moment}
    return msgspec.json.encode(beat | {"seq": seq})


def read(
    payloads: Sequence[bytes], names: Names, size: int, sequence: SequenceKind = "none"
) -> tuple[list[Any], MetricStore, list[DeadLetter]]:
    """(symbol, second, kind, gap) of what is in the ring, in batches of this many messages."""
    ring, refused = Ring.create(1 << 10), list[DeadLetter]()
    sessions = ["s0", "s1", "s2"]
    store = MetricStore.local({"session": sessions, "source": ["test"], "sink": []})
    source, routes = QueueSource(), {s: SymbolRoute(n, (sessions[n],)) for n, s in enumerate(READ)}
    decoder = RecordDecoder(
        source,
        ring,
        routes,
        OffsetTracker(),
        store,
        refused.append,
        payloads=WireDecoder(1 << 20),
        max_ahead_ns=NEVER_NS // 2,
        names=names,
        sequence=sequence,
    )
    messages = [incoming(each, number) for number, each in enumerate(payloads)]
    source.put(*(messages[n : n + size] for n in range(0, len(messages), size)))
    source.end()
    try:
        asyncio.run(decoder.run())
        out = np.zeros(1 << 10, RECORD)
        records = out[: ring.pop(out)]
        found = [
            (
                READ[int(each["symbol"])],
                (int(each["ts_event"]) - START) // SECOND if each["ts_event"] else -1,
                int(each["kind"]),
                bool(each["flags"] & FLAG_GAP),
            )
            for each in records
        ]
        return found, store, refused
    finally:
        ring.close()
        ring.unlink()


@settings(max_examples=150, deadline=None)
@given(symbols=mappings(), rows=ROWS)
def test_a_record_is_of_the_symbol_that_its_time_says(
    symbols: SymbolsConfig, rows: list[tuple[str, int, str]]
) -> None:
    payloads = [payload(*row, number) for number, row in enumerate(rows)]
    expected, counts = [], {"unknown": 0, "outside": 0, "heartbeats": 0, "malformed": 0, "passed": 0}
    for name, second, kind in rows:
        symbol = reference(symbols, name, START + second * SECOND)
        is_read = symbol in READ
        if kind == "bad":
            counts["malformed"] += 1
        elif symbol is None:
            counts["outside"] += 1
        else:
            counts["unknown" if not is_read else "heartbeats" if kind == "heartbeat" else "passed"] += 1
        if is_read:
            code = {"trade": 1, "bad": REFUSAL, "heartbeat": HEARTBEAT}[kind]
            expected.append((symbol, second, code, False))
    for size, few in ((1, 16), (7, 1), (60, 1)):  # the first one by one, the others as columns
        with patch.object(record_decoder, "FEW", few):
            found, store, refused = read(payloads, Names(symbols), size)
        assert found == expected
        total = ledger(store).read
        assert total.unaccounted == 0
        assert len(refused) == counts["malformed"] == sum(total.malformed.values())
        assert counts == {
            "unknown": total.unknown_symbol,
            "outside": total.unopened.get("outside", 0),
            "heartbeats": total.heartbeats,
            "malformed": counts["malformed"],
            "passed": total.passed,
        }


SINCE = (("V:z", 0), ("X:h", 10))
CONTRACTS = SymbolsConfig(
    continuous=(
        ContinuousConfig("V:A", tuple(ContractConfig(n, Instant(START + s * SECOND)) for n, s in SINCE)),
    )
)


def test_a_heartbeat_of_a_venue_is_of_what_has_names_there_at_its_time() -> None:
    names = Names(CONTRACTS)
    for second, venue, found in ((5, "V", ["V:A", "V:B"]), (5, "X", []), (15, "X", ["V:A"])):
        beats, store, _ = read([payload(f"{venue}:*", second, "heartbeat", 0)], names, 1)
        assert [symbol for symbol, *_ in beats] == found
        assert store.value("foretick_heartbeats_total", source="test") == bool(found)


@pytest.mark.parametrize("size", [1, 60])
def test_numbers_are_those_of_the_contract_not_of_the_symbol(size: int) -> None:
    """A record that is missing is a gap of the symbol while its contract is active, and only then."""
    rows = [
        ("V:z", 1, 7),
        ("X:h", 1, 100),
        ("X:h", 2, 105),
        ("V:z", 3, 9),
        ("X:h", 12, 106),
        ("X:h", 13, 108),
    ]
    rows += [("V:z", 14, 20)]
    payloads = [payload(name, second, "trade", 0, seq) for name, second, seq in rows]
    found, store, _ = read(payloads, Names(CONTRACTS), size, "symbol")
    assert [(second, gap) for _, second, _, gap in found] == [(1, False), (3, True), (12, False), (13, True)]
    assert store.value("foretick_records_lost_upstream_total", source="test") == 2
    assert store.value("foretick_records_unopened_total", reason="outside") == 3


def test_a_key_that_is_a_venue_says_nothing_of_its_symbols() -> None:
    ring, broken = Ring.create(64), msgspec.structs.replace(incoming(b"{", 0), key=b"V")
    store = MetricStore.local({"session": ["s0"], "source": ["test"], "sink": []})
    source, limits = QueueSource(), {"payloads": WireDecoder(1 << 20), "max_ahead_ns": SECOND}
    routes = {"V:A": SymbolRoute(0, ("s0",))}
    decoder = RecordDecoder(source, ring, routes, OffsetTracker(), store, lambda letter: None, **limits)  # type: ignore[arg-type]  # mixed
    source.put([broken])
    source.end()
    try:
        asyncio.run(decoder.run())
        assert ring.fill == 0
        assert store.value("foretick_records_malformed_total", reason="json") == 1
    finally:
        ring.close()
        ring.unlink()


def test_a_refused_record_whose_time_is_wrong_lacks_in_every_bar_that_it_may_be_of() -> None:
    moved = SymbolsConfig(
        alias=(
            AliasConfig("V:A", ("V:n",), until=Instant(START + SECOND)),
            AliasConfig("V:B", ("V:n",), from_=Instant(START + SECOND)),
        )
    )
    wrong = msgspec.json.encode(msgspec.json.decode(trade("V:n", START)) | {"ts_event": START // 1000})
    found, *_ = read([wrong], Names(moved), 1)
    assert sorted(found) == [("V:A", -1, REFUSAL, False), ("V:B", -1, REFUSAL, False)]
