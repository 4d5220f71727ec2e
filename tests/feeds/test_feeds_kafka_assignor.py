"""The assignment of a group whose members warm up, against what has to hold after each rebalance."""

from collections import Counter
from dataclasses import replace
from typing import Any

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from hypothesis import example, given
from hypothesis import strategies as st

from feeds.kafka_assignor import AssignedMember, AssignmentPlan, WarmUpAssignor, decide, newest_of, serving
from feeds.source import Partition

TOPIC = "t"


def parts(*numbers: int) -> frozenset[Partition]:
    return frozenset((TOPIC, number) for number in numbers)


class Cluster:
    """As much of aiokafka's as an assignor asks for."""

    def __init__(self, partitions: int) -> None:
        self._partitions = set(range(partitions))

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return self._partitions if topic == TOPIC else None


class Group:
    """Members with an assignor each, as in processes of their own; all goes through its encoding."""

    def __init__(self, partitions: int) -> None:
        self.cluster, self.partitions = Cluster(partitions), parts(*range(partitions))
        self.members: dict[str, WarmUpAssignor] = {}
        self.hung: dict[str, WarmUpAssignor] = {}
        self.generation = 0

    @property
    def has(self) -> dict[str, frozenset[Partition]]:
        return {name: each.plan.partitions for name, each in self.members.items()}

    def join(self, name: str, *, standby: bool = False) -> None:
        self.members[name] = WarmUpAssignor()
        if standby:
            self.members[name].stand_by()

    def rebalance(self) -> None:
        sent = {
            name: ConsumerProtocolMemberMetadata.decode(assignor.metadata([TOPIC]).encode())
            for name, assignor in self.members.items()
        }
        if not sent:
            return
        self.generation += 1
        leader = self.members[min(sent)]
        for name, made in leader.assign(self.cluster, sent).items():
            self.members[name].on_assignment(ConsumerProtocolMemberAssignment.decode(made.encode()))
            self.members[name].note_joined(self.generation)

    def warm(self) -> bool:
        """All that is to be warm is; whether anything was."""
        for each in self.members.values():
            each.note_ready(each.plan.warm)
        return any(each.plan.warm for each in self.members.values())


actions = st.sampled_from(["join", "leave", "hang", "wake", "drain", "ready"])
steps = st.lists(st.tuples(actions, st.integers(0, 4), st.booleans()), max_size=30)


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
@given(st.integers(1, 7), steps)
def test_each_partition_has_one_owner_and_moves_only_to_who_is_ready(
    partitions: int, script: list[tuple[str, int, bool]]
) -> None:
    group, standbys, draining = Group(partitions), dict[str, bool](), set[str]()
    for action, number, standby in script:
        name, before = f"m{number}", group.has
        match action:
            case "join" if name not in group.members and name not in group.hung:
                group.join(name, standby=standby)
                standbys[name] = standby
                draining.discard(name)
            case "leave" if name in group.members:
                del group.members[name]
            case "hang" if name in group.members:
                group.hung[name] = group.members.pop(name)
            case "wake" if name in group.hung:  # with its claims of long ago
                group.members[name] = group.hung.pop(name)
                before[name] = frozenset()
            case "drain" if name in group.members:
                group.members[name].leave(True)
                draining.add(name)
            case "ready" if name in group.members:
                group.members[name].note_ready(group.members[name].plan.warm)
            case _:
                continue
        ready = {each: assignor.ready for each, assignor in group.members.items()}
        group.rebalance()
        owned = [each for found in group.has.values() for each in found]
        assert sorted(owned) == (sorted(group.partitions) if group.members else [])
        for each, found in group.has.items():
            for partition in found - before.get(each, frozenset()):
                alive = [other for other in group.members if partition in before.get(other, ())]
                assert not alive or partition in ready[each], f"{each} takes {partition} from {alive}, cold"
        plans = {each: assignor.plan for each, assignor in group.members.items()}
        warmed = {standby: Counter[Partition]() for standby in (False, True)}
        for each, plan in plans.items():
            warmed[standbys[each]].update(plan.warm)
        left = Counter(each for plan in plans.values() for each in plan.leaves)
        assert warmed[False] <= left <= warmed[False] + warmed[True]
        assert all(plan.leaves <= plan.partitions for plan in plans.values())
        staying = {each for each in group.members if each not in draining}
        if any(not standbys[each] for each in staying):
            for each in draining & group.members.keys():
                assert not plans[each].warm - (parts(*range(partitions)) if standbys[each] else parts())
                assert group.has[each] <= before.get(each, frozenset()), "who leaves gets nothing"


