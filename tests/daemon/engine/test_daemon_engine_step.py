"""Readers driven pass by pass through the executor give what the unmodified model gives."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.model.canary import dense_logits
from engine.model.constrained import Part, TextGrammar, choice_parts, schema_parts
from engine.model.loaded import LoadedModel
from engine.model.vocabulary import Vocabulary
from engine.seeding import Sampling
from engine.step import Chunk, SampledToken
from regions.ephemeral import Fork
from regions.offload.host_tier import HostTier
from regions.streaming_kv import StreamingPrompt
from regions.tape import Retention
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from tests.engine.oracle import VOCABULARY, tiny
from tests.kit import tolerance

RNG = random.Random(11)
SOURCE = [RNG.randrange(3, VOCABULARY) for _ in range(80)]
BLOCK = 4
WRITTEN = [bytes([byte]) for byte in b'abc{}": ,-.0123456789'] + [b'{"', b'a"', b'": ', b"ab", b"bca", b', "']


@cache
def model() -> LoadedModel:
    return tiny("llama", layers=2)


@cache
def dense_best(text: tuple[int, ...]) -> tuple[int, float, float]:
    """The unmodified model's next token, its lead over the second, and the bound on rounding error."""
    logits = dense_logits(model(), list(text))[-1]
    best = logits.topk(2)
    bound = tolerance.of_gap(model(), tolerance.largest(logits))
    return int(best.indices[0]), float(best.values[0] - best.values[1]), bound


def is_dense(row: SampledToken | None, text: Sequence[int]) -> bool:
    """Whether the row is the dense model's; logits closer than rounding may swap."""
    assert row is not None
    token, lead, bound = dense_best(tuple(text))
    return abs(row.gap - lead) <= bound and (row.token == token or lead <= bound)


def scribble(engine: Engine) -> None:
    """Overwrite every free block, as other readers' passes would."""
    pool, fork = engine.pool, engine.open_prompt()
    n = pool.blocks.free_blocks * BLOCK
    assert fork.acquire(n)
    slots = [slot for first, length in fork.next_slots(n).slots for slot in range(first, first + length)]
    for layer in (*pool.keys, *pool.values):
        layer[:, slots] = 99.0
    fork.release()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def engine_of(blocks: int) -> Engine:
    return Engine(model(), blocks=blocks, block_size=BLOCK, eager=True)


STEPS = ["update", "run", "run", "run", "draft", "follow", "match", "save", "swap", "reset", "keep", "evict"]
STEP = st.tuples(st.sampled_from(STEPS), st.integers(0, 1), st.integers(0, 60))
OPERATIONS = st.lists(STEP, min_size=20, max_size=50)


class Driven:
    """One reader and the tokens it must have in KV."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.reader = engine, engine.open_prompt()
        self.prompt: list[int] = []
        self.kv: list[int] = []

    def update(self, prompt: list[int]) -> None:
        kept = common(self.kv, prompt)
        assert self.reader.update(prompt) == len(self.kv) - kept
        self.prompt, self.kv = prompt, self.kv[:kept]

    def run(self, n: int) -> None:
        piece = self.prompt[len(self.kv) : len(self.kv) + n]
        if piece and self.reader.acquire(len(piece)):
            (row,) = self.engine.execute([Chunk(self.reader, piece, sample=True)])
            self.kv += piece
            assert is_dense(row, self.kv)

    def draft(self, n: int) -> None:
        """One known token and three drafts, of which `n % 4` are right; then the scheduler's steps."""
        if len(self.kv) != len(self.prompt) or not self.kv:
            return
        right: list[int] = []
        for _ in range(4):
            right.append(dense_best((*self.kv, 5, *right))[0])
        wrong = n % 4
        guesses = [*right[:wrong], *[(token + 1) % VOCABULARY for token in right[wrong:3]]]
        if not self.reader.acquire(4):
            return
        (row,) = self.engine.execute([Chunk(self.reader, [5, *guesses], sample=True, drafts=3)])
        assert row is not None
        assert self.reader.length == len(self.kv) + 4
        self.reader.keep(self.reader.length - 3 + len(row.accepted))
        texts = [[*self.kv, 5, *guesses[:i]] for i in range(len(row.accepted) + 1)]
        assert all(is_dense(each, text) for each, text in zip((*row.accepted, row), texts, strict=True))
        self.kv = texts[-1]
        self.prompt = list(self.kv)
        assert self.reader.update(self.prompt) == 0


