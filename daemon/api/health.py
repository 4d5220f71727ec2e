"""How the daemon is: what it waits for, which venues are silent, which tapes are late."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Literal

import msgspec

from daemon.api.messages import SessionInfo

API_VERSION = 1
STANDBY = "this daemon is a standby: another one answers"
FILLING = "it has not read yet what the other one has answered"


class VersionInfo(msgspec.Struct, frozen=True):
    """Versions of the daemon and of this API, and the model that answers; empty before it is loaded."""

    version: str
    api: int
    model: str


class Health(msgspec.Struct, frozen=True):
    """``reasons``: what is missing; the daemon is ready without any. ``silent``: sessions whose venue was not
    seen for `silent_after`. ``late``: sessions with closed bars that wait to be read. ``spare``: another
    engine waits to take over.

    `degraded`: ready, but some session is silent or late. `standby`: nothing is missing, but another daemon
    answers.
    """

    status: Literal["ok", "degraded", "waiting", "standby"]
    ready: bool
    reasons: tuple[str, ...]
    silent: tuple[str, ...]
    late: tuple[str, ...]
    version: VersionInfo
    spare: bool


def health_of(
    not_ready: Sequence[str], sessions: Sequence[SessionInfo], model: str, *, spare: bool
) -> Health:
    """From what is missing, all sessions and the model's name."""
    silent = tuple(session.name for session in sessions if session.silent)
    late = tuple(session.name for session in sessions if session.bars_waiting)
    status: Literal["ok", "degraded", "waiting", "standby"] = "degraded" if silent or late else "ok"
    return Health(
        state_of(not_ready) if not_ready else status,
        not not_ready,
        tuple(not_ready),
        silent,
        late,
        VersionInfo(version("foretick"), API_VERSION, model),
        spare,
    )


def state_of(not_ready: Sequence[str]) -> Literal["waiting", "standby"]:
    """How a daemon is that is not ready, for these reasons."""
    return "standby" if list(not_ready) == [STANDBY] else "waiting"
