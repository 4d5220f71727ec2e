"""The table of chat families in docs/models.md: what their templates make of a question, a chat and its end.

Each template writes what the published one writes for messages of text; tools, documents and dates are left
out. The tokenizer is the embedded one under the family's special tokens, and nothing but the template names
the token that ends an answer.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from engine.model.chat_format import PromptFormat, turn_ends
from engine.model.embedded import build_tokenizer

REFUSES = "{%- if messages[0]['role'] == 'system' %}{{- raise_exception('no system role') }}{%- endif %}"
ALTERNATE = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}"
)


def template(each: str, begins: str, before: str = "", prompt: str = "add_generation_prompt") -> str:
    """One part a message, and where an answer begins."""
    loop = f"{{%- for m in messages %}}{each}{{%- endfor %}}"
    return f"{before}{loop}{{%- if {prompt} %}}{begins}{{%- endif %}}"


CHATML = "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
INST = (
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m.content + '</s>' }}{%- endif %}"
)
LLAMA2 = (
    "{%- if messages[0].role == 'system' %}"
    "{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}" + ALTERNATE
)
R1 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}"
    "{%- elif m.role == 'user' %}{{- '<|User|>' + m.content }}"
    "{%- else %}{{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Family:
    """``asked``: a question behind a system prompt; ``chat``: a system prompt and two turns; both exact."""

    template: str
    special: tuple[str, ...]
    ends: str
    asked: str
    chat: str
    begin: str = ""
    configured: str = "<|endoftext|>"


FAMILIES = {
    "ChatML (Qwen2.5, SmolLM2, Yi)": Family(
        template(CHATML, "{{- '<|im_start|>assistant\n' }}"),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Qwen3, SmolLM3 (thought switched off)": Family(
        template(
            CHATML,
            "{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
            "{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
        ),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "Llama 3": Family(
        template(
            "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
            "{{- m.content | trim + '<|eot_id|>' }}",
            "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
            "{{- bos_token }}",
        ),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|begin|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|begin|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        begin="<|begin|>",
    ),
    "Llama 2": Family(
        template(
            "{%- if m.role == 'user' %}"
            "{{- bos_token + '[INST] ' + (system if loop.index0 == 0 else '') + m.content + ' [/INST]' }}"
            "{%- else %}{{- ' ' + m.content + ' </s>' }}{%- endif %}",
            "{{- '' }}",
            LLAMA2,
        ),
        (),
        "</s>",
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST]",
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nA [/INST] B </s><s>[INST] C [/INST]",
        begin="<s>",
        configured="</s>",
    ),
    "Mistral 7B v0.1 to v0.3 (no system role)": Family(
        template(INST, "{{- '' }}", "{{- bos_token }}" + ALTERNATE),
        ("[INST]", "[/INST]"),
        "</s>",
        "<s>[INST] S\n\nQ [/INST]",
        "<s>[INST] S\n\nA [/INST] B</s>[INST] C [/INST]",
        begin="<s>",
        configured="</s>",
    ),
    "Gemma 2 and 3 (no system role)": Family(
        template(
            "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim"
            " + '<end_of_turn>\n' }}",
            "{{- '<start_of_turn>model\n' }}",
            "{{- bos_token }}" + REFUSES + ALTERNATE,
        ),
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "<bos><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\n",
        "<bos><start_of_turn>user\nS\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
        "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n",
        begin="<bos>",
        configured="<eos>",
    ),
    "Phi-3, Phi-4-mini": Family(
        template("{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", "{{- '<|assistant|>\n' }}"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n",
        "<|system|>\nS<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n<|user|>\nC<|end|>\n<|assistant|>\n",
    ),
    "Granite 3": Family(
        template(
            "{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}",
            "{{- '<|start_of_role|>assistant<|end_of_role|>' }}",
        ),
        ("<|start_of_role|>", "<|end_of_role|>"),
        "<|end_of_text|>",
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Q<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>A<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>B<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>C<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        configured="<|end_of_text|>",
    ),
    "DeepSeek-R1 and its distillates (thought ended at once)": Family(
        R1,
        ("<|User|>", "<|Assistant|>", "<|end|>"),
        "<|end|>",
        "<|begin|>S<|User|>Q<|Assistant|><think>\n\n</think>\n\n",
        "<|begin|>S<|User|>A<|Assistant|>B<|end|><|User|>C<|Assistant|><think>\n\n</think>\n\n",
        begin="<|begin|>",
    ),
    "gpt-oss (final channel begun)": Family(
        template(
            "{%- if m.role == 'assistant' %}"
            "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
            "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
            "{%- else %}{{- '<|start|>' + ('developer' if m.role == 'system' else m.role) }}"
            "{{- '<|message|>' + m.content + '<|end|>' }}{%- endif %}",
            "{{- '<|start|>assistant' }}",
        ),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
        "<|return|>",
        "<|start|>developer<|message|>S<|end|><|start|>user<|message|>Q<|end|>"
        "<|start|>assistant<|channel|>final<|message|>",
        "<|start|>developer<|message|>S<|end|><|start|>user<|message|>A<|end|>"
        "<|start|>assistant<|channel|>final<|message|>B<|end|><|start|>user<|message|>C<|end|>"
        "<|start|>assistant<|channel|>final<|message|>",
    ),
}


def tokenizer(family: Family) -> PreTrainedTokenizerFast:
    special: dict[str, object] = {"eos_token": family.configured}
    if family.begin:
        special["bos_token"] = family.begin
    made = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer().backend_tokenizer,
        additional_special_tokens=list(family.special),
        **special,
    )
    made.chat_template = family.template
    return made


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_a_question_stands_where_the_template_has_the_user_s_message(family: Family) -> None:
    prompt = PromptFormat.of(tokenizer(family), "S")
    asked = prompt.before_tape + prompt.before_question + "Q" + prompt.after_question
    assert asked.replace("\nQuestion: ", "") == family.asked


def test_a_chat_goes_on_where_the_next_answer_begins(family: Family) -> None:
    prompt = PromptFormat.of(tokenizer(family), "S")
    turns = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C")]
    assert prompt.chat(turns) == family.chat
    assert prompt.chat([*turns, ("assistant", "begun")]) == family.chat + "begun"


def test_the_token_that_ends_a_turn_ends_an_answer(family: Family) -> None:
    """Whatever the configuration calls the end: Gemma and Phi name another token there."""
    made = tokenizer(family)
    found = turn_ends(made)
    assert [made.convert_ids_to_tokens(each) for each in found] == [family.ends]
    ends = PromptFormat.of(made, end_ids=found).stop_ids
    assert ends == {made.convert_tokens_to_ids(each) for each in {family.ends, family.configured}}


def test_nobody_s_words_are_markers(family: Family) -> None:
    """A message that writes a special token is read as plain text around a blank."""
    prompt = PromptFormat.of(tokenizer(family))
    marker = family.special[0] if family.special else family.configured
    assert prompt.without_special(f"a{marker}b") == "a b"


def test_a_template_without_an_end_names_none() -> None:
    made = tokenizer(FAMILIES["Llama 3"])
    loop = "{%- for m in messages %}{{- m.content }}{%- endfor %}"
    for text in ("{{- messages[0].content }}", "{{- raise_exception('no') }}", loop):
        made.chat_template = text
        assert turn_ends(made) == frozenset()
    made.chat_template = None
    assert turn_ends(made) == frozenset()


def test_the_table_has_every_family() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    section = text.partition("## Chat families")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (?!family|---)([^|]+?) \|", section, re.M) == list(FAMILIES)
