"""Sampling of a token from logits: exact, restricted, at a temperature, and refused when not finite."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import accept, by_torch, choose, compiled, gumbel
from engine.seeding import GOLDEN, MASK, Sampling, fnv1a, mix, prompt_seed, signed
from engine.step import SampledToken
from tests.kit import tolerance

CHI_SQUARE_7 = 24.3
"""0.999 quantile with 7 degrees of freedom; the draws are the same in every run."""


def naive(logits: list[float], allowed: tuple[int, ...] | None) -> tuple[int, float, float]:
    ids = allowed or tuple(range(len(logits)))
    ranked = sorted(ids, key=lambda i: -logits[i])  # stable: the first listed wins among equals
    return ranked[0], logits[ranked[0]], logits[ranked[min(1, len(ranked) - 1)]]


@settings(max_examples=60)
@given(st.sampled_from([2, 5, 199, 256, 384, 1000]), st.integers(1, 6), st.integers(0, 10**6))
def test_the_choice_is_the_first_of_the_best_and_the_gap_is_over_the_same_set(
    width: int, rows: int, seed: int
) -> None:
    """Against sorting, on logits with many equals, rows with and without choices in one batch."""
    rng = random.Random(seed)
    logits = torch.tensor([[float(rng.randrange(-4, 5)) for _ in range(width)] for _ in range(rows)])
    choices = [
        None if rng.random() < 0.4 else tuple(rng.sample(range(width), rng.randint(1, min(width, 5))))
        for _ in range(rows)
    ]
    for row, allowed, choice in zip(logits.tolist(), choices, choose(logits, choices), strict=True):
        assert (choice.token, choice.top1, choice.top2) == naive(row, allowed)
        assert choice.error is None
        assert choice.logits == tuple(row[token] for token in allowed or ())


@settings(max_examples=60)
@given(st.sampled_from([1, 2, 199, 512, 1300]), st.integers(1, 6), st.integers(0, 10**6))
def test_compiled_choices_are_torch_s(width: int, rows: int, seed: int) -> None:
    """To the bit, with and without choices and noise, and where logits are not finite."""
    rng = random.Random(seed)
    values = [*map(float, range(-4, 5)), float("nan"), float("inf"), -float("inf")]
    logits = torch.tensor([rng.choices(values[: rng.choice([9, 12])], k=width) for _ in range(rows)])
    widest = min(width, 3)
    allowed = np.array(
        [
            [-1] * widest if rng.random() < 0.4 else [*rng.sample(range(width), widest - 1), -1][:widest]
            for _ in range(rows)
        ]
    )
    among = allowed if rng.random() < 0.7 else None
    drawn = [(row, Sampling(0.7, rng.randrange(100), 1)) for row in range(rows) if rng.random() < 0.4]
    ours, theirs = (
        np.array(read) for read in (compiled(logits, among, drawn), by_torch(logits, among, drawn).tolist())
    )
    finite = np.isfinite(theirs[:, 3])
    assert np.array_equal(finite, np.isfinite(ours[:, 3]))
    assert np.array_equal(ours[finite], theirs[finite])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 77, 128, 255])
@pytest.mark.parametrize("allowed", [None, (3, 200)])
def test_a_row_that_is_not_finite_anywhere_fails_alone(
    bad: float, at: int, allowed: tuple[int, ...] | None
) -> None:
    logits = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    whole = choose(logits, [allowed] * 3)
    logits[1, at] = bad
    before, failed, after = choose(logits, [allowed] * 3, [None, Sampling(0.5, 1, 1), None])
    assert failed.error == "the model's logits are not finite"
    assert (before, after) == (whole[0], whole[2])


def test_logits_and_their_spread_may_be_large() -> None:
    logits = torch.tensor([[-3e37, 3e37, 1e30, 0.0]])
    (choice,) = choose(logits, [None])
    assert (choice.token, choice.error) == (1, None)


def test_fnv1a_and_the_seed_of_a_prompt_are_the_published_ones() -> None:
    """Vectors of the FNV authors; a token is four bytes, the lowest first."""
    assert fnv1a(b"") == 0x811C9DC5
    assert fnv1a(b"a") == 0xE40C292C
    assert fnv1a(b"foobar") == 0xBF9CF968
    assert prompt_seed([int.from_bytes(b"foob", "little")]) == fnv1a(b"foob") == 0x3F5076EF
    assert prompt_seed([1, 2]) != prompt_seed([2, 1])


def test_the_noise_is_splitmix64_on_every_device() -> None:
    """Tensor arithmetic against Python's integers, whose first number for seed 0 is the published one."""
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF
    keys = [0, 1, 2**63 + 5, MASK]
    noise = gumbel(torch.tensor([signed(key) for key in keys]), 50)
    for key, row in zip(keys, noise.tolist(), strict=True):
        for i, value in enumerate(row):
            bits = mix((key + (i + 1) * GOLDEN) & MASK) >> 32
            uniform = (bits + 0.5) / 2**32
            rate = -math.log1p(-uniform)
            slope = uniform / (1 - uniform) / rate  # by which the rounding of ``uniform`` grows
            bound = tolerance.rounding(max(1.0, slope, abs(math.log(rate))), width=1)
            assert value == tolerance.near(-math.log(rate), bound)


