"""How answers are sampled where a request does not say: `[model]`, the model's own file, or our default."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from daemon.api.generation import SamplingDefaults
from daemon.config.schema import ModelConfig

log = logging.getLogger(__name__)

_FILE = "generation_config.json"
_READ: dict[str, Any] = {
    "do_sample": bool,
    "temperature": Annotated[float, Meta(ge=0, le=100)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "top_k": Annotated[int, Meta(ge=0)],
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "guidance_scale": (1,),
}
"""Members that nothing here does, and their values that ask for nothing."""


def sampling_defaults(settings: ModelConfig, said: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults: a key of ``settings`` before what the model's file has ``said``, before ours.

    Greedy is temperature 0. A temperature in ``settings`` is meant, whatever the file says of `do_sample`.
    What the file asks for and is not done here is logged.
    """
    known = {name: value for name, value in said.items() if name in _READ and _is_usable(name, value)}
    for name, neutral in _NEUTRAL.items():
        if name in said and said[name] not in neutral:
            log.warning("%s asks for %s = %s, which is not done here", _FILE, name, said[name])
    ours = SamplingDefaults()

    def chosen(name: str) -> Any:
        own = getattr(settings, name)
        return known.get(name, getattr(ours, name)) if own is None else own

    samples = settings.do_sample
    if samples is None:
        samples = settings.temperature is not None or known.get("do_sample", True)
    temperature = float(chosen("temperature")) if samples else 0.0
    return SamplingDefaults(temperature, float(chosen("top_p")), chosen("top_k"))


def _is_usable(name: str, value: Any) -> bool:
    try:
        msgspec.convert(value, _READ[name])
    except msgspec.ValidationError as error:
        log.warning("%s: %s = %s is not used: %s", _FILE, name, value, error)
        return False
    return True
