"""Prompts that change while they are prefilled, against a plain list of what must be in KV."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regions.kv_tensors import KVPool
from regions.offload.host_tier import HostTier
from regions.radix import RadixCache
from regions.streaming_kv import StreamingPrompt
from tests.kit.prompts import common, next_tokens, remaining
from tests.regions.contents import pool_with_cache, reads, write


def streaming(blocks: int = 60) -> tuple[KVPool, RadixCache, StreamingPrompt]:
    pool, cache = pool_with_cache(blocks)
    return pool, cache, StreamingPrompt(pool, cache, frame_limit=1000)


def run(pool: KVPool, prompt: StreamingPrompt, n: int = 1000) -> bool:
    """Prefill up to ``n`` of the remaining tokens."""
    piece = next_tokens(prompt, n)
    return write(pool, prompt, prompt.wanted[: prompt.length].tolist(), piece)


def change(pool: KVPool, prompt: StreamingPrompt, tokens: Sequence[int], n: int = 1000) -> int:
    """Replace the prompt and prefill up to ``n`` tokens; returns the tokens that were invalidated."""
    invalidated = prompt.update(tokens)
    assert run(pool, prompt, n)
    return invalidated


def blocks_given_up(pool: KVPool, prompt: StreamingPrompt) -> int:
    """Blocks that are referenced because of the prompt's private tokens."""
    if prompt.swapped:
        return 0
    taken = prompt._table.referenced_blocks()
    own = [block for run in prompt.private_blocks for block in range(run.start, run.stop)]
    return len({*own, *(block for run in taken for block in range(run.start, run.stop))})


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
CHANGES = ["append", "update", "change"]
EVENTS = ["run", "run", "answer", "save", "match", "preempt", "swap", "return", "evict", "recompute last"]
EVENTS += ["follow", "cut"]
OPERATIONS = st.tuples(st.sampled_from(CHANGES + EVENTS), st.integers(0, 30), TOKENS)


@settings(max_examples=75)
@given(st.lists(OPERATIONS, min_size=15, max_size=50))
def test_what_is_in_kv_is_always_the_prompt(operations: list[tuple[str, int, list[int]]]) -> None:
    """After any changes, saves, evictions, preemptions and swaps the KV is right and no block leaks."""
    pool, cache, prompt = streaming(40)
    host = HostTier(pool, 6)
    wanted: list[int] = []
    in_kv: list[int] = []
    for name, n, tokens in operations:
        if name in ("append", "update", "change"):
            changed = {
                "append": wanted + tokens,
                "update": tokens,
                "change": wanted[: max(0, len(wanted) - n % 9)] + tokens,
            }[name]
            kept = common(in_kv, changed)
            assert prompt.update(changed) == len(in_kv) - kept
            wanted, in_kv = changed, in_kv[:kept]
        elif name == "run" and len(wanted) > len(in_kv) and not prompt.swapped:
            if run(pool, prompt, n):
                in_kv = wanted[: len(in_kv) + n]
        elif name == "answer" and wanted and len(in_kv) >= len(wanted) and not prompt.swapped:
            if write(pool, prompt, in_kv, tokens):
                in_kv = in_kv + tokens
        elif name == "save" and not prompt.swapped:
            known = cache.match_length(in_kv)
            assert prompt.save() == len(in_kv) - known
        elif name == "match":
            longest = cache.match_length(wanted[:-1])
            assert prompt.match() == max(0, longest - len(in_kv))
            in_kv = wanted[:longest] if longest > len(in_kv) else in_kv
        elif name == "follow":
            source = StreamingPrompt(pool, cache, frame_limit=1000)
            source.update([*wanted, *tokens])
            source.match()
            first = min(n, len(wanted) - 1)
            if first > len(in_kv) and run(pool, source, n) and source.length >= first:
                prompt.read_from(source, first)
                in_kv = wanted[:first]
            source.release()
        elif name == "cut":
            prompt.keep(n % (len(in_kv) + 1))
            in_kv = in_kv[: n % (len(in_kv) + 1)]
        elif name == "preempt":
            prompt.keep(prompt.cached_tokens)
            in_kv = in_kv[: prompt.cached_tokens]
        elif name == "swap":
            prompt.swap_out(host)
        elif name == "return":
            prompt.swap_in()
        elif name == "evict":
            cache.reclaim(n)
        elif name == "recompute last" and wanted and not remaining(prompt):
            prompt.keep(len(prompt.wanted) - 1)
            in_kv = in_kv if len(in_kv) < len(wanted) else wanted[:-1]
            assert remaining(prompt) >= 1
        assert prompt.wanted.tolist() == wanted
        assert prompt.length == len(in_kv)
        assert remaining(prompt) == max(0, len(wanted) - len(in_kv))
        assert prompt.swapped == (host.pool.free_blocks < 6)
        assert prompt.swapped or reads(pool, prompt.extents, in_kv)
        assert prompt.blocks == blocks_given_up(pool, prompt)
        for either in (pool, host.pool):
            either.check_integrity()
        cache.check_integrity()
    prompt.release()
    assert (pool.free_blocks, host.pool.free_blocks) == (40, 6)


