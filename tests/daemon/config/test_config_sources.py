"""Further sources: each has a name of its own and one connector's table."""

import pytest

from daemon.config.load import ConfigError, load_config

ZEROMQ = {"endpoint": "ipc://x"}
SESSIONS = [{"name": "a", "symbol": "V:A"}]


@pytest.mark.parametrize(
    ("sources", "key", "says"),
    [
        ([{"name": "a"}], "sources[0]", "needs one table of http, kafka, replay, zeromq; there is: none"),
        ([{"name": "all", "zeromq": ZEROMQ}], "sources[0].name", "names all sources together"),
        ([{"name": "zeromq", "zeromq": ZEROMQ}], "sources[0].name", "is already source.kind"),
        ([{"name": "a", "zeromq": ZEROMQ}] * 2, "sources[1].name", "is already sources[0].name"),
    ],
)
def test_a_wrong_source_names_its_key(sources: list[dict[str, object]], key: str, says: str) -> None:
    given = {"source.kind": "zeromq", "source.zeromq": ZEROMQ, "sources": sources, "sessions": SESSIONS}
    with pytest.raises(ConfigError) as raised:
        load_config(None, {}, given)
    assert [says in problem.message for problem in raised.value.problems if problem.key == key] == [True]


def test_sources_need_a_session() -> None:
    with pytest.raises(ConfigError, match="the sources have no session"):
        load_config(None, {}, {"sources": [{"name": "a", "zeromq": ZEROMQ}]})


def test_sources_are_told_apart_by_name() -> None:
    several = [{"name": name, "zeromq": ZEROMQ} for name in ("a", "b")]
    config = load_config(None, {}, {"sources": several, "sessions": SESSIONS})
    assert [name for name, _ in config.feeds.values()] == ["a", "b"]
    assert list(config.feeds) == ["sources[0].zeromq", "sources[1].zeromq"]
