"""Plans: formulas and simulation of small configurations."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.config.schema import (
    UNTRAINED,
    BarsConfig,
    Config,
    ModelConfig,
    QuestionConfig,
    SessionConfig,
    SourceConfig,
)
from feeds.durations import Duration, parse_duration
from flash.capacity import max_sessions, passes_ns
from lab.plan.capacity import bars_per_s
from lab.plan.host_costs import HostCosts
from lab.plan.load import Load
from lab.plan.plan import Plan, plan, repeated, simulate
from lab.plan.sources import sources_of
from scheduler.costs import CostModel
from scheduler.curves import CostCurve
from scheduler.interfaces import Limits

MEMORY = 64 << 30
MS = 1e-3


def costs(pass_ms: float = 2.0, token_ms: float = 0.05, **more: Any) -> CostModel:
    """A device with a linear cost, which results can be computed for by hand."""
    return CostModel(
        device="linear",
        model="any",
        block_size=16,
        source="a test",
        pass_tokens=1024,
        pass_s=pass_ms * MS,
        floor_s=pass_ms * MS,
        recompute=CostCurve((0.0, 1.0), (0.0, token_ms * MS)),
        swap_out=CostCurve((0.0, 1.0), (0.0, MS)),
        swap_in=CostCurve((0.0, 1.0), (0.0, MS)),
        **more,
    )


def config(count: int = 2, **more: Any) -> Config:
    own = tuple(
        SessionConfig(f"s{n}", f"V:S{n}", retention_records=8, divergence_every=Duration(0))
        for n in range(count)
    )
    return Config(**{"sessions": own, "source": SourceConfig(backlog_policy="skip")} | more)


def planned(
    ticks: float = 20, settings: Config | None = None, device: CostModel | None = None, **load: Any
) -> Plan:
    found = Load(**{"ticks": ticks, "seconds": 6} | load)
    return plan(settings or config(), found, MEMORY, device or costs())


def test_one_session_without_questions() -> None:
    found = planned(settings=config(1, standing="none"))
    assert (found.questions, found.capacity.k) == (0, 0)
    assert found.simulated.answers == 0
    assert found.simulated.close_to_answer_s is None
    assert found.simulated.bars == found.simulated.versions > 3
    assert found.capacity.k_max > 0
    assert found.overload == ()


def test_one_quiet_session_is_computed_by_hand() -> None:
    """A bar is 6 tokens, the six questions are 6 rows of one token in one pass."""
    found = planned(50, config(1), costs(token_ms=0.1, step_s=0.5 * MS, answer_s=0.25 * MS))
    bar, question = (2 + 0.6 + 0.5) * MS, (2 + 0.6 + 0.5) * MS
    times = found.simulated.close_to_answer_s
    assert times is not None
    # the answers are acknowledged one after the other; the median of six is the third, as in the daemon
    assert times.p50 == pytest.approx(bar + question + 3 * 0.25 * MS)
    assert times.p99 == pytest.approx(bar + question + 6 * 0.25 * MS)
    capacity = found.capacity
    assert capacity.t_ingest_s == pytest.approx(bar)
    assert capacity.k == 6
    assert capacity.k_max == int((capacity.t_data_s - capacity.t_ingest_s) / capacity.t_flash_s)
    assert found.simulated.utilisation_ratio == pytest.approx(capacity.utilisation_ratio, rel=0.35)
    assert capacity.worker_ratio > capacity.utilisation_ratio


@pytest.mark.parametrize(
    ("seconds", "interval"), [(4, "250ms"), (6, "1s"), (60, "15s")], ids=["short", "a second", "long"]
)
def test_bars_follow_the_interval(seconds: float, interval: str) -> None:
    settings = config(2, bars=BarsConfig(interval=parse_duration(interval)))
    found = planned(200, settings, seconds=seconds)
    expected = 2 * seconds / (parse_duration(interval) * 1e-9)
    assert found.simulated.bars == pytest.approx(expected, abs=2)
    assert found.simulated.answers == 6 * found.simulated.versions


def test_more_load_makes_more_work_and_no_answer_faster() -> None:
    """More ticks make bars of intervals that had none; shorter bars, asks and prompts come on top."""
    device = costs(4.0, 0.2)
    rising = [
        simulate(sources_of(config(6), device), Load(ticks=ticks, seconds=10)) for ticks in (3, 12, 120)
    ]
    for less, more in pairwise(rising):
        assert more.bars > less.bars
        assert more.utilisation_ratio > less.utilisation_ratio
    used = [
        simulate(
            sources_of(config(6, bars=BarsConfig(interval=parse_duration(interval))), device),
            Load(ticks=1200, seconds=4),
        )
        for interval in ("1s", "250ms", "60ms")
    ]
    assert used[0].utilisation_ratio < used[1].utilisation_ratio < used[2].utilisation_ratio
    assert used[0].coalesced_ratio <= used[1].coalesced_ratio <= used[2].coalesced_ratio
    quiet, busy = (
        simulate(sources_of(config(6), device), Load(ticks=60, seconds=6, asks=asks, prompts=asks / 4))
        for asks in (0, 40)
    )
    assert busy.utilisation_ratio > quiet.utilisation_ratio
    assert busy.ask_computed_s is not None
    assert busy.ttft_pool_s is not None
    assert quiet.close_to_answer_s is not None
    assert busy.close_to_answer_s is not None
    assert busy.close_to_answer_s.p99 >= quiet.close_to_answer_s.p50


def test_beyond_compute() -> None:
    found = planned(4000, config(8, bars=BarsConfig(interval=parse_duration("20ms"))), costs(20.0), seconds=1)
    assert found.capacity.worker_ratio > 1
    assert any(why.startswith("compute: ") for why in found.overload)
    assert found.capacity.sessions_by_compute in range(8)


def test_beyond_the_memory() -> None:
    found = plan(config(4), Load(ticks=10), 8 << 20, costs())
    assert (found.limit, found.simulated.seconds) == ("KV memory", 0)
    assert found.capacity.sessions_by_kv_memory < 4
    assert any(why.startswith("KV memory: ") for why in found.overload)


def test_beyond_the_freshness_objective() -> None:
    """Passes of 40 ms and bars of 20 ms with an objective of one bar."""
    sessions = tuple(
        replace(session, max_staleness=parse_duration("20ms"), retention_records=4)
        for session in config(4).sessions
    )
    settings = config(4, sessions=sessions, bars=BarsConfig(interval=parse_duration("20ms")))
    found = planned(4000, settings, costs(40.0), seconds=1)
    assert found.capacity.freshness_objective_s == pytest.approx(0.02)
    assert found.capacity.sessions_by_freshness == 0
    assert found.simulated.freshness_met_ratio < 0.5
    assert any(why.startswith("freshness: ") for why in found.overload)


def test_beyond_the_gateway() -> None:
    found = planned(20_000, config(1), costs(record_s=0.1 * MS))
    assert found.capacity.gateway_ratio == pytest.approx(2.0, rel=0.01)
    assert any(why.startswith("gateway: ") for why in found.overload)


def test_hits_are_weighted_by_equation_18() -> None:
    found = planned(asks=40, asks_standing=0.6, device=costs(answer_s=MS))
    assert found == planned(asks=40, asks_standing=0.6, device=costs(answer_s=MS)), "equal plans are equal"
    mix, computed = found.hit_mix, found.simulated.ask_computed_s
    assert computed is not None
    assert mix.mean_s == pytest.approx(0.6 * MS + 0.4 * computed.mean)
    cached = planned(asks=40, asks_standing=1.0, device=costs(answer_s=MS))
    assert cached.simulated.ask_computed_s is None
    assert cached.hit_mix.mean_s == pytest.approx(MS)


def test_schedules_and_texts_count_by_how_often_they_are_asked() -> None:
    questions = (
        QuestionConfig("up", "Is it up?", ("YES", "NO")),
        QuestionConfig("rare", "Is it rare?", ("YES", "NO"), ask_every_bars=4),
        QuestionConfig("timed", "Is it timed?", ("YES", "NO"), ask_every=parse_duration("10s")),
        QuestionConfig("text", "Say it.", max_tokens=5, sessions=("s0",)),
    )
    settings = config(2, standing="none", questions=questions, model=ModelConfig(path=UNTRAINED))
    found = planned(100, settings, seconds=8)
    assert found.questions == 7
    assert found.capacity.k == pytest.approx(1 + 0.25 + 0.1 + 0.5)
    assert found.simulated.answers > found.simulated.versions


def test_sessions_of_their_own_intervals_and_of_several_symbols() -> None:
    own = (
        SessionConfig("fast", "V:A", retention_records=8, interval=parse_duration("500ms")),
        SessionConfig("slow", "V:A", retention_records=8, interval=parse_duration("2s")),
        SessionConfig("pair", "V:A", more_symbols=("V:B",), retention_records=8),
    )
    settings = config(0, sessions=own, model=ModelConfig(path=UNTRAINED))
    sources = sources_of(settings, costs())
    assert sources.symbols == {"V:A": 0, "V:B": 1}
    assert bars_per_s(sources, 1000) == pytest.approx([2, 0.5, 2])
    found = simulate(sources, Load(ticks=1000, seconds=8))
    assert found.bars == pytest.approx(8 * 4.5, abs=4)


def test_repeating_a_configuration() -> None:
    questions = (QuestionConfig("up", "Is it up?", ("YES", "NO"), sessions=("s1",)),)
    found = repeated(config(2, questions=questions), 5)
    assert [s.name for s in found.sessions] == ["s0", "s1", "s0.1", "s1.1", "s0.2"]
    assert len({s.symbol for s in found.sessions}) == 5
    assert found.questions[0].sessions == ("s1", "s1.1")
    assert repeated(config(2, questions=questions), 1).questions == ()


def test_search_finds_what_the_simulation_carries() -> None:
    settings = config(1, bars=BarsConfig(interval=parse_duration("100ms")))
    device = costs(40.0, 2.0)
    found = plan(settings, Load(ticks=200, seconds=1), MEMORY, device, search=True)
    most = found.sessions_simulated
    assert most is not None
    assert most >= 1
    carried = simulate(sources_of(repeated(settings, most), device), Load(ticks=200 * most, seconds=1))
    assert carried.freshness_met_ratio >= 0.99


def test_rows_fill_passes_up_to_the_limits() -> None:
    device, limits = HostCosts(costs(1.0, 0.1)), Limits(max_batch_tokens=64, max_batch_requests=4)
    ms = 1_000_000
    assert passes_ns(0, (10, 6), device, limits) == 0
    assert passes_ns(4, (10, 6), device, limits) == round(3.4 * ms)
    assert passes_ns(9, (10, 6), device, limits) == round((2 * 3.4 + 1.6) * ms)
    assert passes_ns(3, (10, 40), device, limits) == 15 * ms


def test_a_pass_takes_longer_after_a_pause() -> None:
    now, ms = 0, 1_000_000
    waking = CostCurve((0.0, 0.02, 0.1, 0.2), (0.0, 0.0, 0.008, 0.008))
    device = HostCosts(replace(costs(1.0, 0.1), waking=waking), now=lambda: now)
    hot = HostCosts(costs(1.0, 0.1)).batch_ns([(0, 10)])
    assert device.batch_ns([(0, 10)]) == hot  # right after the start
    now = hot + 20 * ms
    assert device.batch_ns([(0, 10)]) == hot
    now += hot + 60 * ms
    assert device.batch_ns([(0, 10)]) == hot + 4 * ms
    now += hot + 4 * ms + 5_000 * ms
    assert device.batch_ns([(0, 10)]) == hot + 8 * ms


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 17, 1000])
def test_the_search_for_a_limit_finds_it(limit: int) -> None:
    assert max_sessions(lambda n: n <= limit) == limit
    assert max_sessions(lambda n: True) is None


_WRONG = {
    **{"ticks": 0, "asks": -1, "asks_standing": 1.1, "prompts": -1},
    **{"prompt_tokens": 0, "answer_tokens": 0, "seconds": -1},
}


@pytest.mark.parametrize("wrong", [{name: value} for name, value in _WRONG.items()])
def test_loads_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"above 0|at least|add up"):
        Load(**{"ticks": 1.0} | wrong)
