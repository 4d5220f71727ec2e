"""Secrets are removed from what leaves the machine: the configuration's own, and those in files it names."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from daemon.config.schema import Config
from daemon.doctor.leaves import named

REMOVED = "[removed]"
SECRET_FILES = tuple(
    f"{name}_file" for name in ("secret_key", "secret", "key", "tls_key", "credentials", "token", "headers")
)
"""Keys whose files hold secrets; the tenants file has hashes of keys, which are removed, too."""
MIN_SECRET = 4
"""Characters of a secret that is looked for: a shorter one would match everywhere."""
_KEY = re.compile(r"[A-Za-z0-9+/=_.:-]{16,}")
_SECRET_NAME = re.compile(r"(?i)key|token|secret|sign|auth|pass")
_IS = r"""\\?["']?\s*[:=]\s*"""
_QUOTED = r"""b?(?:\\"(?:(?!\\").)+|"(?:[^"\\\n]|\\.)+"?|'(?:[^'\\\n]|\\.)+'?)"""
"""As JSON and Python write it, also JSON inside JSON; what is cut ends with the line."""
_LINE = re.compile(rf"(?i)(authorization|cookie|passphrase)({_IS})[^\s][^\r\n]*")
"""Names whose values have spaces."""
_ASSIGNED = re.compile(
    rf"(?i)(password|passwd|secret|token|(?:api|access|listen|private|secret)[-_]?key)({_IS})"
    rf"""(?:{_QUOTED}|[^\s"',;&]{{4,}})"""
)
_PATH = re.compile(r"""(?i)\b([a-z][a-z0-9+.-]*://[^/\s"']*)(/[^\s"'?#]*)""")
_SEGMENT = re.compile(r"(?<=/)(?=[^/@]*\d)[A-Za-z0-9+=_.:~%-]{16,}+(?!@)")
"""A part of a path that looks like a key; a stream of a venue has its channel after an @."""
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=_.~-]{8,}")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@\"']+@")


@dataclass(frozen=True)
class Redactor:
    """Replaces ``secrets`` wherever they stand, and what looks like one."""

    secrets: tuple[str, ...]

    @classmethod
    def of(cls, config: Config) -> "Redactor":
        """The secrets of a configuration, the longest first, for one may begin another."""
        found = {secret for secret in _secrets_of(config) if len(secret) >= MIN_SECRET}
        # also as a log in JSON and a URL have them
        forms = {form for each in found for form in (each, json.dumps(each)[1:-1], quote(each, safe=""))}
        return cls(tuple(sorted(forms, key=len, reverse=True)))

    def clean(self, value: Any) -> Any:
        """A text, or the texts in dicts, lists and tuples, without them."""
        if isinstance(value, str):
            for secret in self.secrets:
                value = value.replace(secret, REMOVED)
            for assigned in (_LINE, _ASSIGNED):
                value = assigned.sub(rf"\1\2{REMOVED}", value)
            value = _USERINFO.sub(rf"\1{REMOVED}@", _SCHEME.sub(rf"\1 {REMOVED}", value))
            return _PATH.sub(lambda url: url[1] + _SEGMENT.sub(REMOVED, url[2]), value)
        if isinstance(value, Mapping):
            return {self.clean(name): self.clean(each) for name, each in value.items()}
        return [self.clean(each) for each in value] if isinstance(value, list | tuple) else value


def _secrets_of(config: Config) -> Iterator[str]:
    for key, path in named(config, *SECRET_FILES):
        yield from _in_file(key, path)
    if config.tenants.file:
        yield from _KEY.findall("\n".join(_lines(config.tenants.file)))
    for _, message in named(config, "subscribe"):  # it may log in
        yield from (message, *_KEY.findall(message))
    for _, url in named(config, "url", "proxy", "endpoint"):
        parts = urlsplit(url)
        login = parts.password or parts.username or ""  # a name alone is a token
        values = parse_qsl(parts.query)
        yield from (login, unquote(login), parts.query, *_SEGMENT.findall(parts.path))
        yield from (value for name, value in values if _SECRET_NAME.search(name) or _KEY.fullmatch(value))


def _in_file(key: str, path: str) -> Iterator[str]:
    # a user's name is no secret, and may be any word
    for line in _lines(path)[1:] if key.endswith("credentials_file") else _lines(path):
        value = line.partition(":")[2].strip() if key.endswith("headers_file") else line
        yield from (line, value, value.rpartition(" ")[2])


def _lines(path: str) -> list[str]:
    """None of a file that this user cannot read, and so cannot show."""
    try:
        return [line.strip() for line in Path(path).read_text("utf-8", "replace").splitlines()]
    except OSError:
        return []
