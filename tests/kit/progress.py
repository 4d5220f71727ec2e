"""Progress of sessions as a daemon stores it with an offset."""

from collections.abc import Mapping

from daemon.progress import Progress, StoredProgress, encode_stored, stored_name


def stored(
    epoch: int, sessions: Mapping[str, Progress], owner: str = "", writer: str = "other"
) -> dict[str, bytes]:
    """The records of a daemon of this ``epoch``."""
    return {
        stored_name(writer, name): encode_stored(StoredProgress(each, epoch, owner))
        for name, each in sessions.items()
    }
