"""The settings that a session's tokens and logits depend on, as one hash.

The model is named in each answer. Left out is what says when something is done, how much memory there is,
or where data comes from and goes to.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec

from daemon.config.schema import BarsConfig, Config, SessionConfig
from flash.question import Question
from metrics.catalogue import EVENTS
from metrics.feed_faults import RULED

_SESSION = (
    "symbol",
    "more_symbols",
    "price_decimals",
    "scale",
    "volume_decimals",
    "lines",
    "unit",
    "retention_tokens",
    "retention_records",
    "retention_span",
    "semantics",
    "rollup",
    "rollup_tokens",
    "rollup_every",
)
_WINDOW = ("symbol", "more_symbols", "retention_tokens", "retention_records", "retention_span", "rollup")
_BARS = (
    "interval",
    "lateness",
    "empty",
    "max_fill",
    "late",
    "price_jump",
    "on_price_jump",
    "ready",
    "venue_lag",
)
_EVENTS = (*EVENTS, "text_tokens", "on_split")
_QUALITY = (*(kind.name for kind in RULED if kind.actions), "bad_tick_band", "splits")


def settings_of(config: Config, session: SessionConfig, questions: Sequence[Question]) -> dict[str, Any]:
    """These settings by key, as in JSON; ``questions``: the session's standing ones."""
    bars, model = session.bars(config.bars), config.model_of(session)
    found: dict[str, object] = {f"sessions.{name}": getattr(session, name) for name in _SESSION}
    found |= {f"bars.{name}": getattr(bars, name) for name in _BARS}
    found |= zip((f"quality.{name}" for name in _QUALITY), quality_settings(config), strict=True)
    found |= {f"events.{name}": getattr(config.events, name) for name in _EVENTS}
    found |= {
        "model.dtype": model.dtype,
        "model.describe": model.describe,
        "model.system_prompt": model.system_prompt,
        "flash.placement": config.flash.placement,
        "pool.frame_limit": config.pool.frame_limit,
        "source.sequence": config.source.sequence,
        "source.max_message_bytes": config.source.max_message_bytes,
    }
    # settings that came later say something only where they are used, so that older answers keep their hash
    later = {
        "bars.dates": bars.dates,
        "sessions.prices_in": session.prices_in if model.describe else "",
        "sessions.volumes_in": session.volumes_in if model.describe else "",
        "model.end_tokens": model.end_tokens,
        "model.examples": model.examples,
        "model.kv_dtype": "" if model.kv_dtype == "auto" else model.kv_dtype,
        "model.weights": "" if model.weights == "auto" else model.weights,
    }
    found |= {name: value for name, value in later.items() if value}
    if config.flash.placement == "frozen":
        found["questions"] = [each.hash for each in questions]
    plain: dict[str, Any] = msgspec.to_builtins(found, enc_hook=str)
    return plain


def quality_settings(config: Config) -> list[object]:
    """What of `[quality]` decides which records are in bars, and their flags."""
    return [getattr(config.quality, name) for name in _QUALITY]


def window_settings(config: Config, session: SessionConfig) -> int:
    """32-bit checksum of the settings that decide which records the session's window has."""
    events = tuple(getattr(config.events, name) for name in _EVENTS)
    model = config.model_of(session).path
    return _window_settings(model, config.bars, tuple(quality_settings(config)), events, session)


@lru_cache(maxsize=1 << 14)
def _window_settings(
    model: str,
    defaults: BarsConfig,
    quality: tuple[object, ...],
    events: tuple[object, ...],
    session: SessionConfig,
) -> int:
    bars = session.bars(defaults)
    parts = [getattr(session, name) for name in _WINDOW] + [getattr(bars, name) for name in _BARS]
    return crc32(repr((model, *parts, *quality, *events)).encode())


def fingerprint(config: Config, session: SessionConfig, questions: Sequence[Question]) -> str:
    """16 hexadecimal digits."""
    text = msgspec.json.encode(settings_of(config, session, questions), order="sorted")
    return blake2b(text, digest_size=8).hexdigest()
