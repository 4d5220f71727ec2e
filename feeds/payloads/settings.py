"""Which formats the messages of a source have, as configured."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from feeds.connector import Finding, SettingError, SourceConnector, about, settings_in
from feeds.durations import Duration
from feeds.secret_files import read_login, read_secret

if TYPE_CHECKING:
    from feeds.payloads.format_decoder import FormatDecoder
    from feeds.payloads.payload_decoder import PayloadDecoder
    from feeds.payloads.schema_registry import SchemaRegistry


class RegistrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema registry that speaks Confluent's API: Confluent's own, Apicurio, Karapace, Redpanda's."""

    url: Annotated[
        str, about('base URL, such as https://registry:8081; "" for none', pattern=r"^(https?://.+)?$")
    ] = ""
    credentials_file: Annotated[
        str, about("user name and password, a line each; only its owner may read the file")
    ] = ""
    token_file: Annotated[str, about("bearer token; only its owner may read the file")] = ""
    ca_file: Annotated[
        str, about('certificate authorities that sign the registry, in PEM; "" trusts those of the system')
    ] = ""
    certificate_file: Annotated[str, about("certificate by which the registry knows this client, in PEM")] = (
        ""
    )
    key_file: Annotated[str, about("private key of that certificate, in PEM")] = ""
    timeout: Annotated[Duration, about("longest wait for one reply")] = Duration(5_000_000_000)

    def open(self) -> SchemaRegistry | None:
        """The registry, if there is one. Raises SettingError."""
        if not self.url:
            return None
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            needs = "a registry needs confluent-kafka: pip install 'foretick[registry]'"
            raise SettingError("url", f"{needs} ({error})") from error
        from feeds.payloads.schema_registry import SchemaRegistry

        try:
            return SchemaRegistry(SchemaRegistryClient(self._options()))
        except (OSError, ValueError, TypeError) as error:
            raise SettingError("url", str(error)) from error

    def check(self, registry: SchemaRegistry | None) -> Iterator[Finding]:
        """Whether it answers, if there is one."""
        if registry is None:
            return
        try:
            registry.check()
            yield Finding("registry.url", f"{self.url} answers")
        except Exception as error:  # whatever the client raises
            yield Finding("registry.url", f"{self.url} does not answer: {error}", ok=False)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "url": self.url,
            "timeout": self.timeout / 1e9,
            "max.retries": 0,  # `SchemaRegistry` tries again itself
            "ssl.ca.location": self.ca_file or ssl.get_default_verify_paths().cafile,
            "ssl.certificate.location": self.certificate_file or None,
            "ssl.key.location": self.key_file or None,
        }
        if self.credentials_file:
            login = read_login("credentials_file", self.credentials_file)
            options["basic.auth.user.info"] = ":".join(login)
        if self.token_file:
            options |= {
                "bearer.auth.credentials.source": "STATIC_TOKEN",
                "bearer.auth.token": read_secret("token_file", self.token_file).strip(),
                "bearer.auth.logical.cluster": "",
            }
        if self.key_file:
            read_secret("key_file", self.key_file)
        return {name: value for name, value in options.items() if value is not None}


_CONDITION = r"^([^=]+=.+)?$"
"""NAME=PATTERN, or nothing."""


class FormatRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A format of some of the messages."""

    format: Annotated[str, about("name of a built-in format, or the TOML file of another", min_length=1)]
    topics: Annotated[
        tuple[str, ...], about("topics whose messages have it, or patterns such as md.*.v1; none for any")
    ] = ()
    header: Annotated[
        str,
        about(
            'a header that messages of it have, and its value or a pattern of it, such as type=quote; "" for '
            "any",
            pattern=_CONDITION,
        ),
    ] = ""
    field: Annotated[
        str,
        about(
            "a field that messages of it have (JSON and msgpack), and its value or a pattern of it, such as "
            'data.0.kind=*trade; "" for any',
            pattern=_CONDITION,
        ),
    ] = ""


class MessageSource(SourceConnector, frozen=True, kw_only=True):
    """Settings of a source whose messages may be in declared formats."""

    format: Annotated[
        str,
        about(
            'format of the messages: the name of a built-in one, or the TOML file of another; "" for '
            "Foretick's own records"
        ),
    ] = ""
    formats: Annotated[
        tuple[FormatRule, ...],
        about(
            "formats of some of the messages, by topic, header or field; the first that covers a message "
            "counts"
        ),
    ] = ()
    registry: RegistrySettings = RegistrySettings()

    def payloads(self, max_bytes: int) -> PayloadDecoder:
        """The decoder of its messages, each of at most ``max_bytes``. Raises SettingError."""
        return self._payloads(max_bytes, self._open_registry())

    def _open_registry(self) -> SchemaRegistry | None:
        with settings_in("registry"):
            return self.registry.open()

    def _payloads(self, max_bytes: int, registry: SchemaRegistry | None) -> PayloadDecoder:
        from feeds.payloads.format_decoder import ByRule, Rule
        from feeds.payloads.payload_decoder import WireDecoder

        other: PayloadDecoder = WireDecoder(max_bytes)
        if self.format:
            other = self._decoder("format", self.format, max_bytes, registry)
        rules = []
        for index, rule in enumerate(self.formats):
            decoder = self._decoder(f"formats[{index}].format", rule.format, max_bytes, registry)
            header, field = _named(rule.header), _named(rule.field)
            if field is not None and not decoder.has_fields:
                raise SettingError(f"formats[{index}].field", "only messages of JSON and msgpack have fields")
            rules.append(Rule(decoder, rule.topics, header, field))
        return ByRule(rules, other) if rules else other

    def _decoder(self, key: str, name: str, max_bytes: int, registry: SchemaRegistry | None) -> FormatDecoder:
        from feeds.file_format import FormatError, load_format
        from feeds.payloads.format_decoder import FormatDecoder

        try:
            return FormatDecoder(load_format(name, of_messages=True), max_bytes, registry)
        except FormatError as error:
            raise SettingError(key, str(error)) from error

    def check_formats(self) -> Iterator[Finding]:
        """The formats can be used, and the registry answers."""
        try:
            registry = self._open_registry()
            self._payloads(1, registry)
        except SettingError as error:
            yield Finding(error.key, error.message, ok=False)
            return
        names = [rule.format for rule in self.formats] + ([self.format] if self.format else [])
        if names:
            yield Finding("format", ", ".join(names))
        yield from self.registry.check(registry)


def _named(condition: str) -> tuple[str, str] | None:
    """The name and the pattern in NAME=PATTERN."""
    name, _, pattern = condition.partition("=")
    return (name, pattern) if name else None
