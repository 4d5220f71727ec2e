"""The SDKs' own tests of their resources, unmodified, against a daemon: each reply must fit the SDK's types.

They are written for a mock of the whole API that accepts anything. The daemon serves the part that it has, so
some fail, and exactly those that are listed here.
"""

import re
from importlib.metadata import version

import pytest
from anthropic.resources.messages import DEPRECATED_MODELS

from daemon.config.schema import UNTRAINED, ModelConfig, QueryConfig, SchedulerConfig
from tests.kit import inproc_config
from tests.kit.inproc import running
from tests.others.suites import Suite, outcomes

AIOHTTP = "-k=not aiohttp"
"""That transport of the SDKs is an extra."""
OPENAI = Suite(
    "openai",
    version("openai"),
    "",
    tuple(
        f"tests/api_resources/{name}.py"
        for name in ("test_models", "test_completions", "chat/test_completions", "test_responses")
    ),
    (f"openai=={version('openai')}", "rich"),
    (AIOHTTP,),
)
ANTHROPIC = Suite(
    "anthropic",
    version("anthropic"),
    "",
    tuple(
        f"tests/api_resources/{name}.py"
        for name in ("test_messages", "test_models", "beta/test_messages", "beta/test_models")
    ),
    (f"anthropic=={version('anthropic')}", "inline-snapshot", "http-snapshot[httpx]==0.1.9", "respx"),
    (AIOHTTP, "-p", "tests._alias_httpx"),
)
ALIASES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "claude-opus-5-5", "model_id", *DEPRECATED_MODELS)
"""The models that they ask for."""
_STORED = "completions are not stored"
_RESPONSES = "responses are not stored"
FAILING = {
    "openai": {
        "completions::create_with_all_params": "suffix and echo are not supported",
        "chat.completions::create_with_all_params": "audio and penalties are not supported",
        "chat.completions::retrieve": _STORED,
        "chat.completions::update": _STORED,
        "chat.completions::list": _STORED,
        "chat.completions::list_with_all_params": _STORED,
        "chat.completions::delete": _STORED,
        "models::delete": "there are no fine-tuned models to be deleted",
        "responses::create": "a response needs a model and an input, and these requests are empty",
        "responses::create_with_all_params": "background and stored prompts are not supported",
        "responses::retrieve": _RESPONSES,
        "responses::retrieve_with_all_params": _RESPONSES,
        "responses::delete": _RESPONSES,
        "responses::cancel": _RESPONSES,
        "responses::compact": "there is no conversation to be compacted: nothing is stored",
        "responses::compact_with_all_params": "there is no conversation to be compacted: nothing is stored",
    },
    "anthropic": {
        "messages::create_with_all_params": "tools are not supported",
        "messages::count_tokens_with_all_params": "tools are not supported",
        "beta.messages::create_with_all_params": "tools, containers and MCP servers are not supported",
        "beta.messages::count_tokens_with_all_params": "tools and MCP servers are not supported",
    },
}
"""What fails in every way to call it, and why."""
_NAME = re.compile(
    r"tests\.api_resources\.(?P<module>[\w.]+)\.\w+::"
    r"test_(?:method|raw_response|streaming_response)?_?(?P<method>\w+?)(?:_overload_\d)?(?:\[\w+])?"
)


def method_of(name: str) -> str:
    """Module and method that a test calls."""
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return f"{found['module'].replace('test_', '')}::{found['method']}"


@pytest.mark.parametrize(("suite", "path"), [(OPENAI, "/v1"), (ANTHROPIC, "")], ids=["openai", "anthropic"])
async def test_replies_fit_the_types_of_the_sdk(suite: Suite, path: str) -> None:
    config = inproc_config(
        model=ModelConfig(path=UNTRAINED, aliases=ALIASES),
        sessions=(),
        standing="none",
        scheduler=SchedulerConfig(max_new_tokens=4),
        query=QueryConfig(endpoint="tcp://127.0.0.1:*", max_prompts_each=64),
    )
    async with running(config) as daemon:
        found, told = await outcomes(suite, {"TEST_API_BASE_URL": f"http://127.0.0.1:{daemon.port}{path}"})
    failed = {method_of(name) for name, why in found.items() if why}
    passed = {method_of(name) for name, why in found.items() if not why}
    assert failed == set(FAILING[suite.package]), told[-20_000:]
    assert passed
    assert not failed & passed
