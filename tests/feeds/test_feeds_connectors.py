"""Connectors by name, and settings whose errors only show in use."""

import pytest

from feeds.connector import Connector, SettingError
from feeds.connectors import SINKS, SOURCES
from feeds.source import Sink, Source

SETTINGS = {
    "http": {},
    "kafka": {"bootstrap": "127.0.0.1:1"},
    "zeromq": {"endpoint": "tcp://127.0.0.1:*"},
    "websocket": {"url": "ws://127.0.0.1:1"},
    "replay": {"file": "ticks.csv", "format": "histdata_quotes"},
}


def test_every_module_is_a_connector_of_its_name():
    assert set(SOURCES) == {"http", "kafka", "replay", "websocket", "zeromq"}
    assert set(SINKS) == {"kafka", "zeromq"}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_source_connector_opens_a_source_of_the_given_name(name):
    source = SOURCES[name](**SETTINGS[name]).open(name, 1.0)
    assert isinstance(source, Source)
    assert source.name == name


@pytest.mark.parametrize("name", sorted(SINKS))
def test_a_sink_connector_opens_a_sink_and_names_its_topics(name):
    route = SINKS[name](**SETTINGS[name]).open(name, 1.0)
    assert isinstance(route.sink, Sink)
    assert route.sink.name == name
    assert route.answers == "answers.v1"
    assert route.dead_letters == "dlq.v1"


def test_only_an_endpoint_that_is_bound_is_reported_as_bound():
    bound, connected = (SOURCES["zeromq"](endpoint="tcp://127.0.0.1:1", bind=bind) for bind in (True, False))
    assert bound.bound() == {"endpoint": "tcp://127.0.0.1:1"}
    assert connected.bound() == {}
    assert Connector().bound() == {}


def test_a_replay_of_an_unknown_format_is_refused_by_key(tmp_path):
    replay = SOURCES["replay"](file=str(tmp_path / "none"), format="nowhere")
    with pytest.raises(SettingError, match="nowhere") as refused:
        replay.open("replay", 1.0)
    assert refused.value.key == "format"
    assert [(found.key, found.ok) for found in replay.check()] == [("file", False), ("format", False)]