@settings(max_examples=30)
@given(OPERATIONS)
def test_any_history_of_two_prompts_gives_the_dense_models_rows(
    operations: list[tuple[str, int, int]],
) -> None:
    """Changed, followed, matched, saved, swapped, dropped, drafted and cut, in a pool for 1.5 prompts."""
    engine = engine_of(22)
    host = HostTier(engine.pool, 9)
    tier = host
    both = [Driven(engine), Driven(engine)]
    for mine, n in zip(both, (25, 31), strict=True):
        mine.update(SOURCE[:n])
    for name, which, n in operations:
        mine, other = both[which], both[1 - which]
        reader = mine.reader
        if name == "update":
            mine.update([*SOURCE[: n % 37], *SOURCE[60 : 60 + n % 5]])
        elif name == "run":
            mine.run(n)
        elif name == "draft":
            mine.run(100)
            mine.draft(n)
        elif name == "follow":
            end = min(len(mine.prompt) - 1, common(mine.prompt, other.kv))
            if end > len(mine.kv) and not reader.swapped and not other.reader.swapped:
                reader.read_from(other.reader, end)
                mine.kv = mine.prompt[:end]
                assert reader.cached_tokens == end
        elif name == "match" and not reader.swapped:
            found = engine.cache.match_length(mine.prompt[:-1])
            assert reader.match() == max(0, found - len(mine.kv))
            mine.kv = mine.prompt[: max(found, len(mine.kv))] if found > len(mine.kv) else mine.kv
        elif name == "save" and not reader.swapped:
            reader.save()
        elif name == "swap":
            before = (reader.length, reader.blocks, reader.swapped)
            if not reader.swapped and not tier.swap_out(reader):
                assert before == (reader.length, reader.blocks, reader.swapped)
        elif name == "reset":
            reader.reset()
            mine.kv = []
        elif name == "keep":
            mine.kv = mine.kv[: n % (len(mine.kv) + 1)]
            reader.keep(len(mine.kv))
        elif name == "evict":
            engine.cache.reclaim(n)
        scribble(engine)
        assert reader.length == len(mine.kv)
        assert not (reader.swapped and reader.blocks)
    for mine, other in (both, both[::-1]):
        other.reader.reset()
        other.kv = []
        mine.update([*mine.prompt, 4])
        mine.run(100)
        assert mine.kv == mine.prompt, "a prompt alone has room"
    for mine in both:
        mine.reader.release()
    assert engine.pool.free_blocks == engine.pool.total_blocks
    assert host.pool.free_blocks == host.pool.total_blocks


def test_a_followed_prompt_computes_only_its_own_end() -> None:
    """Three prompts with 30 common tokens: one full pass, then a token each; every row is its own."""
    engine = engine_of(40)
    start = SOURCE[:30]
    first, *others = (Driven(engine) for _ in range(3))
    first.update([*start, 3])
    first.run(30)
    for mine, last in zip(others, (7, 9), strict=True):
        mine.update([*start, last])
        mine.reader.read_from(first.reader, 30)
        mine.kv = list(start)
        assert (mine.reader.cached_tokens, mine.reader.blocks) == (30, 0)
    first.reader.release()
    for mine in others:
        mine.run(1)
        mine.reader.release()
    assert engine.pool.free_blocks == engine.pool.total_blocks


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_with_drafts_are_those_without(temperature: float) -> None:
    """A saved prompt and a tape's fork in one batch; the number of right drafts differs each time."""
    plain, drafted = (answers(temperature, drafts) for drafts in (0, 4))
    assert drafted[0] == plain[0]
    assert plain[1] == 24
    assert drafted[1] < 16, "accepted drafts save passes"


