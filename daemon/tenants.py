"""Tenants, and the clients that act for them: who asks, what they see, and how much they may ask.

Without a tenants file there is one tenant, `LOCAL`: every program of this machine, which may do everything.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from daemon.config.tenants_file import TenantTable

ALL = ("*",)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the tenants file, without its keys. Limits of 0 are none.

    ``sessions``: shell patterns of the names that it sees; ``sources``: of those that it may push into;
    ``weight``: its share within a scheduling class
    relative to other tenants'. ``operator``: it may change sessions and questions, and read all metrics.
    """

    name: str
    sessions: tuple[str, ...] = ALL
    sources: tuple[str, ...] = ALL
    weight: float = 1.0
    requests_per_second: float = 0.0
    tokens_per_minute: int = 0
    engine_share: float = 0.0
    max_prompts: int = 0
    max_listeners: int = 0
    operator: bool = False

    def sees(self, session: str) -> bool:
        """Whether there is such a session as far as this tenant can tell."""
        return self.sessions == ALL or _matches(self.sessions, session)

    def feeds(self, source: str) -> bool:
        """Whether it may push records into this source."""
        return self.sources == ALL or _matches(self.sources, source)

    def seen(self, sessions: Iterable[str]) -> list[str]:
        """Those of ``sessions`` that it sees, in their order."""
        return [name for name in sessions if self.sees(name)]

    def salt(self, own: str = "") -> str:
        """The salt of every cache for requests of this tenant; empty is that of `LOCAL`.

        ``own``: a client's own salt, under which it shares with no other client of its tenant either.
        """
        if not self.name and not own:
            return ""
        # a name has no line break, so no pair of name and salt reads like another
        return hashlib.sha256(f"{self.name}\n{own}".encode()).hexdigest()[:32]


LOCAL = Tenant("", operator=True)


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request. ``name``: what limits per client count by: an HTTP address, or a ZeroMQ route.

    ``credential`` finds the tenant again after the tenants file was read again; empty without a key.
    ``forwarded``: another daemon of the consumer group sent it on, for a client of its own.
    """

    tenant: Tenant
    name: str
    credential: str = field(default="", repr=False)
    forwarded: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the client among those of all tenants."""
        return self.tenant.name, self.name


class Tenants:
    """The tenants of the file as it was read last. Without a file none needs a key.

    ``own``: the public CURVE key of this daemon's query socket. Who has its secret part is an operator of the
    machine, or another daemon of the group, and acts as `LOCAL`.
    """

    def __init__(self, tables: Sequence[TenantTable] | None = None, own: str = "") -> None:
        self.required = tables is not None
        self._own = own
        # an index that no outsider can compute says nothing by the time that a look-up takes
        self._secret = secrets.token_bytes(32)
        self.replace(tables or ())

    def replace(self, tables: Sequence[TenantTable]) -> None:
        """The file was read again: these are the tenants from now on."""
        members = list(Tenant.__dataclass_fields__)
        self._by_name = {t.name: Tenant(**{name: getattr(t, name) for name in members}) for t in tables}
        self._by_key = {
            self._index(credential): (credential, self._by_name[table.name])
            for table in tables
            for credential in (*table.api_keys, *table.curve_keys)
        }
        if self._own:
            self._by_key[self._index(self._own)] = self._own, LOCAL

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tenants, in the file's order."""
        return tuple(self._by_name)

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name; empty is `LOCAL`."""
        return LOCAL if not name else self._by_name.get(name)

    def holder(self, credential: str) -> Tenant | None:
        """Whose this is: the hash of an API key (`hash_of`), or a public CURVE key that a peer has proven.

        How long it takes says nothing about keys that are close to it.
        """
        known, tenant = self._by_key.get(self._index(credential), ("", None))
        return tenant if hmac.compare_digest(known.encode(), credential.encode()) else None

    def is_own(self, credential: str) -> bool:
        """Whether it is the key of this daemon's query socket."""
        return bool(self._own) and credential == self._own

    def _index(self, credential: str) -> bytes:
        return hashlib.blake2b(credential.encode(), key=self._secret, digest_size=16).digest()


API_KEY = "ftk_"
"""How API keys begin, so that a scanner of code finds one that was left there."""


def new_key() -> str:
    """An API key: 256 random bits, in characters that a URL and a header may have."""
    return API_KEY + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """An API key as the tenants file has it.

    A fast hash is enough: no attacker finds 256 random bits by trying, as they find a password.
    """
    return "sha256:" + hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


@lru_cache(maxsize=1 << 14)
def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