@given(st.integers(1, 12), steps)
def test_it_converges_in_a_bounded_number_of_rounds_to_equal_shares(
    partitions: int, script: list[tuple[str, int, bool]]
) -> None:
    group = Group(partitions)
    for action, number, _ in script:
        name = f"m{number}"
        match action:
            case "join" if name not in group.members:
                group.join(name)
            case "leave":
                group.members.pop(name, None)
            case "drain" if name in group.members:
                group.members[name].leave(True)
            case _:
                group.warm()
        group.rebalance()
    moved = rounds = 0
    while group.warm():
        rounds += 1
        assert rounds <= 2 * partitions + 1, "it moves on and on"
        before = group.has
        group.rebalance()
        moved += sum(len(found - before[name]) for name, found in group.has.items())
    assert moved <= partitions, "none moves twice"
    leaving = {name for name, each in group.members.items() if each._leaving}
    if group.members.keys() - leaving:
        assert all(not group.has[name] for name in leaving)
        shares = [len(found) for name, found in group.has.items() if name not in leaving]
        # `place` keeps the busiest one's share least, with the fewest moves: ten may settle at 4, 4, 2
        assert max(shares) <= -(-partitions // len(shares))
        assert min(shares) > 0 or partitions < len(shares)
    settled = group.has
    group.rebalance()
    assert group.has == settled, "without a change nothing moves"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_loads_are_equal_but_for_one_partition(weights: list[int], members: int) -> None:
    costs = {(TOPIC, n): float(weight) for n, weight in enumerate(weights)}
    owner = AssignedMember(leaving=True, owns=frozenset(costs), generation=1, costs=costs)
    plans = decide({f"m{n}": AssignedMember() for n in range(members)} | {"owner": owner}, list(costs))
    loads = {name: sum(costs[each] for each in plan.warm) for name, plan in plans.items() if name != "owner"}
    assert sum(loads.values()) == sum(costs.values())
    least = min(loads.values())
    for name, load in loads.items():
        lightest = min((costs[each] for each in plans[name].warm), default=0.0)
        assert load - lightest <= least


def test_hot_partitions_part_and_whoever_warmed_one_gets_it_though_costs_have_changed() -> None:
    group = Group(4)
    group.join("a")
    group.rebalance()
    group.join("b")
    group.members["a"].note_costs({(TOPIC, 0): 90.0, (TOPIC, 1): 80.0, (TOPIC, 2): 2.0})
    group.rebalance()
    warm = group.members["b"].plan.warm
    assert len(warm & parts(0, 1)) == 1, "not both, and one that is not measured costs as the others do"
    group.warm()
    group.members["a"].note_costs({(TOPIC, n): cost for n, cost in enumerate((2.0, 3.0, 90.0, 70.0))})
    group.rebalance()
    assert group.has["b"] == warm


def test_a_claim_of_an_outdated_assignment_does_not_count() -> None:
    hung = AssignedMember(owns=parts(0, 1), generation=2)
    owner = AssignedMember(owns=parts(0), generation=3)
    plans = decide({"a": hung, "b": owner}, parts(0, 1))
    assert plans["b"].partitions == parts(0)
    assert plans["a"].partitions == parts(1), "it has no living owner"


def test_what_has_no_owner_goes_to_whoever_is_ready_for_it() -> None:
    members = {"a": AssignedMember(), "b": AssignedMember(), "c": AssignedMember(ready=parts(0, 1))}
    plans = decide(members, parts(0, 1, 2))
    assert plans["c"].partitions >= parts(0, 1)
    assert plans["c"].leaves == plans["b"].warm | plans["a"].warm - parts(2)
    assert len(plans["c"].leaves) == 1, "and on to its target once that is ready"


def test_a_member_that_leaves_alone_keeps_its_partitions_and_knows_that_it_is_alone() -> None:
    alone = {"a": AssignedMember(leaving=True, owns=parts(0, 1), generation=1)}
    assert decide(alone, parts(0, 1)) == {"a": AssignmentPlan(parts(0, 1), leaving=True)}
    plans = decide(alone | {"b": AssignedMember(generation=1)}, parts(0, 1))
    assert plans["a"] == AssignmentPlan(parts(0, 1), leaves=parts(0, 1), others=True, leaving=True)
    assert plans["b"] == AssignmentPlan(warm=parts(0, 1))
    ready = replace(AssignedMember(generation=1), ready=parts(0))
    plans = decide(alone | {"b": ready}, parts(0, 1))
    assert (plans["a"].partitions, plans["b"].partitions) == (parts(1), parts(0))


def test_a_standby_warms_all_and_takes_over_only_what_nobody_serves() -> None:
    owner = AssignedMember(owns=parts(0, 1), generation=1)
    standby = AssignedMember(standby=True, ready=parts(0, 1), generation=1)
    plans = decide({"a": owner, "b": standby}, parts(0, 1))
    assert plans["a"] == AssignmentPlan(parts(0, 1))
    assert plans["b"] == AssignmentPlan(warm=parts(0, 1), others=True)
    assert decide({"b": standby, "c": replace(standby, ready=parts())}, parts(0, 1))["b"].partitions == parts(
        0, 1
    )


def test_of_standbys_alone_one_serves_and_of_two_claims_the_newer_counts() -> None:
    assert serving({"b": AssignedMember(True), "a": AssignedMember(True)}) == {"a"}
    assert serving({"a": AssignedMember(True), "b": AssignedMember(False)}) == {"b"}
    zombie = AssignedMember(True, owns=parts(0), generation=2)
    members = {"a": zombie, "b": replace(zombie, generation=3), "c": AssignedMember(True)}
    assert (serving(members), newest_of(members)) == ({"b"}, 3)


def test_partitions_go_only_to_who_subscribes_to_their_topic() -> None:
    members = {
        "a": AssignedMember(topics=frozenset({"t"})),
        "b": AssignedMember(topics=frozenset({"t", "u"})),
    }
    plans = decide(members, [("t", 0), ("u", 0), ("u", 1)])
    assert plans["a"].partitions == {("t", 0)}
    assert decide({"a": members["a"]}, [("u", 0)])["a"].partitions == set()


def test_a_member_of_another_program_serves_and_its_assignment_is_taken() -> None:
    group = Group(2)
    group.join("ours", standby=True)
    theirs: Any = ConsumerProtocolMemberMetadata(0, [TOPIC], b"")
    sent = {"ours": group.members["ours"].metadata([TOPIC]), "theirs": theirs}
    made = group.members["ours"].assign(group.cluster, sent)
    assert {name: each.assignment for name, each in made.items()} == {"ours": [], "theirs": [(TOPIC, [0, 1])]}
    group.members["ours"].on_assignment(ConsumerProtocolMemberAssignment(0, [(TOPIC, [1])], b""))
    assert group.members["ours"].plan == AssignmentPlan(parts(1))
