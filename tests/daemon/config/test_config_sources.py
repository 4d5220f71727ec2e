"""Further sources: each has a name of its own and one connector's table."""

from pathlib import Path

import msgspec
import pytest

from daemon.config.checks import connectors_of
from daemon.config.load import ConfigError, load_config
from daemon.gateway.connectors import make_sources
from feeds.connectors import SOURCES

ZEROMQ = {"endpoint": "ipc://x"}
SESSIONS = [{"name": "a", "symbol": "V:A"}]


def test_sources_are_told_apart_by_name() -> None:
    several = [{"name": name, "zeromq": ZEROMQ} for name in ("a", "b")]
    config = load_config(None, {}, {"sources": several, "sessions": SESSIONS})
    assert [name for name, _ in config.feeds.values()] == ["a", "b"]
    assert list(config.feeds) == ["sources[0].zeromq", "sources[1].zeromq"]


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("origin", ["file", "environment", "flag"])
def test_a_source_needs_a_table_only_for_keys_without_a_default(
    kind: str, origin: str, tmp_path: Path
) -> None:
    path = tmp_path / "foretick.toml"
    kept = f'kind = "{kind}"' if origin == "file" else ""
    path.write_text(f'[source]\n{kept}\n[[sessions]]\nname = "a"\nsymbol = "V:A"\n')
    environment = {"FORETICK_SOURCE__KIND": kind} if origin == "environment" else {}
    given = {"source.kind": kind} if origin == "flag" else {}
    table = SOURCES[kind]
    needed = [field.name for field in msgspec.structs.fields(table) if field.required]
    if needed:
        with pytest.raises(ConfigError, match=f"needed, with {', '.join(needed)}"):
            load_config(path, environment, given)
        return
    config = load_config(path, environment, given)
    assert config.source.connector == table()
    assert config.feeds == {f"source.{kind}": (kind, table())}
    assert list(connectors_of(config))[:1] == [f"source.{kind}"]
    assert [source.name for source in make_sources(config)] == [kind]


def test_a_source_s_table_is_used_where_it_is_given() -> None:
    given = {"source.kind": "http", "source.http.max_waiting": 9, "sessions": SESSIONS}
    connector = load_config(None, {}, given).source.connector
    assert (connector.max_waiting, SOURCES["http"]().max_waiting) == (9, 65_536)
