"""Loading: models that are accepted or refused, and how the prompt is cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

from engine.attention.rotary import FrameRotation
from engine.engine import Engine
from engine.model import canary
from engine.model.architectures import ModelError
from engine.model.chat_format import PromptError, PromptFormat
from engine.model.embedded import build_tokenizer, embedded_directory
from engine.model.loading import load_model, prepare, resolve_device
from engine.sampling import choose
from engine.step import Chunk
from regions.tape import Retention
from tests.engine.oracle import tiny
from tests.kit import tolerance


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_directory(tmp_path_factory.mktemp("cache"))


def test_the_embedded_model_is_the_same_every_time(directory: Path, tmp_path: Path) -> None:
    """Two builds in two places have the same weights, tokens and revision, and say untrained."""
    again = embedded_directory(tmp_path)
    one, two = (load_model(each, layers="torch") for each in (directory, again))
    assert one.revision == two.revision
    assert one.untrained
    assert two.untrained
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert canary.check(one) < tolerance.of_model(one)
    assert embedded_directory(tmp_path) == again  # the second time it is only found


def test_the_embedded_tokenizer_reads_back_any_text() -> None:
    tokenizer = build_tokenizer()
    text = "143000,61837.63,61840.00,61830.12,61835.25,12.512\nIs the trend up or down? é☂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer.encode("061837", add_special_tokens=False))
    assert digits == ["061", "837"]
    assert len(tokenizer) == 2048
    with pytest.raises(ValueError, match="vocabulary needs"):
        build_tokenizer(300)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


def test_learned_positions_are_refused_by_name() -> None:
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2)
    with pytest.raises(ModelError, match=r"^gpt2 is not supported"):
        prepare(AutoModelForCausalLM.from_config(config), None, name="gpt2")


def test_the_canary_catches_a_rotary_layout_that_re_rotation_does_not_reproduce() -> None:
    """The same model with a wrong rotation passes as long as nothing is rotated, so two frames are needed."""
    model = tiny("llama")
    wrong = FrameRotation(model.model.model.rotary_emb.inv_freq * 1.5)
    with pytest.raises(ModelError, match="dense forward"):
        canary.check(dataclasses.replace(model, rotations=(wrong,) * len(model.rotations)))


def test_an_untested_architecture_with_partial_rotary_is_served() -> None:
    """GPT-NeoX rotates a quarter of each head; probe and canary decide."""
    config = GPTNeoXConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    loaded = prepare(AutoModelForCausalLM.from_config(config), None, name="neox")
    assert canary.check(loaded) < tolerance.of_model(loaded)


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="GPU"):
            resolve_device("cuda")
    assert resolve_device("cpu") == "cpu"


def test_the_prompt_is_cut_at_tape_and_question() -> None:
    tokenizer = build_tokenizer()
    prompt = PromptFormat.of(tokenizer, "Be brief.")
    whole = list(prompt.frozen()) + prompt.encode("TAPE\n") + prompt.question("Why?")
    text = tokenizer.decode(whole)
    assert text.index("Be brief.") < text.index("TAPE") < text.index("Why?")
    assert text.endswith("<|assistant|>")
    assert prompt.decode(prompt.encode(" 42") + list(prompt.stop_ids)) == "42"
    assert prompt.choice("UP") != prompt.choice("DOWN")
    with pytest.raises(ValueError, match="empty choice"):
        prompt.choice(" ")


def test_the_ready_position_is_the_header_of_an_answer_without_a_question() -> None:
    tokenizer = build_tokenizer()
    prompt = PromptFormat.of(tokenizer)
    question, ready = tokenizer.decode(prompt.question("Why?")), tokenizer.decode(prompt.ready())
    assert question == "\nQuestion: Why?" + ready
    assert ready.endswith("<|assistant|>")


def test_a_template_without_a_system_role_gets_it_in_the_user_turn() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}[{{ m['content'] }}]{% endfor %}"
    )
    prompt = PromptFormat.of(tokenizer, "Be brief.")
    assert tokenizer.decode(list(prompt.frozen())).startswith("[Be brief.")
    tokenizer.chat_template = "nothing of it"
    with pytest.raises(PromptError, match="exactly once"):
        PromptFormat.of(tokenizer)


def test_a_tokenizer_without_a_template_gets_plain_text() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    prompt = PromptFormat.of(tokenizer)
    assert prompt.after_question == "\nAnswer:"
    assert prompt.choice("UP") == prompt.encode(" UP")[0]


def test_the_choice_is_the_argmax_of_its_set_and_the_gap_is_over_that_set() -> None:
    logits = torch.tensor([[0.0, 5.0, 3.0, 4.0], [1.0, 2.0, 9.0, 0.5], [float("nan"), 0, 0, 0]])
    free, restricted, broken = choose(logits, [None, (3, 0), (1, 2)])
    assert (free.token, free.top1, free.top2) == (1, 5.0, 4.0)
    assert (restricted.token, restricted.top1, restricted.top2) == (0, 1.0, 0.5)
    assert broken.error
    assert choose(logits[:1], [(2,)])[0].top2 == 3.0  # a single choice: gap zero


def test_positions_never_exceed_what_the_model_was_made_for() -> None:
    """The frame limit is at most the model's own positions, and a session that cannot fit is refused."""
    model = tiny("llama", layers=1, max_position_embeddings=64)
    engine = Engine(model, blocks=32, frame_limit=1 << 20)
    assert engine.frame_limit == 64
    with pytest.raises(ValueError, match="64"):
        engine.open_tape("t", [1, 2, 3], Retention(61))


def test_one_pass_for_many_questions_equals_one_pass_each() -> None:
    """Standing questions batched over one tape give the logits of the same questions asked alone."""
    model = tiny("gemma2")
    engine = Engine(model, blocks=64, block_size=4)
    tape = engine.open_tape("t", [5, 6, 7], Retention(64))
    for record in ([8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19]):
        tape.make_room([len(record)])
        assert tape.acquire(len(record))
        engine.execute([Chunk(tape, record, sample=False)])
        tape.commit([len(record)])
    questions = [[20, 21, 22], [23], [24, 25, 26, 27, 28]]

    def ask(batches: list[list[int]]) -> list[torch.Tensor]:
        forks = [tape.fork() for _ in batches]
        for fork, question in zip(forks, batches, strict=True):
            assert fork.acquire(len(question))
        logits = engine.logits([Chunk(f, q) for f, q in zip(forks, batches, strict=True)])
        for fork in forks:
            fork.release()
        return list(logits.split([len(q) for q in batches]))

    for alone, together in zip([ask([q])[0] for q in questions], ask(questions), strict=True):
        tolerance.assert_logits(model, alone, together)
    tape.release()
