"""The assignment of a group in which members stand by, against what has to hold after each rebalance."""

from typing import Any

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.kafka_assignor import AssignedMember, StandbyAssignor, serving

TOPIC = "t"


class Cluster:
    """As much of aiokafka's as an assignor asks for."""

    def __init__(self, partitions: int) -> None:
        self._partitions = set(range(partitions))

    def topics(self) -> set[str]:
        return {TOPIC}

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self._partitions if topic == TOPIC else None


class Group:
    """Members with an assignor each, as in processes of their own; all goes through its encoding."""

    def __init__(self, partitions: int) -> None:
        self.cluster = Cluster(partitions)
        self.members: dict[str, Any] = {}
        self.hung: dict[str, Any] = {}
        self.has: dict[str, frozenset[int]] = {}

    def join(self, name: str, standby: bool) -> None:
        self.members[name] = type("Own", (StandbyAssignor,), {"standby": standby})

    def rebalance(self) -> None:
        sent = {
            name: ConsumerProtocolMemberMetadata.decode(assignor.metadata([TOPIC]).encode())
            for name, assignor in self.members.items()
        }
        self.has = {}
        if not sent:
            return
        leader = self.members[min(sent)]
        for name, made in leader.assign(self.cluster, sent).items():
            got = ConsumerProtocolMemberAssignment.decode(made.encode())
            self.members[name].on_assignment(got)
            self.has[name] = frozenset(each.partition for each in got.partitions())


steps = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "hang", "wake"]), st.integers(0, 4), st.booleans()),
    max_size=25,
)


HUNG_WHILE_EMPTY = [
    ("join", 0, False),
    ("join", 1, True),
    ("leave", 0, False),
    ("hang", 1, False),
    ("join", 0, False),
    ("wake", 1, False),
]
"""A standby that took over hangs, the group is empty, and another member begins before it comes back."""


@example(1, HUNG_WHILE_EMPTY)
@given(st.integers(1, 3), steps)
def test_partitions_have_one_owner_and_stay_with_a_standby_that_took_over(
    partitions: int, script: list[tuple[str, int, bool]]
) -> None:
    group, standbys = Group(partitions), dict[str, bool]()
    for action, number, standby in script:
        name, before = f"m{number}", group.has
        match action:
            case "join" if name not in group.members and name not in group.hung:
                group.join(name, standby)
                standbys[name] = standby
            case "leave" if name in group.members:
                del group.members[name]
            case "hang" if name in group.members:
                group.hung[name] = group.members.pop(name)
            case "wake" if name in group.hung:  # with its claims of long ago
                group.members[name] = group.hung.pop(name)
            case _:
                continue
        group.rebalance()
        owned = [each for found in group.has.values() for each in found]
        assert sorted(owned) == (list(range(partitions)) if group.members else [])
        idle = [name for name in group.members if not group.has[name]]
        serving_before = {each for each, found in before.items() if found and each in group.members}
        for each in group.members:
            if standbys[each] and group.has[each] and not before.get(each):
                # it took over: nobody served, or would have
                assert not serving_before
                assert all(standbys[other] for other in group.members)
        if standbys[name] and action in ("join", "wake") and serving_before:
            assert name in idle
            assert {each: group.has[each] for each in before} == before, "nothing moves for a standby"


def test_of_standbys_alone_one_serves_and_of_two_claims_the_newer_counts() -> None:
    assert serving({"b": AssignedMember(True), "a": AssignedMember(True)}) == {"a"}
    assert serving({"a": AssignedMember(True), "b": AssignedMember(False)}) == {"b"}
    zombie, owner = (
        AssignedMember(True, owns=True, assignment=2),
        AssignedMember(True, owns=True, assignment=3),
    )
    assert serving({"a": zombie, "b": owner, "c": AssignedMember(True)}) == {"b"}


def test_a_member_of_another_program_serves() -> None:
    group = Group(2)
    group.join("ours", standby=True)
    theirs = ConsumerProtocolMemberMetadata(0, [TOPIC], b"")
    sent = {"ours": group.members["ours"].metadata([TOPIC]), "theirs": theirs}
    made = group.members["ours"].assign(group.cluster, sent)
    assert {name: each.assignment for name, each in made.items()} == {"ours": [], "theirs": [(TOPIC, [0, 1])]}
