"""N-gram drafts: their source, their number, and that they change no answer."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import contains
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step import Chunk, SampledToken
from scheduler.interfaces import Limits
from scheduler.request import State
from scheduler.speculation import NgramProposer, draft_cap, worthwhile
from tests.kit.scheduler.fakes import FakeExecutor
from tests.kit.scheduler.harness import Harness

FEW = st.lists(st.integers(0, 3), max_size=60)


def scanned(tokens: list[int], most: int) -> list[int]:
    """The definition: the tokens after the newest earlier occurrence of the last 3 tokens, else of 2."""
    for n in (3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + most]
    return []


@given(FEW, FEW, st.integers(1, 6))
def test_a_draft_is_what_followed_the_newest_earlier_occurrence(
    prompt: list[int], answer: list[int], most: int
) -> None:
    proposer = NgramProposer(prompt)
    proposer.extend(answer)
    assert proposer.propose(most) == scanned([*prompt, *answer], most)
    assert len(proposer) == len(prompt) + len(answer)


def test_only_the_newest_part_of_a_long_prompt_is_remembered() -> None:
    proposer = NgramProposer([7, 8, 9, *range(100, 9000)])
    proposer.extend([7, 8, 9])
    assert proposer.propose(3) == []
    assert len(proposer) == 8906


def test_the_cap_falls_with_running_answers_and_with_acceptance() -> None:
    limits = Limits(max_drafts=8, max_draft_rows=64, draft_give_up=0.1, draft_retry=16)

    def cap(decoders: int, acceptance: float) -> int:
        return draft_cap(limits, decoders, acceptance, generated=16)

    assert [cap(decoders, 1.0) for decoders in (1, 8, 16, 64, 65)] == [8, 8, 4, 1, 0]
    assert [cap(1, acceptance) for acceptance in (1.0, 0.5, 0.2, 0.1)] == [8, 4, 2, 1]
    assert all(cap(n, a) >= cap(n + 1, a) for n in range(1, 80) for a in (0.0, 0.3, 1.0))
    assert draft_cap(replace(limits, max_drafts=0), 1, 1.0, 0) == 0


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 40))
def test_an_answer_gives_up_at_its_rate_and_tries_again_after_so_many_tokens(
    rate: float, acceptance: float, retry: int
) -> None:
    limits = Limits(max_drafts=8, draft_give_up=rate, draft_retry=retry)
    caps = [draft_cap(limits, 1, acceptance, generated) for generated in range(2 * retry)]
    if acceptance < rate:
        assert caps == [1, *[0] * (retry - 1)] * 2, "one try now and then"
    else:
        assert all(caps)


@given(st.integers(0, 16), st.floats(0, 1), st.floats(0, 3))
def test_as_many_drafts_as_give_most_tokens_for_the_time(most: int, acceptance: float, price: float) -> None:
    """By the definition: the expected tokens of a pass over what it takes, of each number of drafts."""

    def rate(drafts: int) -> float:
        return sum(acceptance**k for k in range(drafts + 1)) / (1 + price * drafts)

    found = worthwhile(most, acceptance, price)
    assert 0 <= found <= most
    assert rate(found) >= max(map(rate, range(most + 1))) * (1 - 1e-12)


def test_drafts_that_cost_more_than_they_bring_are_tried_now_and_then() -> None:
    limits = Limits(max_drafts=4, draft_retry=16)
    assert [draft_cap(limits, 1, a, 5, price=0.25) for a in (1.0, 0.5, 0.3, 0.2)] == [4, 1, 1, 0]
    assert draft_cap(limits, 1, 0.2, 16, price=0.25) == 1
    assert draft_cap(limits, 1, 0.2, 5) == 1, "free ones"


class Parrot(FakeExecutor):
    """A model that counts in a circle: its answers repeat, so drafts prove right."""

    circle = 5

    def _run(self, chunk: Chunk) -> SampledToken | None:
        visible = chunk.target.write(chunk.tokens)
        if not chunk.sample:
            return None
        known = len(visible) - chunk.drafts
        rows: list[SampledToken] = []
        for draft in (*visible[known:], None):
            token = (visible[known + len(rows) - 1] + 1) % self.circle
            rows.append(SampledToken(token, 1.0, 0.0))
            if token != draft:
                break
        return SampledToken(rows[-1].token, 1.0, 0.0, accepted=tuple(rows[:-1]))


def run(
    prompts: Sequence[Sequence[int]],
    executor: FakeExecutor,
    spec: Mapping[str, Any] = MappingProxyType({}),
    tokens: int = 23,
    **limits: int,
) -> tuple[Harness, list[list[int]]]:
    made = Limits(max_batch_tokens=64, chunk_min=3, chunk_max=8, max_new_tokens=64, **limits)
    h = Harness(limits=made, executor=executor)
    asked = [h.ask(prompt, max_tokens=tokens, **spec) for prompt in prompts]
    h.run()
    assert all(request.state is State.FINISHED for request in asked)
    assert h.memory.free_blocks == h.memory.total_blocks
    return h, [request.output for request in asked]


@pytest.mark.parametrize(("tokens", "spec"), [(40, {}), (23, {"grammar": lambda _output, _left: range(5)})])
def test_drafts_that_prove_right_save_passes_and_change_nothing(tokens: int, spec: dict[str, Any]) -> None:
    """Free text begins with fewer drafts than a grammar, so it takes a longer answer to save as much."""
    prompts = [[0, 1, 2, 3, 4, 0, 1], [3, 4, 0, 1, 2, 3]]
    plain, expected = run(prompts, Parrot(), spec, tokens, max_drafts=0)
    drafted, found = run(prompts, Parrot(), spec, tokens, max_drafts=4)
    assert found == expected
    assert len(drafted.executor.batches) * 3 < len(plain.executor.batches)


@settings(max_examples=50)
@given(st.lists(FEW.filter(bool), min_size=1, max_size=4), st.integers(1, 5))
def test_answers_are_token_for_token_those_without_drafts(prompts: list[list[int]], most: int) -> None:
    """The fakes' model is a hash of all it sees: a draft left in KV, or one too many, would change it."""
    _, expected = run(prompts, FakeExecutor(), max_drafts=0)
    _, found = run(prompts, FakeExecutor(), max_drafts=most)
    assert found == expected


