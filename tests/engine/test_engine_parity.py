"""Logits over regions equal the unmodified model's, however batched, forked or evicted."""

import random

import pytest
import torch

from engine.attention.base import Attention
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.engine import Engine
from engine.model.canary import check, dense_logits
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.tape import Retention
from tests.engine.oracle import ARCHITECTURES, History, oracle_logits, tiny
from tests.kit import tolerance
from tests.kit.engine import TapeWithHistory, append, ask, ask_together, tokens

BACKENDS: list[type[Attention]] = [CpuAttention, ReferenceAttention]


def test_the_oracle_is_the_dense_model_while_nothing_is_evicted() -> None:
    """The oracle itself is checked against transformers' own eager forward."""
    for architecture in ARCHITECTURES:
        model = tiny(architecture)
        rng = random.Random(0)
        history = History.begin(tokens(rng, 11))
        history.add(tokens(rng, 40), 0, 0)
        # the dense positions of frozen and tape are one sequence
        tolerance.assert_logits(model, oracle_logits(model, history), dense_logits(model, history.tokens))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_batches_equal_the_dense_forward(architecture: str, backend: type[Attention]) -> None:
    """Prefill chunks and single tokens of several prompts, interleaved at random, in one pool."""
    model = tiny(architecture)
    engine = Engine(model, blocks=64, block_size=4, attention=backend())
    rng = random.Random(3)
    prompts = [tokens(rng, n) for n in (37, 23, 41)]
    forks = [engine.open_prompt() for _ in prompts]
    seen: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(fork.length < len(prompt) for fork, prompt in zip(forks, prompts, strict=True)):
        batch = []
        for i in rng.sample(range(3), 3):
            n = min(rng.choice([0, 1, 1, 5, 13]), len(prompts[i]) - forks[i].length)
            if n:
                assert forks[i].acquire(n)
                batch.append((i, Chunk(forks[i], prompts[i][forks[i].length : forks[i].length + n])))
        if batch:
            logits = engine.logits([work for _, work in batch])
            for (i, _), part in zip(batch, logits.split([len(w.tokens) for _, w in batch]), strict=True):
                seen[i].append(part)
    for prompt, parts in zip(prompts, seen, strict=True):
        tolerance.assert_logits(model, torch.cat(parts), dense_logits(model, prompt))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_eviction_in_frames_equals_the_oracle(architecture: str, backend: type[Attention]) -> None:
    """A tape with forks, evictions and many position frames; every logit is the oracle's.

    Records that come together see what they would see one by one.
    """
    world = TapeWithHistory(
        architecture, blocks=96, frame_limit=110, retention=Retention(64, 9), attention=backend()
    )
    tape, rng = world.tape, world.rng
    forks: list[tuple[int, Fork, int, int]] = []
    for owner in range(1, 40):
        count = rng.choice([1, 1, 1, 2, 5])
        world.append_together(*(tokens(rng, rng.randrange(4, 10)) for _ in range(count)))
        assert max((each.max_position for each in tape.state.stretches), default=0) < 110
        if owner % 3 == 0:
            forks.append((owner, tape.fork(), world.coord, tape.evicted_tokens))
        if len(forks) == 3:  # three versions, asked in one batch, two steps each, after the tape moved on
            for length, before in ((6, 0), (1, 6)):
                asked = [(fork, tokens(rng, length)) for _, fork, _, _ in forks]
                for (who, _, coord, evicted), (_, question), logits in zip(
                    forks, asked, ask_together(world.engine, asked), strict=True
                ):
                    world.history.add(question, coord + before, evicted, who, logits)
            for _, fork, _, _ in forks:
                fork.release()
            forks.clear()
    assert tape.evicted_tokens > 150
    world.history.verify(world.model)
    tape.release()
    world.engine.pool.blocks.check_integrity()


def test_thousands_of_evicted_tokens_equal_the_oracle() -> None:
    """Positions stay below the frame bound and logits at the oracle's after 4,000 evicted tokens.

    A row depends on its window, and on one window more for each layer before: the oracle of some records sees
    as much before them.
    """
    layers, retention = 2, 64
    model = tiny("llama", layers=layers)
    engine = Engine(model, blocks=64, block_size=4, frame_limit=128)
    rng = random.Random(8)
    frozen = tokens(rng, 20)
    tape = engine.open_tape("tape", frozen, Retention(retention))
    appended: list[tuple[list[int], int, int, torch.Tensor]] = []
    highest = 0
    while tape.evicted_tokens < 4000:
        record = tokens(rng, rng.randrange(20, 40))
        logits = append(engine, tape, record)
        coord = tape.evicted_tokens + tape.live_tokens - len(record)
        appended.append((record, coord, tape.evicted_tokens, logits))
        highest = max(highest, max((each.max_position for each in tape.state.stretches), default=0))
    assert retention < highest < 128
    for first in range(0, len(appended), 20):
        begin = appended[first][1] - (layers + 1) * retention
        history = History.begin(frozen)
        seen = [each for each in appended[: first + 20] if each[1] + len(each[0]) > begin]
        checks = [(history.add(record, coord, evicted), logits) for record, coord, evicted, logits in seen]
        expected = oracle_logits(model, history)
        for where, logits in checks[len(seen) - len(appended[first : first + 20]) :]:
            tolerance.assert_logits(model, logits, expected[where])


def test_one_pass_for_many_questions_equals_one_pass_each() -> None:
    """Standing questions batched over one tape have the logits of the same questions asked alone."""
    world = TapeWithHistory("gemma2", blocks=64, frame_limit=128, frozen=3)
    for length in (4, 3, 5):
        world.append(length)
    questions = [tokens(world.rng, n) for n in (3, 1, 5)]
    together = ask_together(world.engine, [(world.tape.fork(), question) for question in questions])
    for question, logits in zip(questions, together, strict=True):
        tolerance.assert_logits(world.model, ask(world.engine, world.tape.fork(), question), logits)


def test_a_fork_outgrowing_its_frame_opens_a_new_one() -> None:
    """A long answer behind a nearly full frame keeps positions bounded and logits at the oracle's."""
    world = TapeWithHistory(blocks=64, frame_limit=100, retention=Retention(40), frozen=10)
    tape = world.tape
    for _ in range(11):
        world.append(8)
    fork = tape.fork()
    for i in range(5):
        part = tokens(world.rng, 6)
        logits = ask(world.engine, fork, part)
        world.history.add(part, world.coord + 6 * i, tape.evicted_tokens, 1, logits)
    world.history.verify(world.model)
    assert fork.extents[-1].origin != tape.extents[-1].origin
    assert all(e.coord + e.length - e.origin <= 100 for e in fork.extents)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_canary_passes_supported_models(architecture: str) -> None:
    model = tiny(architecture)
    assert check(model) < tolerance.of_model(model)
