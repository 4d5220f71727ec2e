"""Forward passes over mixed batches: drafts, repeatable sampling, a bad request alone, out of memory."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from engine.attention.base import Attention, LayerCall
from engine.attention.cpu import CpuAttention
from engine.device import out_of_memory
from engine.engine import Engine
from engine.model.canary import dense_logits
from engine.model.loaded import LoadedModel
from engine.seeding import Sampling, prompt_seed
from engine.step import Chunk, OutOfMemory, SampledToken
from regions.ephemeral import Fork
from regions.tape import Retention
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem
from tests.engine.oracle import VOCABULARY, History, tiny
from tests.kit import tolerance
from tests.kit.engine import tokens as tokens_of

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33], [50, 40, 30, 20, 10]]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny("llama", layers=2)


class Meddling:
    """The CPU backend with a change to every layer's output."""

    def __init__(self, meddle: Callable[[LayerCall, torch.Tensor], torch.Tensor]) -> None:
        self.meddle = meddle
        self.inner = CpuAttention()

    def __call__(self, call: LayerCall) -> torch.Tensor:
        return self.meddle(call, self.inner(call))


class Failing:
    """The CPU backend, which raises ``error`` at its ``at``-th call only."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.inner, self.at, self.calls = CpuAttention(), at, 0
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nDetails")

    def __call__(self, call: LayerCall) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.inner(call)


def run(engine: Engine, work: Sequence[Chunk]) -> list[SampledToken]:
    for each in work:
        assert each.target.acquire(len(each.tokens))
    chosen = engine.execute(work)
    assert all(choice is not None for choice in chosen)
    return [choice for choice in chosen if choice is not None]


def sampling_of(prompt: Sequence[int], temperature: float, index: int) -> Sampling | None:
    return Sampling(temperature, prompt_seed(prompt), index) if temperature else None


def answers(model: LoadedModel, temperature: float, count: int) -> list[list[int]]:
    """The answer of each prompt alone, one token per pass."""
    engine = Engine(model, blocks=64, block_size=4)
    result = []
    for prompt in PROMPTS:
        fork, tokens, out = engine.open_prompt(), list(prompt), []
        for index in range(count):
            (choice,) = run(engine, [Chunk(fork, tokens, sampling=sampling_of(prompt, temperature, index))])
            tokens = [choice.token]
            out.append(choice.token)
        result.append(out)
        fork.release()
    return result


# Verification.


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_with_drafts_equal_those_without_token_for_token(
    model: LoadedModel, temperature: float
) -> None:
    """Four requests in one batch, with drafts that are right, wrong, right up to a point, and absent.

    The kept KV is then the dense model's: the rejected drafts left nothing behind.
    """
    expected = answers(model, temperature, 24)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    engine = Engine(model, blocks=64, block_size=4)
    rng = random.Random(1)
    forks = [engine.open_prompt() for _ in PROMPTS]
    out: list[list[int]] = [[] for _ in PROMPTS]
    accepted: set[tuple[int, int]] = set()
    while min(map(len, out)) < 12:
        work = []
        for which, (prompt, answer) in enumerate(zip(PROMPTS, out, strict=True)):
            known = answer[-1:] or prompt
            drafts = expected[which][len(answer) : len(answer) + rng.choice([0, 1, 3, 4])]
            spoiled = rng.randrange(2 * len(drafts) or 1)
            if spoiled < len(drafts):
                drafts[spoiled] = (drafts[spoiled] + 1) % VOCABULARY
            sampling = sampling_of(prompt, temperature, len(answer))
            work.append(Chunk(forks[which], [*known, *drafts], sampling=sampling, drafts=len(drafts)))
        for fork, answer, each, choice in zip(forks, out, work, run(engine, work), strict=True):
            answer += [*(confirmed.token for confirmed in choice.accepted), choice.token]
            fork.keep(fork.length - each.drafts + len(choice.accepted))
            accepted.add((each.drafts, len(choice.accepted)))
    for answer, whole in zip(out, expected, strict=True):
        assert answer == whole[: len(answer)]
    assert {(0, 0), (3, 3), (4, 4)} <= accepted
    assert any(0 < right < drafts for drafts, right in accepted)
    assert any(drafts and not right for drafts, right in accepted)
    for prompt, fork, answer in zip(PROMPTS, forks, out, strict=True):
        assert fork.tokens == [*prompt, *answer[:-1]]
        assert fork.acquire(1)
        (logits,) = engine.logits([Chunk(fork, answer[-1:])])
        tolerance.assert_logits(model, logits, dense_logits(model, [*prompt, *answer])[-1])
        fork.release()


def test_accepted_drafts_carry_the_confidence_of_the_pass_without_them(model: LoadedModel) -> None:
    engine = Engine(model, blocks=64, block_size=4)
    alone, drafted = engine.open_prompt(), engine.open_prompt()
    tokens, plain = list(PROMPTS[0]), []
    for _ in range(4):
        plain += run(engine, [Chunk(alone, tokens)])
        tokens = [plain[-1].token]
    (last,) = run(engine, [Chunk(drafted, [*PROMPTS[0], *(choice.token for choice in plain[:3])], drafts=3)])
    for one, other in zip(plain, [*last.accepted, last], strict=True):
        assert (one.token, other.top1, other.top2) == (
            other.token,
            tolerance.near(one.top1, tolerance.of_model(model, one.top1)),
            tolerance.near(one.top2, tolerance.of_model(model, one.top1)),
        )
    alone.release()
    drafted.release()


def test_drafts_without_a_token_before_them_are_refused(model: LoadedModel) -> None:
    fork = Engine(model, blocks=4).open_prompt()
    with pytest.raises(ValueError, match="2 drafts"):
        Chunk(fork, [1, 2], drafts=2)
    with pytest.raises(ValueError, match="2 drafts have"):
        Chunk(fork, [1, 2, 3], drafts=2, draft_choices=((1,),))


# Seeded draws.


def test_draws_repeat_whatever_the_batch_the_chunks_and_preemption(model: LoadedModel) -> None:
    expected = answers(model, 1.2, 10)
    assert expected != answers(model, 0.0, 10)
    engine = Engine(model, blocks=64, block_size=4)
    rng = random.Random(7)
    forks = [engine.open_prompt() for _ in PROMPTS]
    out: list[list[int]] = [[] for _ in PROMPTS]
    preempted = 0
    while min(map(len, out)) < 10:
        work, who = [], []
        for which in rng.sample(range(len(PROMPTS)), rng.randint(1, len(PROMPTS))):
            fork, known = forks[which], [*PROMPTS[which], *out[which]]
            if len(out[which]) == 10:
                continue
            if rng.random() < 0.1:
                preempted += fork.length > 0
                fork.reset()
            n = rng.randint(1, len(known) - fork.length)
            sample = fork.length + n == len(known)
            sampling = sampling_of(PROMPTS[which], 1.2, len(out[which]))
            assert fork.acquire(n)
            tokens = known[fork.length : fork.length + n]
            work.append(Chunk(fork, tokens, sample, sampling=sampling))
            who.append(which)
        for which, choice in zip(who, engine.execute(work) if work else [], strict=True):
            if choice is not None:
                out[which].append(choice.token)
    assert out == expected
    assert preempted > 3
    for fork in forks:
        fork.release()


# One bad request.


@pytest.mark.parametrize("layers", [{1}, {0, 1}], ids=["last layer", "every layer"])
def test_a_request_whose_logits_are_not_finite_fails_alone(model: LoadedModel, layers: set[int]) -> None:
    """Also when its NaN are next to the keys and values of others."""
    calls = 0

    def poison(call: LayerCall, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if calls % 2 in layers:
            # the second request's rows; of the last layer one row of each request is computed
            output[:, slice(1, 2) if output.shape[1] == 3 else slice(2, 5)] = float("nan")
        calls += 1
        return output

    batches = []
    for attention in (Meddling(poison), CpuAttention()):
        engine = Engine(model, blocks=64, block_size=4, attention=attention)
        forks = [engine.open_prompt() for _ in range(3)]
        prompts = [[7, 8], [9, 10, 11], [12, 13, 14, 15]]
        batches.append(run(engine, [Chunk(f, tokens) for f, tokens in zip(forks, prompts, strict=True)]))
        assert [fork.length for fork in forks] == [2, 3, 4]
        for fork in forks:
            fork.release()
    poisoned, healthy = batches
    assert poisoned[1].error == "the model's logits are not finite"
    for which in (0, 2):
        assert poisoned[which].token == healthy[which].token
        assert poisoned[which].top1 == tolerance.near(
            healthy[which].top1, tolerance.of_model(model, healthy[which].top1)
        )
        assert poisoned[which].error is None


# Memory.


def allocator_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    return raised.value


def test_what_allocators_raise_is_recognised_and_nothing_else() -> None:
    """The CPU's is a real one."""
    assert "can't allocate memory" in str(allocator_error())
    triton = RuntimeError("Triton Error [CUDA]: out of memory")
    for error in (allocator_error(), torch.OutOfMemoryError("x"), MemoryError(), triton):
        assert out_of_memory(error)
    for error in (RuntimeError("shapes do not fit"), ValueError("can't allocate memory"), KeyError()):
        assert not out_of_memory(error)


