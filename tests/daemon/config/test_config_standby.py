"""`recovery.standby` needs a consumer group, and says so."""

import pytest

from daemon.config.load import ConfigError, load_config

KAFKA = {"source.kind": "kafka", "source.kafka": {"bootstrap": "a:1"}}
ZEROMQ = {"endpoint": "ipc://x"}
SESSIONS = [{"name": "a", "symbol": "V:A"}]


@pytest.mark.parametrize(
    ("source", "key", "says"),
    [
        ({}, "recovery.standby", "only a Kafka source has a consumer group"),
        ({"source.kind": "zeromq", "source.zeromq": ZEROMQ}, "recovery.standby", "alone, not zeromq"),
        ({"source.kind": "http"}, "recovery.standby", "alone, not http"),
        (KAFKA | {"sources": [{"name": "b", "zeromq": ZEROMQ}]}, "recovery.standby", "alone, not b, kafka"),
        (
            {"source.kind": "kafka", "source.kafka": {"bootstrap": "a:1", "start_at": "latest"}},
            "source.kafka.start_at",
            "goes on from what is committed",
        ),
    ],
)
def test_another_source_is_refused(source: dict[str, object], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, {}, {"sessions": SESSIONS, "recovery.standby": True, **source})
    assert [says in problem.message for problem in raised.value.problems if problem.key == key] == [True]


def test_with_one_kafka_source_it_is_taken() -> None:
    assert load_config(None, {}, {"sessions": SESSIONS, "recovery.standby": True, **KAFKA}).recovery.standby
