"""How Kafka clients prove who they are: TLS and SASL, with user and password from a file."""

import ssl
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from feeds.connector import Finding, SettingError, about
from feeds.secret_files import read_login, read_secret

Mechanism = Literal["none", "plain", "scram-sha-256", "scram-sha-512"]


class KafkaSecurity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encryption and login. Without a key here the connection is in the clear and anonymous."""

    tls: Annotated[bool, about("encrypt the connection, and verify the broker's certificate and name")] = (
        False
    )
    ca_file: Annotated[
        str, about('certificate authorities that sign brokers, in PEM; "" trusts those of the system')
    ] = ""
    certificate_file: Annotated[
        str, about('certificate by which the broker knows this client, in PEM; "" shows none')
    ] = ""
    key_file: Annotated[
        str, about("private key of that certificate, in PEM; only its owner may read the file")
    ] = ""
    sasl: Annotated[Mechanism, about("how the client logs in; plain needs TLS")] = "none"
    credentials_file: Annotated[
        str,
        about("user name and password, a line each; only its owner may read the file"),
    ] = ""

    def client_options(self) -> dict[str, Any]:
        """Options of an aiokafka client; they hold the password. Raises SettingError."""
        self._contradictions()
        options: dict[str, Any] = {}
        if self.tls:
            options["ssl_context"] = self._ssl_context()
        if self.sasl != "none":
            user, password = read_login("credentials_file", self.credentials_file)
            options |= {
                "sasl_mechanism": self.sasl.upper(),
                "sasl_plain_username": user,
                "sasl_plain_password": password,
            }
        protocol = ("SASL_" if self.sasl != "none" else "") + ("SSL" if self.tls else "PLAINTEXT")
        return options | {"security_protocol": protocol}

    def librdkafka_options(self) -> dict[str, Any]:
        """The same for a client of librdkafka. Raises SettingError."""
        checked = self.client_options()
        options: dict[str, Any] = {"security.protocol": checked["security_protocol"]}
        files = {
            "ssl.ca.location": self.ca_file,
            "ssl.certificate.location": self.certificate_file,
            "ssl.key.location": self.key_file,
        }
        options |= {name: file for name, file in files.items() if file}
        if self.sasl != "none":
            options["sasl.mechanism"] = checked["sasl_mechanism"]
            options["sasl.username"] = checked["sasl_plain_username"]
            options["sasl.password"] = checked["sasl_plain_password"]
        return options

    def check(self) -> Iterator[Finding]:
        """Files can be used, and settings do not contradict each other."""
        try:
            self.client_options()
        except SettingError as error:
            yield Finding(f"security.{error.key}", error.message, ok=False)
            return
        if self != KafkaSecurity():
            shown = "TLS" if self.tls else "no TLS"
            yield Finding("security", f"{shown}, login {self.sasl}")

    def _contradictions(self) -> None:
        for key in ("ca_file", "certificate_file", "key_file"):
            if getattr(self, key) and not self.tls:
                raise SettingError(key, "is for TLS: set tls = true, or remove it")
        if bool(self.certificate_file) != bool(self.key_file):
            missing = "key_file" if self.certificate_file else "certificate_file"
            raise SettingError(missing, "certificate_file and key_file belong together")
        if bool(self.credentials_file) != (self.sasl != "none"):
            raise SettingError("credentials_file", "sasl and credentials_file belong together")
        if self.sasl == "plain" and not self.tls:
            raise SettingError("sasl", "plain sends the password as it is: set tls = true, or take SCRAM")

    def _ssl_context(self) -> ssl.SSLContext:
        key, file = "ca_file", self.ca_file
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.certificate_file:
                key, file = "key_file", self.key_file
                read_secret(key, file)
                key, file = "certificate_file", self.certificate_file
                # an empty password: an encrypted key is refused, and never asks the terminal
                context.load_cert_chain(self.certificate_file, self.key_file, password="")
        except (OSError, ssl.SSLError) as error:
            raise SettingError(key, f"{file} cannot be used: {error.strerror or error}") from error
        return context