def test_whether_a_pass_runs_can_be_seen_by_other_threads(model: LoadedModel) -> None:
    seen: list[bool] = []
    attention = Meddling(lambda call, out: (seen.append(engine.between_passes.is_set()), out)[1])
    engine = Engine(model, blocks=64, block_size=4, frame_limit=40, attention=attention)
    engine.append(engine.open_tape("t", [3, 4, 5], Retention(24)), [[5, 6, 7]])
    assert set(seen) == {False}
    assert engine.between_passes.is_set()
    failing = Failing(1)
    engine = Engine(model, blocks=64, block_size=4, frame_limit=40, attention=failing)
    with pytest.raises(OutOfMemory):
        engine.open_tape("t", [3, 4, 5], Retention(24))
    assert engine.between_passes.is_set()


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("cpu", [False, True])
def test_a_pass_without_memory_leaves_every_target_as_it_was(model: LoadedModel, at: int, cpu: bool) -> None:
    """It fails in either layer; the retry, cut smaller and in another order, has the oracle's logits."""
    attention = Failing(0, allocator_error() if cpu else None)
    engine = Engine(model, blocks=64, block_size=4, frame_limit=40, attention=attention)
    frozen = [3, 4, 5]
    tape = engine.open_tape("t", frozen, Retention(24))
    history = History.begin(frozen)
    frames = set()
    rng = random.Random(2)
    fork: Fork | None = None
    for owner in range(1, 13):
        record, question = tokens_of(rng, 8), tokens_of(rng, 6)
        fork = tape.fork()
        begins, evicted = fork.begins_at, tape.evicted_tokens
        tape.make_room([8])
        assert tape.acquire(8)
        assert fork.acquire(6)
        before = (tape.extents, tape.live_tokens, fork.extents, fork.length)
        attention.at = attention.calls + at
        with pytest.raises(OutOfMemory) as raised:
            engine.execute([Chunk(tape, record, sample=False), Chunk(fork, question)])
        assert "\n" not in str(raised.value)
        assert (tape.extents, tape.live_tokens, fork.extents, fork.length) == before
        for part in (question[:2], question[2:]):
            coord = begins + fork.length
            history.add(part, coord, evicted, owner, engine.logits([Chunk(fork, part)]))
        coord, logits = tape.evicted_tokens + tape.live_tokens, engine.logits([Chunk(tape, record)])
        history.add(record, coord, tape.evicted_tokens, logits=logits)
        tape.commit([8])
        frames.add(tape.extents[-1].origin)
        fork.release()
    history.verify(model)
    assert len(frames) > 2, "failures happened where frames change, too"
    tape.release()


