"""LoRA adapters: the served model is the merged checkpoint to the bit; what does not fit is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from daemon.cli.check import command
from daemon.config.schema import Config, ModelConfig
from daemon.engine.build import load
from engine.measurement_cache import Memory
from engine.model import remembered
from engine.model.canary import dense_logits
from engine.model.embedded import build_tokenizer
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.model.lora import Adapter, AdapterError, read_adapter, write_adapter
from engine.model.revision import ADAPTER_CONFIG, ADAPTER_WEIGHTS, revision_of
from feeds.connector import SettingError
from tests.engine.model.test_engine_remembered import TOKENS, VOCABULARY, logits
from tests.engine.oracle import random_weights, tiny_config
from tests.kit import tolerance

RANK, ALPHA = 4, 10.0
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def base_in(path: Path, dtype: torch.dtype = torch.float32, **extra: Any) -> Path:
    random_weights(tiny_config("llama", vocab_size=VOCABULARY, layers=3, **extra)).to(dtype).save_pretrained(
        path
    )
    build_tokenizer(VOCABULARY).save_pretrained(path)
    return path


def adapter_in(path: Path, base: Path, seed: int = 0, revision: str | None = None) -> Path:
    """Random matrices for the base's own shapes."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    matrices = {
        name.removesuffix(".weight"): (random(RANK, weight.shape[1]), random(weight.shape[0], RANK))
        for name, weight in load_file(base / "model.safetensors").items()
        if name.endswith(tuple(f"{target}.weight" for target in TARGETS))
    }
    trained_on = revision_of(base) if revision is None else revision
    write_adapter(Adapter(path, ALPHA / RANK, matrices, trained_on), base.name)
    return path


def merged_in(path: Path, base: Path, adapter: Path) -> Path:
    """The checkpoint with W + scale B A, by plain products over the files."""
    tensors, added = load_file(base / "model.safetensors"), load_file(adapter / ADAPTER_WEIGHTS)
    for name in [key for key in added if ".lora_A." in key]:
        own = name.removeprefix("base_model.model.").replace(".lora_A", "")
        change = ALPHA / RANK * (added[name.replace("lora_A", "lora_B")] @ added[name])
        tensors[own] = (tensors[own].float() + change).to(tensors[own].dtype)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_state_dict(tensors, strict=False)
    model.save_pretrained(path)
    build_tokenizer(VOCABULARY).save_pretrained(path)
    return path


