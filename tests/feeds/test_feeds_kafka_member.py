"""What a member of a group may read and commit: nothing that others may have had in between."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from feeds.kafka_assignor import AssignmentPlan, WarmUpAssignor
from feeds.kafka_client import generation_of
from feeds.kafka_member import BegunPartition, KafkaMember
from feeds.kafka_positions import KafkaPositions
from feeds.kafka_start import KafkaStart
from tests.feeds.test_feeds_kafka_log import Notes
from tests.kit import until

P, Q = TopicPartition("t", 0), TopicPartition("t", 1)


class Joined:
    """As much of a consumer as a member asks for; ``tells`` is set while the coordinator answers."""

    def __init__(self) -> None:
        self.partitions, self.committed_offset = {P}, 5
        self.tells = asyncio.Event()
        self.tells.set()
        self._coordinator: Any = SimpleNamespace(generation=1, member_id="m")
        self._coordinator.fetch_committed_offsets = self._committed

    async def _committed(self, partitions: list[TopicPartition]) -> Mapping[TopicPartition, Any]:
        await self.tells.wait()
        return {each: OffsetAndMetadata(self.committed_offset, "") for each in partitions}

    def assignment(self) -> set[TopicPartition]:
        return self.partitions

    def is_given(self, *partitions: TopicPartition, generation: int, member: str = "m") -> None:
        self.partitions = set(partitions)
        self._coordinator.generation, self._coordinator.member_id = generation, member


class Rig:
    """A member of a group, and its consumer."""

    def __init__(self) -> None:
        start = KafkaStart("in", "committed", True, lambda: 0)
        self.assignor = WarmUpAssignor()
        self.member = KafkaMember("in", "g", None, start, KafkaPositions(), None, self.assignor)
        self.consumer: Any = Joined()
        source: Any = SimpleNamespace(set_rebalance_listener=self.member.set_listener)
        self.notes = Notes(source, "text", commits=False)

    async def begun(self) -> None:
        """It reads P by generation 1."""
        await self.member.joined(self.consumer)
        self.member.part(self.consumer)
        self.member.begin({P: BegunPartition(0, False, self.member._terms[P])})
        assert self.member.may_read(self.consumer)

    async def rejoined(self, generation: int, member: str = "m") -> tuple[bool, bool]:
        """Whether it reads, and commits, before the coordinator says what others have committed."""
        self.consumer.is_given(P, generation=generation, member=member)
        self.consumer.tells.clear()
        joining = asyncio.create_task(self.member.joined(self.consumer))
        await until(lambda: self.member.rejoined)
        found = self.member.may_read(self.consumer), self.member.of(self.consumer) is not None
        self.consumer.tells.set()
        await joining
        assert self.member.may_read(self.consumer)
        assert self.member.of(self.consumer) is not None
        return found


async def test_the_next_generation_stops_no_partition_that_stays() -> None:
    rig = Rig()
    await rig.begun()
    assert await rig.rejoined(2) == (True, False)


async def test_one_that_missed_a_generation_reads_nothing_until_it_knows_what_others_have_answered() -> None:
    rig = Rig()
    await rig.begun()
    assert await rig.rejoined(3) == (False, False)


async def test_nor_does_one_that_is_another_member_now() -> None:
    rig = Rig()
    await rig.begun()
    assert await rig.rejoined(2, "another") == (False, False)


async def test_one_that_is_no_member_reads_nothing() -> None:
    rig = Rig()
    await rig.begun()
    rig.consumer.is_given(P, generation=-1, member="")
    assert not rig.member.may_read(rig.consumer)
    assert rig.member.of(rig.consumer) is None


async def test_a_place_that_was_found_counts_unless_others_may_have_had_the_partition_since() -> None:
    rig = Rig()
    await rig.begun()
    for generation, counts in ((3, True), (5, False)):
        rig.consumer.is_given(P, Q, generation=2)
        await rig.member.joined(rig.consumer)
        found = {Q: BegunPartition(7, False, rig.member._terms[Q])}
        assert rig.member.still(found) == found
        rig.consumer.is_given(P, Q, generation=generation)
        await rig.member.joined(rig.consumer)
        assert rig.member.still(found) == (found if counts else {})
        rig.consumer.is_given(P, generation=generation + 1)
        await rig.member.joined(rig.consumer)
        assert rig.member.still(found) == {}
        rig.consumer.is_given(P, generation=1)
        await rig.member.joined(rig.consumer)


async def test_a_partition_that_has_just_gone_is_warmed_once_nothing_more_of_it_is_answered_here() -> None:
    rig = Rig()
    await rig.begun()
    rig.consumer.is_given(generation=2)
    rig.assignor.plan = AssignmentPlan(warm=frozenset({tuple(P)}))
    joining = asyncio.create_task(rig.member.joined(rig.consumer))
    assert rig.member.warm == set()
    await joining
    assert (rig.member.part(rig.consumer), rig.notes.gone) == ({P}, [tuple(P)])
    assert rig.member.warm == {P}


async def test_while_the_group_is_formed_there_is_no_membership_for_a_moment() -> None:
    rig = Rig()
    await rig.begun()
    await rig.member.revoke()
    assert rig.member.of(rig.consumer) is None
    assert rig.member.may_read(rig.consumer), "it reads on"
    rig.member._rejoin.since_ns -= 10**10
    assert rig.member.of(rig.consumer) is not None, "somebody else keeps it waiting"
    assert generation_of(rig.consumer) == (1, "m")


class Follower:
    """Places partitions at once."""

    def __init__(self) -> None:
        self.consumer: Any = SimpleNamespace(
            beginning_offsets=self._begin,
            end_offsets=self._end,
            position=self._position,
            seek=lambda partition, offset: None,
        )

    async def _begin(self, partitions: list[TopicPartition]) -> Mapping[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    async def _end(self, partitions: list[TopicPartition]) -> Mapping[TopicPartition, int]:
        return dict.fromkeys(partitions, 180)

    async def _position(self, partition: TopicPartition) -> int:
        return 5

    async def add(self, partitions: Any, place: Any) -> None:
        for partition in partitions:
            await place(self.consumer, partition)


async def placed(rig: Rig) -> None:
    """Q comes and is placed, and the group is formed again before it begins."""
    await rig.begun()
    rig.consumer.is_given(P, Q, generation=2)
    await rig.member.joined(rig.consumer)
    follower: Any = Follower()
    assert await rig.member.place(rig.consumer, rig.member.new(rig.consumer), follower)
    assert tuple(Q) in rig.notes.stored


async def test_a_partition_that_goes_before_it_began_is_answered_here_no_longer() -> None:
    rig = Rig()
    await placed(rig)
    rig.member.give_up(rig.consumer)
    assert rig.notes.gone == []
    rig.consumer.is_given(P, generation=3)
    await rig.member.joined(rig.consumer)
    rig.member.give_up(rig.consumer)
    assert rig.notes.gone == [tuple(Q)]
    rig.member.give_up(rig.consumer)
    assert rig.notes.gone == [tuple(Q)], "once"


@pytest.mark.parametrize("committed", [5, 6])
async def test_one_that_comes_back_begins_again_if_others_have_committed_meanwhile(committed: int) -> None:
    rig = Rig()
    await placed(rig)
    rig.consumer.committed_offset = committed
    rig.consumer.is_given(P, Q, generation=5)
    await rig.member.joined(rig.consumer)
    follower: Any = Follower()
    starts = await rig.member.place(rig.consumer, [Q], follower)
    assert rig.notes.gone == ([tuple(Q)] if committed > 5 else [])
    rig.member.begin(starts)
    rig.member.give_up(rig.consumer)
    assert len(rig.notes.gone) == (committed > 5)