class Exhausting(tuple[int, ...]):
    """Choices that run out of memory."""

    def __len__(self) -> int:
        raise torch.OutOfMemoryError("no room for the noise")


@pytest.mark.parametrize(
    ("attention", "choices", "error", "match"),
    [
        (Failing(1), None, OutOfMemory, "2 GiB"),
        (CpuAttention(), Exhausting((5, 6)), OutOfMemory, "the noise"),
        (Failing(2, RuntimeError("a defect")), None, RuntimeError, "a defect"),
    ],
    ids=["in the model", "while choosing", "another error"],
)
def test_a_pass_that_fails_says_why_and_changes_nothing(
    model: LoadedModel, attention: Attention, choices: tuple[int, ...] | None, error: type, match: str
) -> None:
    engine = Engine(model, blocks=16, block_size=4, attention=attention)
    fork = engine.open_prompt()
    assert fork.acquire(3)
    with pytest.raises(error, match=match):
        engine.execute([Chunk(fork, [1, 2, 3], choices=choices)])
    assert fork.length == 0


def test_the_failed_pass_is_gone_when_its_error_arrives(model: LoadedModel) -> None:
    """The error keeps no frames and tensors alive, even without the garbage collector.

    Otherwise its activations would take the memory that the retry needs.
    """
    seen: list[weakref.ref[torch.Tensor]] = []

    def fail(call: LayerCall, output: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(call.query))
        raise torch.OutOfMemoryError

    engine = Engine(model, blocks=16, block_size=4, attention=Meddling(fail))
    fork = engine.open_prompt()
    assert fork.acquire(3)
    gc.disable()
    try:
        with pytest.raises(OutOfMemory) as raised:
            engine.execute([Chunk(fork, [1, 2, 3], sample=True)])
        assert [reference() for reference in seen] == [None]
        assert raised.value.__cause__ is raised.value.__context__ is None  # the error carries no other frames
    finally:
        gc.enable()
    fork.release()


