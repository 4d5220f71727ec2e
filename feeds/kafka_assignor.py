"""Which member of a consumer group has which partitions: an owner keeps them until another one is warm.

The group's leader, whichever member that is, decides, so all members follow one rule. With its claims a
member sends the generation of its newest assignment: one that hung, and was left behind, claims in vain. It
also says for which partitions it is ready: it has read all that their owner has committed. With the
assignment each member learns what it is to read behind its owner (warm), and what it will leave once others
are ready.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from feeds.source import Partition

NEVER = -1
"""Generation of a member that has had no assignment."""
_VERSION = 0
_NONE: frozenset[Partition] = frozenset()


@dataclass(frozen=True)
class AssignedMember:
    """``owns``: what it had by its newest assignment, of ``generation``. ``topics`` None: all."""

    standby: bool = False
    leaving: bool = False
    owns: frozenset[Partition] = _NONE
    generation: int = NEVER
    ready: frozenset[Partition] = _NONE
    topics: frozenset[str] | None = None

    def reads(self, partition: Partition) -> bool:
        """Whether it subscribes to the partition's topic."""
        return self.topics is None or partition[0] in self.topics


@dataclass(frozen=True)
class AssignmentPlan:
    """What a member has, what it reads behind its owner, and what it will leave once another is ready.

    ``moved``: what it has from an owner that lives. ``others``: members that are not about to leave could
    take over. ``leaving``: it was about to leave.
    """

    partitions: frozenset[Partition] = _NONE
    warm: frozenset[Partition] = _NONE
    leaves: frozenset[Partition] = _NONE
    moved: frozenset[Partition] = _NONE
    others: bool = False
    leaving: bool = False


def newest_of(members: Mapping[str, AssignedMember]) -> int:
    """Generation of the newest assignment that a member knows."""
    return max((each.generation for each in members.values()), default=NEVER)


def serving(members: Mapping[str, AssignedMember]) -> Set[str]:
    """The members that share the partitions: all but standbys and those that leave; else a single standby.

    A standby that had partitions by the newest assignment has taken over, so it is no standby. One that
    had them by an older one hung, and was left behind. Where all are leaving, all of them serve on.
    """
    newest = newest_of(members)
    staying = {name: each for name, each in members.items() if not each.leaving}
    found = {
        name
        for name, each in staying.items()
        if not each.standby or (each.owns and each.generation == newest)
    }
    if found or not staying:
        return found or members.keys()
    return {min(staying, key=lambda name: (-len(staying[name].ready), name))}


def decide(
    members: Mapping[str, AssignedMember],
    partitions: Collection[Partition],
    weights: Mapping[Partition, float] | None = None,
) -> dict[str, AssignmentPlan]:
    """A plan for each member. ``weights``: what each partition costs, by default 1.

    A partition with a living owner stays with it until its target is ready. Without one it goes to a member
    that is ready, else to its target. Targets are balanced, and change as little as that allows.
    """
    shared = _Shares(members, serving(members), weights or {})
    held = _held(members, partitions)
    living = dict(held)
    for partition in sorted(partitions):
        if partition not in held and (ready := shared.ready(partition)):
            held[partition] = shared.least(ready)
        if partition in held:
            shared.put(partition, held[partition])
    shared.put_all(set(partitions) - shared.place.keys())
    if not all(each.leaving for each in members.values()):
        shared.balance()
    has, warm, leaves, moved = ({name: set[Partition]() for name in members} for _ in range(4))
    for partition, target in shared.place.items():
        owner = held.get(partition, target)
        if owner == target or partition in members[target].ready:
            has[target].add(partition)
            if living.get(partition, target) != target:
                moved[target].add(partition)
        else:
            has[owner].add(partition)
            warm[target].add(partition)
            leaves[owner].add(partition)
    for name, each in members.items():
        if each.standby and name not in shared.serving:  # for whoever fails next
            warm[name] = {partition for partition in partitions if each.reads(partition)}
    stay = {name for name in shared.serving if not members[name].leaving}
    return {
        name: AssignmentPlan(
            frozenset(has[name]),
            frozenset(warm[name]),
            frozenset(leaves[name]),
            frozenset(moved[name]),
            others=bool(stay - {name}),
            leaving=each.leaving,
        )
        for name, each in members.items()
    }


def _held(members: Mapping[str, AssignedMember], partitions: Collection[Partition]) -> dict[Partition, str]:
    """By partition, its living owner: claims of outdated assignments do not count."""
    newest = newest_of(members)
    return {
        partition: name
        for name, each in sorted(members.items(), reverse=True)
        for partition in each.owns
        if each.generation == newest != NEVER and partition in partitions and each.reads(partition)
    }


