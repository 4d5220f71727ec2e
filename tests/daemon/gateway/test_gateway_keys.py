"""Keys and tenants at the start: what cannot be used is named by its setting, and no key is repeated."""

from pathlib import Path

import pytest

from daemon.config.schema import Config, QueryConfig, TenantsConfig
from daemon.gateway.credentials import query_keys, tenants_of
from feeds.connector import SettingError
from feeds.curve import make_keys


def test_the_socket_has_its_own_pair_and_its_holder_is_local(tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path / "daemon")
    keys = query_keys(QueryConfig(secret_key_file=str(secret)))
    assert keys is not None
    assert keys.public == keys.server == public.read_bytes().strip()
    file = tmp_path / "tenants.toml"
    file.write_text('[[tenants]]\nname = "desk"')
    tenants = tenants_of(Config(tenants=TenantsConfig(str(file))), keys)
    local = tenants.holder(keys.public.decode())
    assert local is not None
    assert (local.name, local.operator, tenants.names) == ("", True, ("desk",))


def test_without_files_nobody_needs_a_key() -> None:
    assert query_keys(QueryConfig()) is None
    assert not tenants_of(Config(), None).required


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    _, secret = make_keys(tmp_path / "daemon")
    secret.chmod(0o644)
    with pytest.raises(SettingError) as refused:
        query_keys(QueryConfig(secret_key_file=str(secret)))
    assert refused.value.key == "query.secret_key_file"
    assert secret.read_text().strip() not in str(refused.value)


def test_a_bad_tenants_file_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[[tenants]]\nname = "desk"\napi_keys = ["ftk_plain"]')
    for path in (file, tmp_path / "absent"):
        with pytest.raises(SettingError) as refused:
            tenants_of(Config(tenants=TenantsConfig(str(path))), None)
        assert (refused.value.key, str(path) in refused.value.message) == ("tenants.file", True)
        assert "ftk_plain" not in str(refused.value)
