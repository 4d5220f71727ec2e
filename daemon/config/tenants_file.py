"""The tenants file: who may ask, with which keys, and how much."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from daemon.config.errors import ConfigError, ConfigProblem
from daemon.config.load import load_table, read_toml
from daemon.config.schema import Table
from feeds.connector import about
from feeds.curve import is_key

RESERVED = ("local", "other")
"""Names that stand for the daemon's own tools, and for tenants that came later, in metrics."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class TenantTable(Table, frozen=True):
    """A tenant: its keys, what it sees, and its limits, all its clients together. 0 is no limit."""

    name: Annotated[str, about("unique", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
    sessions: Annotated[
        tuple[str, ...],
        about(
            "the sessions that it sees, by name; `*`, `?` and `[abc]` match as in a shell; none by default"
        ),
    ] = ()
    sources: Annotated[
        tuple[str, ...],
        about("the sources that it may push records into, by name, matched alike; none by default"),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...], about("hashes of its keys for HTTP, as `foretick keys --api NAME` prints them")
    ] = ()
    curve_keys: Annotated[
        tuple[str, ...],
        about("its public keys for the query socket: the text of NAME.public of `foretick keys NAME`"),
    ] = ()
    weight: Annotated[
        float,
        about("its share of the engine beside other tenants', within a scheduling class", ge=1e-6, le=1e6),
    ] = 1.0
    requests_per_second: Annotated[
        float, about("requests a second over all interfaces; as many may come at once", ge=0, le=1e6)
    ] = 0.0
    tokens_per_minute: Annotated[
        int,
        about(
            "prompt and answer tokens that are computed for it a minute; what is reused is free. Tokens are "
            "charged as they are computed, so a request may overdraw, and the next ones wait",
            ge=0,
        ),
    ] = 0
    engine_share: Annotated[
        float,
        about(
            "share of the engine's time that its prompts and asks may take; what that is in "
            "`scheduler.share_window` may be taken at once, and a request may overdraw; 0 is any",
            ge=0,
            le=1,
        ),
    ] = 0.0
    max_prompts: Annotated[int, about("most prompts open at a time", ge=0)] = 0
    max_listeners: Annotated[
        int,
        about("most clients that listen to events at a time; 0: half of `http.max_listeners`", ge=0),
    ] = 0
    operator: Annotated[
        bool,
        about("it may open, change and close its sessions, change their questions, and read all metrics"),
    ] = False


class TenantsFile(Table, frozen=True):
    """The whole file."""

    tenants: tuple[TenantTable, ...] = ()


def read_tenants(path: str) -> tuple[TenantTable, ...]:
    """All tenants. Raises ConfigError, whose keys begin with the file's name."""
    try:
        read = load_table(TenantsFile, read_toml(Path(path))).tenants
    except ConfigError as error:
        raise ConfigError(
            [ConfigProblem(f"{path}: {p.key}" if p.key else "", p.message) for p in error.problems]
        ) from None
    problems = [ConfigProblem(f"{path}: {key}", message) for key, message in _contradictions(read)]
    if problems:
        raise ConfigError(problems)
    return read


def _contradictions(tenants: tuple[TenantTable, ...]) -> Iterator[tuple[str, str]]:
    """Keys, and what is wrong with them."""
    if not tenants:
        yield "tenants", "there are none: no client could ask"
    names: dict[str, str] = {}
    keys: dict[str, str] = {}
    for index, tenant in enumerate(tenants):
        here = f"tenants[{index}]"
        if tenant.name in RESERVED:
            yield f"{here}.name", f"{tenant.name!r} has a meaning of its own: take another"
        if (first := names.setdefault(tenant.name, here)) != here:
            yield f"{here}.name", f"{tenant.name!r} is already {first}.name"
        given = [(f"api_keys[{n}]", key, bool(_HASH.fullmatch(key))) for n, key in enumerate(tenant.api_keys)]
        given += [(f"curve_keys[{n}]", key, is_key(key)) for n, key in enumerate(tenant.curve_keys)]
        for name, key, fits in given:
            where = f"{here}.{name}"
            # a key that stands in the file by mistake is not repeated in a log
            if not fits:
                yield where, "is not what `foretick keys` prints"
            elif (known := keys.setdefault(key, where)) != where:
                yield where, f"is already {known}: a key has one tenant"