def test_a_prefix_that_finds_no_memory_keeps_no_block(model: LoadedModel) -> None:
    engine = Engine(model, blocks=16, block_size=4, attention=Failing(1))
    with pytest.raises(OutOfMemory):
        engine.open_tape("t", [1, 2, 3], Retention(20))
    assert engine.pool.blocks.free_blocks == 16
    engine.open_tape("t", [1, 2, 3], Retention(20)).release()


# Under the scheduler.


def test_requests_and_records_survive_a_device_that_runs_out_of_memory(model: LoadedModel) -> None:
    """The scheduler over the real engine: every third pass fails; draws and the tape are those of none."""
    passes = 0

    class Counting(Observer):
        failed = 0

        def out_of_memory(self, *, retried: bool) -> None:
            assert retried
            self.failed += 1

    def fail(call: LayerCall, output: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes % 7 == 3:  # of two layers a pass, in each alternately, never twice in a row
            raise torch.OutOfMemoryError
        return output

    outputs, windows, observer = [], [], Counting()
    for attention in (Meddling(fail), CpuAttention()):
        engine = Engine(model, blocks=64, block_size=4, attention=attention)
        tape = engine.open_tape("t", (), Retention(30))
        limits, clock = Limits(chunk_min=2, chunk_max=4), iter(range(10**6)).__next__
        scheduler = Scheduler(engine, engine.pool, limits, clock, observer)
        done: list[Request] = []
        for prompt in PROMPTS:
            reader, cls = engine.open_prompt(), PriorityClass.SESSION
            spec = RequestSpec(cls, "", prompt, 6, done.append, reader=reader, temperature=0.9)
            scheduler.submit(Request(spec))
        scheduler.append((tape, [TapeItem([n + 3, n + 4, n + 5]) for n in range(12)]))
        while scheduler.step():
            pass
        assert [request.state for request in done] == [State.FINISHED] * len(PROMPTS)
        outputs.append({request.id: request.output for request in done})
        windows.append(tape.window)
        tape.release()
        assert engine.pool.blocks.free_blocks == 64
    assert observer.failed > 3
    assert outputs[0] == outputs[1]
    assert [outputs[0][i + 1] for i in range(len(PROMPTS))] == answers(model, 0.9, 6)
    assert windows[0] == windows[1]
