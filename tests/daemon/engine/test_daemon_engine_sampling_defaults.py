"""Defaults of sampling: a key of `[model]` before the model's generation_config.json, before ours."""

import json
import logging
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.api.generation import SamplingDefaults
from daemon.config.schema import Config, ModelConfig
from daemon.engine.build import load
from daemon.engine.sampling_defaults import sampling_defaults
from engine.model.embedded import build_tokenizer, embedded_directory
from feeds.connector import SettingError

TEMPERATURES, TOP_PS, TOP_KS = st.floats(0, 100), st.floats(0.01, 1), st.integers(0, 1000)
ALIKE = {"temperature": TEMPERATURES, "top_p": TOP_PS, "top_k": TOP_KS, "do_sample": st.booleans()}


def maybe() -> Any:
    return st.fixed_dictionaries({}, optional=ALIKE)


@given(maybe(), maybe())
def test_a_key_comes_before_the_file_and_the_file_before_ours(
    keys: dict[str, Any], said: dict[str, Any]
) -> None:
    found = sampling_defaults(ModelConfig(**keys), said)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | said | keys
    greedy = keys.get("do_sample") is False or (
        "do_sample" not in keys and "temperature" not in keys and said.get("do_sample") is False
    )
    assert found.temperature == (0 if greedy else plain["temperature"])
    assert (found.top_p, found.top_k) == (plain["top_p"], plain["top_k"])


@pytest.mark.parametrize(
    "said", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}, {"temperature": "hot"}]
)
def test_a_value_that_cannot_be_is_left_out_and_logged(
    said: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert sampling_defaults(ModelConfig(), said) == SamplingDefaults()
    ((name, _),) = said.items()
    assert f"{name} = " in caplog.text


def test_what_is_not_done_here_is_logged_unless_it_asks_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"repetition_penalty": 1.0, "num_beams": 1, "min_p": 0.0}
    assert sampling_defaults(ModelConfig(), neutral) == SamplingDefaults()
    assert not caplog.text
    sampling_defaults(ModelConfig(), {"repetition_penalty": 1.1})
    assert "asks for repetition_penalty = 1.1, which is not done here" in caplog.text


def directory(folder: Path, **members: Any) -> Path:
    made = copytree(embedded_directory(), folder / "model")
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | members))
    return made


def test_a_model_s_own_file_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = directory(tmp_path, do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    settings = ModelConfig(path=str(path), device="cpu", top_k=7)
    loaded, _ = load(Config(model=settings))
    assert sampling_defaults(settings, loaded.generation) == SamplingDefaults(0.6, 0.9, 7)


def test_a_file_that_transformers_made_up_says_nothing(tmp_path: Path) -> None:
    path = directory(tmp_path, _from_model_config=True, do_sample=False)
    loaded, _ = load(Config(model=ModelConfig(path=str(path), device="cpu")))
    assert loaded.generation == {}


def test_end_tokens_of_the_configuration_replace_all_others() -> None:
    tokenizer = build_tokenizer()
    model = ModelConfig(path=str(embedded_directory()), device="cpu", end_tokens=("\n",))
    _, prompt = load(Config(model=model))
    assert prompt.stop_ids == set(tokenizer.encode("\n", add_special_tokens=False))
    bad = ModelConfig(path=str(embedded_directory()), device="cpu", end_tokens=("The end",))
    with pytest.raises(SettingError, match=r"end_tokens: 'The end'"):
        load(Config(model=bad))
