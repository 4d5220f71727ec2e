"""Rows of the last layer that are not read are not computed; the others do not change."""

import random
from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import LayerCall
from engine.attention.cpu import CpuAttention
from engine.attention.last_layer import LastLayer, install
from engine.attention.metadata import AttentionMetadata
from engine.engine import Engine
from engine.model.architectures import ModelError
from engine.model.canary import check, dense_logits
from engine.model.loaded import LoadedModel
from engine.step import Chunk
from regions.tape import Retention
from tests.engine.oracle import ARCHITECTURES, VOCABULARY, tiny
from tests.kit import tolerance
from tests.kit.engine import tokens


class Counting:
    """The CPU backend; ``rows``: those of each call."""

    def __init__(self) -> None:
        self.inner = CpuAttention()
        self.rows: list[int] = []

    def __call__(self, call: LayerCall) -> torch.Tensor:
        self.rows.append(call.query.shape[1])
        return self.inner(call)


class Session:
    """A tape of two records in two frames and forks of it."""

    def __init__(self, model: LoadedModel) -> None:
        self.rng = random.Random(4)
        self.counting = Counting()
        self.engine = Engine(model, blocks=64, block_size=4, attention=self.counting)
        self.tape = self.engine.open_tape("tape", self.tokens(9), Retention(90))
        self.append(self.tokens(21))
        self.tape.new_frame(at=3)
        self.append(self.tokens(13))

    def tokens(self, n: int) -> list[int]:
        return tokens(self.rng, n)

    def append(self, record: list[int]) -> None:
        self.engine.append(self.tape, [record])

    def ask(self, questions: Sequence[Sequence[int]], drafts: Sequence[int | None]) -> list[Chunk]:
        """A fork of the tape for each question; ``drafts`` None: nothing is sampled."""
        forks = [self.tape.fork() for _ in questions]
        assert all(fork.acquire(len(question)) for fork, question in zip(forks, questions, strict=True))
        return [
            Chunk(fork, question, sample=d is not None, drafts=d or 0)
            for fork, question, d in zip(forks, questions, drafts, strict=True)
        ]

    def close(self, work: Sequence[Chunk]) -> None:
        for each in work:
            each.target.release()
        self.tape.release()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rows_that_are_read_have_the_logits_of_a_whole_pass(architecture: str) -> None:
    """Questions of several lengths, one with drafts, one not sampled, over two frames."""
    model = tiny(architecture)
    assert model.trims
    session = Session(model)
    questions = [session.tokens(n) for n in (17, 5, 11, 17)]
    work = session.ask(questions, [0, None, 2, 0])
    whole = session.engine.logits(work)
    session.close(work)

    session = Session(model)
    session.counting.rows.clear()
    work = session.ask(questions, [0, None, 2, 0])
    rows = [16, 30, 31, 32, 49]
    read = session.engine.logits(work, rows)
    layers = len(model.layers)
    assert session.counting.rows == [50] * (layers - 1) + [5]
    tolerance.assert_logits(model, read, whole[rows])
    session.close(work)


def test_a_pass_that_only_appends_ends_at_the_last_layer_s_keys() -> None:
    """Its KV is that of a pass which computes everything."""
    model = tiny("llama")
    session = Session(model)
    session.counting.rows.clear()
    record = session.tokens(30)
    assert session.tape.acquire(30)
    step = session.tape.next_slots(30)
    places = [slot for first, n in step.slots for slot in range(first, first + n)]
    session.engine.logits([Chunk(session.tape, record)])
    pool = session.engine.pool
    assert session.counting.rows == [30] * len(model.layers)
    expected = [tensor[:, places].clone() for tensor in (*pool.keys, *pool.values)]
    session.tape.commit([30])
    session.close([])

    session = Session(model)
    session.counting.rows.clear()
    session.append(record)
    pool = session.engine.pool
    assert session.counting.rows == [30] * (len(model.layers) - 1)
    for tensor, kv in zip((*pool.keys, *pool.values), expected, strict=True):
        tolerance.assert_sums(tensor[:, places], kv, width=64)  # the hidden size
    session.close([])


def test_a_pass_that_reads_every_row_computes_them_all() -> None:
    """After a pass that read fewer rows, and in the unmodified model."""
    model = tiny("llama")
    session = Session(model)
    assert dense_logits(model, [3, 4, 5, 6]).shape == (4, VOCABULARY)
    session.counting.rows.clear()
    work = session.ask([session.tokens(6)], [0])
    assert session.engine.logits(work).shape == (6, VOCABULARY)
    assert session.counting.rows == [6] * len(model.layers)
    session.close(work)


def test_the_canary_compares_rows_that_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that mixes rows in a way its arguments do not show is refused at load."""
    model = tiny("llama")
    check(model)
    whole = LastLayer.__init__

    def shifted(last: LastLayer, rows: Sequence[int], metadata: AttentionMetadata) -> None:
        whole(last, [max(0, row - 1) for row in rows], metadata)

    monkeypatch.setattr(LastLayer, "__init__", shifted)
    with pytest.raises(ModelError, match="differ"):
        check(model)


def test_layers_that_are_not_found_or_wrapped_already_are_left_alone() -> None:
    model = tiny("llama").model
    del model.model.layers[-1].forward
    assert not install(model, len(model.model.layers) + 1, lambda: None)
    assert not install(model.model.rotary_emb, len(model.model.layers), lambda: None)
    assert install(model, len(model.model.layers), lambda: None)
    assert not install(model, len(model.model.layers), lambda: None)
