"""Tensor parallelism: two processes over gloo, each with half of the heads, give one process's logits."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model import tensor_parallel
from engine.model.architectures import ModelError
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from tests.engine.model import tensor_parallel_rank
from tests.engine.model.tensor_parallel_rank import scenario, weight_bytes
from tests.engine.oracle import tiny, words
from tests.kit import tolerance

RANKS = 2
# plain, tied embeddings with a rope base for each layer type, experts split over the ranks
KINDS = ("llama", "gemma3_text", "mixtral")


@pytest.fixture(scope="module")
def both_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, LoadedModel], dict[str, list[Any]]]:
    """The models in one process, and what each rank of the pair found."""
    directory = tmp_path_factory.mktemp("ranks")
    alone = {}
    for kind in KINDS:
        alone[kind] = tiny(kind, layers=2)
        alone[kind].model.save_pretrained(directory / kind)
        words().save_pretrained(directory / kind)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([tensor_parallel_rank.__name__])  # PyTorch is imported once for both
    ranks = [
        context.Process(target=tensor_parallel_rank.main, args=(rank, RANKS, directory))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        for rank, process in enumerate(ranks):
            process.join(240)
            assert process.exitcode == 0, (directory / f"{rank}.log").read_text()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    found = {kind: [torch.load(directory / f"{kind}.{rank}.pt") for rank in range(RANKS)] for kind in KINDS}
    return alone, found


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_logits_of_one_process(
    kind: str, both_ranks: tuple[dict[str, LoadedModel], dict[str, list[Any]]]
) -> None:
    """Through appends, forks of several versions, evictions and frames, on a pool of half the heads each."""
    alone, found = both_ranks
    expected = scenario(alone[kind])
    first, second = found[kind]
    assert first["kv_heads"] == second["kv_heads"] == alone[kind].layers[0].kv_heads // RANKS
    for one, other, whole in zip(first["logits"], second["logits"], expected, strict=True):
        assert torch.equal(one, other)  # so that both ranks choose the same token
        tolerance.assert_logits(alone[kind], one, whole)


def test_a_rank_has_its_part_of_the_weights(
    both_ranks: tuple[dict[str, LoadedModel], dict[str, list[Any]]],
) -> None:
    """Nothing keeps the whole weights that were loaded, neither as parameters nor behind views."""
    alone, found = both_ranks
    for rank in found["llama"]:
        assert rank["bytes"] < 0.55 * weight_bytes(alone["llama"].model)


def test_without_a_group_it_is_refused(tmp_path: Path) -> None:
    tiny("llama", layers=1).model.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"torch\.distributed"):
        load_model(tmp_path, tensor_parallel=True)


def test_heads_that_cannot_be_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(tensor_parallel.distributed, "get_world_size", lambda: 4)
    with pytest.raises(ModelError, match="among 4 ranks"):
        tensor_parallel.shard(tiny("llama", layers=1).model)
