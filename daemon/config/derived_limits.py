"""Limits that follow from a few keys of the configuration: who raises one raises what belongs to it.

Who lowers one does not: what is lowered on purpose is that key's own limit.

`foretick check` names them, and the last table of the configuration's reference is made of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction
from operator import attrgetter
from typing import Any, NamedTuple

from daemon.config.schema import Config

_DEFAULT = Config()


class Rule(NamedTuple):
    """A limit: ``factor`` times the value of ``key``, or its default if that is more. ``about``: of what."""

    key: str
    factor: Fraction
    about: str

    def of(self, config: Config) -> int:
        """The limit of a configuration."""
        value: int = max(map(attrgetter(self.key), (config, _DEFAULT)))
        return int(value * self.factor)


def _follows(key: str, factor: str, about: str) -> Any:
    return field(metadata={"rule": Rule(key, Fraction(factor), about)})


_REQUESTS, _EACH = "query.max_requests", "query.max_requests_each"


@dataclass(frozen=True)
class DerivedLimits:
    """Each is `Rule.of` a configuration."""

    connections: int = _follows(_REQUESTS, "1", "HTTP connections beside those that listen to events")
    agents: int = _follows(_REQUESTS, "1", "sessions of agents at /mcp")
    kept_responses: int = _follows(_REQUESTS, "4", "responses kept, to be given again")
    kept_chats: int = _follows(_REQUESTS, "1", "chats kept as their template renders them")
    kept_texts: int = _follows(_REQUESTS, "1/4", "texts kept as tokens")
    kept_questions: int = _follows(_REQUESTS, "1", "questions of sessions kept as tokens")
    kept_schemas: int = _follows(_REQUESTS, "1/16", "schemas kept as grammars")
    socket_requests: int = _follows(_EACH, "1/4", "requests answered at a time over one WebSocket")
    subscriptions: int = _follows(_EACH, "1/8", "subscriptions of one ZeroMQ connection or WebSocket")
    prompt_inputs: int = _follows(_EACH, "1/8", "inputs of one prompt that wait for the engine")
    ended_prompts: int = _follows("query.max_prompts", "4", "ended prompts of which it is known why")
    agent_subscriptions: int = _follows("http.max_listeners", "1/4", "subscriptions of all agents")
    kept_signals: int = _follows("http.kept_events", "1/16", "newest signals kept for `GET /v1/signals`")
    deliveries: int = _follows(
        "source.ring_capacity", "1/16", "messages that wait for sinks before sources do, or the oldest go"
    )
    kept_originals: int = _follows(
        "source.ring_capacity", "256", "bytes of messages kept as they came, for DLQ records"
    )
    exported_traces: int = _follows("traces.kept", "4", "traces that wait for the collector")
    choice_nodes: int = _follows(
        "scheduler.max_batch_requests", "16", "places in which choices scored in one request may part"
    )

    @classmethod
    def of(cls, config: Config) -> "DerivedLimits":
        """Those of a configuration."""
        return cls(**{name: rule.of(config) for name, rule in rules()})


def rules() -> Iterator[tuple[str, Rule]]:
    """The limits by name, those of one key together."""
    for each in fields(DerivedLimits):
        yield each.name, each.metadata["rule"]