EXPECTED: dict[float, list[list[int]]] = {}


def answers(temperature: float, drafts: int) -> tuple[list[list[int]], int]:
    """Two answers of 24 tokens, and their passes. The first call, without drafts, is remembered."""
    engine = engine_of(60)
    tape = engine.open_tape("t", SOURCE[:9], Retention(40))
    tape.make_room([12])
    assert tape.acquire(12)
    engine.execute([Chunk(tape, SOURCE[9:21], sample=False)])
    tape.commit([12])
    prompt = Driven(engine)
    prompt.update(SOURCE[30:47])
    prompt.run(16)
    prompt.reader.save()
    rng = random.Random(3)
    readers: list[StreamingPrompt | Fork] = [prompt.reader, tape.fork()]
    pending, found = [[SOURCE[46]], SOURCE[50:55]], list[list[int]]([[], []])
    passes = 0
    while any(len(answer) < 24 for answer in found):
        batch, asked = [], [i for i in (0, 1) if len(found[i]) < 24]
        for i in asked:
            guesses: list[int] = []
            if drafts:
                known = EXPECTED[temperature][i][len(found[i]) : 23][: rng.randint(0, drafts)]
                spoiled = rng.randrange(2 * len(known) + 1)
                guesses = [(t + 1) % VOCABULARY if at == spoiled else t for at, t in enumerate(known)]
            tokens = [*pending[i], *guesses]
            assert readers[i].acquire(len(tokens))
            sampling = Sampling(temperature, 41 + i, len(found[i])) if temperature else None
            batch.append(Chunk(readers[i], tokens, sample=True, sampling=sampling, drafts=len(guesses)))
        passes += 1
        for i, chunk, row in zip(asked, batch, engine.execute(batch), strict=True):
            assert row is not None
            readers[i].keep(readers[i].length - chunk.drafts + len(row.accepted))
            found[i] += [each.token for each in (*row.accepted, row)]
            pending[i] = [row.token]
    for reader in readers:
        reader.release()
    tape.release()
    if not drafts:
        EXPECTED[temperature] = found
    return found, passes


def test_the_loop_drafts_by_itself_and_every_answer_stays_the_same() -> None:
    """Through the scheduler: a small model repeats itself, so drafts are accepted, and rejected too."""
    plain = [served(0, temperature) for temperature in (0.0, 0.7)]
    drafted = [served(5, temperature) for temperature in (0.0, 0.7)]
    for before, after in zip(plain, drafted, strict=True):
        assert [request.output for request in after] == [request.output for request in before]
        assert not any(request.drafts.verified for request in before)
        for right, row in zip_rows(after, before):
            assert right.gap == tolerance.near(row.gap, tolerance.of_gap(model(), abs(row.top1)))
    tried = [request for requests in drafted for request in requests]
    accepted = sum(request.drafts.accepted for request in tried)
    assert 0 < accepted < sum(request.drafts.verified for request in tried)


PIECES = Vocabulary({3 + n: piece for n, piece in enumerate(WRITTEN)})


@settings(max_examples=15)
@given(
    st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=4, unique=True),
    st.integers(1, 5), st.sampled_from([0.0, 0.9]), st.booleans(),
)  # fmt: skip
def test_text_under_a_grammar_is_the_same_with_drafts(
    texts: list[str], drafts: int, temperature: float, of_numbers: bool
) -> None:
    """Choices, or JSON of choices and numbers: token for token, each chosen among as many."""
    fields = {"a": {"enum": texts}, "b": {"type": "number"} if of_numbers else {"const": texts[0] * 3}}
    parts = schema_parts({"type": "object", "properties": fields}) if of_numbers else choice_parts(texts)
    plain, drafted = (served(most, temperature, parts) for most in (0, drafts))
    assert [request.output for request in drafted] == [request.output for request in plain]
    for right, row in zip_rows(drafted, plain):
        assert len(right.logits) == len(row.logits)
    if of_numbers:
        assert sum(request.drafts.verified for request in drafted)


