"""Logits after aliased prefixes and of changing prompts equal those of the unmodified model."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import Attention
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.engine import Engine
from engine.model.canary import dense_logits
from engine.model.loaded import LoadedModel
from engine.step import Chunk, SampledToken
from regions.offload.host_tier import HostTier
from regions.streaming_kv import StreamingPrompt
from regions.tape import Retention
from tests.engine.oracle import tiny
from tests.kit import tolerance
from tests.kit.engine import append, tokens
from tests.kit.prompts import common, next_tokens, remaining


class Counting(Engine):
    """An engine that counts the tokens it computes."""

    computed = 0

    def _run(self, batch: Sequence[Chunk], *args: object) -> object:  # type: ignore[override]  # passed on
        self.computed += sum(len(work.tokens) for work in batch)
        return super()._run(batch, *args)  # type: ignore[arg-type]


def opened(engine: Engine, tokens: list[int], salt: str = "") -> StreamingPrompt:
    """A prompt of ``tokens``, of which it reads the longest prefix in the cache."""
    prompt = engine.open_prompt(salt)
    prompt.update(tokens)
    prompt.match()
    return prompt


def finish(engine: Engine, prompt: list[int], *, save: bool = True) -> tuple[int, torch.Tensor]:
    """Compute and save what is not cached: (how many tokens were, the logits of the others)."""
    fork = opened(engine, prompt)
    rest = prompt[fork.cached_tokens :]
    assert fork.acquire(len(rest))
    logits = engine.logits([Chunk(fork, rest)])
    if save:
        engine.cache.save(prompt, fork)
    found = fork.cached_tokens
    fork.release()
    return found, logits


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("backend", [CpuAttention, ReferenceAttention])
def test_prompts_behind_several_levels_of_splits_equal_the_dense_model(
    architecture: str, backend: type[Attention]
) -> None:
    """Each prompt leaves an earlier one in the middle of a block, at another depth of the trie."""
    model = tiny(architecture, layers=2)
    engine = Engine(model, blocks=80, block_size=4, attention=backend())
    rng = random.Random(2)
    base = tokens(rng, 41)
    prompts = [base]
    for cut in (30, 17, 23, 9, 26, 41):
        prompts.append(prompts[-1][:cut] + tokens(rng, 10) if cut < 41 else base + tokens(rng, 7))
    for i, prompt in enumerate(prompts):
        found, logits = finish(engine, prompt)
        assert found == max((common(each, prompt[:-1]) for each in prompts[:i]), default=0)
        tolerance.assert_logits(model, logits, dense_logits(model, prompt)[found:])
    for prompt in prompts:  # all of it cached by now: one row is left
        found, logits = finish(engine, prompt)
        assert found == len(prompt) - 1
        tolerance.assert_logits(model, logits[-1], dense_logits(model, prompt)[-1])
    assert len(engine.cache._parents) > len(prompts)
    engine.cache.check_integrity()


def test_frozen_prefixes_are_computed_once_and_only_where_they_are_new() -> None:
    """Sessions of one prefix share it, a longer one computes the rest; all equal the dense model."""
    model = tiny("llama", layers=2)
    engine = Counting(model, blocks=80, block_size=4)
    free = engine.pool.free_blocks
    rng = random.Random(4)
    frozen, record = tokens(rng, 18), tokens(rng, 9)
    longer = frozen + tokens(rng, 7)
    branch = frozen[:11] + tokens(rng, 5)
    tapes = []
    for name, prefix, new in (("a", frozen, 18), ("b", frozen, 0), ("c", longer, 7), ("d", branch, 5)):
        before = engine.computed
        tapes.append((engine.open_tape(name, prefix, Retention(30)), prefix))
        assert engine.computed - before == new
    engine.cache.reclaim(80)  # the sessions still read all of it
    assert engine.cache.match_length(longer) == 25
    assert engine.cache.match_length(branch) == 16
    for tape, prefix in tapes:
        logits = append(engine, tape, record)
        tolerance.assert_logits(model, logits, dense_logits(model, prefix + record)[len(prefix) :])
    for tape, _ in tapes:
        tape.release()
    assert engine.pool.free_blocks == free
    engine.cache.reclaim(80)
    assert engine.pool.blocks.free_blocks == free


def test_a_session_that_cannot_be_opened_references_nothing() -> None:
    engine = Engine(tiny("llama", layers=2), blocks=40, block_size=4, frame_limit=64)
    free = engine.pool.free_blocks
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            engine.open_tape("t", [5] * 20, Retention(50))
    assert engine.pool.free_blocks == free


def test_without_a_budget_nothing_is_cached_and_all_is_right() -> None:
    model = tiny("llama", layers=2)
    engine = Engine(model, blocks=40, block_size=4, cache_tokens=0)
    free = engine.pool.free_blocks
    prompt = tokens(random.Random(1), 20)
    for _ in range(2):
        found, logits = finish(engine, prompt)
        assert found == 0
        tolerance.assert_logits(model, logits, dense_logits(model, prompt))
    assert engine.cache.refused == 2
    assert engine.pool.blocks.free_blocks == free


def test_another_tenants_prompt_is_computed_again() -> None:
    engine = Engine(tiny("llama", layers=2), blocks=40, block_size=4)
    prompt = tokens(random.Random(1), 20)
    finish(engine, prompt)
    for salt, expected in (("", 19), ("bob", 0)):
        fork = opened(engine, prompt, salt)
        assert fork.cached_tokens == expected
        fork.release()


@cache
def small_llama() -> LoadedModel:
    return tiny("llama", layers=2)


def run(engine: Engine, prompt: StreamingPrompt, n: int) -> None:
    """Compute the next ``n`` tokens if there is room; every row equals the dense model's."""
    piece = next_tokens(prompt, n)
    if piece and prompt.acquire(len(piece)):
        at = prompt.length
        logits = engine.logits([Chunk(prompt, piece)])
        expected = dense_logits(small_llama(), prompt.wanted[: at + len(piece)].tolist())[at:]
        tolerance.assert_logits(small_llama(), logits, expected)


