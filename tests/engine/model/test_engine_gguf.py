"""GGUF files become model directories: every weight as the gguf package expands it, or a refusal by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.peers.convert import _PLAIN, adjacent
from daemon.cli.model import command
from daemon.config.schema import Config, ModelConfig
from daemon.engine.build import load
from engine.model.architectures import ModelError
from engine.model.canary import check
from engine.model.gguf import gguf_directory, import_gguf
from engine.model.kept import codes_of, held_as
from engine.model.loading import load_model
from engine.model.revision import CODES, revision_of
from feeds.connector import SettingError
from tests.kit import tolerance

gguf = pytest.importorskip("gguf", reason="pip install gguf")

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
QUANTISED = [kind for kind in KINDS if kind.startswith("Q")]
SCALES = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
"""Where a block has its scales in fp16; the package expands these kinds, and makes none."""
TOKENS = ["<unk>", "<s>", "</s>", "<end>", *(chr(0x21 + n) for n in range(90)), '!"']
TEMPLATE = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"


def weights() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def quantised(tensor: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the kind, and what they say."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        values = gguf.quantize(tensor, number)
        return values, gguf.dequantize(values, number).reshape(tensor.shape)
    elements, size = gguf.GGML_QUANT_SIZES[number]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // elements, size)
    rng = np.random.default_rng(tensor.size)
    blocks = rng.integers(0, 256, shape, np.uint8)
    first, end = SCALES[kind]
    count = (end - first) // 2
    scales = rng.uniform(1e-4, 1e-3, (*shape[:-1], count)).astype(np.float16)
    blocks[..., first:end] = scales.view(np.uint8)
    values = blocks.reshape(*tensor.shape[:-1], -1)
    return values, gguf.dequantize(values, number).reshape(tensor.shape)


def write(file: Path, kind: str = "Q8_0", **more: Any) -> dict[str, torch.Tensor]:
    """A tiny Llama; returns its state as it should be read. ``more``: fields, or ``extra`` for a tensor."""
    model = weights()
    config, state = model.config, {}
    writer = gguf.GGUFWriter(file, more.get("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    if more.get("heads", True):
        writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(more.get("rotary", 64))
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = more.get("tokens", TOKENS)
    writer.add_tokenizer_model(more.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    if tokens:
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
        writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    if more.get("ends", True):
        writer.add_eos_token_id(2)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
    writer.add_chat_template(TEMPLATE)
    if "scaling" in more:
        writer.add_string("llama.rope.scaling.type", more["scaling"])
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        part = name.removesuffix(".weight").split(".", 3)
        own = part[3] if part[:2] == ["model", "layers"] else name.removesuffix(".weight")
        prefix = f"blk.{part[2]}." if part[:2] == ["model", "layers"] else ""
        turned = own in ("self_attn.q_proj", "self_attn.k_proj")
        if values.ndim == 1:
            writer.add_tensor(f"{prefix}{_PLAIN[own]}.weight", values)
        elif more.get("without") != name:
            raw, expected = quantised(adjacent(values, 64) if turned else values, kind)
            writer.add_tensor(f"{prefix}{_PLAIN[own]}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
            values = straight(expected, 64) if turned else expected
        state[name] = torch.from_numpy(np.array(values))
    if "factor" in more:
        writer.add_float32("llama.rope.scaling.factor", more["factor"])
    if "factors" in more:
        writer.add_tensor("rope_freqs.weight", more["factors"])
    if "extra" in more:
        writer.add_tensor(more["extra"], np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def straight(projection: np.ndarray, head: int) -> np.ndarray:
    """What `adjacent` turned, turned back."""
    pairs = projection.reshape(-1, head // 2, 2, projection.shape[1])
    return pairs.swapaxes(1, 2).reshape(projection.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_what_the_file_says(kind: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "model.gguf", kind)
    said = import_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")
    assert said.startswith("llama, ")
    assert f"tensors {kind}" in said
    found = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_file_is_served_as_its_directory_with_its_tokens_template_and_ends(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    directory = gguf_directory(tmp_path / "model.gguf", "float32", tmp_path / "cache")
    loaded = load_model(directory)
    assert loaded.end_ids == {2, 3}
    assert loaded.tokenizer.encode("!") == [TOKENS.index("!")]
    template = AutoTokenizer.from_pretrained(directory).chat_template
    assert template == TEMPLATE
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert gguf_directory(tmp_path / "model.gguf", "float32", tmp_path / "cache") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    write(tmp_path / "model.gguf", "F16")  # another file of this name is another model
    assert gguf_directory(tmp_path / "model.gguf", "float32", tmp_path / "cache") != directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_kept_as_codes_that_compiled_layers_read(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    """Codes of 4 and 8 bits with what the file says to the bit, or rounded to 8 bits; the rest is floats."""
    said = import_gguf_as(tmp_path, kind, dtype)
    exact = not kind.endswith("K")
    assert said.endswith(
        f"as codes for a CPU: 15 matrices {kind} {'as it is' if exact else 'rounded to 8 bits'}"
    )
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    codes = codes_of(tmp_path / "out", expected, "gguf")
    assert len(codes) == 15
    for name, each in codes.items():
        assert each.bits == (4 if kind.startswith("Q4") and exact else 8)
        again = each.expanded().to(expected[name].dtype)
        if exact:
            assert torch.equal(again, expected[name]), name
        else:
            spread = (expected[name].amax() - expected[name].amin()).item()
            assert (again.float() - expected[name].float()).abs().max() <= spread / 255
    loaded = load_model(tmp_path / "out", device="cpu")
    assert loaded.weights == "gguf"
    assert "with weights in int" in loaded.layers_run
    check(loaded)
    floats = load_model(tmp_path / "out", device="cpu", weights="float", layers="compiled")
    assert (floats.weights, floats.decoder.quantised) == ("float", False)  # type: ignore[union-attr]
    assert floats.revision != loaded.revision
    assert floats.packed_bytes > loaded.packed_bytes
    plain = load_model(tmp_path / "out", device="cpu", layers="torch")
    assert (plain.weights, plain.revision) == ("float", floats.revision)


def import_gguf_as(tmp_path: Path, kind: str, dtype: str) -> str:
    write(tmp_path / "model.gguf", kind)
    return import_gguf(tmp_path / "model.gguf", tmp_path / "out", dtype)


def test_a_file_of_floats_has_no_codes(tmp_path: Path) -> None:
    assert "codes" not in import_gguf_as(tmp_path, "F16", "float32")
    assert not (tmp_path / "out" / CODES).exists()
    assert load_model(tmp_path / "out", device="cpu", layers="compiled").weights == "float"


def test_codes_that_cannot_be_read_are_an_error_of_one_line(tmp_path: Path) -> None:
    import_gguf_as(tmp_path, "Q8_0", "float32")
    file = tmp_path / "out" / CODES
    before = load_model(tmp_path / "out", device="cpu").revision
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SettingError, match=r"^[^\n]*out cannot be read") as refused:
        load(Config(model=ModelConfig(path=str(tmp_path / "out"), device="cpu")))
    assert refused.value.key == "model.path"
    assert revision_of(tmp_path / "out", weights="gguf") != before


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"extra": "rope_freqs.weight"}, "scales its rope"),
        ({"factors": np.linspace(1, 8, 32, dtype=np.float32)}, "scales its rope"),
        ({"factors": np.ones(16, np.float32)}, "scales its rope"),
        ({"scaling": "yarn"}, "scales its rope"),
        ({"scaling": "linear"}, "scales its rope"),
        ({"extra": "rope_factors_long.weight"}, "scales its rope"),
        ({"extra": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias would be left out"),
        ({"rotary": 32}, "rotates a part of each head"),
        ({"ends": False}, "names no token that ends an answer"),
        ({"without": "model.layers.1.mlp.up_proj.weight"}, "lacks model.layers.1.mlp.up_proj.weight"),
        ({"architecture": "mamba", "heads": False}, "the architecture 'mamba' is not read from GGUF"),
        ({"architecture": "llamoid"}, "the architecture 'llamoid' is not read from GGUF"),
        ({"tokenizer": "wordly"}, "tokenizer 'wordly'"),
        ({"tokens": []}, "has no tokenizer"),
        ({"tokens": [*TOKENS, "aa", "bb"]}, "its tokenizer has 97 tokens and its embedding 95"),
        ({"tokens": TOKENS[:40]}, "its tokenizer has 40 tokens and its embedding 95"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    """transformers reads most of these without a word, and the model answers something else."""
    write(tmp_path / "model.gguf", **more)
    with pytest.raises(ModelError, match=why):
        gguf_directory(tmp_path / "model.gguf", cache=tmp_path / "cache")
    assert [each.suffix for each in (tmp_path / "cache").iterdir()] == [".lock"]


def llama3_factors(factor: float, theta: float, head: int) -> np.ndarray:
    """What frequencies are divided by, step by step as the converter of llama.cpp writes them."""
    found = []
    for n in range(0, head, 2):
        wave = 2 * math.pi * theta ** (n / head)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaled_rope_of_llama_3_is_read(factor: float, tmp_path: Path) -> None:
    """A file has only the factors; the rope divides its frequencies by exactly these."""
    factors = llama3_factors(factor, 5000.0, 64)
    assert len(set(factors.tolist())) > 4
    write(tmp_path / "model.gguf", factors=factors)
    import_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")
    loaded = load_model(tmp_path / "out", layers="torch")
    plain = 5000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    for rotation in loaded.rotations:
        expected = plain / torch.from_numpy(factors).double()
        tolerance.assert_sums(rotation.inv_freq, expected, width=1, dtype=torch.float32)


def test_a_rope_that_one_factor_scales_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", scaling="linear", factor=4.0)
    import_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")
    loaded = load_model(tmp_path / "out", layers="torch")
    expected = 5000.0 ** -(torch.arange(0, 64, 2).double() / 64) / 4
    for rotation in loaded.rotations:
        tolerance.assert_sums(rotation.inv_freq, expected, width=1, dtype=torch.float32)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"safetensors"])
def test_a_file_that_is_none_or_is_cut_off_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=f"{file} cannot be read as GGUF"):
        import_gguf(file, tmp_path / "out")
    with pytest.raises(ModelError, match="cannot be read: No"):
        gguf_directory(tmp_path / "none.gguf", cache=tmp_path)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.99])
def test_a_file_cut_short_is_refused_by_the_command(share: float, tmp_path: Path) -> None:
    """In its fields, among its tensors, and in the last one."""
    file = tmp_path / "model.gguf"
    write(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    done = CliRunner().invoke(command, ["import", str(file), str(tmp_path / "out")])
    assert done.exit_code == 2
    assert f"{file} cannot be read as GGUF: it is none, damaged or cut short" in done.output


def test_the_command_writes_a_directory_and_overwrites_none(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    run = CliRunner().invoke
    arguments = ["import", str(tmp_path / "model.gguf"), str(tmp_path / "out"), "--dtype", "float32"]
    done = run(command, arguments)
    assert done.exit_code == 0, done.output
    assert "llama, 5 tensors F32, 16 tensors Q8_0, expanded to float32" in done.output
    again = run(command, arguments)
    assert (again.exit_code, "is not empty" in again.output) == (2, True)
    (tmp_path / "bad.gguf").write_bytes(b"no")
    bad = run(command, ["import", str(tmp_path / "bad.gguf"), str(tmp_path / "other")])
    assert (bad.exit_code, "bad.gguf cannot be read as GGUF" in bad.output) == (2, True)


def test_a_daemon_whose_file_cannot_be_read_names_the_key(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(path=str(tmp_path / "none.gguf")))
    with pytest.raises(SettingError, match=r"none\.gguf cannot be read") as caught:
        load(config)
    assert caught.value.key == "model.path"


def test_codes_of_a_file_are_not_those_of_a_model_with_an_adapter(tmp_path: Path) -> None:
    (tmp_path / CODES).touch()
    assert held_as(tmp_path, "auto", "auto", "auto", "cpu") == "gguf"
    assert held_as(tmp_path, "auto", "auto", "auto", "cpu", tmp_path / "adapter") == "float"
    assert held_as(tmp_path, "int8", "auto", "auto", "cpu", tmp_path / "adapter") == "int8"
