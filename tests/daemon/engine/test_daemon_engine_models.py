"""Several models in one engine: memory that they share, their names, and what refuses a second one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import structs

from daemon.cli.main import main
from daemon.config.schema import UNTRAINED, Config, ModelConfig, NamedModel, PoolConfig, SessionConfig
from daemon.engine import build as building
from daemon.engine.build import build
from daemon.engine.memory_budget import SharedMemory
from engine.model.embedded import embedded_directory
from feeds.connector import SettingError
from regions.kv_tensors import KVPool
from tests.kit import inproc_config, log_source

CPU = torch.device("cpu")


def config(**second: Any) -> Config:
    return inproc_config(
        model=ModelConfig(path=UNTRAINED, layers="torch", threads=1),
        models=(NamedModel(**{"name": "chat", "path": UNTRAINED, "seed": 1, "layers": "torch"} | second),),
        sessions=(
            SessionConfig(name="one", symbol="V:A", retention_tokens=256),
            SessionConfig(name="two", symbol="V:A", model="chat", retention_tokens=256),
        ),
        standing="none",
    )


def test_each_model_has_its_pool_its_sessions_and_its_names() -> None:
    built = build(config(blocks=2048, aliases=("gpt-x",)), {})
    first, second = built.all
    assert [[*each.tapes] for each in (first, second)] == [["one"], ["two"]]
    assert second.engine.pool.capacity == 2048 != first.engine.pool.capacity
    assert first.loaded.revision != second.loaded.revision
    assert first.names == (first.loaded.name,)
    assert second.names == (second.loaded.name, "chat", "gpt-x")
    assert first.identity != second.identity  # so a snapshot of one is foreign to the other


def test_one_directory_twice_is_told_apart_by_the_configured_name() -> None:
    first, second = build(config(seed=0), {}).all
    assert (first.names, second.names) == ((first.loaded.name,), ("chat",))


def test_a_name_that_is_another_model_s_own_is_refused() -> None:
    with pytest.raises(SettingError, match="name of another model") as refused:
        build(config(name=embedded_directory().name), {})
    assert refused.value.key == "models[0].name"


def test_the_second_model_gets_what_the_first_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    both = build(config(), {})
    sizes = [
        each.engine.pool.capacity * each.engine.pool.bytes // each.engine.pool.total_blocks
        for each in both.all
    ]
    for enough in (True, False):
        free = int(sum(sizes) / 0.95) + 4096 if enough else int(sum(sizes) * 0.99)
        monkeypatch.setattr(building, "SharedMemory", lambda free=free: SharedMemory(lambda device: free))
        if enough:
            build(config(), {})
            continue
        with pytest.raises(SettingError, match="available") as refused:
            build(config(), {})
        assert refused.value.key == "models[0].blocks"


def test_pools_and_host_tiers_of_all_models_come_off_the_same_memory() -> None:
    loaded = build(config(), {}).loaded
    each = KVPool.block_bytes(loaded.layers, 16, loaded.dtype)
    memory = SharedMemory(lambda device: 1000 * each)
    assert memory(CPU) == 1000 * each
    memory.take(PoolConfig(host_blocks=30), 200, loaded)
    memory.take(PoolConfig(), 70, loaded)
    assert memory(CPU) == 700 * each


FILE = """
standing = "none"
[http]
port = 0
[query]
endpoint = "tcp://127.0.0.1:*"
[model]
path = "untrained"
layers = "torch"
threads = 1
[[models]]
name = "chat"
path = "PATH"
layers = "torch"
blocks = BLOCKS
[[sessions]]
name = "one"
symbol = "V:A"
retention_tokens = 256
"""


@pytest.mark.parametrize(
    ("path", "blocks", "said"),
    [
        ("no-such-directory", 0, "WRONG models[0].path: no-such-directory"),
        ("broken", 0, "WRONG models[0].path: "),
        ("untrained", 10**9, "WRONG models[0].blocks: 1,000,000,000 blocks need"),
    ],
)
def test_check_says_in_one_line_what_is_wrong_with_the_second_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, blocks: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    (tmp_path / "f.toml").write_text(FILE.replace("PATH", path).replace("BLOCKS", str(blocks)))
    done = CliRunner().invoke(main, ["check", "--config", "f.toml"])
    assert done.exit_code == 2, done.output
    (line,) = [each for each in done.output.splitlines() if each.startswith("WRONG")]
    assert line.startswith(said)


def test_check_tells_of_both_models(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(FILE.replace("PATH", "untrained").replace("BLOCKS", "500"))
    done = CliRunner().invoke(main, ["check", "--config", str(tmp_path / "f.toml")])
    assert done.exit_code == 0, done.output
    assert "ok    models[0].path: untrained-llama" in done.output
    assert "ok    models[0].blocks: 500 blocks" in done.output


def test_a_part_s_opened_sessions_are_those_of_its_model() -> None:
    both = config()
    parts = [each.opened.sessions for each in build(both, {}).all]
    assert parts == [(both.sessions[0],), (both.sessions[1],)]


def test_sessions_that_open_by_partition_have_room_in_their_model_s_pool() -> None:
    first, second = build(structs.replace(config(), source=log_source()), {}).all
    for built, name in ((first, "one"), (second, "two")):
        assert (built.tapes, built.opened.sessions) == ({}, ())
        assert built.limit.at_a_time >= 1
        (session,) = (each for each in config().sessions if each.name == name)
        assert built.limit.has_room(session, compact=False)
