"""torchao's codes, on a CPU by its own products: against the dense forward of what they expand to.

No GPU has run them. Four bits have another packing on a CPU, which stands in here.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from daemon.cli.main import main
from engine.graphs.runner import capture_obstacle
from engine.linears.install import install_linears
from engine.model import by_torchao, canary
from engine.model.architectures import ModelError
from engine.model.by_torchao import FORMS, Form, config_of, expanded, is_coded
from engine.model.kept import held_as
from engine.model.loaded import ATTENTION, Layers, LoadedModel, Weights
from engine.model.loading import load_model
from engine.model.probe import single_token
from tests.engine.oracle import random_weights, tiny_config, words
from tests.kit.engine import assert_logits_over_regions
from tests.kit.programs import unavailable
from tests.kit.weights import smollm2_directory

HELD: tuple[Weights, ...] = ("torchao-int8", "torchao-int4", "torchao-fp8")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, and four bits as a CPU has them."""
    if find_spec("torchao") is None:
        unavailable("torchao is missing: pip install --no-deps torchao")
    import torchao.quantization
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    monkeypatch.setattr(torchao.quantization, "OnCpu", PrototypeInt4WeightOnlyConfig, raising=False)
    form = Form("int4", "OnCpu", FORMS["torchao-int4"].off, options={"group_size": by_torchao.GROUP})
    monkeypatch.setitem(FORMS, "torchao-int4", form)


def saved(folder: Path, dtype: torch.dtype, architecture: str = "llama", **extra: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, **extra}
    random_weights(tiny_config(architecture, **sizes)).to(dtype).save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


