"""The bandit that chooses k, in an environment whose best k is known. All seeds are fixed."""

import math
import pickle
import random
from itertools import accumulate
from statistics import mean

import pytest

from scheduler.bandit import ARMS, KBandit

FEW = (1, 1.3, 1.7, 2.2, 3, 3.5, 4, 5)
"""Relative TTFT of each arm where prefixes hardly repeat: FCFS is best."""
SOME = (4, 2, 1.3, 1, 1.2, 1.5, 2.2, 4)
"""k = 4 is best."""
MANY = (5, 4, 3.2, 2.5, 2, 1.7, 1.3, 1)
"""LPM is best."""
SEEDS = range(6)
EPOCH = 50


def played(
    bandit: KBandit,
    costs: tuple[float, ...],
    seed: int,
    epochs: int,
    *,
    unit: float = 1e9,
    swing: float = 1.0,
) -> list[int]:
    """The arm of each of about so many epochs; log-normal TTFTs, a load that swings by e^(2 swing)."""
    rng = random.Random(seed)
    arms = []
    for epoch in range(epochs):
        load = unit * math.exp(swing * math.sin(epoch / 15))
        for _ in range(EPOCH):
            cost = costs[ARMS.index(bandit.k)]
            bandit.observe(int(load * cost * rng.lognormvariate(0, 0.8)))
        arms.append(ARMS.index(bandit.k))
    return arms


def excess(arms: list[int], costs: tuple[float, ...]) -> float:
    """TTFT under these arms, relative to the best arm's."""
    return mean(costs[arm] for arm in arms) / min(costs)


@pytest.mark.parametrize("costs", [FEW, SOME, MANY])
def test_the_bandit_finds_the_best_k(costs: tuple[float, ...]) -> None:
    """After 60 epochs it is played most, and three quarters of what chance would cost are saved."""
    best = costs.index(min(costs))
    late = [played(KBandit(rng=random.Random(seed)), costs, seed, 160, swing=0)[60:] for seed in SEEDS]
    assert all(max(set(arms), key=arms.count) == best for arms in late)
    chance = excess(list(range(len(costs))), costs)
    assert all(excess(arms, costs) < 1 + (chance - 1) / 4 for arms in late)


@pytest.mark.parametrize("costs", [FEW, SOME, MANY])
def test_a_load_that_swings_does_not_hide_the_best_k(costs: tuple[float, ...]) -> None:
    """TTFT rises and falls by a factor of 7 under any k: mostly the best arm or its neighbour is played."""
    best = costs.index(min(costs))
    late = [played(KBandit(rng=random.Random(seed)), costs, seed, 160)[60:] for seed in SEEDS]
    near = [mean(abs(arm - best) <= 1 for arm in arms) for arms in late]
    assert mean(near) > 0.75
    assert min(near) > 0.5


def test_the_bandit_follows_traffic_that_changes() -> None:
    """From FCFS over k = 4 to LPM and back: after each change the new best arm is played most."""
    for seed in SEEDS:
        bandit = KBandit(rng=random.Random(seed))
        for part, costs in enumerate((FEW, SOME, MANY, FEW)):
            late = played(bandit, costs, 10 * seed + part, 120)[60:]
            assert abs(max(set(late), key=late.count) - costs.index(min(costs))) <= 1
            assert excess(late, costs) < 1.5