def test_drafts_end_with_the_answer() -> None:
    """The answer has 23 tokens: 22 rows after the first, whatever was guessed behind them."""
    h, (answer,) = run([[0, 1, 2, 3, 4, 0, 1, 2]], Parrot(), max_drafts=16)
    assert len(answer) == 23
    decodes = len(h.executor.batches) - 1
    assert decodes + h.done[0].drafts.accepted == 22, "one verified behind the end would be one too many"
    assert h.done[0].drafts.verified > 0
    assert 0 < h.done[0].drafts.accepted <= h.done[0].drafts.verified


def among(width: int) -> Callable[[Sequence[int], int], tuple[int, ...]]:
    """A grammar that permits 1 to ``width`` tokens, whichever the answer so far and its length say."""

    def allowed(output: Sequence[int], left: int) -> tuple[int, ...]:
        rng = random.Random(repr((output[-2:], left)))
        return tuple(rng.sample(range(4), rng.randint(1, width)))

    return allowed


@settings(max_examples=50)
@given(
    st.lists(FEW.filter(bool), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 3),
    st.sampled_from([frozenset[int](), frozenset({2})]), st.booleans(),
)  # fmt: skip
def test_answers_under_a_grammar_are_token_for_token_those_without_drafts(
    prompts: list[list[int]], most: int, width: int, stops: frozenset[int], forced: bool
) -> None:
    """Each row is chosen among what the grammar permits there; what it is said to force may be wrong."""
    spec = {"grammar": among(width), "stop_ids": stops, "forced": len if forced else None}
    _, expected = run(prompts, FakeExecutor(), spec, max_drafts=0)
    h, found = run(prompts, FakeExecutor(), spec, max_drafts=most)
    assert found == expected
    for batch in h.executor.batches:
        for chunk in batch:
            drafts = chunk.tokens[len(chunk.tokens) - chunk.drafts :]
            if not forced:
                assert all(map(contains, chunk.row_choices, drafts))
            assert stops.isdisjoint(drafts)


def test_where_one_token_is_permitted_it_is_a_draft_that_is_accepted() -> None:
    """Of 23 tokens the first comes with the prompt; then five a pass."""
    spec = {"grammar": lambda output, left: (left % 4,)}
    h, (answer,) = run([[3, 1, 4]], FakeExecutor(), spec, max_drafts=4)
    assert answer == [left % 4 for left in range(23, 0, -1)]
    assert len(h.executor.batches) == 1 + -(-22 // 5)
    assert h.done[0].drafts.accepted == h.done[0].drafts.verified


def test_a_text_that_must_follow_is_drafted_and_a_wrong_guess_costs_no_answer() -> None:
    spec: dict[str, Any] = {"grammar": lambda output, left: (0, 1, 2)}
    _, (expected,) = run([[3, 1, 4]], FakeExecutor(), spec, max_drafts=0)
    spec["forced"] = lambda output: expected[len(output)] if len(output) % 7 else 3
    h, (answer,) = run([[3, 1, 4]], FakeExecutor(), spec, max_drafts=4)
    assert answer == expected
    assert 0 < h.done[0].drafts.accepted < h.done[0].drafts.verified
