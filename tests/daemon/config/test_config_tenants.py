"""The tenants file: what it may say, and the error for what it may not."""

from pathlib import Path

import pytest
import zmq

from daemon.config.errors import ConfigError
from daemon.config.tenants_file import read_tenants
from daemon.tenants import LOCAL, Tenants, hash_of, new_key

HASH = hash_of("a key")
CURVE = zmq.curve_keypair()[0].decode()


def written(path: Path, *tables: str) -> str:
    file = path / "tenants.toml"
    file.write_text("\n".join(f"[[tenants]]\n{table}" for table in tables))
    return str(file)


def test_a_tenant_has_what_its_table_says_and_both_kinds_of_keys_find_it(tmp_path: Path) -> None:
    desk = f'name="desk"\nsessions=["btc*"]\nweight=2.5\nmax_prompts=3\napi_keys=["{HASH}"]'
    tables = read_tenants(written(tmp_path, desk, f'name="risk"\noperator=true\ncurve_keys=["{CURVE}"]'))
    tenants = Tenants(tables, "own")
    found = tenants.holder(hash_of("a key"))
    assert found is not None
    assert (found.name, found.weight, found.max_prompts, found.operator) == ("desk", 2.5, 3, False)
    assert found.seen(["btc-1", "eth-1"]) == ["btc-1"]
    risk = tenants.holder(CURVE)
    assert risk is not None
    assert (risk.operator, risk.seen(["btc-1"]), risk.feeds("http")) == (True, [], False)
    assert tenants.holder("own") is LOCAL
    assert tenants.holder(hash_of("another")) is tenants.holder("") is tenants.holder("a key") is None
    tenants.replace(tables[1:])
    assert tenants.holder(hash_of("a key")) is None
    assert tenants.names == ("risk",)


def test_keys_are_random_and_their_hashes_do_not_contain_them() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == 4 + 43 and key[4:] not in hash_of(key) for key in keys)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ((), "tenants"),
        (('name="a"\nsesions=[]',), "tenants[0].sesions"),
        (("sessions=[]",), "tenants[0]"),
        (('name="a b"',), "tenants[0].name"),
        (('name="other"',), "tenants[0].name"),
        (('name="a"', 'name="a"'), "tenants[1].name"),
        (('name="a"\nweight=0',), "tenants[0].weight"),
        (('name="a"\nweight=inf',), "tenants[0].weight"),
        (('name="a"\nrequests_per_second=-1',), "tenants[0].requests_per_second"),
        (('name="a"\napi_keys=["ftk_secret"]',), "tenants[0].api_keys[0]"),
        (('name="a"\ncurve_keys=["ftk_secret"]',), "tenants[0].curve_keys[0]"),
        ((f'name="a"\napi_keys=["{HASH}"]', f'name="b"\napi_keys=["{HASH}"]'), "tenants[1].api_keys[0]"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_repeated(
    tmp_path: Path, tables: tuple[str, ...], key: str
) -> None:
    path = written(tmp_path, *tables)
    with pytest.raises(ConfigError) as refused:
        read_tenants(path)
    assert [problem.key for problem in refused.value.problems] == [f"{path}: {key}"]
    assert "ftk_secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["[[tenants]", None])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tenants.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"tenants\.toml"):
        read_tenants(str(path))
