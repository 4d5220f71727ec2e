"""The recipes of docs/models.md: Llama 3.1 and Qwen3, random weights of their shapes, their chat templates.

Shapes are the published ones, made smaller alike in hidden size, heads and layers; ropes, norms, ties and the
form of `config.json` are as published. The templates write what the published ones write for one system and
one user message.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from engine.engine import Engine
from engine.model import canary
from engine.model.canary import dense_logits
from engine.model.chat_format import PromptFormat, schema_of
from engine.model.embedded import build_tokenizer
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.step import Chunk
from regions.tape import Retention
from tests.engine.oracle import History, random_weights
from tests.kit import engine as kit
from tests.kit import tolerance

LLAMA_TEMPLATE = (
    "{{- bos_token }}"
    "{%- set date = date_string if date_string is defined else '26 Jul 2024' %}"
    "{%- set system = '' %}"
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}"
    "{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}"
    "{{- 'Today Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- m['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
QWEN_TEMPLATE = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@dataclass(frozen=True)
class Recipe:
    """A published model, made small. ``cut``: the text before the tape, and after the question."""

    model_type: str
    config: dict[str, Any]
    special: dict[str, Any]
    template: str
    cut: tuple[str, str]

    def tokenizer(self) -> Any:
        """The embedded words under the special tokens of this model."""
        backend = build_tokenizer().backend_tokenizer
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **self.special)
        tokenizer.chat_template = self.template
        return tokenizer

    def save(self, path: Path) -> Path:
        """Weights, tokenizer, and the configuration in the form in which it was published."""
        tokenizer = self.tokenizer()
        # published vocabularies have more rows than their tokenizers tokens
        config = {**self.config, "vocab_size": -(-len(tokenizer) // 64) * 64}
        random_weights(CONFIG_MAPPING[self.model_type](**config)).save_pretrained(path)
        tokenizer.save_pretrained(path)
        published = {**config, "model_type": self.model_type, "torch_dtype": "bfloat16"}
        (path / "config.json").write_text(json.dumps(published))
        return path


QWEN3 = {
    "max_position_embeddings": 40960,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3_SPECIAL = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "additional_special_tokens": ["<|im_start|>"],
}
QWEN3_CUT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
RECIPES = {
    "Llama-3.1-8B-Instruct": Recipe(
        "llama",
        {
            "hidden_size": 128,
            "intermediate_size": 448,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_scaling": LLAMA3_SCALING,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": False,
        },
        {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>"],
        },
        LLAMA_TEMPLATE,
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ),
    "Qwen3-8B": Recipe(
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 128,
            "head_dim": 16,
            "intermediate_size": 384,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
        QWEN3_SPECIAL,
        QWEN_TEMPLATE,
        QWEN3_CUT,
    ),
    # its heads are together twice as wide as its hidden states, and its embeddings are tied
    "Qwen3-0.6B": Recipe(
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 64,
            "head_dim": 16,
            "intermediate_size": 192,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        QWEN3_SPECIAL,
        QWEN_TEMPLATE,
        QWEN3_CUT,
    ),
}


@pytest.fixture(scope="module", params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def recipe(name: str) -> Recipe:
    return RECIPES[name]


@pytest.fixture(scope="module")
def directory(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RECIPES[name].save(tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(directory, dtype="float32", layers="torch")  # ties of weights are compared


def test_the_prompt_is_cut_at_tape_and_question(recipe: Recipe, loaded: LoadedModel) -> None:
    """The prefix ends where the data begins, and an answer begins at once, behind an empty thought."""
    prompt = PromptFormat.of(loaded.tokenizer, "Be brief.")
    before, after = recipe.cut
    assert (prompt.before_tape, prompt.before_question, prompt.after_question) == (
        before,
        "\nQuestion: ",
        after,
    )
    frozen, question = list(prompt.frozen()), prompt.question("Up?")
    decode = loaded.tokenizer.decode
    assert decode(frozen) == before + schema_of("decimal")
    assert decode(question) == f"\nQuestion: Up?{after}"
    begin = loaded.tokenizer.bos_token_id
    assert [frozen.index(begin), frozen.count(begin)] == [0, 1] if begin is not None else begin not in frozen
    end = loaded.tokenizer.convert_tokens_to_ids(recipe.special["eos_token"])
    assert frozen.count(end) == question.count(end) == 1
    assert prompt.stop_ids == {end}
    up, down = prompt.choices("Up?", ["UP", "DOWN"])
    assert (decode([up]), decode([down])) == ("UP", "DOWN")


def test_the_canary_passes_as_published_and_in_full_precision(loaded: LoadedModel, directory: Path) -> None:
    assert canary.check(loaded) < tolerance.of_model(loaded)
    published = load_model(directory)
    assert published.dtype == torch.bfloat16
    assert canary.check(published) < tolerance.of_model(published)


def test_the_shape_is_that_of_the_recipe(recipe: Recipe, loaded: LoadedModel) -> None:
    """Key and value heads, ties, norms of queries and keys, and the rope, by the published formula."""
    config, heads = recipe.config, recipe.config["num_attention_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    assert {(layer.kv_heads, layer.key_dim) for layer in loaded.layers} == {
        (config["num_key_value_heads"], dim)
    }
    assert loaded.max_positions == config["max_position_embeddings"]
    model = loaded.model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == config["tie_word_embeddings"]
    assert hasattr(model.model.layers[0].self_attn, "q_norm") == (recipe.model_type == "qwen3")
    inverse = config["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
    if scaling := config["rope_scaling"]:
        original, low, high = 8192, scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * inverse / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # none of a slow rotation, all of a fast one
        assert 0 < int((kept == 1).sum()) < len(kept)
        assert ((kept > 0) & (kept < 1)).any()
        inverse = (1 - kept) * inverse / scaling["factor"] + kept * inverse
    for rotation in loaded.rotations:
        tolerance.assert_sums(rotation.inv_freq, inverse, width=1, dtype=torch.float32)


def test_answers_over_a_sliding_window_are_those_of_the_dense_forward(loaded: LoadedModel) -> None:
    """Before an eviction and after a refresh of the unmodified forward, in between of the oracle."""
    prompt = PromptFormat.of(loaded.tokenizer)
    frozen, question = list(prompt.frozen()), prompt.question("Up or down?")
    choices = prompt.choices("Up or down?", ["UP", "DOWN"])
    engine = Engine(loaded, blocks=80, block_size=16, frame_limit=len(frozen) + 260)
    tape = engine.open_tape("t", frozen, Retention(160))
    history = History.begin(frozen)

    def written() -> int:
        return tape.evicted_tokens + tape.live_tokens

    def append(n: int) -> None:
        line = prompt.encode(
            f"1430{n:02d},{100 + n}.25,{103 + n}.50,{99 + n}.00,{101 + n * n % 7}.75,{n}.500\n"
        )
        engine.append(tape, [line])
        history.add(line, written() - len(line), tape.evicted_tokens)

    def ask() -> torch.Tensor:
        """Logits of every token of the question; the choice is by the last one's."""
        fork = tape.fork()
        logits = kit.ask(engine, fork, question)
        fork.reset()
        assert fork.acquire(len(question))
        (chosen,) = engine.execute([Chunk(fork, question, choices=choices)])
        fork.release()
        assert chosen is not None
        best = logits[-1, list(choices)]
        bound = tolerance.of_gap(loaded, tolerance.largest(logits))
        assert chosen.gap == tolerance.near(float(best.max() - best.min()), bound)
        assert chosen.token == choices[int(best.argmax())] or chosen.gap <= bound
        return logits

    def dense() -> torch.Tensor:
        return dense_logits(loaded, [*frozen, *tape.window, *question])[-len(question) :]

    for n in range(4):
        append(n)
    assert tape.evicted_tokens == 0
    tolerance.assert_logits(loaded, ask(), dense())
    for n in range(4, 24):
        append(n)
        if n % 5 == 4:
            history.add(question, written(), tape.evicted_tokens, n, ask())
    assert tape.evicted_tokens > 260  # past a position frame
    history.verify(loaded)
    tape.make_room([40])  # the last eviction: the next line fits
    evicted = tape.evicted_tokens
    fresh = tape.fresh_window()
    kit.prefill(engine, fresh, tape.window, 1000)
    tape.adopt(fresh)
    append(24)
    assert tape.evicted_tokens == evicted
    tolerance.assert_logits(loaded, ask(), dense())
