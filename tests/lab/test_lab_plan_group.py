"""Plans of a group: where partitions go, what each daemon carries, and what one more or fewer moves."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from daemon.cli.main import main
from daemon.config.schema import (
    UNTRAINED,
    Config,
    ModelConfig,
    QuestionConfig,
    SessionConfig,
    SourceConfig,
)
from feeds.source import Partition
from feeds.topic_sample import TopicSample
from lab.plan.capacity import session_bars_per_s
from lab.plan.group import GroupPlan, group_plan, group_table, keyed, sampled
from lab.plan.sources import Sources, sources_of

TOPIC = "md.trades.v1"
SECOND = 10**9


def sources(count: int, **more: object) -> Sources:
    own = tuple(SessionConfig(f"s{n}", f"V:S{n}", retention_records=8) for n in range(count))
    return sources_of(Config(**{"sessions": own, "source": SourceConfig(backlog_policy="skip")} | more))  # type: ignore[arg-type]


def planned(found: Sources, daemons: int, rates: list[float], partitions: int = 0) -> GroupPlan:
    """Each symbol in a partition of its own."""
    all_ = [(TOPIC, n) for n in range(partitions or len(rates))]
    where = dict(zip(found.symbols, all_, strict=False))
    return group_plan(found, daemons, all_, where, dict(zip(found.symbols, rates, strict=True)))


def test_every_partition_and_session_is_somewhere_once_and_rates_add_up() -> None:
    plan = planned(sources(7), 3, [float(n + 1) for n in range(7)])
    partitions = [p for each in plan.daemons for p in each.partitions]
    assert sorted(partitions) == [(TOPIC, n) for n in range(7)]
    assert sorted(name for each in plan.daemons for name in each.sessions) == [f"s{n}" for n in range(7)]
    assert sum(each.records_per_s for each in plan.daemons) == pytest.approx(plan.ticks) == 28
    assert (plan.split, plan.overload) == ((), ())


def test_hot_symbols_are_apart() -> None:
    """Their bars cost as much as any bar; a quiet symbol makes few."""
    plan = planned(sources(9), 3, [100.0] * 3 + [0.01] * 6)
    hot = [{name for name in each.sessions if name in ("s0", "s1", "s2")} for each in plan.daemons]
    assert all(len(names) == 1 for names in hot)
    loads = [each.utilisation_ratio for each in plan.daemons]
    assert max(loads) < 1.1 * min(loads)


def test_a_session_with_more_questions_costs_more() -> None:
    asked = tuple(QuestionConfig(f"q{n}", f"Number {n}?", ("YES", "NO"), sessions=("s0",)) for n in range(40))
    more = sources(2, questions=asked, standing="none", model=ModelConfig(UNTRAINED))
    loads = {each.sessions: each.utilisation_ratio for each in planned(more, 2, [5.0, 5.0]).daemons}
    assert loads["s0",] > 1.5 * loads["s1",]


def test_what_moves_is_what_the_new_daemon_gets_and_the_old_one_had() -> None:
    plan = planned(sources(12), 3, [10.0] * 12)
    assert [len(each.partitions) for each in plan.daemons] == [4, 4, 4]
    assert len(plan.more) == 3
    assert set(plan.fewer) == set(plan.daemons[2].partitions)


def test_fewer_partitions_than_daemons_and_a_full_device_are_overload() -> None:
    few = planned(sources(2), 3, [1.0, 1.0])
    assert few.overload == ("partitions: 2 keep 2 of 3 daemons busy",)
    fast = tuple(
        SessionConfig(f"s{n}", f"V:S{n}", interval=SECOND // 1000, retention_records=8) for n in range(40)
    )
    full = planned(sources(0, sessions=fast), 2, [5000.0] * 40)
    assert {each.partition(":")[0] for each in full.overload} == {"compute"}


def test_bars_come_as_often_as_intervals_have_ticks() -> None:
    session = SessionConfig("a", "V:A", ("V:B",))
    assert session_bars_per_s(session, SECOND, {"V:A": 1000.0, "V:B": 0.0}) == pytest.approx(1.0)
    assert session_bars_per_s(session, SECOND, {"V:A": 1000.0, "V:B": 1000.0}) == pytest.approx(2.0)
    assert session_bars_per_s(session, 60 * SECOND, {"V:A": 1e-6, "V:B": 0.0}) == pytest.approx(
        1e-6, rel=1e-3
    )


def test_a_sample_gives_partitions_and_shares_of_the_rate() -> None:
    sample = TopicSample({(TOPIC, 0): {"V:A": 30.0, "V:X": 5.0}, (TOPIC, 1): {"V:B": 10.0}, (TOPIC, 2): {}})
    where, rates = sampled(sample, ["V:A", "V:B"], 100.0)
    assert where == {"V:A": (TOPIC, 0), "V:B": (TOPIC, 1)}
    assert rates == {"V:A": 75.0, "V:B": 25.0}
    with pytest.raises(ValueError, match="none of V:C"):
        sampled(sample, ["V:A", "V:C"], 100.0)


def test_a_split_session_is_named() -> None:
    pair = SessionConfig("pair", "V:A", ("V:B",), retention_records=8, lines="decimal")
    where: dict[str, Partition] = {"V:A": (TOPIC, 0), "V:B": (TOPIC, 1)}
    found = sources(0, sessions=(pair,), model=ModelConfig(UNTRAINED))
    plan = group_plan(found, 1, sorted(where.values()), where, {"V:A": 1.0, "V:B": 1.0})
    assert plan.split == ("pair",)


def test_symbols_are_where_kafkas_default_partitioner_puts_them() -> None:
    """The hashes are those of Apache Kafka's own tests, Java's signed integers."""
    hashes = {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536}
    where = keyed(list(hashes), 12, TOPIC)
    assert where == {key: (TOPIC, (value & 0x7FFFFFFF) % 12) for key, value in hashes.items()}


def test_the_table_has_a_row_for_each_daemon() -> None:
    text = group_table(planned(sources(4), 2, [5.0] * 4))
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["daemon-0", "daemon-1"]
    assert "one daemon more moves 1 partitions" in text


FILE = '[source]\nbacklog_policy = "skip"\n' + "".join(
    f'[[sessions]]\nname = "s{n}"\nsymbol = "V:S{n}"\nretention_records = 8\n' for n in range(6)
)


@pytest.fixture
def command(tmp_path: Path):
    (tmp_path / "foretick.toml").write_text(FILE)

    def run(*arguments: str) -> Result:
        fixed = ("plan", "--config", str(tmp_path / "foretick.toml"), "--profile", "h200-paper")
        return CliRunner().invoke(main, [*fixed, *arguments])

    return run


def test_json_has_a_plan_for_each_rate(command) -> None:
    done = command("--group", "2", "--partitions", "8", "--rate", "10,100", "--json")
    assert done.exit_code == 0, done.output
    plans = msgspec.json.decode(done.stdout, type=list[GroupPlan])
    assert [round(plan.ticks) for plan in plans] == [10, 100]
    assert all(len(plan.daemons) == 2 for plan in plans)


def test_what_does_not_fit_is_said_and_ends_with_status_1(command) -> None:
    done = command("--group", "3", "--partitions", "2")
    assert done.exit_code == 1
    assert "beyond capacity at 100 ticks a second, partitions: 2 keep 2 of 3 daemons busy" in done.stderr


def test_without_a_topic_to_read_the_number_of_partitions_is_asked_for(command) -> None:
    done = command("--group", "3")
    assert done.exit_code == 2
    assert "--partitions" in done.output
