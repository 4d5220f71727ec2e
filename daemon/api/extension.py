"""The member `foretick` of a request of any HTTP API: what the API itself has no words for."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from daemon.api.api_errors import ApiError
from daemon.api.messages import ORDINARY, RETENTION_S, Choices, RetentionPriority, RetentionSeconds


class Extension(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer is one of ``choices``.

    Without a session, prompt and answer stay in the prefix cache with ``retention_priority``, above 35 for
    ``retention_seconds``. With a ``salt`` it shares caches only with its tenant's requests of the same one.
    """

    choices: Choices = ()
    retention_priority: RetentionPriority = ORDINARY
    retention_seconds: RetentionSeconds = RETENTION_S
    salt: Annotated[str, Meta(max_length=256)] = ""


def extended(extension: Extension | None, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The members of a `Generate`. Raises ApiError for choices where there is a schema, too."""
    given = extension or Extension()
    if given.choices and schema is not None:
        raise ApiError("bad_request", "foretick.choices and a JSON schema exclude each other", "foretick")
    return msgspec.structs.asdict(given)
