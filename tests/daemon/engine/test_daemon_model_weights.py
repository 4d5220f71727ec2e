"""The memory of a model's weights is known before they are loaded."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from daemon.config.schema import Config, ModelConfig
from daemon.engine import build as building
from daemon.engine.build import load
from daemon.engine.memory_budget import SHARE, check_weights, shown_bytes
from daemon.engine.model_weights import weight_bytes
from engine.model.terse import TAPE_MODEL
from feeds.connector import SettingError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
Shapes = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), max_size=4)


@given(shapes=Shapes)
def test_they_are_those_of_the_tensors(tmp_path_factory: pytest.TempPathFactory, shapes: list) -> None:  # type: ignore[type-arg]  # as generated
    folder = tmp_path_factory.mktemp("model")
    tensors = {f"t{n}": torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in enumerate(shapes)}
    save_file(tensors, folder / "model-1.safetensors", {"format": "pt"})
    save_file({"more": torch.zeros(7)}, folder / "model-2.safetensors")
    every = [*tensors.values(), torch.zeros(7)]
    assert weight_bytes(folder, "auto") == sum(each.nbytes for each in every)
    assert weight_bytes(folder, "bfloat16") == sum(2 * each.numel() for each in every)


@pytest.mark.parametrize("head", [b"", b"\xff" * 20, *(b"\x02" + bytes(7) + each for each in (b"[]", b"{}"))])
def test_a_file_that_cannot_be_read_is_left_to_the_loading(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(head)
    assert weight_bytes(tmp_path, "auto") == 0


def test_other_files_count_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1234))
    assert weight_bytes(tmp_path, "float32") == 1234


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    need = weight_bytes(TAPE_MODEL, "auto")
    assert need > 1_000_000
    check_weights(TAPE_MODEL, "auto", "cpu", lambda device: int(need / SHARE) + 1)
    with pytest.raises(SettingError) as refused:
        check_weights(TAPE_MODEL, "auto", "cpu", lambda device: need)
    assert refused.value.key == "model.path"
    assert refused.value.message.count(shown_bytes(need)) == 2
    monkeypatch.setattr("daemon.engine.memory_budget.weight_bytes", lambda *_: 1 << 60)
    monkeypatch.setattr(building, "load_checked", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(SettingError) as refused:
        load(Config(model=ModelConfig(device="cpu")))
    assert refused.value.key == "model.path"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_while_they_are_loaded_is_a_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(building, "load_checked", fail)
    with pytest.raises(SettingError) as refused:
        load(Config(model=ModelConfig(device="cpu")))
    assert refused.value.key == "model.path"