def test_only_the_changed_end_is_invalidated_and_freed() -> None:
    """The paper's example: when a document is replaced, only the KV from there on is freed."""
    pool, _, prompt = streaming()
    system, old, new, question = [1] * 10, [2] * 12, [3] * 14, [4] * 6
    prompt.update(system)
    change(pool, prompt, system + old + question)
    assert pool.free_blocks == 60 - 7
    assert prompt.update(system + new + question) == 18
    assert (prompt.length, remaining(prompt)) == (10, 20)
    assert pool.free_blocks == 60 - 3
    assert next_tokens(prompt, 4) == [3] * 4
    assert prompt.update(system + old) == 0  # what was not in KV yet cannot be invalidated


def test_a_change_inside_the_aliased_part_lets_go_of_the_rest() -> None:
    """The shared prefix is cut, not copied, and its end may be reclaimed by others."""
    pool, cache, donor = streaming()
    tokens = list(range(24))
    change(pool, donor, tokens)
    assert donor.save() == 24
    donor.release()
    prompt = StreamingPrompt(pool, cache, frame_limit=1000)
    prompt.update([*tokens, 50, 51])
    assert prompt.match() == 24
    run(pool, prompt)
    assert cache.reclaimable == 0
    changed = [*tokens[:9], 99, *tokens[10:]]
    assert prompt.update(changed) == 26 - 9
    assert (prompt.length, prompt.cached_tokens, len(prompt.tokens)) == (9, 9, 0)
    assert cache.reclaimable == 6 - 3
    run(pool, prompt)
    assert reads(pool, prompt.extents, changed)
    assert cache.match_length(tokens) == 24


def test_what_is_cut_off_is_given_back() -> None:
    """However often a prompt that others read is cut back and grows again."""
    pool, cache, prompt = streaming()
    used = set()
    for turn in range(20):
        change(pool, prompt, [*range(6), *[100 + turn] * 12])
        prompt.save()
        change(pool, prompt, [*range(6), *[100 + turn] * 8, 7])
        change(pool, prompt, [*range(6), 7])
        cache.clear()
        used.add(pool.total_blocks - pool.blocks.free_blocks)
    assert used == {3}, "6 tokens in two blocks that were shared, and the next"
    assert reads(pool, prompt.extents, [*range(6), 7])
    prompt.release()
    assert pool.free_blocks == pool.total_blocks


