"""Signatures of webhooks' requests, by the Standard Webhooks specification 1.0."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from feeds.connector import SettingError
from feeds.secret_files import read_secret

_PREFIX, _LEAST_BYTES = "whsec_", 24


def read_keys(key: str, path: str) -> list[bytes]:
    """The keys of a file, one a line; a request is signed by each. Raises SettingError."""
    keys = []
    for line in read_secret(key, path).split():
        try:
            found = base64.b64decode(line.removeprefix(_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            found = b""
        if not line.startswith(_PREFIX) or len(found) < _LEAST_BYTES:
            why = f"{path}: a secret is {_PREFIX} and at least {_LEAST_BYTES} bytes in base64"
            raise SettingError(key, why)
        keys.append(found)
    if not keys:
        raise SettingError(key, f"{path} is empty")
    return keys


def signed(keys: Sequence[bytes], id_: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a request that is sent at ``timestamp``, Unix seconds."""
    content = f"{id_}.{timestamp}.".encode() + body
    digests = [hmac.new(key, content, hashlib.sha256).digest() for key in keys]
    return {
        "content-type": "application/json",
        "webhook-id": id_,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(each).decode()}" for each in digests),
    }