@pytest.mark.parametrize("layers", ["compiled", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_served_model_is_the_merged_checkpoint_to_the_bit(
    tied: bool, dtype: torch.dtype, layers: Any, tmp_path: Path
) -> None:
    base = base_in(tmp_path / "base", dtype, tie_word_embeddings=tied)
    before = (base / "model.safetensors").read_bytes()
    adapter = adapter_in(tmp_path / "adapter", base)
    merged = merged_in(tmp_path / "merged", base, adapter)
    found = load_model(base, layers=layers, adapter=adapter)
    expected, plain = load_model(merged, layers=layers), load_model(base, layers=layers)
    assert torch.equal(logits(found), logits(expected))
    assert not torch.allclose(logits(found), logits(plain), atol=0.1)
    assert (base / "model.safetensors").read_bytes() == before
    assert found.name == "base+adapter"


def test_the_next_start_has_the_same_model_to_the_bit(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    adapter, memory = adapter_in(tmp_path / "adapter", base), Memory(lambda: tmp_path / "measured")

    def next_start(with_adapter: Path | None) -> LoadedModel | None:
        return remembered.recall(base, "auto", "compiled", memory, with_adapter)

    first = load_model(base, layers="compiled", adapter=adapter)
    remembered.remember(first, base, "auto", "compiled", memory, adapter)
    again = next_start(adapter)
    assert again is not None
    assert again.model is None
    assert (again.name, again.revision) == (first.name, first.revision)
    assert torch.equal(logits(again), logits(first))
    assert next_start(None) is None
    assert next_start(adapter_in(tmp_path / "other", base, seed=1)) is None


def test_it_is_the_dense_forward_with_the_low_rank_products_beside_the_layers(tmp_path: Path) -> None:
    """The definition: each linear layer's output and scale B (A x), nothing merged."""
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    read = read_adapter(adapter)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")

    def beside(a: torch.Tensor, b: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda _module, inputs, output: output + read.scale * (inputs[0] @ a.T) @ b.T

    for name, (a, b) in read.matrices.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.register_forward_hook(beside(a, b))
    loaded = load_model(base, layers="torch", adapter=adapter)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    tolerance.assert_logits(loaded, dense_logits(loaded, TOKENS), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers' names that peft still uses
def test_peft_reads_what_is_written_and_answers_alike(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install --no-deps peft accelerate psutil")
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    loaded = load_model(base, layers="torch", adapter=adapter)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    tolerance.assert_logits(loaded, dense_logits(loaded, TOKENS), expected)
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    again = read_adapter(tmp_path / "again")
    assert again.matrices.keys() == read_adapter(adapter).matrices.keys()
    assert again.scale == ALPHA / RANK


def test_models_and_adapters_are_told_apart(tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    first, other = adapter_in(tmp_path / "first", base), adapter_in(tmp_path / "other", base, seed=1)
    scaled = adapter_in(tmp_path / "scaled", base)
    rewrite(scaled, lora_alpha=2 * ALPHA)
    found = {revision_of(base, each) for each in (None, first, other, scaled)}
    assert len(found) == 4
    assert revision_of(base, adapter_in(tmp_path / "again", base)) == revision_of(base, first)


def rewrite(adapter: Path, **changes: Any) -> None:
    config = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(config | changes))


def edit(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / ADAPTER_WEIGHTS)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def cut(adapter: Path) -> None:
    whole = (adapter / ADAPTER_WEIGHTS).read_bytes()
    (adapter / ADAPTER_WEIGHTS).write_bytes(whole[: len(whole) // 2])


def renamed(adapter: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for which in "AB":
            tensors[f"{FIRST.replace('layers.0', 'layers.9')}{which}.weight"] = tensors.pop(
                f"{FIRST}{which}.weight"
            )

    edit(adapter, change)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, "cut or broken"),
    "no weights": (lambda path: (path / ADAPTER_WEIGHTS).unlink(), "missing, cut or broken"),
    "no config": (lambda path: (path / ADAPTER_CONFIG).unlink(), "is no adapter"),
    "config cut": (lambda path: (path / ADAPTER_CONFIG).write_text('{"peft_type":'), "cannot be read"),
    "rank": (lambda path: rewrite(path, r=8), "does not have the rank of its config, 8"),
    "rank 0": (lambda path: rewrite(path, r=0), "a rank is 1 or more"),
    "no such module": (renamed, "changes model.layers.9.self_attn.q_proj, which the model lacks"),
    "no such target": (
        lambda path: rewrite(path, target_modules=["q_proj", "w_pack"]), "no matrices of the target w_pack",
    ),
    "one half": (lambda path: edit(path, lambda each: each.pop(f"{FIRST}A.weight")), "only one of the two"),
    "no LoRA": (
        lambda path: edit(path, lambda each: each.update({"base_model.model.prompt": torch.zeros(3)})),
        "base_model.model.prompt, which is no matrix of a LoRA",
    ),
    "not finite": (
        lambda path: edit(path, lambda each: each[f"{FIRST}B.weight"].fill_(float("nan"))), "not finite",
    ),
    "DoRA": (lambda path: rewrite(path, use_dora=True), "use_dora, which is not merged here"),
    "prompt tuning": (lambda path: rewrite(path, peft_type="PROMPT_TUNING"), "peft_type PROMPT_TUNING"),
    "PiSSA": (lambda path: rewrite(path, init_lora_weights="pissa"), "init_lora_weights pissa"),
    "other base": (
        lambda path: adapter_in(path, base_in(path.parent / "elsewhere", rms_norm_eps=1e-3)),
        "was trained on model",
    ),
    "other shape": (
        lambda path: adapter_in(path, base_in(path.parent / "wider", intermediate_size=96), revision=""),
        "it was trained on another model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_what_does_not_fit_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    base = base_in(tmp_path / "base")
    adapter = adapter_in(tmp_path / "adapter", base)
    spoil, said = BROKEN[kind]
    spoil(adapter)
    with pytest.raises(AdapterError, match=said) as refused:
        load_model(base, layers="torch", adapter=adapter)
    assert "\n" not in str(refused.value)
    assert str(adapter) in str(refused.value)


def test_the_daemon_names_the_key_and_exits_with_2(tmp_path: Path) -> None:
    base, other = base_in(tmp_path / "base"), base_in(tmp_path / "other", rms_norm_eps=1e-3)
    model = ModelConfig(path=str(base), adapter=str(adapter_in(tmp_path / "adapter", other)), layers="torch")
    with pytest.raises(SettingError, match=r"^model\.adapter: "):
        load(Config(model=model))
    file = tmp_path / "foretick.toml"
    file.write_text(f'[model]\npath = "{model.path}"\nadapter = "{model.adapter}"\n')
    done = CliRunner().invoke(command, ["--config", str(file)])
    assert done.exit_code == 2
    assert "model.adapter" in done.output
