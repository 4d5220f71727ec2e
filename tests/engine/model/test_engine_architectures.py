"""Which architectures are served, which are refused and why, and what is measured of their layers."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from engine.attention.rotary import FrameRotation
from engine.engine import Engine
from engine.model import canary, probe
from engine.model import loading as model
from engine.model.architectures import REFUSED, TESTED, ModelError, check_known
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model, prepare
from engine.model.revision import CALIBRATION, revision_of
from regions.tape import Retention
from tests.engine.oracle import ARCHITECTURES, random_weights, tiny, tiny_config, words
from tests.kit import tolerance

SMALL_LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def docs_table(heading: str) -> dict[str, str]:
    """First and second column of the table under ``heading`` in docs/models.md; names in backticks."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE)
    return {name: note for names, note in rows for name in re.findall(r"`(.*?)`", names)}


def test_the_docs_list_exactly_the_tested_and_the_refused() -> None:
    assert docs_table("Tested architectures") == TESTED
    assert docs_table("Refused architectures") == REFUSED


def test_every_tested_architecture_is_compared_with_the_oracle() -> None:
    """All but the wrapper around Gemma 3's language model, which has a test of its own below."""
    assert set(ARCHITECTURES) == TESTED.keys() - {"gemma3"}


def test_the_tables_name_model_types_of_transformers_and_do_not_overlap() -> None:
    assert (TESTED.keys() | REFUSED.keys()) <= set(CONFIG_MAPPING)
    assert not TESTED.keys() & REFUSED.keys()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_known_bad_architecture_is_refused_by_name_with_the_reason(kind: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{kind} is not supported: {REFUSED[kind]}")):
        check_known(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize(
    ("kind", "special", "reason"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "does not rotate the halves"),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "does not rotate the halves"),
        ("bloom", {"n_layer": 2, "n_head": 4}, r"layers \[\] reach our attention"),
        ("cohere", {}, "does not rotate the halves"),
        ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, r"layers \[\] reach"),
        ("mamba", {"state_size": 8}, r"layers \[\] reach"),
        (
            "qwen3_next",
            {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2},
            r"layers \[3\] reach our attention",
        ),
        ("deepseek_v3", SMALL_LATENT, "does not rotate the halves"),
        ("llama4_text", {"attention_chunk_size": 4000, "num_local_experts": 2}, "masks otherwise than caus"),
        ("diffllama", {}, r"layers \[0, 0, 1, 1\] reach our attention, expected each of 2 once"),
    ],
)
def test_what_is_refused_by_name_is_refused_by_measurement_too(
    kind: str, special: dict[str, Any], reason: str
) -> None:
    """The table saves loading the weights and gives the reason; the measurement alone is sufficient."""
    config = tiny_config(kind, layers=special.pop("num_hidden_layers", 2), **special)
    with pytest.raises(ModelError, match=reason):
        probe.probe(random_weights(config).eval())


