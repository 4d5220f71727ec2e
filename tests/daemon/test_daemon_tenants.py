"""Tenants: what they see, and the salts of their caches."""

import re

from hypothesis import given
from hypothesis import strategies as st

from daemon.tenants import LOCAL, Client, Tenant

NAMES = st.text("abc-", max_size=5)


@given(st.lists(NAMES), st.lists(st.text("abc-*?", max_size=4), max_size=4))
def test_a_tenant_sees_what_its_patterns_match(names: list[str], patterns: list[str]) -> None:
    expressions = [p.replace("*", ".*").replace("?", ".") for p in patterns]
    wanted = [name for name in names if any(re.fullmatch(e, name) for e in expressions)]
    assert Tenant("a", tuple(patterns)).seen(names) == wanted
    assert LOCAL.seen(names) == names


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
def test_salts_are_equal_for_equal_tenants_and_own_salts_alone(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    salts = [Tenant(name).salt(own) for name, own in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)
    assert LOCAL.salt() == ""


def test_a_client_is_told_apart_by_tenant_and_name_and_its_credential_is_not_shown() -> None:
    client = Client(Tenant("a"), "http 127.0.0.1", "secret")
    assert client.key != Client(Tenant("b"), client.name).key
    assert "secret" not in repr(client)
