"""Keys and certificates that the configuration names, read at the start."""

import ssl

from daemon.api.http_server import Tls
from daemon.config.errors import ConfigError
from daemon.config.schema import Config, HttpConfig, QueryConfig
from daemon.config.tenants_file import read_tenants
from daemon.tenants import Tenants
from feeds.connector import SettingError
from feeds.curve import Keys, key_pair


def query_keys(query: QueryConfig) -> Keys | None:
    """The pair of the query socket; other daemons of the group have the same. Raises SettingError."""
    if not query.secret_key_file:
        return None
    return key_pair("query.secret_key_file", query.secret_key_file)


def tenants_of(config: Config, keys: Keys | None) -> Tenants:
    """The tenants of the file. Raises SettingError."""
    if not config.tenants.file:
        return Tenants()
    try:
        return Tenants(read_tenants(config.tenants.file), "" if keys is None else keys.public.decode())
    except ConfigError as error:
        raise SettingError("tenants.file", str(error)) from None


def tls_of(http: HttpConfig) -> Tls | None:
    """The certificate and its key, which fit. Raises SettingError."""
    if not http.tls_certificate_file:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(http.tls_certificate_file, http.tls_key_file, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        files = f"{http.tls_certificate_file}, {http.tls_key_file}"
        raise SettingError("http.tls_certificate_file", f"{files}: cannot be used: {error}") from None
    return Tls(http.tls_certificate_file, http.tls_key_file)


def _no_password() -> str:
    raise OSError("the key has a password")