def p99_of_a_queue(bandit: KBandit | None, seed: int) -> float:
    """P99 TTFT of one server whose cache holds eight users' prefixes, in requests without reuse.

    Four requests of each user come a while apart, faster than FCFS can serve them. Without a bandit: FCFS.
    """
    rng, n = random.Random(seed), 10_000
    users = [i // 4 for i in sorted(range(n), key=lambda i: i + rng.uniform(0, 200))]
    arrivals = list(accumulate(rng.expovariate(1 / 0.5) for _ in users))
    waiting: dict[int, None] = {}
    cached: dict[int, None] = {}
    now, come, ttfts = 0.0, 0, []
    for step in range(n):
        now = max(now, arrivals[come]) if not waiting else now
        while come < n and arrivals[come] <= now:
            waiting[come] = None
            come += 1
        k = bandit.k if bandit else 1
        matching = (i for i in waiting if users[i] in cached)
        oldest = next(iter(waiting))
        chosen = oldest if k is not None and step % k == 0 else next(matching, oldest)
        del waiting[chosen]
        now += 1 / 6 if users[chosen] in cached else 1
        cached.pop(users[chosen], None)
        cached[users[chosen]] = None
        if len(cached) > 8:
            del cached[next(iter(cached))]
        ttfts.append(now - arrivals[chosen])
        if bandit:
            bandit.observe(int(ttfts[-1] * 1e6))
    return sorted(ttfts)[n * 99 // 100]


def test_the_bandit_leaves_a_k_under_which_the_queue_grows_without_end() -> None:
    """FCFS and k = 2 cannot keep up here: trying them must not end in their backlog."""
    for seed in range(3):
        assert p99_of_a_queue(KBandit(rng=random.Random(seed)), seed) < p99_of_a_queue(None, seed) / 8


def test_the_unit_of_time_does_not_matter() -> None:
    """A device that is 1024 times as slow gets the same choices."""
    slow, quick = (
        played(KBandit(rng=random.Random(1)), SOME, 1, 60, unit=unit)
        for unit in (float(1 << 40), float(1 << 30))
    )
    assert slow == quick


def test_equal_observations_give_equal_choices() -> None:
    first, second = (played(KBandit(rng=random.Random(5)), MANY, 3, 50) for _ in range(2))
    assert first == second


def test_the_tail_decides_not_the_mean() -> None:
    """An arm with a better mean but a slower worst tenth is left."""
    bandit = KBandit((1, 2), rng=random.Random(0), epoch=20, warm_up=0)
    plays = {1: 0, 2: 0}
    for _ in range(100):
        k = bandit.k or 0
        plays[k] += 1
        for ttft in [10] * 18 + [1000] * 2 if k == 1 else [300] * 20:
            bandit.observe(ttft)
    assert plays[2] > 80


def test_requests_that_waited_under_another_k_are_not_judged() -> None:
    """The first requests after a change of k do not count."""

    def choices(late: int) -> list[int | None]:
        bandit = KBandit((1, 2), rng=random.Random(0), epoch=5, warm_up=3)
        made = []
        for _ in range(60):
            before = bandit.k
            for ttft in [50] * 4 + [60 if before == 1 else 70]:
                bandit.observe(ttft)
            made.append(bandit.k)
            if bandit.k != before:
                for _ in range(3):
                    bandit.observe(late)
        return made

    assert choices(1) == choices(10**12)
    assert len(set(choices(1))) == 2


def test_the_state_of_the_bandit_does_not_grow() -> None:
    bandit = KBandit(rng=random.Random(0))
    played(bandit, SOME, 0, 20)
    before = len(pickle.dumps(bandit))
    played(bandit, SOME, 1, 200)
    assert len(pickle.dumps(bandit)) < before + 200


def test_a_constant_ttft_is_no_error() -> None:
    bandit = KBandit(rng=random.Random(0), epoch=1, warm_up=0)
    for _ in range(1000):
        bandit.observe(0)
        assert bandit.k in ARMS


def test_a_single_arm_is_always_chosen() -> None:
    bandit = KBandit((None,), rng=random.Random(0), epoch=1)
    for _ in range(20):
        bandit.observe(1)
        assert bandit.k is None


def test_the_bandit_begins_with_the_given_arm_or_the_middle_one() -> None:
    assert KBandit((1, 2, 3), rng=random.Random(0)).k == 2
    assert KBandit((1, 2, 3), rng=random.Random(0), first=0).k == 1
    assert KBandit((1, None), rng=random.Random(0), first=1).k is None
