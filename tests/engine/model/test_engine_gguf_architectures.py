"""GGUF files of each architecture: the logits of the model that was written, or a refusal."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

from daemon.cli.model import command
from engine.model.architectures import ModelError
from engine.model.canary import check
from engine.model.gguf import import_gguf
from engine.model.gguf_settings import READ, settings_of
from engine.model.kept import codes_of
from engine.model.loading import load_model
from tests.engine.oracle import VOCABULARY, random_weights, tiny_config
from tests.kit.gguf_files import fields_of, name_of, write_model

gguf = pytest.importorskip("gguf", reason="pip install gguf")

SPECIAL = ("<pad>", "<unk>", "<mask>", "<bos>", "<eos>")
BYTES = {
    **{"ggml.model": "gpt2", "ggml.pre": "qwen2", "ggml.merges": ['! "'], "ggml.bos_token_id": 3},
    **{"ggml.tokens": ["!", '"', '!"', *(f"w{n}" for n in range(3, VOCABULARY))]},
    **{"ggml.eos_token_id": 4, "ggml.padding_token_id": 0},
}
PIECES = BYTES | {
    **{"ggml.model": "llama", "ggml.pre": "default", "ggml.merges": None},
    **{"ggml.tokens": [*SPECIAL, *(f"w{n}" for n in range(5, VOCABULARY))]},
    "ggml.token_type": [3] * 5 + [1] * (VOCABULARY - 5),
    "ggml.scores": [-float(n) for n in range(VOCABULARY)],
}
THETA = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
PHI3 = {"rope_parameters": {**THETA, "partial_rotary_factor": 1.0}}
GEMMA2 = {"query_pre_attn_scalar": 16}
GEMMA3 = {"layer_types": None, "num_hidden_layers": 7}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": THETA}),
    "llama, heads wider than the hidden states": ("llama", {"rope_parameters": THETA, "head_dim": 32}),
    "llama, tied, one factor": ("llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"rope_parameters": THETA, "head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", {"rope_parameters": THETA}),
    "qwen2, tied, one factor": ("qwen2", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_parameters": THETA}),
    "qwen3, tied, wide heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 of 2b and 9b": ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3 of 1b": ("gemma3_text", {**GEMMA3, "rope_parameters": None}),
    "gemma3 of 4b and 12b": ("gemma3_text", GEMMA3),
    "gemma3, capped": ("gemma3_text", {**GEMMA3, "final_logit_softcapping": 3.0}),
    "phi3": ("phi3", PHI3),
    "phi3 of 4k": ("phi3", {**PHI3, "sliding_window": 9}),
    "phi3, a part of each head": ("phi3", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    "phi3 of 128k, tied": ("phi3", {"tie_word_embeddings": True}),
}  # fmt: skip
UNTOUCHED = {"transformers_version", "architectures", "dtype", "_name_or_path", "model_type"} | {
    f"{each}_token_id" for each in ("bos", "pad")
}
"""Members of a config that change no pass."""


def written(case: str, file: Path, kind: str = "F32", **more: Any) -> Any:
    """The tiny model of a case, in ``file``: with norms that are not all ones, exact when shifted by one."""
    architecture, special = CASES[case]
    layers = special.get("num_hidden_layers", 4)
    model = random_weights(tiny_config(architecture, layers=layers, **special)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                middle = 0 if architecture.startswith("gemma") or name.endswith("bias") else 1
                parameter.copy_(torch.randint(-64, 64, parameter.shape) / 256 + middle)
    write_model(file, model, PIECES if architecture.startswith("gemma") else BYTES, kind, **more)
    return model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits


def close(found: Any, expected: Any) -> bool:
    """Equal, numbers to what float32 keeps of them."""
    if isinstance(expected, dict):
        # LongRoPE's attention factor is written out in a file, and follows from lengths in a config
        return all(close(found[key], expected[key]) for key in expected)
    numbers = expected if isinstance(expected, list) else [expected]
    floats = any(isinstance(each, float) for each in numbers)
    return found == (pytest.approx(expected, rel=1e-7) if floats else expected)


def test_the_docs_list_the_architectures_that_are_read_and_each_is_tested() -> None:
    section = (
        (Path(__file__).parents[3] / "docs" / "models.md").read_text().split("## GGUF\n")[1].split("\n## ")[0]
    )
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert set(listed) == READ.keys() == {name_of(architecture) for architecture, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_a_file_has_the_logits_of_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    expected = written(case, tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert torch.equal(logits(found), logits(expected))
    before, after = expected.config.to_dict(), AutoConfig.from_pretrained(tmp_path / "out").to_dict()
    assert after.pop("eos_token_id") == [4]
    assert not [key for key in before.keys() & after.keys() - UNTOUCHED if not close(after[key], before[key])]


@pytest.mark.parametrize(
    ("period", "layers"),
    [(3, "ssfs"), ([True, False, False, True], "sffs"), ([False] * 4, "ffff")],
)
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text"])
def test_a_file_says_which_layers_have_a_window(architecture: str, period: Any, layers: str) -> None:
    fields = fields_of(tiny_config(architecture)) | {"attention.sliding_window_pattern": period}
    found = settings_of(name_of(architecture), fields, fields.get, {})["layer_types"]
    assert "".join(each[0] for each in found) == layers


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_gemma_of_27b_scales_scores_by_its_width(architecture: str, layers: int) -> None:
    """As published: by hidden size over heads, and not by the width of a head as all others."""
    fields = fields_of(
        tiny_config(architecture, layers=layers, head_dim=32, hidden_size=64, layer_types=None)
    )
    found = settings_of(name_of(architecture), fields, fields.get, {})
    assert found["query_pre_attn_scalar"] == 64 / 4
    fields["block_count"] = 42
    assert settings_of(name_of(architecture), fields, fields.get, {})["query_pre_attn_scalar"] == 32


def test_gemma_3_without_a_window_has_none(tmp_path: Path) -> None:
    """As the converter writes one of which every layer sees all."""
    special = {"layer_types": ["full_attention"] * 4, "rope_parameters": None, "query_pre_attn_scalar": 16}
    model = random_weights(tiny_config("gemma3_text", **special)).eval()
    write_model(tmp_path / "model.gguf", model, PIECES, attention__sliding_window=None)
    import_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize(
    ("case", "more", "why"),
    [
        ("llama", {"attention__scale": 0.5}, "says llama.attention.scale = 0.5"),
        ("llama", {"attention__causal": False}, "says llama.attention.causal = False"),
        ("llama", {"attention__value_length": 8}, "values of another length than keys"),
        ("mistral", {"attention__sliding_window": 9}, "says llama.attention.sliding_window = 9"),
        ("qwen2", {"attn_logit_softcapping": 5.0}, "says qwen2.attn_logit_softcapping = 5"),
        ("qwen3", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "scales its rope"),
        ("gemma3 of 1b", {"rope__local__freq_base": 1e4}, "says gemma3.rope.local.freq_base = 1"),
        ("phi3", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "than LongRoPE"),
        ("phi3", {"attention__layer_norm_epsilon": 1e-5}, "says phi3.attention.layer_norm_epsilon"),
    ],
)
def test_a_field_that_nothing_reads_is_refused(
    case: str, more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    written(case, tmp_path / "model.gguf", **more)
    with pytest.raises(ModelError, match=f"gguf .*{why}.*original directory"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_a_field_of_zero_is_none(tmp_path: Path) -> None:
    """As old files have of experts."""
    written("llama", tmp_path / "model.gguf", expert_count=0, attention__sliding_window=0)
    import_gguf(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("case", ["mistral", "qwen2", "qwen3, tied, wide heads"])
def test_plain_decoders_keep_the_codes_of_a_file(case: str, kind: str, tmp_path: Path) -> None:
    """Queries and keys of llama.cpp's Llama have another order of rows; those of the others are in order."""
    model = written(case, tmp_path / "model.gguf", kind)
    said = import_gguf(tmp_path / "model.gguf", tmp_path / "out", "float32")
    assert said.endswith(f"as codes for a CPU: 29 matrices {kind} as it is")
    number = gguf.GGMLQuantizationType[kind]
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, each in codes_of(tmp_path / "out", state, "gguf").items():
        before = model.state_dict()[name].numpy()
        rounded = gguf.dequantize(gguf.quantize(before, number), number)
        assert torch.equal(each.expanded(), torch.from_numpy(rounded)), name
    loaded = load_model(tmp_path / "out", device="cpu")
    assert "with weights in int" in loaded.layers_run
    check(loaded)


def test_the_import_draws_no_bars_where_there_is_no_terminal(tmp_path: Path) -> None:
    written("qwen2", tmp_path / "model.gguf")
    done = CliRunner().invoke(command, ["import", str(tmp_path / "model.gguf"), str(tmp_path / "out")])
    assert (done.exit_code, "it/s" in done.stderr) == (0, False), done.output
