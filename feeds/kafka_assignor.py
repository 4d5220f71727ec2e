"""Which member of a consumer group has which partitions: an owner keeps them until another one is warm.

The group's leader, whichever member that is, decides, so all members follow one rule. With its claims a
member sends the generation of its newest assignment: one that hung, and was left behind, claims in vain. It
also says for which partitions it is ready: it has read all that their owner has committed. With the
assignment each member learns what it is to read behind its owner (warm), and what it will leave once others
are ready.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from feeds.placement import place
from feeds.source import Partition

NEVER = -1
"""Generation of a member that has had no assignment."""
_VERSION = 0
_NONE: frozenset[Partition] = frozenset()


@dataclass(frozen=True)
class AssignedMember:
    """``owns``: what it had by its newest assignment, of ``generation``. ``topics`` None: all.

    ``costs``: what it measured of its partitions, in answers a second.
    """

    standby: bool = False
    leaving: bool = False
    owns: frozenset[Partition] = _NONE
    generation: int = NEVER
    ready: frozenset[Partition] = _NONE
    topics: frozenset[str] | None = None
    costs: Mapping[Partition, float] = field(default_factory=dict)

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
    members: Mapping[str, AssignedMember], partitions: Collection[Partition]
) -> dict[str, AssignmentPlan]:
    """A plan for each member.

    A partition with a living owner stays with it until its target is ready. Without one it goes to a member
    that is ready, else to its target. Targets are balanced by what owners have measured, and change as little
    as that allows.
    """
    serves = serving(members)
    living = _held(members, partitions)
    ready = _ready(members, serves, partitions)
    held = {**ready, **living}
    # whoever has warmed up is the target still, though costs may have changed meanwhile
    targets = _targets(members, serves, _costs(members, partitions, living), {**held, **ready})
    has, warm, leaves, moved = ({name: set[Partition]() for name in members} for _ in range(4))
    for partition, target in targets.items():
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
        if each.standby and name not in serves:  # for whoever fails next
            warm[name] = {partition for partition in partitions if each.reads(partition)}
    stay = {name for name in serves if not members[name].leaving}
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


def _costs(
    members: Mapping[str, AssignedMember], partitions: Collection[Partition], living: Mapping[Partition, str]
) -> dict[Partition, float]:
    """As owners measured them; one that is not measured is taken for an average one."""
    known = {p: members[name].costs[p] for p, name in living.items() if p in members[name].costs}
    usual = sum(known.values()) / len(known) if known else 1.0
    return {partition: known.get(partition, usual) for partition in partitions}


def _ready(
    members: Mapping[str, AssignedMember], serves: Set[str], partitions: Collection[Partition]
) -> dict[Partition, str]:
    """Of these, those that a serving member is ready for, spread by number."""
    found: dict[Partition, str] = {}
    counts = dict.fromkeys(sorted(serves), 0)
    for partition in sorted(partitions):
        ready = [n for n in counts if partition in members[n].ready and members[n].reads(partition)]
        if ready:
            found[partition] = name = min(ready, key=lambda each: (counts[each], each))
            counts[name] += 1
    return found


def _targets(
    members: Mapping[str, AssignedMember],
    serves: Set[str],
    costs: Mapping[Partition, float],
    held: Mapping[Partition, str],
) -> dict[Partition, str]:
    """By partition, who is to have it in the end; where all are leaving, owners keep theirs."""
    targets: dict[Partition, str] = {}
    if all(each.leaving for each in members.values()):
        targets = dict(held)
    by_readers: dict[tuple[str, ...], list[Partition]] = {}
    for partition in costs:
        if partition not in targets:
            readers = tuple(sorted(name for name in serves if members[name].reads(partition)))
            by_readers.setdefault(readers, []).append(partition)
    for partition in by_readers.pop((), ()):
        if partition in held:
            targets[partition] = held[partition]
    for readers, found in by_readers.items():
        targets |= place({p: costs[p] for p in found}, readers, {p: held[p] for p in found if p in held})
    return targets


class _Claims(msgspec.Struct, frozen=True, array_like=True):
    """What a member sends to the leader."""

    standby: bool
    leaving: bool
    generation: int
    owns: frozenset[Partition]
    ready: frozenset[Partition]
    costs: tuple[tuple[Partition, Annotated[float, msgspec.Meta(ge=0.0, lt=1e12)]], ...] = ()


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
        self._costs: Mapping[Partition, float] = {}

    def stand_by(self) -> None:
        """Ask for no partitions while others serve."""
        self.is_standby = True

    def leave(self, leaving: bool) -> None:
        """From the next rebalance on, give all partitions to others, or no longer."""
        self._leaving = leaving

    def note_ready(self, partitions: Collection[Partition]) -> None:
        """From the next rebalance on, we are ready for these."""
        self.ready = frozenset(partitions)

    def note_costs(self, costs: Mapping[Partition, float]) -> None:
        """From the next rebalance on, our partitions cost this."""
        self._costs = costs

    def note_joined(self, generation: int) -> None:
        """Our newest assignment is of this generation of the group: aiokafka does not tell it here."""
        self._generation = generation

    # What aiokafka calls.

    def metadata(self, topics: Iterable[str]) -> Any:
        """What we send to the leader."""
        claims = _Claims(
            self.is_standby,
            self._leaving,
            self._generation,
            self.plan.partitions,
            self.ready,
            tuple(self._costs.items()),
        )
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
        found.standby,
        found.leaving,
        found.owns,
        found.generation,
        found.ready,
        topics,
        dict(found.costs),
    )


def _assignment(plan: AssignmentPlan) -> Any:
    news = _News(plan.warm, plan.leaves, plan.moved, plan.others, plan.leaving)
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(plan.partitions):
        by_topic.setdefault(topic, []).append(partition)
    return ConsumerProtocolMemberAssignment(_VERSION, list(by_topic.items()), msgspec.msgpack.encode(news))
