"""Faults of feeds through the whole daemon in this process: in answers, metrics, the DLQ and the ledger."""

from typing import get_args

import msgspec
import pytest

from daemon.config.schema import BarsConfig, QualityConfig
from daemon.engine.answers import feed_faults
from daemon.ledger import ledger
from feeds.durations import Duration
from feeds.market_data import DeadLetter, Flag
from feeds.quality.silence import LEAST
from ingest.feed_rules import BITS
from metrics.feed_faults import ALL_KINDS, RULED
from tests.kit import SECOND, START, inproc_config, trade, until
from tests.kit.inproc import DEAD, RunningDaemon, running


def quote(at_s: float, bid: str = "99.99", ask: str = "100.01") -> bytes:
    moment = START + int(at_s * SECOND)
    record = {"type": "quote", "venue": "V", "symbol": "AAA", "ts_event": moment, "ts_recv": moment}
    return msgspec.json.encode(record | {"bid": bid, "ask": ask, "bid_size": "1", "ask_size": "2"})


def tick(at_s: float, price: str = "100.00", **more: object) -> bytes:
    return trade("V:AAA", START + int(at_s * SECOND), price, **more)


def quality(**settings: object) -> QualityConfig:
    return QualityConfig(**settings)  # type: ignore[arg-type]  # settings of it


def flagged(daemon: RunningDaemon, flag: str) -> set[int]:
    return {a.data_version for a in daemon.answers() if flag in a.flags}


def faults(daemon: RunningDaemon, kind: str) -> int:
    return daemon.count("feed_faults", source="test", kind=kind)


async def test_a_fault_is_a_flag_of_the_answers_of_its_bar_and_counted():
    async with running(inproc_config()) as daemon:
        daemon.put(quote(0.1), quote(0.5, "100.00", "100.00"), quote(1.1), quote(2.1))
        await until(lambda: flagged(daemon, "locked"), 15)
        assert faults(daemon, "locked") == 1
        assert ledger(daemon.gateway.store).unaccounted == {}


async def test_a_crossed_quote_goes_to_the_dlq_with_its_kind_and_its_content():
    async with running(inproc_config(quality=quality(crossed="dead_letter"))) as daemon:
        crossed = quote(0.5, "100.05", "100.01")
        daemon.put(quote(0.1), crossed, quote(1.1), quote(2.1))
        await until(lambda: flagged(daemon, "incomplete") and list(daemon.sink.messages(DEAD)), 15)
        (found,) = (each for each in daemon.sink.messages(DEAD) if isinstance(each, DeadLetter))
        assert (found.reason, found.offset, found.payload) == ("crossed", 1, crossed)
        assert "quality.crossed" in found.error
        assert (
            daemon.count("records_refused", session="aaa", reason="quality") == faults(daemon, "crossed") == 1
        )
        assert not flagged(daemon, "crossed")
        assert ledger(daemon.gateway.store).unaccounted == {}


async def test_a_dropped_record_is_in_the_ledger_and_its_offset_is_committed():
    async with running(inproc_config(quality=quality(zero_size="drop"))) as daemon:
        daemon.put(tick(0.1), tick(0.5, size="0"), tick(1.1), tick(2.1, size="0"))
        await until(lambda: daemon.answered("aaa", 1))
        await until(lambda: max(daemon.source.committed.values(), default=0) == 2)
        found = ledger(daemon.gateway.store)
        assert (found.sessions[0].dropped, found.unaccounted) == (2, {})
        assert daemon.count("records_dropped", session="aaa") == faults(daemon, "zero_size") == 2


async def test_a_held_bad_tick_is_in_no_bar():
    bars = BarsConfig(interval=Duration(SECOND))
    calm = [tick(n / 100, "100.00" if n % 2 else "100.01") for n in range(99)]
    async with running(inproc_config(bars=bars, quality=quality(bad_tick="hold"))) as daemon:
        daemon.put(*calm, tick(1.1), tick(1.2, "150.00"), tick(1.3), tick(2.1))
        await until(lambda: flagged(daemon, "incomplete"), 15)
        assert faults(daemon, "bad_tick") == daemon.count("records_dropped", session="aaa") == 1
        assert ledger(daemon.gateway.store).unaccounted == {}


@pytest.mark.parametrize("action", ["flag", "count"])
async def test_a_symbol_that_is_unusually_quiet_is_silent(action: str):
    """Its P99 of a millisecond is learnt from its first records; `silent_after` is not set."""
    own = quality(silent=action, silence_floor=Duration(SECOND // 100))
    async with running(inproc_config(quality=own)) as daemon:
        state = daemon.state()
        daemon.put(*(tick(n / 1000) for n in range(LEAST - 1)))
        await until(lambda: daemon.count("records_in_bars", session="aaa") == LEAST - 1)
        assert not state.is_silent, "too few gaps"
        daemon.put(tick(0.3), tick(0.301))
        await until(lambda: faults(daemon, "silent") == 1, 15)
        assert state.is_silent == (action == "flag")
        daemon.put(*(tick(0.302 + n / 1000) for n in range(5)))
        await until(lambda: daemon.count("records_in_bars", session="aaa") == LEAST + 6)
        await until(lambda: faults(daemon, "silent") == 2, 15, "another silence")


def test_each_fault_that_is_kept_has_a_flag_of_answers() -> None:
    flags = set(get_args(Flag))
    assert {kind.flag for kind in ALL_KINDS} <= flags
    kept = {kind.name for kind in RULED if kind.actions} - {"skewed_clock"}
    assert set(feed_faults(())) == kept
    assert not any(feed_faults(()).values())
    assert len(set(BITS.values())) == len(RULED)
