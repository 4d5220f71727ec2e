"""The contenders that answer the scenario's questions: our regions, and two uses of the unmodified model."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.engine.scenario import PAPER
from bench.run import MeasurementFailed, SuiteRun
from engine.device import in_own_thread
from engine.engine import Engine
from engine.model.embedded import embedded_directory
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.step import Chunk
from regions.ephemeral import Fork
from regions.tape import Retention, Tape

_BLOCK = 16
_READER_BLOCKS = 8
"""A question of about 40 tokens, its answer, and a block that begins in the middle."""
EIGHTY_SHAPE: dict[str, Any] = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "vocabulary": 4096}
"""About 80 million parameters."""
TIE = 1e-3
"""Logit gap below which two fp32 computations may order the best two tokens either way."""
Tokens = Sequence[Sequence[int]]
_loaded: dict[str, tuple[LoadedModel, Any]] = {}


class Disagreement(MeasurementFailed):
    """Two contenders that read the same tokens gave different answers."""


class Reply(NamedTuple):
    """The greedy answer token, its logit, and its lead over the second best."""

    token: int
    logit: float
    gap: float


def load(shape: dict[str, Any], threads: int) -> tuple[LoadedModel, Any]:
    """Load one model twice: over regions, and as transformers runs it. ``shape``: of `embedded_directory`."""
    torch.set_num_threads(threads)
    path = embedded_directory(**shape)
    if str(path) not in _loaded:
        _loaded[str(path)] = load_model(path, dtype="float32", device="cpu"), load_plain(path, "float32")
    return _loaded[str(path)]


def load_plain(path: Path, dtype: str) -> Any:
    """The unmodified model in directory ``path``."""
    return AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()


def model_of(run: SuiteRun) -> tuple[LoadedModel, Any]:
    """The engine suite's model: the larger one; in small sizes, the embedded one."""
    return load({} if run.quick else EIGHTY_SHAPE, run.threads)


def embedded(run: SuiteRun) -> LoadedModel:
    """The embedded model, loaded on the engine's thread, where the scheduler's worker will run it."""
    return in_own_thread(lambda: load({}, run.threads))[0]


def engine_for(loaded: LoadedModel, tokens: int, *, readers: int = 1) -> Engine:
    """An engine whose pool holds ``tokens`` tokens and this many questions at a time, with room to spare."""
    blocks = -(-tokens * 9 // (8 * _BLOCK)) + readers * _READER_BLOCKS + 64
    return Engine(loaded, blocks=blocks, block_size=_BLOCK, frame_limit=loaded.max_positions)


def ask_together(engine: Engine, tapes: Sequence[Tape], questions: Tokens) -> list[Reply]:
    """One pass with a fork per question; includes creating and dropping the forks."""
    (replies,) = answer_together(engine, tapes, questions, 1)
    return replies


def answer_together(
    engine: Engine, tapes: Sequence[Tape], questions: Tokens, tokens: int
) -> Iterator[list[Reply]]:
    """Passes with a fork per question, each an answer token further."""
    forks = [tape.fork() for tape in tapes]
    appended = questions
    try:
        for _ in range(tokens):
            yield (replies := append(engine, forks, appended))
            appended = [[reply.token] for reply in replies]
    finally:
        for fork in forks:
            fork.release()


@torch.inference_mode()
def append(engine: Engine, forks: Sequence[Fork], tokens: Tokens) -> list[Reply]:
    """One pass that appends to every fork and samples its next token."""
    for fork, own in zip(forks, tokens, strict=True):
        if not fork.acquire(len(own)):
            raise RuntimeError("the pool is too small for the questions")
    chunks = [Chunk(fork, own) for fork, own in zip(forks, tokens, strict=True)]
    return [
        Reply(choice.token, choice.top1, choice.top1 - choice.top2)
        for choice in engine.execute(chunks)
        if choice is not None  # every fork is sampled
    ]


@torch.inference_mode()
def read_together(engine: Engine, tapes: Sequence[Tape], records: Sequence[Tokens]) -> None:
    """Append each tape's ``records`` in one pass over all tapes, and commit."""
    chunks = []
    for tape, own in zip(tapes, records, strict=True):
        tokens = list(chain.from_iterable(own))
        tape.make_room(list(map(len, own)))
        if not tape.acquire(len(tokens)):
            raise RuntimeError("the pool is too small for the scenario")
        chunks.append(Chunk(tape, tokens, sample=False))
    engine.execute(chunks)
    for tape, own in zip(tapes, records, strict=True):
        tape.commit([len(record) for record in own])


class Regions:
    """Ours: a tape on the pool; a question is a fork that is dropped afterwards."""

    def __init__(self, engine: Engine, frozen: Sequence[int], retention: Retention) -> None:
        self.engine = engine
        self.tape = engine.open_tape("bench", frozen, retention)

    def ingest(self, records: Tokens) -> None:
        """One STREAM pass and a commit, as in the scheduler."""
        read_together(self.engine, [self.tape], [records])

    def fill(self, records: Tokens) -> None:
        """Read a context whose reading is not measured, in passes of an update's size."""
        for start in range(0, len(records), PAPER.bars):
            self.ingest(records[start : start + PAPER.bars])

    def ask(self, question: Sequence[int]) -> Reply:
        """Fork, one pass, release."""
        (reply,) = ask_together(self.engine, [self.tape], [question])
        return reply


class KeptCache:
    """The unmodified model with a kept `DynamicCache`, cropped back after each question."""

    def __init__(self, model: Any, frozen: Sequence[int]) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self.ingest([frozen])

    def ingest(self, records: Tokens) -> None:
        """One pass that extends the cache."""
        self._forward(list(chain.from_iterable(records)))

    def ask(self, question: Sequence[int]) -> Reply:
        """One pass, then crop."""
        (reply,) = self.answer(question, 1)
        return reply

    def answer(self, question: Sequence[int], tokens: int) -> Iterator[Reply]:
        """Passes, each an answer token further; then crop."""
        appended = question
        for _ in range(tokens):
            yield (reply := _reply(self._forward(appended)))
            appended = [reply.token]
        self._cache.crop(-(len(question) + tokens - 1))

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        position = self._cache.get_seq_length()
        output = self._model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(position, position + len(tokens))[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[0, -1]  # type: ignore[no-any-return]  # transformers is untyped here


class Dense:
    """The unmodified model over everything read so far, recomputed for each question."""

    def __init__(self, model: Any, frozen: Sequence[int]) -> None:
        self._model = model
        self._tokens = list(frozen)

    def ingest(self, records: Tokens) -> None:
        """Remember the tokens; a question computes them."""
        self._tokens.extend(chain.from_iterable(records))

    @torch.inference_mode()
    def ask(self, question: Sequence[int]) -> Reply:
        """One pass over context and question."""
        ids = torch.tensor([[*self._tokens, *question]])
        return _reply(self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1])


def agree(ours: Reply, other: Reply, context: int) -> bool:
    """Whether both give the same answer token; False for a tie. Raises Disagreement otherwise."""
    if ours.token != other.token and max(ours.gap, other.gap) > TIE:
        raise Disagreement(f"at {context} tokens we answer {ours}, the reference {other}")
    return ours.token == other.token


def _reply(logits: torch.Tensor) -> Reply:
    (best, second), (token, _) = (part.tolist() for part in torch.topk(logits.float(), 2))
    return Reply(token, best, best - second)
