"""A random model of the terse layout, with the tape model's tokenizer and description."""

from pathlib import Path
from typing import Any

from engine.model.embedded import build_model
from training.export import foretick_block
from training.tokenizer import VOCABULARY, build_tokenizer

WINDOW_BARS = 8


def description() -> dict[str, Any]:
    """What such a model has as `foretick` in its config.json."""
    return foretick_block(WINDOW_BARS)


def terse_directory(path: Path) -> Path:
    """Save the model to ``path``, a new directory."""
    model = build_model(hidden=64, layers=2, heads=4, kv_heads=2, vocabulary=VOCABULARY, seed=3)
    model.config.foretick = description()
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path