def answer(engine: Engine, prompt: StreamingPrompt, n: int) -> None:
    """Generate a few tokens after a finished prompt, if there is room."""
    if len(prompt.wanted) and not remaining(prompt):
        prompt.keep(len(prompt.wanted) - 1)
    run(engine, prompt, len(prompt.wanted))
    token = 3
    for _ in range(n % 4):
        if remaining(prompt) or not prompt.acquire(1):
            return
        (choice,) = engine.execute([Chunk(prompt, [token])])
        assert isinstance(choice, SampledToken)
        token = choice.token


OPERATIONS = st.tuples(
    st.sampled_from(
        ["append", "update", "run", "run", "answer", "save", "match", "evict", "preempt", "swap", "return"]
    ),
    st.integers(0, 1),
    st.integers(0, 40),
)


@settings(max_examples=75)
@given(st.lists(OPERATIONS, min_size=5, max_size=40), st.integers(0, 1 << 20))
def test_any_history_of_a_prompt_gives_the_logits_of_a_fresh_prefill(
    operations: list[tuple[str, int, int]], seed: int
) -> None:
    """Two prompts that change and share a cache are saved, evicted, preempted and swapped in a small pool."""
    engine = Engine(small_llama(), blocks=36, block_size=4)
    free = engine.pool.free_blocks
    host = HostTier(engine.pool, 10)
    rng = random.Random(seed)
    source = tokens(rng, 40)  # both are cut from it, so that they share beginnings
    prompts = [engine.open_prompt(), engine.open_prompt()]
    for name, which, n in operations:
        prompt = prompts[which]
        if name == "append" and len(prompt.wanted) < 50:
            at = len(prompt.wanted)
            more = source[at : at + n % 9] if n % 3 else tokens(rng, n % 9 + 1)
            prompt.update([*prompt.wanted.tolist(), *more])
        elif name == "update":
            prompt.update([*source[: n % 29], *tokens(rng, n % 4), *source[n % 29 : n % 35]])
        elif name == "run":
            run(engine, prompt, n)
        elif name == "answer" and len(prompt.wanted):
            answer(engine, prompt, n)
        elif name == "save" and not prompt.swapped:
            prompt.save()
        elif name == "match":
            prompt.match()
        elif name == "evict":
            engine.cache.reclaim(n)
        elif name == "preempt":
            prompt.keep(prompt.cached_tokens)
        elif name == "swap":
            prompt.swap_out(host)
        elif name == "return":
            prompt.swap_in()
        engine.cache.check_integrity()
        engine.pool.check_integrity()
    for prompt in prompts:
        prompt.update([*prompt.wanted.tolist(), *tokens(rng, 2)])
        prompt.match()
        run(engine, prompt, 100)
        if remaining(prompt):  # the other one takes the room it needs
            prompts[0].keep(prompts[0].cached_tokens)
            run(engine, prompt, 100)
        prompt.release()
    assert engine.pool.free_blocks == free