def chi_square(tokens: list[int], expected: torch.Tensor) -> float:
    counts = Counter(tokens)
    return sum(
        (counts[i] - len(tokens) * p) ** 2 / (len(tokens) * p) for i, p in enumerate(expected.tolist()) if p
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("over", ["seeds", "indices"])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float, over: str) -> None:
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 0.1, 0.6])
    draws = 20_000
    sampling = [
        Sampling(temperature, prompt_seed([i]), 3) if over == "seeds" else Sampling(temperature, 99, i)
        for i in range(draws)
    ]
    tokens = [choice.token for choice in choose(logits.expand(draws, 8), [None] * draws, sampling)]
    assert chi_square(tokens, torch.softmax(logits / temperature, -1)) < CHI_SQUARE_7
    # two neighbours in the answer, or of two prompts, are independent
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    p = torch.softmax(logits / temperature, -1).tolist()
    expected = {(a, b): draws / 2 * p[a] * p[b] for a in range(8) for b in range(8)}
    assert sum((pairs[k] - e) ** 2 / e for k, e in expected.items()) < 104  # 0.999 quantile, 63 degrees


def test_restricted_draws_follow_the_softmax_over_the_choices() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))
    allowed, draws = (31, 4, 7, 11, 0, 38, 20, 19), 10_000
    sampling = [Sampling(0.8, i, 0) for i in range(draws)]
    chosen = choose(logits.expand(draws, 40), [allowed] * draws, sampling)
    places = [allowed.index(choice.token) for choice in chosen]
    assert chi_square(places, torch.softmax(logits[list(allowed)] / 0.8, -1)) < CHI_SQUARE_7


def test_the_confidence_of_a_draw_is_that_of_the_raw_logits() -> None:
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(3))
    greedy = choose(logits, [None] * 200)
    drawn = choose(logits, [None] * 200, [Sampling(2.0, i, 0) for i in range(200)])
    assert [(c.top1, c.top2) for c in drawn] == [(c.top1, c.top2) for c in greedy]
    assert sum(a.token != b.token for a, b in zip(drawn, greedy, strict=True)) > 50


def test_a_draw_is_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(30, 199, generator=torch.Generator().manual_seed(4))
    sampling = [None if i % 3 == 0 else Sampling(0.1 * i, i, 7 * i) for i in range(30)]
    choices = [(5, 6, 7, i) if i % 4 == 0 else None for i in range(30)]
    together = choose(logits, choices, sampling)
    assert together == [
        choose(logits[i : i + 1], choices[i : i + 1], sampling[i : i + 1])[0] for i in range(30)
    ]


def test_a_temperature_near_zero_takes_the_best() -> None:
    logits = torch.randn(50, 199, generator=torch.Generator().manual_seed(5))
    drawn = choose(logits, [None] * 50, [Sampling(1e-38, i, 0) for i in range(50)])
    assert drawn == choose(logits, [None] * 50)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_makes_no_sense_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature, 1, 0)


def test_keys_differ_by_seed_and_index() -> None:
    keys = {Sampling(1.0, seed, index).key for seed in range(100) for index in range(100)}
    assert len(keys) == 10_000
    assert Sampling(1.0, 3, 4).later(2) == Sampling(1.0, 3, 6)


