"""The exported directory is a plain transformers model that says how its prompts are rendered."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.chat_format import PromptFormat
from engine.model.embedded import embedded_directory
from tapes.generate import TRAINING
from tapes.rules import RULES
from tests.kit.tolerance import apart, largest, rounding
from tests.training import brute
from training.batches import Layout, Vocabulary, make_batch
from training.export import LARGEST, export, foretick_block, is_packed, tape_model
from training.model import Shape, TapeModel
from training.tokenizer import QUESTIONS

SMALL = Shape(hidden=32, layers=2, heads=2, inner=48)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    export(TapeModel(SMALL, seed=4), path, torch.float32)
    return path


def test_transformers_loads_it_and_answers_as_the_packed_model(directory: Path) -> None:
    """With the tokenizer beside it; the weights come back as they were."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model, vocabulary = tape_model(directory), Vocabulary(AutoTokenizer.from_pretrained(directory))
    original = dict(TapeModel(SMALL, seed=4).named_parameters())
    assert all(torch.equal(value, original[name]) for name, value in model.named_parameters())
    batch = make_batch(np.random.default_rng(0), vocabulary, Layout(16, 16, 1, 2, 0), TRAINING)
    with torch.no_grad():
        packed = model(batch).logits
        logits = plain(torch.from_numpy(batch.ids[:, brute.dense_rows(batch, 5)])).logits[:, -1]
    assert apart(packed[:, 5], logits) <= rounding(largest(logits), width=SMALL.inner, depth=SMALL.layers)


def test_the_configuration_lists_every_question_with_its_token(directory: Path) -> None:
    block = json.loads((directory / "config.json").read_text())["foretick"]
    known = {"layout": "terse", "lines": "compact", "window_bars": 64, "none": "NONE"}
    assert known.items() <= block.items()
    assert list(block["questions"]) == list(QUESTIONS)
    vocabulary = Vocabulary()
    for rule in RULES:
        entry = block["questions"][rule.name]
        assert entry["text"] == rule.text
        assert entry["choices"] == list(rule.choices)
        assert vocabulary.id(entry["token"]) == vocabulary.questions[QUESTIONS.index(rule.name)]
    assert block["questions"]["exact_value"]["choices"] == []


def test_the_daemon_reads_its_prompts_and_only_it_is_packed(directory: Path, tmp_path: Path) -> None:
    """The prompts of the daemon are those of training; other models are read prompt by prompt."""
    from transformers import AutoTokenizer

    assert is_packed(directory)
    assert not is_packed(embedded_directory(tmp_path))
    prompt = PromptFormat.of(AutoTokenizer.from_pretrained(directory), described=foretick_block())
    vocabulary = Vocabulary()
    for numbered in (False, True):
        batch = make_batch(np.random.default_rng(0), vocabulary, Layout(16, 16, 1, 2, 0, numbered), TRAINING)
        header = vocabulary.tokenizer.decode(batch.ids[0, : batch.prefix]).split("<|bos|>")[1]
        header = header[: header.index("\n") + 1]
        asked = [QUESTIONS[kind] for kind in batch.queries.kind[0]] if numbered else []
        assert list(prompt.frozen(header, asked)) == batch.ids[0, : batch.prefix].tolist()
        first = brute.dense_rows(batch, 0)[batch.prefix + batch.tape :]
        expected = prompt.numbered(1) if numbered else prompt.question(QUESTIONS[0])
        assert batch.ids[0, first].tolist() == expected


def test_generation_is_greedy_and_ends_with_the_end_token(directory: Path) -> None:
    config = json.loads((directory / "generation_config.json").read_text())
    vocabulary = Vocabulary()
    assert (config["bos_token_id"], config["eos_token_id"]) == (vocabulary.bos, vocabulary.end)
    assert not config.get("do_sample", False)


def test_weights_too_large_to_commit_are_refused(tmp_path: Path) -> None:
    large = TapeModel(Shape(hidden=512, layers=2, heads=8, inner=2048))
    assert sum(p.numel() for p in large.parameters()) * 4 > LARGEST
    with pytest.raises(ValueError, match="bfloat16"):
        export(large, tmp_path, torch.float32)