def test_one_token_is_always_left_to_compute() -> None:
    """A fully cached prompt, or one cut back to its tokens in KV, still has a row to answer from."""
    pool, cache, prompt = streaming()
    change(pool, prompt, range(9))
    prompt.save()
    for wanted, expected in (([*range(9)], 8), ([0], 0)):
        again = StreamingPrompt(pool, cache, frame_limit=1000)
        again.update(wanted)
        assert again.match() == expected
    prompt.update(range(5))
    assert remaining(prompt) == 0
    prompt.keep(len(prompt.wanted) - 1)
    assert next_tokens(prompt, 5) == [4]


def test_a_swapped_prompt_is_invalidated_on_the_host() -> None:
    """The paper's order: free on the host, bring back what is left, compute the rest."""
    pool, cache, prompt = streaming()
    host = HostTier(pool, 10)
    change(pool, prompt, range(30))
    assert prompt.swap_out(host)
    assert (pool.free_blocks, host.pool.free_blocks) == (60, 2)
    assert prompt.update([*range(14), 99]) == 16
    assert (host.pool.free_blocks, prompt.length) == (6, 14)
    with pytest.raises(RuntimeError, match="swapped out"):
        prompt.save()
    with pytest.raises(RuntimeError, match="swapped out"):
        StreamingPrompt(pool, cache, frame_limit=1000).read_from(prompt, 10)
    assert prompt.swap_in()
    assert (pool.free_blocks, host.pool.free_blocks) == (56, 10)
    run(pool, prompt)
    assert reads(pool, prompt.extents, [*range(14), 99])
    assert prompt.save() == 15
    assert prompt.swap_out(host)
    assert prompt.update([5, 6]) == 15  # nothing is left, here or there
    assert (cache.reclaimable, host.pool.free_blocks) == (4, 10)


def test_the_prompt_does_not_change_with_the_callers_array() -> None:
    _, _, prompt = streaming()
    array = np.array([1, 2, 3], np.int32)
    prompt.update(array)
    array[:] = 9
    assert prompt.wanted.tolist() == [1, 2, 3]


def test_a_prompt_reads_the_kv_of_another_and_neither_writes_into_the_others() -> None:
    """Two blocks and a half in common: metadata only, and it stays when the source is gone."""
    pool, cache, source = streaming()
    change(pool, source, range(20), 13)
    reader = StreamingPrompt(pool, cache, frame_limit=1000)
    change(pool, reader, [*range(10), 70, 71, 72], 3)
    before = pool.free_blocks
    reader.read_from(source, 10)
    assert pool.free_blocks == before + 1, "what it had computed itself goes, nothing else is taken"
    assert (reader.length, reader.cached_tokens, reader.blocks) == (10, 10, 0)
    run(pool, reader)
    run(pool, source)
    assert reads(pool, reader.extents, [*range(10), 70, 71, 72])
    assert reads(pool, source.extents, list(range(20)))
    source.release()
    other = StreamingPrompt(pool, cache, frame_limit=1000)
    change(pool, other, [9] * (pool.free_blocks * 4))
    assert reads(pool, reader.extents, [*range(10), 70, 71, 72])
    reader.release()
    other.release()
    assert pool.free_blocks == pool.total_blocks


def test_a_rejected_draft_behind_a_saved_prompt_does_not_hide_the_blocks() -> None:
    """The next token goes to a new block, because the cache reads the old one; the fork has both."""
    pool, cache, prompt = streaming()
    change(pool, prompt, range(10))
    prompt.save()
    assert write(pool, prompt, range(10), [50, 51])
    prompt.keep(11)
    assert prompt.blocks == 3
    assert write(pool, prompt, [*range(10), 50], [52])
    assert prompt.blocks == 4
    host = HostTier(pool, 4)
    assert prompt.swap_out(host)
    assert prompt.blocks == 0, "what is left of it in the pool stays when it is preempted again"
    assert prompt.swap_in()
    cache.clear()
    assert pool.free_blocks == 60 - 4
    prompt.keep(prompt.cached_tokens)
    assert (prompt.blocks, pool.free_blocks) == (0, 60)
