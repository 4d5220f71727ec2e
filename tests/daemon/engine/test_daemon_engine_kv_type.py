"""`model.kv_dtype`: how its models differ, what a block and a plan then take, and what is refused."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from daemon.cli.main import main
from daemon.config.schema import UNTRAINED, Config, ModelConfig
from daemon.engine.build import build, directory_of
from engine.model import canary
from lab.plan.outline import outline_of
from regions.kv_codes import SCALE
from regions.kv_tensors import KVPool
from regions.offload.snapshot_format import ForeignSnapshot, Snapshot, SnapshotHeader, write_snapshot
from regions.tape import Retention
from tests.kit import inproc_config

FILE = """
standing = "none"
[model]
path = "untrained"
kv_dtype = "int8"
layers = "compiled"
calibration = "off"
[pool]
memory = 4_000_000
host_blocks = 0
[[sessions]]
name = "one"
symbol = "V:A"
retention_tokens = 256
"""
KINDS = {"auto": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def config_of(kv: str) -> Config:
    settings = ModelConfig(path=UNTRAINED, layers="compiled", threads=1, kv_dtype=kv)  # type: ignore[arg-type]
    return inproc_config(model=settings, standing="none")


def check(tmp_path: Path) -> tuple[int, list[str]]:
    (tmp_path / "f.toml").write_text(FILE)
    done = CliRunner().invoke(main, ["check", "--config", str(tmp_path / "f.toml")])
    return done.exit_code, done.output.splitlines()


def test_check_says_what_a_token_takes_and_a_pool_of_given_memory_has_more_blocks(tmp_path: Path) -> None:
    code, lines = check(tmp_path)
    assert code == 0, lines
    pool = build(config_of("int8"), {}).engine.pool
    token = KVPool.block_bytes(pool.layers, 1, torch.int8)
    assert f"ok    model.kv_dtype: int8: {token:,} bytes a token" in lines
    blocks = 4_000_000 // (16 * token)
    assert any(line.startswith(f"ok    pool.memory: {blocks} blocks") for line in lines), lines


def test_types_of_kv_are_told_apart_in_answers_and_snapshots() -> None:
    built = [build(config_of(kv), {}) for kv in KINDS]
    assert [each.engine.pool.dtype for each in built] == list(KINDS.values())
    assert {each.loaded.dtype for each in built} == {torch.float32}
    assert len({each.loaded.revision for each in built}) == 3
    assert len({each.identity.dtype for each in built}) == 3


def test_a_snapshot_of_another_type_of_kv_is_foreign(tmp_path: Path) -> None:
    one, other = (build(config_of(kv), {}) for kv in ("int8", "auto"))
    engine, file = one.engine, tmp_path / "s.kv"
    tape = engine.open_tape("t", [3, 4, 5], Retention(40))
    engine.append(tape, [[6, 7, 8, 9]])
    header = SnapshotHeader("t", one.identity, engine.pool.block_size, tape.state, 1)
    write_snapshot(file, header, engine.pool, tape.live_ranges)
    tape.release()
    snapshot = Snapshot.open(file)
    snapshot.expect(one.identity)
    with pytest.raises(ForeignSnapshot, match="is foreign"):
        snapshot.expect(other.identity)


@pytest.mark.parametrize("kv", KINDS)
def test_a_plan_counts_kv_as_the_pool_takes_it(kv: str) -> None:
    config = config_of(kv)
    pool = build(config, {}).engine.pool
    token = outline_of(directory_of(config.model), "auto", config.model.kv_dtype).token_bytes
    assert pool.bytes == pool.total_blocks * pool.block_size * token
    heads = sum(2 * layer.kv_heads for layer in pool.layers)
    floats = KVPool.block_bytes(pool.layers, 1, torch.float32)
    assert token == {"auto": floats, "bfloat16": floats // 2, "int8": floats // 4 + SCALE * heads}[kv]


def test_a_model_that_such_kv_changes_too_much_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "_KV", 1e-6)
    code, lines = check(tmp_path)
    assert code == 2
    (line,) = [each for each in lines if each.startswith("WRONG")]
    assert line.startswith("WRONG model.kv_dtype: with model.kv_dtype int8, the logits of ")
