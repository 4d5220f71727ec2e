"""`foretick check` against a topic: a session in one partition, and partitions for every daemon."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.cli.check import check_all, placement_findings
from daemon.config.load import load_config
from daemon.config.schema import PoolConfig, SessionConfig
from feeds.connector import Finding
from feeds.kafka_sink import KafkaSink
from feeds.mock_broker import MockBroker
from feeds.topic_sample import TopicSample
from tests.kit import inproc_config, log_source
from tests.kit.kafka import free_ports
from tests.kit.records import START, TOPIC, trade

PAIR = SessionConfig("pair", "V:A", ("V:B",))
KEY = "source.kafka.topics"


def findings(sample: TopicSample, group: int = 1) -> tuple[list[Finding], str]:
    """What is wrong, and the summary."""
    *wrong, summary = placement_findings(KEY, [PAIR, SessionConfig("c", "V:C")], sample, group)
    assert summary.ok
    return wrong, summary.message


def test_the_names_of_a_symbol_are_looked_for_as_the_symbol() -> None:
    names = {"V:a": "V:A", "V:b": "V:B", "V:aa": "V:A"}
    together = TopicSample(
        {("t", 0): {"V:a": 1.0, "V:aa": 2.0, "V:B": 1.0, "V:b": 1.0}, ("t", 1): {"V:C": 1.0}}
    )
    assert together.renamed(names).rates == {("t", 0): {"V:A": 3.0, "V:B": 2.0}, ("t", 1): {"V:C": 1.0}}
    assert findings(together.renamed(names))[0] == []
    (wrong,) = findings(TopicSample({("t", 0): {"V:a": 1.0}, ("t", 1): {"V:aa": 1.0}}).renamed(names))[0]
    assert "V:A in t/0, t/1" in wrong.message


@pytest.mark.parametrize(
    ("rates", "split"),
    [
        ([{"V:A": 1.0, "V:B": 1.0}, {"V:C": 1.0}], False),
        ([{"V:A": 1.0}, {"V:C": 1.0}], False),
        ([{"V:A": 1.0, "V:C": 1.0}, {"V:B": 1.0}], True),
        ([{"V:A": 1.0, "V:B": 1.0}, {"V:B": 1.0}], True),
        ([{}, {}], False),
    ],
)
def test_symbols_of_a_session_are_in_one_partition(rates: list[dict[str, float]], split: bool) -> None:
    wrong, summary = findings(TopicSample({(TOPIC, n): found for n, found in enumerate(rates)}))
    assert [each.key for each in wrong if "session pair is split" in each.message] == [KEY] * split
    assert len(wrong) == split
    assert summary.startswith(f"2 partitions; {len(set().union(*rates))} symbols")


def test_what_is_split_is_named_with_its_partitions() -> None:
    (wrong,), _ = findings(TopicSample({(TOPIC, 0): {"V:A": 1.0}, (TOPIC, 7): {"V:A": 1.0, "V:B": 9.0}}))
    assert f"V:A in {TOPIC}/0, {TOPIC}/7; V:B in {TOPIC}/7" in wrong.message


@pytest.mark.parametrize(("group", "wrong"), [(1, 0), (2, 0), (3, 1)])
def test_there_is_a_partition_for_each_daemon(group: int, wrong: int) -> None:
    found, _ = findings(TopicSample({(TOPIC, 0): {}, (TOPIC, 1): {}}), group)
    assert len(found) == wrong
    assert all("2 partitions keep 2 of 3 daemons busy" in each.message for each in found)


def test_check_reads_the_topic_of_the_configuration(tmp_path: Path) -> None:
    with MockBroker() as broker:
        for topic, partitions in ((TOPIC, 2), ("answers.v1", 1), ("dlq.v1", 1)):
            broker.create_topic(topic, partitions)
        asyncio.run(_fill(broker.bootstrap))
        file = tmp_path / "foretick.toml"
        file.write_text(
            f'[source]\nkind = "kafka"\n[source.kafka]\nbootstrap = "{broker.bootstrap}"\n'
            '[query]\nendpoint = ""\n[[sessions]]\nname = "pair"\nsymbol = "V:A"\nmore_symbols = ["V:B"]\n'
            'lines = "decimal"\n[model]\npath = "untrained"\nlayers = "torch"\n'
        )
        config = load_config(file, {}, {"http.port": free_ports(1)[0]})
        wrong = [each.message for each in check_all(config, 3) if each.key == KEY and not each.ok]
    assert len(wrong) == 2
    assert "2 partitions keep 2 of 3 daemons busy" in wrong[0]
    assert f"V:A in {TOPIC}/0; V:B in {TOPIC}/1" in wrong[1]


async def _fill(bootstrap: str) -> None:
    sink = KafkaSink("fill", bootstrap)
    await sink.start()
    # the default partitioner puts one of these keys into each of two partitions
    for key, symbol in ((b"V:A", "V:A"), (b"OTHER", "V:B")):
        await sink.publish(TOPIC, key, trade(symbol, START), {})
    await sink.stop()


@pytest.mark.parametrize(("group", "ok"), [(6, False), (7, True)])
def test_check_says_how_many_daemons_have_room_for_all_sessions(group: int, ok: bool) -> None:
    names = [f"V:S{number}" for number in range(20)]
    config = replace(inproc_config(names), source=log_source())
    alike = {name: PoolConfig(blocks=blocks) for name, blocks in (("all", 0), ("some", 1500))}
    found = {
        name: [each for each in check_all(replace(config, pool=pool), group) if each.key == "sessions"]
        for name, pool in alike.items()
    }
    assert [each.message for each in found["all"]] == ["a daemon has room for 20 of 20 sessions at a time"]
    (some,) = found["some"]
    assert some.ok is ok
    assert some.message.startswith("a daemon has room for 3 of 20")
    assert ("at least 7 daemons are needed" in some.message) is not ok
