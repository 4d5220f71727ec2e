"""Rows of the last layer that are not read are not computed; the others do not change."""

from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import LayerCall
from engine.attention.cpu import CpuAttention
from engine.attention.last_layer import LastLayer, install
from engine.attention.metadata import AttentionMetadata
from engine.model.architectures import ModelError
from engine.model.canary import check, dense_logits
from engine.model.loaded import LoadedModel
from engine.step import Chunk
from regions.tape import Retention
from tests.engine.oracle import ARCHITECTURES, VOCABULARY, tiny
from tests.kit import tolerance
from tests.kit.engine import TapeWithHistory, append, tokens


class Session(TapeWithHistory):
    """A tape of two records in two frames and forks of it; ``rows``: of each call of the CPU backend."""

    def __init__(self, model: LoadedModel) -> None:
        self.rows: list[int] = []
        super().__init__(
            model, blocks=64, frame_limit=4096, retention=Retention(90), frozen=9, attention=self.attend
        )
        self.append(21)
        self.tape.new_frame(at=3)
        self.append(13)
        self.rows.clear()

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.rows.append(call.query.shape[1])
        return CpuAttention()(call)

    def ask(self, questions: Sequence[Sequence[int]], drafts: Sequence[int | None]) -> list[Chunk]:
        """A fork of the tape for each question; ``drafts`` None: nothing is sampled."""
        forks = [self.tape.fork() for _ in questions]
        assert all(fork.acquire(len(question)) for fork, question in zip(forks, questions, strict=True))
        return [
            Chunk(fork, question, sample=d is not None, drafts=d or 0)
            for fork, question, d in zip(forks, questions, drafts, strict=True)
        ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rows_that_are_read_have_the_logits_of_a_whole_pass(architecture: str) -> None:
    """Questions of several lengths, one with drafts, one not sampled, over two frames."""
    model = tiny(architecture)
    assert model.trims
    session = Session(model)
    questions = [tokens(session.rng, n) for n in (17, 5, 11, 17)]
    drafts = [0, None, 2, 0]
    whole = session.engine.logits(session.ask(questions, drafts))

    session, rows = Session(model), [16, 30, 31, 32, 49]
    read = session.engine.logits(session.ask(questions, drafts), rows)
    assert session.rows == [50] * (len(model.layers) - 1) + [5]
    tolerance.assert_logits(model, read, whole[rows])


def test_a_pass_that_only_appends_ends_at_the_last_layer_s_keys() -> None:
    """Its KV is that of a pass which computes everything."""
    model = tiny("llama")
    found = []
    for layers in (len(model.layers), len(model.layers) - 1):
        session = Session(model)
        record = tokens(session.rng, 30)
        if layers == len(model.layers):
            append(session.engine, session.tape, record)
        else:
            session.engine.append(session.tape, [record])
        assert session.rows == [30] * layers
        extent = session.tape.extents[-1]
        own = slice(extent.slot + extent.length - 30, extent.slot + extent.length)
        pool = session.engine.pool
        found.append([tensor[:, own] for tensor in (*pool.keys, *pool.values)])
    for one, other in zip(*found, strict=True):
        tolerance.assert_sums(other, one, width=64)  # the hidden size


def test_a_pass_that_reads_every_row_computes_them_all() -> None:
    """After a pass that read fewer rows, and in the unmodified model."""
    model = tiny("llama")
    session = Session(model)
    assert dense_logits(model, [3, 4, 5, 6]).shape == (4, VOCABULARY)
    work = session.ask([tokens(session.rng, 6)], [0])
    assert session.engine.logits(work).shape == (6, VOCABULARY)
    assert session.rows == [6] * len(model.layers)


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