def zip_rows(a: list[Request], b: list[Request]) -> Iterator[tuple[SampledToken, SampledToken]]:
    for one, other in zip(a, b, strict=True):
        yield from zip(one.samples, other.samples, strict=True)


def served(drafts: int, temperature: float, parts: Sequence[Part] = ()) -> list[Request]:
    """Prompts that repeat themselves, with answers long enough to do so too, or of ``parts``."""
    engine = engine_of(120)
    ticks = count()
    limits = Limits(
        max_batch_tokens=64, chunk_min=16, chunk_max=64, cell_budget_fraction=1.0, max_drafts=drafts
    )
    scheduler = Scheduler(engine, engine.pool, limits, lambda: next(ticks))
    how = {"open_prompt": engine.open_prompt, "temperature": temperature}
    prompts = [[*SOURCE[at : at + 6]] * 3 for at in (0, 10, 20)]
    requests = []
    for prompt in prompts:
        own = how
        if parts:  # one for each answer, as the daemon makes them
            grammar = TextGrammar(parts, PIECES, frozenset({2}))
            own = how | {"grammar": grammar.allowed, "forced": grammar.forced, "stop_ids": frozenset({2})}
        requests.append(Request(RequestSpec(PriorityClass.POOL, "", prompt, 40, lambda _: None, **own)))
    for request in requests:
        scheduler.submit(request)
    while scheduler.step():
        pass
    assert all(request.state is State.FINISHED for request in requests)
    assert engine.pool.free_blocks == engine.pool.total_blocks
    return requests


def test_a_question_of_a_session_is_swapped_to_the_host_and_resumes() -> None:
    """A plain fork through the same tier; the tape's KV stays in the pool."""
    engine = engine_of(30)
    tape = engine.open_tape("t", SOURCE[:9], Retention(40))
    host = HostTier(engine.pool, 8)
    tier = host
    alone, moved = tape.fork(), tape.fork()
    rows = []
    for fork in (alone, moved):
        assert fork.acquire(10)
        engine.execute([Chunk(fork, SOURCE[20:30], sample=False)])
        if fork is moved:
            assert fork.blocks == 3
            assert tier.swap_out(fork)
            assert (fork.blocks, fork.swapped, fork.length) == (0, True, 10)
            scribble(engine)
        assert fork.acquire(1)
        assert not fork.swapped
        rows += engine.execute([Chunk(fork, [8], sample=True)])
        fork.release()
    first, second = rows
    assert first is not None
    assert second is not None
    assert first.token == second.token
    assert first.top1 == tolerance.near(second.top1, tolerance.of_model(model(), abs(second.top1)))
    tape.release()
    assert host.pool.free_blocks == 8


def test_nothing_is_swapped_if_that_frees_no_block() -> None:
    """The cache shares all that it reads: swapping moves nothing, so the victim is to be dropped."""
    engine = engine_of(30)
    tier = HostTier(engine.pool, 8)
    prompt = Driven(engine)
    prompt.update(SOURCE[:10])
    assert not tier.swap_out(prompt.reader)
    prompt.run(10)
    prompt.reader.save()
    assert prompt.reader.acquire(2)
    engine.execute([Chunk(prompt.reader, [7, 8], sample=False)])
    prompt.reader.keep(11)
    assert prompt.reader.blocks == 3
    assert not tier.swap_out(prompt.reader)
    assert (prompt.reader.length, prompt.reader.swapped) == (11, False)
    prompt.reader.release()
