"""Limits that follow from keys: never less than they were as constants."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from daemon.cli.check import limit_findings
from daemon.config.derived_limits import DerivedLimits, rules
from daemon.config.key_reference import configuration_reference
from daemon.config.schema import Config, SourceConfig, TracesConfig

DEFAULTS = {
    "connections": 256,
    "agents": 256,
    "kept_responses": 1024,
    "kept_chats": 256,
    "kept_texts": 64,
    "kept_questions": 256,
    "kept_schemas": 16,
    "socket_requests": 32,
    "subscriptions": 16,
    "prompt_inputs": 16,
    "ended_prompts": 1024,
    "agent_subscriptions": 1024,
    "kept_signals": 256,
    "deliveries": 4096,
    "kept_originals": 16 << 20,
    "exported_traces": 4000,
    "choice_nodes": 4096,
}


def test_with_the_defaults_they_are_what_they_were() -> None:
    assert vars(DerivedLimits.of(Config())) == DEFAULTS


@given(
    keys=st.fixed_dictionaries(
        {
            "query.max_requests": st.integers(1, 10**6),
            "query.max_requests_each": st.integers(1, 10**6),
            "query.max_prompts": st.integers(0, 10**6),
            "http.max_listeners": st.integers(0, 10**6),
            "http.kept_events": st.integers(16, 1 << 20),
            "source.ring_capacity": st.integers(6, 24).map(lambda n: 1 << n),
            "traces.kept": st.integers(1, 10**6),
            "scheduler.max_batch_requests": st.integers(1, 10**6),
        }
    )
)
def test_each_grows_with_its_key_alone_and_none_falls_below_its_default(keys: dict[str, int]) -> None:
    config = Config()
    for key, value in keys.items():
        table, name = key.split(".")
        changed = msgspec.structs.replace(getattr(config, table), **{name: value})
        config = msgspec.structs.replace(config, **{table: changed})
    limits = DerivedLimits.of(config)
    for name, rule in rules():
        numerator, denominator = rule.factor.as_integer_ratio()
        assert getattr(limits, name) == max(DEFAULTS[name], keys[rule.key] * numerator // denominator)


def test_the_reference_and_the_check_name_each() -> None:
    page = configuration_reference()
    config = Config(source=SourceConfig(ring_capacity=1 << 17), traces=TracesConfig(kept=7000))
    found = {each.key: each.message for each in limit_findings(config)}
    for name, rule in rules():
        assert f"| {rule.about} | `{rule.key}` |" in page
        assert f"{getattr(DerivedLimits.of(config), name):,} {rule.about}" in found[rule.key]