def rows(*tokens: int) -> list[SampledToken]:
    return [SampledToken(token, 2.0, 1.0) for token in tokens]


def test_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    model = rows(5, 6, 7, 8)
    for drafts, accepted in (((5, 6, 7), 3), ((5, 6, 9), 2), ((9, 6, 7), 0), ((5, 9, 7), 1)):
        choice = accept(drafts, model)
        assert choice.accepted == tuple(model[:accepted])
        assert choice.token == model[accepted].token
    assert accept((), model[:1]) == model[0]


def test_a_broken_row_confirms_nothing_and_is_what_comes_back() -> None:
    model = rows(5, 6, 7)
    model[1] = SampledToken(0, 0.0, 0.0, "broken")
    assert accept((5, 0), model).error == "broken"
    assert accept((9, 0), model).error is None  # the answer never comes to the broken row


@settings(max_examples=40)
@given(st.integers(0, 1000), st.floats(0.05, 1.0), st.integers(0, 9), st.floats(0.2, 3.0))
def test_only_the_nucleus_is_drawn_from(seed, top_p, top_k, temperature) -> None:
    """Against a plain sort; without a cut nothing changes."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (1, 24)).astype(np.float32))
    chances = torch.softmax(logits[0] / temperature, -1).tolist()
    ranked = sorted(range(24), key=lambda token: -chances[token])
    allowed, total = [], 0.0
    for token in ranked[: top_k or 24]:
        if allowed and total >= top_p - 1e-6:
            break
        allowed.append(token)
        total += chances[token]
    for index in range(20):
        how = Sampling(temperature, seed, index, top_p, top_k)
        (found,) = choose(logits, [None], [how])
        assert found.token in allowed
        (plain,) = choose(logits, [None], [Sampling(temperature, seed, index)])
        (whole,) = choose(logits, [None], [Sampling(temperature, seed, index, 1.0, 24)])
        assert whole == plain
    (chosen,) = choose(logits, [(3, 5)], [Sampling(temperature, seed, 0, 0.05, 1)])
    (free,) = choose(logits, [(3, 5)], [Sampling(temperature, seed, 0)])
    assert chosen == free  # among choices nothing is cut


def test_log_probabilities_are_of_the_whole_vocabulary_and_only_where_they_are_asked_for() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0], [5.0, 1.0, 0.0, 0.0], [math.nan, 0, 0, 0]])
    one, two, bad = choose(logits, [(0, 1), None, None], [], [2, None, 1])
    reference = torch.log_softmax(logits[0], -1)
    assert one.token == 1
    assert one.logprob == pytest.approx(reference[1].item())
    assert [token for token, _ in one.top] == [2, 3]
    assert [logprob for _, logprob in one.top] == pytest.approx(reference[[2, 3]].tolist())
    assert (two.logprob, two.top) == (None, ())
    assert bad.error
    assert choose(logits[:1], [None], [], [0])[0].top == ()
    assert len(choose(logits[:1], [None], [], [20])[0].top) == 4


@given(st.integers(0, 1000), st.floats(0.01, 100.0))
def test_a_log_probability_alone_is_as_exact_as_doubles(seed: int, scale: float) -> None:
    """Beside rows that ask for none, or are not finite."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (5, 300)).astype(np.float32))
    logits[1, 7], logits[2, 9] = math.inf, -math.inf
    found = choose(logits, [None, None, (3, 4), (5, 6), (8,)], [], [0, 0, 0, None, 0])
    reference = torch.log_softmax(logits.double(), -1)
    assert [bool(each.error) for each in found] == [False, True, True, False, False]
    assert found[3].logprob is None
    for row in (0, 4):
        expected = reference[row, found[row].token].item()
        assert found[row].logprob == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert found[row].top == ()


@pytest.mark.parametrize(("top_p", "top_k"), [(0.0, 0), (1.1, 0), (0.5, -1)])
def test_a_cut_out_of_range_is_refused(top_p: float, top_k: int) -> None:
    with pytest.raises(ValueError, match="top_p"):
        Sampling(1.0, 1, 0, top_p, top_k)
