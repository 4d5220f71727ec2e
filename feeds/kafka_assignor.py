"""Which members of a consumer group get partitions: standbys get none while somebody else answers.

The group's leader, whichever member that is, computes the assignment, so all members follow one rule. Among
those that may have partitions aiokafka's sticky assignor divides them. It lets members claim what they had,
but does not tell it from what they had before they hung: aiokafka never gives it the generation. So each
assignment has a number here, which its members send with their claims.
"""

import struct
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

NEVER = -1
"""Number of an assignment to a member that has not had one."""
_MARK = b"\0foretick"
_END = struct.Struct(">?q")
"""Whether the member is a standby, and the number of its newest assignment."""


@dataclass(frozen=True)
class AssignedMember:
    """``owns``: it had partitions by assignment number ``assignment``, its newest."""

    standby: bool
    owns: bool = False
    assignment: int = NEVER


def serving(members: Mapping[str, AssignedMember]) -> Collection[str]:
    """The members that share the partitions: all that are not standbys or, without one, a single standby.

    A standby that had partitions by the newest assignment has taken over, so it is no standby. One that
    had them by an older one hung, and was left behind.
    """
    newest = newest_of(members)
    found = {
        name
        for name, each in members.items()
        if not each.standby or (each.owns and each.assignment == newest)
    }
    return found or set(sorted(members)[:1])


def newest_of(members: Mapping[str, AssignedMember]) -> int:
    """Number of the newest assignment that a member knows."""
    return max((each.assignment for each in members.values()), default=NEVER)


class StandbyAssignor(StickyPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
    """The sticky assignor among the members that `serving` names. Its state is on the class: derive one."""

    standby = False
    newest = NEVER
    """Number of our newest assignment."""

    @classmethod
    def metadata(cls, topics: Iterable[str]) -> Any:
        """As the sticky assignor's, whose decoder ignores what follows its data."""
        found = super().metadata(topics)
        return _with_data(found, found.user_data + _MARK + _END.pack(cls.standby, cls.newest))

    @classmethod
    def on_assignment(cls, assignment: Any) -> None:
        """We have this assignment."""
        super().on_assignment(assignment)
        if len(assignment.user_data) == _END.size:
            _, cls.newest = _END.unpack(assignment.user_data)

    @classmethod
    def assign(cls, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        """Partitions by member id; none for standbys while others serve. Outdated claims do not count."""
        known, claims = {}, {}
        for name, metadata in members.items():
            known[name], claims[name] = _read(cls, metadata)
        newest = newest_of(known)
        chosen = {
            name: claims[name] if known[name].assignment == newest else _with_data(claims[name], b"")
            for name in serving(known)
        }
        found = super().assign(cluster, chosen)
        # at least the time: a group that was empty has no number, and a member that hung brings its own
        number = _END.pack(False, max(newest + 1, time.time_ns()))
        return {
            name: ConsumerProtocolMemberAssignment(
                cls.version, found[name].assignment if name in found else [], number
            )
            for name in members
        }


def _read(assignor: type[StandbyAssignor], metadata: Any) -> tuple[AssignedMember, Any]:
    """A member, and its metadata for the sticky assignor."""
    data, mark, end = metadata.user_data.rpartition(_MARK)
    if not mark or len(end) != _END.size:  # of another program
        return AssignedMember(standby=False), metadata
    standby, assignment = _END.unpack(end)
    claim = _with_data(metadata, data)
    return AssignedMember(standby, bool(assignor.parse_member_metadata(claim).partitions), assignment), claim


def _with_data(metadata: Any, user_data: bytes) -> Any:
    return ConsumerProtocolMemberMetadata(metadata.version, metadata.subscription, user_data)


def assignor_of(*, standby: bool = False) -> type[StandbyAssignor]:
    """A class for one consumer: the sticky assignor keeps its state on the class."""
    return type("Sticky", (StandbyAssignor,), {"standby": standby})