@dataclass(eq=False)
class _Shares:
    """Who is to have which partition, and what each of those who serve has to carry."""

    members: Mapping[str, AssignedMember]
    serving: Set[str]
    weights: Mapping[Partition, float]
    place: dict[Partition, str] = field(default_factory=dict)
    load: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.load = dict.fromkeys(sorted(self.serving), 0.0)

    def ready(self, partition: Partition) -> list[str]:
        """Those who serve and are ready for it."""
        return [
            each
            for each in self.load
            if partition in self.members[each].ready and self.members[each].reads(partition)
        ]

    def least(self, among: Iterable[str]) -> str:
        """The one of these that carries least."""
        return min(among, key=lambda name: (self.load[name], name))

    def put(self, partition: Partition, name: str) -> None:
        """It is to be this member's, if that serves."""
        if name not in self.load:
            return
        if before := self.place.get(partition):
            self.load[before] -= self.weight(partition)
        self.place[partition] = name
        self.load[name] += self.weight(partition)

    def weight(self, partition: Partition) -> float:
        """What it costs."""
        return self.weights.get(partition, 1.0)

    def put_all(self, partitions: Iterable[Partition]) -> None:
        """Place what has no owner that serves, the heaviest first."""
        for each in sorted(partitions, key=lambda found: (-self.weight(found), found)):
            readers = [name for name in self.load if self.members[name].reads(each)]
            if readers:
                self.put(each, self.least(self.ready(each) or readers))

    def balance(self) -> None:
        """Move what makes loads more equal: each move lowers the sum of their squares, so this ends."""
        while (move := self._move()) is not None:
            self.put(*move)

    def _move(self) -> tuple[Partition, str] | None:
        by_load = sorted(self.load, key=lambda name: (self.load[name], name))
        for giver, taker in itertools.product(reversed(by_load), by_load):
            gap, reader = self.load[giver] - self.load[taker], self.members[taker]
            fits = [
                each
                for each, name in self.place.items()
                if name == giver and reader.reads(each) and self.weight(each) < gap
            ]
            if fits:
                return min(fits, key=lambda p: (p not in reader.ready, -self.weight(p), p)), taker
        return None


class _Claims(msgspec.Struct, frozen=True, array_like=True):
    """What a member sends to the leader."""

    standby: bool
    leaving: bool
    generation: int
    owns: frozenset[Partition]
    ready: frozenset[Partition]


class _News(msgspec.Struct, frozen=True, array_like=True):
    """What a member learns from the leader, beside its partitions."""

    warm: frozenset[Partition]
    leaves: frozenset[Partition]
    moved: frozenset[Partition]
    others: bool
    leaving: bool


_claims = msgspec.msgpack.Decoder(_Claims)
_news = msgspec.msgpack.Decoder(_News)


class WarmUpAssignor:
    """`decide` as an assignor of aiokafka, for one consumer. ``plan``: ours by the newest assignment."""

    name = "foretick"

    def __init__(self) -> None:
        self.plan = AssignmentPlan()
        self.is_standby = self._leaving = False
        self._generation = NEVER
        self.ready = _NONE

    def stand_by(self) -> None:
        """Ask for no partitions while others serve."""
        self.is_standby = True

    def leave(self, leaving: bool) -> None:
        """From the next rebalance on, give all partitions to others, or no longer."""
        self._leaving = leaving

    def note_ready(self, partitions: Collection[Partition]) -> None:
        """From the next rebalance on, we are ready for these."""
        self.ready = frozenset(partitions)

    def note_joined(self, generation: int) -> None:
        """Our newest assignment is of this generation of the group: aiokafka does not tell it here."""
        self._generation = generation

    # What aiokafka calls.

    def metadata(self, topics: Iterable[str]) -> Any:
        """What we send to the leader."""
        claims = _Claims(self.is_standby, self._leaving, self._generation, self.plan.partitions, self.ready)
        return ConsumerProtocolMemberMetadata(_VERSION, list(topics), msgspec.msgpack.encode(claims))

    def on_assignment(self, assignment: Any) -> None:
        """We have this assignment."""
        partitions = frozenset((each.topic, each.partition) for each in assignment.partitions())
        try:
            news = _news.decode(assignment.user_data)
        except msgspec.DecodeError:
            self.plan = AssignmentPlan(partitions)
            return
        self.plan = AssignmentPlan(partitions, news.warm, news.leaves, news.moved, news.others, news.leaving)

    def assign(self, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        """Assignments by member id, as the leader of the group."""
        known = {name: _member(metadata) for name, metadata in members.items()}
        topics = set[str]().union(*(metadata.subscription for metadata in members.values()))
        partitions = [(topic, n) for topic in topics for n in cluster.partitions_for_topic(topic) or ()]
        return {name: _assignment(plan) for name, plan in decide(known, partitions).items()}


def _member(metadata: Any) -> AssignedMember:
    """What a member sent; one of another program claims nothing."""
    topics = frozenset(metadata.subscription)
    try:
        found = _claims.decode(metadata.user_data or b"")
    except msgspec.DecodeError:
        return AssignedMember(topics=topics)
    return AssignedMember(
        found.standby, found.leaving, found.owns, found.generation, found.ready, topics=topics
    )


def _assignment(plan: AssignmentPlan) -> Any:
    news = _News(plan.warm, plan.leaves, plan.moved, plan.others, plan.leaving)
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(plan.partitions):
        by_topic.setdefault(topic, []).append(partition)
    return ConsumerProtocolMemberAssignment(_VERSION, list(by_topic.items()), msgspec.msgpack.encode(news))
