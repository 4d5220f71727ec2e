"""Loading a model for the engine: what fails its canary is not served."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from daemon.engine.build import checked
from engine.attention.rotary import FrameRotation
from engine.model.architectures import ModelError
from engine.model.canary import dense_logits
from tests.engine.oracle import tiny


def test_compiled_layers_that_fail_the_canary_give_way_to_transformers_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = tiny("llama", layers=2)
    assert loaded.compiled is not None
    first, second = loaded.compiled.layers
    wrong = replace(loaded, compiled=replace(loaded.compiled, layers=(second, first)))
    with caplog.at_level(logging.WARNING):
        served = checked(wrong)
    assert served.compiled is None
    assert "compiled ones failed their canary" in caplog.text
    assert dense_logits(served, [5, 6, 7]).shape[0] == 3  # its weights were kept


def test_a_model_that_fails_without_compiled_layers_is_refused() -> None:
    loaded = tiny("llama", layers=2)
    other = FrameRotation(3 * loaded.rotations[0].inv_freq)
    wrong = replace(loaded, compiled=None, rotations=(other, other))
    with pytest.raises(ModelError, match="differ from the dense forward"):
        checked(wrong)