def assert_dense(loaded: LoadedModel) -> None:
    """Its logits over regions, of a row and of many, are those of its expanded weights."""
    canary.check(loaded)
    tokens = torch.randint(3, 90, (60,), generator=torch.Generator().manual_seed(6)).tolist()
    expected = canary.dense_logits(loaded, tokens)
    assert_logits_over_regions(loaded, tokens, expected)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(
    ("architecture", "extra"),
    [("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("gemma2", {})],
    ids=["llama tied", "qwen2 with biases", "gemma2"],
)
def test_a_model_gives_the_dense_logits_of_its_expanded_weights(
    tmp_path: Path, architecture: str, extra: dict[str, Any], held: Weights, dtype: torch.dtype
) -> None:
    path = saved(tmp_path, dtype, architecture, **extra)
    floats, loaded = (
        load_model(path, device="cpu", layers="torch", weights=each) for each in ("float", held)
    )
    assert (loaded.weights, loaded.decoder, loaded.dtype) == (held, None, dtype)
    assert loaded.revision != floats.revision
    linears = [each for each in loaded.model.modules() if isinstance(each, nn.Linear)]
    head = loaded.model.lm_head
    assert [each for each in linears if not is_coded(each)] == [head]
    assert (head.weight is loaded.model.get_input_embeddings().weight) == (
        loaded.model.config.tie_word_embeddings
    )
    size = sum(each.weight.numel() for each in linears if each is not head)
    assert 0.5 * size < loaded.packed_bytes < 1.3 * size
    assert capture_obstacle(loaded.model, ATTENTION) is None
    assert_dense(loaded)


@pytest.mark.usefixtures("torchao")
def test_the_canary_shows_a_wrong_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one matrix with a single row, which the dense forward does not have."""
    path = saved(tmp_path, torch.float32)
    loaded = load_model(path, device="cpu", layers="torch", weights="torchao-int8")
    assert canary.check(loaded) < 1e-4
    module = loaded.model.model.layers[1].mlp.down_proj
    right = nn.Linear.forward

    def wrong(self: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        return (1.5 if self is module and rows.shape[-2] == 1 else 1) * right(self, rows)

    monkeypatch.setattr(nn.Linear, "forward", wrong)
    with pytest.raises(ModelError, match="differ from the dense"):
        canary.check(loaded)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("held", HELD)
def test_codes_of_other_weights_are_refused(
    tmp_path: Path, held: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packing that moves columns, as its product shows them."""
    path = saved(tmp_path, torch.float32)
    right: Callable[[torch.Tensor], torch.Tensor] = expanded
    monkeypatch.setattr(by_torchao, "expanded", lambda weight: right(weight).roll(1, 1))
    with pytest.raises(ModelError, match="codes are not those"):
        load_model(path, device="cpu", weights=held)


@pytest.mark.usefixtures("torchao")
def test_a_group_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.bfloat16, intermediate_size=80)
    with pytest.raises(ModelError, match=r"mlp.down_proj: .* 80 inputs"):
        load_model(path, device="cpu", weights="torchao-int4")


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("layers", ["auto", "compiled", "onednn"])
def test_what_wraps_linear_layers_leaves_codes_alone(tmp_path: Path, layers: Layers) -> None:
    loaded = load_model(saved(tmp_path, torch.float32), device="cpu", layers=layers, weights="torchao-int8")
    linears = install_linears(loaded.model, lambda: single_token(loaded.model), "onednn")
    loaded.model.set_attn_implementation(ATTENTION)
    assert sum(linears.ways.values()) <= 1  # the head
    assert is_coded(loaded.model.model.layers[0].mlp.up_proj)
    canary.check(loaded)


@pytest.mark.usefixtures("torchao")
def test_a_checkpoint_of_torchao_s_codes_is_served_as_it_is(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    path = saved(tmp_path / "floats", torch.bfloat16)
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=quantization)
    model.save_pretrained(tmp_path / "codes")
    words().save_pretrained(tmp_path / "codes")
    loaded = load_model(tmp_path / "codes", device="cpu", layers="torch")
    assert is_coded(loaded.model.model.layers[0].mlp.up_proj)
    assert_dense(loaded)
    with pytest.raises(ModelError, match="hold codes: set it"):
        load_model(tmp_path / "codes", device="cpu", weights="torchao-int8")


@pytest.mark.parametrize(("asked", "has"), [("fp8", (8, 6)), ("int4", (7, 5))])
def test_a_gpu_that_is_too_old_is_refused(
    asked: Weights, has: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: has)
    held = held_as(Path(), asked, "auto", "auto", "cuda")
    with pytest.raises(ModelError, match=rf"^model.weights is {asked}, .*capability 8.*: take int8"):
        config_of(held, "cuda")


def check(tmp_path: Path, weights: str) -> tuple[int, str]:
    text = (
        f'standing = "none"\n[model]\npath = "untrained"\nweights = "{weights}"\n'
        '[[sessions]]\nname = "one"\nsymbol = "V:A"\nretention_tokens = 256\n'
    )
    (tmp_path / "f.toml").write_text(text)
    done = CliRunner().invoke(main, ["check", "--config", str(tmp_path / "f.toml")])
    return done.exit_code, next((each for each in done.output.splitlines() if each.startswith("WRONG")), "")


def test_a_cpu_has_no_fp8(tmp_path: Path) -> None:
    code, line = check(tmp_path, "fp8")
    wrong = "WRONG model.weights: model.weights is fp8, which a single GPU holds: on a CPU take int8 or int4"
    assert (code, line) == (2, wrong)


def test_a_missing_package_is_a_sentence_in_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU was there."""
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("daemon.engine.build.resolve_device", lambda device: "cuda")
    monkeypatch.setattr("engine.model.loading.resolve_device", lambda device: "cuda")
    monkeypatch.setattr("daemon.engine.build.check_weights", lambda *_: None)
    code, line = check(tmp_path, "int8")
    assert code == 2
    assert line.startswith(
        "WRONG model.weights: model.weights is int8, which torchao holds on a GPU: pip install "
    )


@pytest.mark.weights
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("held", HELD[:1])
def test_smollm2_gives_the_dense_logits_of_its_expanded_weights(held: Weights) -> None:
    assert_dense(load_model(smollm2_directory(), device="cpu", layers="torch", weights=held))
