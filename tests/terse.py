"""A random model of the terse layout, with the tape model's tokenizer and description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model.embedded import build_model
from tapes.rules import EXACT_TEXT, EXACT_VALUE, RULES
from training.tokenizer import NONE, VOCABULARY, build_tokenizer, question_token

WINDOW_BARS = 8


def description() -> dict[str, Any]:
    """What such a model has as `foretick` in its config.json."""
    questions = {
        rule.name: {"text": rule.text, "token": question_token(rule.name), "choices": list(rule.choices)}
        for rule in RULES
    }
    exact = {"text": EXACT_TEXT, "token": question_token(EXACT_VALUE), "choices": []}
    return {
        "layout": "terse",
        "lines": "compact",
        "window_bars": WINDOW_BARS,
        "none": NONE,
        "questions": {**questions, EXACT_VALUE: exact},
    }


def terse_directory(path: Path) -> Path:
    """Save the model to ``path``, a new directory."""
    model = build_model(hidden=64, layers=2, heads=4, kv_heads=2, vocabulary=VOCABULARY, seed=3)
    model.config.foretick = description()
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path
