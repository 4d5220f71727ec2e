"""The snapshot that an answer's state stands on, where the log does not go back as far as the state."""

from collections.abc import Mapping

from daemon.config.schema import Config
from daemon.engine.build import Built, retention_of
from daemon.engine.snapshot_store import Recovery, SavedSession, UsableSnapshot, state_of
from feeds.market_data import Basis, InputRange
from feeds.source import Partition
from ingest.record import stream_number
from regions.offload.snapshot_format import Snapshot, SnapshotError

Stream = tuple[str, Partition]
"""Name of the source, where there are several, and partition."""


def stream_of(each: InputRange) -> Stream:
    """The stream of a range."""
    return each.source, (each.topic, each.partition)


def below(config: Config, built: Built, name: str, version: int, basis: Basis) -> UsableSnapshot | None:
    """The newest snapshot of a session before ``version`` whose state began where that of ``basis`` did.

    None where there is none, or it cannot be read.
    """
    recovery = Recovery(config)
    (session,) = (each for each in config.sessions if each.name == name)
    retention = retention_of(session, built.prompt)
    settings = recovery.settings(session, built.lines[name], retention)
    several = len(config.feeds) > 1
    try:
        for path in recovery.files.newest_first(name):
            try:
                snapshot = Snapshot.open(path)
                state = state_of(path, snapshot.header, name, settings)
            except SnapshotError:
                continue
            if snapshot.header.state.version < version and _leads_to(state, basis, several):
                return UsableSnapshot(snapshot, state)
    except OSError:  # the directory is another user's
        pass
    return None


def starts(state: SavedSession, several: bool) -> dict[Stream, int]:
    """Where to read on behind a snapshot."""
    found: dict[Stream, int] = {}
    for place in (*state.positions, *state.others):
        if place is not None:
            stream = place.source if several else "", (place.topic, place.partition)
            found[stream] = min(place.offset, found.get(stream, place.offset))
    return found


def _leads_to(state: SavedSession, basis: Basis, several: bool) -> bool:
    names = {
        stream_number(each.source, each.topic, each.partition): (
            each.source if several else "",
            (each.topic, each.partition),
        )
        for each in state.streams
    }
    lineage = state.parts.lineage
    if not state.has_log or not lineage.state_first or not names.keys() >= lineage.state_first.keys():
        return False
    began: Mapping[Stream, int] = {stream_of(each): each.first_offset for each in basis.state}
    ends = {stream_of(each): each.last_offset for each in basis.state}
    alike = all(began.get(names[number]) == first for number, first in lineage.state_first.items())
    newest = {names[number]: last for number, last in lineage.newest.items() if number in names}
    behind = all(last <= ends.get(stream, last) for stream, last in newest.items())
    return alike and behind and newest != ends and lineage.left == basis.left
