"""Loading a model for the engine: what fails its canary is not served."""

import logging
from dataclasses import replace

import pytest

from daemon.engine.build import checked
from engine.attention.rotary import FrameRotation
from engine.cpu.emit import host_has
from engine.cpu.vectors import PAIRED
from engine.model.architectures import ModelError
from engine.model.canary import dense_logits
from engine.model.loading import prepare
from tests.engine.oracle import random_weights, tiny, tiny_config


def test_compiled_layers_that_fail_the_canary_give_way_to_transformers_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = tiny("llama", layers=2)
    assert loaded.decoder is not None
    first, second = loaded.decoder.layers
    wrong = replace(loaded, decoder=replace(loaded.decoder, layers=(second, first)))
    with caplog.at_level(logging.WARNING):
        served = checked(wrong)
    assert served.decoder is None
    assert "compiled layers in float32 failed their canary, transformers' layers take over" in caplog.text
    assert dense_logits(served, [5, 6, 7]).shape[0] == 3  # its weights were kept


@pytest.mark.skipif(not host_has(PAIRED), reason="this CPU has no products of bfloat16")
def test_layers_in_bfloat16_that_fail_the_canary_give_way_to_those_in_float32(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = prepare(random_weights(tiny_config("llama")).bfloat16(), None, name="pairs")
    assert loaded.decoder is not None
    assert loaded.decoder.pairs
    wrong = replace(loaded, decoder=replace(loaded.decoder, layers=loaded.decoder.layers[::-1]))
    with caplog.at_level(logging.WARNING):
        served = checked(wrong)
    assert served.decoder is not None
    assert not served.decoder.pairs
    assert "compiled layers in bfloat16 failed their canary" in caplog.text


def test_a_model_that_fails_without_compiled_layers_is_refused() -> None:
    loaded = tiny("llama", layers=2)
    other = FrameRotation(3 * loaded.rotations[0].inv_freq)
    wrong = replace(loaded, decoder=None, rotations=(other, other))
    with pytest.raises(ModelError, match="dense forward"):
        checked(wrong)