@pytest.mark.parametrize("kind", ["olmo2", "gpt_neox"])
def test_an_untested_architecture_is_warned_of_and_served_when_it_passes(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-NeoX rotates a quarter of each head; probe and canary decide."""
    with caplog.at_level(logging.WARNING):
        loaded = tiny(kind)
    assert f"{kind} is not in the table of tested architectures" in caplog.text
    assert canary.check(loaded) < tolerance.of_model(loaded)
    caplog.clear()
    tiny("llama")
    assert not caplog.text


def test_the_wrapper_around_gemma_3_serves_its_language_model() -> None:
    """Checkpoints with a vision tower have a composite configuration and layers one level down."""
    text = tiny_config("gemma3_text").to_dict()
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config={**vision, "image_size": 28})
    loaded = prepare(random_weights(config), None, name="gemma3")
    assert len(loaded.layers) == 4
    assert len({id(rotation) for rotation in loaded.rotations}) == 2
    assert canary.check(loaded) < tolerance.of_model(loaded)


def test_layers_with_the_same_rotary_base_share_one_rotation() -> None:
    """Gemma 3 has a base for sliding and one for full layers; both are found without reading names."""
    loaded = tiny("gemma3_text")
    sliding, full, *again = loaded.rotations
    assert again == [sliding, full]
    exponents = torch.arange(0, 16, 2).double() / 16
    tolerance.assert_sums(sliding.inv_freq, 100.0**-exponents, width=1, dtype=torch.float32)
    tolerance.assert_sums(full.inv_freq, 10000.0**-exponents / 8, width=1, dtype=torch.float32)


def test_layers_without_positions_are_not_rotated() -> None:
    rotating, none, *_ = tiny("smollm3").rotations
    query, shifts = torch.randn(4, 3, 16), torch.tensor([5, 6, 7])
    assert not torch.equal(rotating.rotate(query, shifts), query)
    assert torch.equal(none.rotate(query, shifts), query)


def test_a_model_that_rotates_otherwise_beyond_a_length_is_served_up_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """longrope changes frequencies beyond the original length: positions stay below it, with a warning."""
    loaded = tiny("phi3")
    assert loaded.max_positions == 128
    assert "phi3: positions are served up to 128" in caplog.text
    engine = Engine(loaded, blocks=64, frame_limit=4096)
    assert engine.frame_limit == 128
    with pytest.raises(ValueError, match="128"):
        engine.open_tape("t", [1, 2, 3], Retention(126))


@pytest.mark.parametrize("last", [97, 98, 1234, 2046, 2047])
def test_the_last_good_position_is_found_exactly(last: int) -> None:
    assert probe._positions(lambda position: position <= last, 97, 2048) == last + 1


@pytest.mark.parametrize(
    ("kind", "window", "said"),
    [("phimoe", 3000, "none"), ("olmoe", 3000, "3000 tokens")],
)
def test_a_window_that_mask_and_layer_disagree_on_is_refused(kind: str, window: int, said: str) -> None:
    """PhiMoE's mask slides and its layers do not say so, OLMoE's the other way round.

    The window is far longer than anything the canary computes.
    """
    config = tiny_config(
        kind, layers=1, sliding_window=window, num_local_experts=2, num_experts=2, num_experts_per_tok=1
    )
    with pytest.raises(ModelError, match=rf"layer 0 masks otherwise .* \({said}\)"):
        prepare(random_weights(config), None, name=kind)


@pytest.mark.parametrize("layer", range(4))
def test_the_canary_catches_one_layer_with_the_rotation_of_another(layer: int) -> None:
    loaded = tiny("gemma3_text")
    rotations = list(loaded.rotations)
    rotations[layer] = rotations[(layer + 1) % 4]
    with pytest.raises(ModelError, match=r"^gemma3_text: its logits"):
        canary.check(dataclasses.replace(loaded, rotations=tuple(rotations)))


def test_the_canary_catches_a_rotary_layout_that_re_rotation_does_not_reproduce() -> None:
    """The same model with a wrong rotation passes as long as nothing is rotated, so two frames are needed."""
    loaded = tiny("llama")
    wrong = FrameRotation(loaded.rotations[0].inv_freq * 1.5)
    with pytest.raises(ModelError, match="dense forward"):
        canary.check(dataclasses.replace(loaded, rotations=(wrong,) * len(loaded.rotations)))


def test_the_canary_catches_a_layer_that_mixes_tokens_outside_of_attention() -> None:
    """A token shift is invisible to probes of one token, and regions do not keep its state."""
    loaded = tiny("llama")
    mlp = loaded.model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: plain(hidden + hidden.roll(1, dims=1))
    with pytest.raises(ModelError, match=r"^llama: its logits"):
        canary.check(loaded)


def test_the_canary_turns_a_failing_forward_into_a_refusal() -> None:
    loaded = tiny("llama")

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    loaded.model.model.layers[1].mlp.forward = fail
    with pytest.raises(ModelError, match="no such kernel"):
        canary.check(loaded)


def save(loaded: LoadedModel, directory: Path, **options: Any) -> Path:
    loaded.model.save_pretrained(directory, **options)
    words().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral", "gpt_oss"])
def test_a_bf16_checkpoint_stays_bf16_and_passes_its_canary(kind: str, tmp_path: Path) -> None:
    """Weights and KV are bf16, the rotary frequencies are not rounded, and wrong rotations still show."""
    full = tiny(kind, layers=2)
    expected = [rotation.inv_freq for rotation in full.rotations]
    full.model.to(torch.bfloat16)
    loaded = load_model(save(full, tmp_path))
    assert loaded.dtype == torch.bfloat16
    assert Engine(loaded, blocks=4).pool.keys[0].dtype == torch.bfloat16
    for rotation, frequencies in zip(loaded.rotations, expected, strict=True):
        assert torch.equal(rotation.inv_freq, frequencies)
    assert canary.check(loaded) < tolerance.of_model(loaded)
    for wrong in (FrameRotation(expected[0] * 1.5), FrameRotation(torch.empty(0))):
        with pytest.raises(ModelError, match="dense forward"):
            canary.check(dataclasses.replace(loaded, rotations=(wrong,) * len(loaded.rotations)))


def test_a_checkpoint_in_many_files_is_the_same_model(tmp_path: Path) -> None:
    """Sharded safetensors give the logits of the one file, bit for bit; the revision covers every file."""
    made = tiny("llama")
    whole = load_model(save(made, tmp_path / "whole"))
    many = load_model(save(made, tmp_path / "many", max_shard_size="40KB"))
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 4
    tokens = list(range(5, 45))
    assert torch.equal(canary.dense_logits(whole, tokens), canary.dense_logits(many, tokens))
    assert many.revision == revision_of(tmp_path / "many")
    with files[-1].open("r+b") as stream:  # the last value of the last tensor
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))
    assert revision_of(tmp_path / "many") != many.revision
    with files[-1].open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(last)
    assert revision_of(tmp_path / "many") == many.revision
    (tmp_path / "many" / CALIBRATION).write_text("{}")  # fitted for the revision, so no part of it
    assert revision_of(tmp_path / "many") == many.revision
    with files[-1].open("ab") as stream:
        stream.write(b"\0")
    assert revision_of(tmp_path / "many") != many.revision


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    (file,) = save(tiny("llama"), tmp_path).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


@pytest.mark.parametrize("available", [True, False])
def test_the_loader_gets_the_device_for_the_weights(
    available: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accelerate transformers fills weights where they belong; without it, it must not be asked to."""
    asked: dict[str, Any] = {}
    original = model.AutoModelForCausalLM.from_pretrained

    def record(path: Path, **options: Any) -> Any:
        asked.update(options)
        options.pop("device_map", None)
        return original(path, **options)

    monkeypatch.setattr(model, "is_accelerate_available", lambda: available)
    monkeypatch.setattr(model.AutoModelForCausalLM, "from_pretrained", record)
    load_model(save(tiny("llama", layers=1), tmp_path), device="cpu")
    assert asked.get("device_map") == ({"": "cpu"} if available else None)
