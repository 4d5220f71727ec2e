"""System One for clients of others, unmodified: jevcompat finds nothing to fail, typesafe-sdk asks a session.

Both run in an environment of their own. The suite sends up to 255 options, so prompts may be long.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.config.schema import (
    UNTRAINED,
    ModelConfig,
    PoolConfig,
    QueryConfig,
    SchedulerConfig,
    TenantsConfig,
)
from daemon.tenants import hash_of, new_key
from feeds.durations import Duration
from tests.kit import SECOND, inproc_config
from tests.kit.environments import environment
from tests.kit.inproc import RunningDaemon, running
from tests.kit.weights import smollm2_directory
from tests.others.suites import CACHE

JEVCOMPAT, SDK = "jevcompat==0.1.1", "typesafe-sdk==0.7.5"
JEVCOMPAT_HOME = CACHE / "jevcompat-0.1.1" / "environment"
KEYED = {"auth.ignored-when-off"}
KEYLESS = {"auth.bearer", "auth.missing", "auth.invalid"}
"""What the suite can test only without a key, and only with one: no other requirement may be skipped."""
REQUIRED = {"MUST": 33, "SHOULD": 15}
"""All requirements of the suite, by level."""
PROGRAM = """
import asyncio, sys
from typesafe_sdk import AsyncTypeSafeClient, Choice, Noul, Score, TypeSafeAPIError, TypeSafeClient

options = {"base_url": sys.argv[1], "api_key": "none", "timeout": 60}
questions = {
    "up": Noul(instructions="Is it up?"),
    "way": Choice(instructions="Which way?", criteria={"UP": None, "DOWN": "it falls"}),
    "far": Score(instructions="How far?", criteria=["near", "far"]),
}
with TypeSafeClient(**options) as client:
    names = [each.name for each in client.models.list().models]
    said = client.system_one(state="It rises.", questions=questions)
    asked = client.system_one(state={"session": "aaa"}, questions=questions, model=names[0])
    beside = client.system_one(state=["long", 2], questions=questions, model="session:aaa")
    try:
        client.system_one(state={"session": "nowhere"}, questions=questions)
    except TypeSafeAPIError as error:
        refused = error.status
    try:
        client.system_one(state="x", questions={"a": {"type": "choice", "criteria": {"one": None}}})
    except TypeSafeAPIError as error:
        invalid = error.status


async def again():
    async with AsyncTypeSafeClient(**options) as client:
        return await client.system_one(state={"session": "aaa"}, questions=questions)


for found in (said, asked, beside, asyncio.run(again())):
    assert 0 <= found.nouls["up"].noul <= 1
    assert set(found.choices["way"].probabilities) == {"UP", "DOWN"}
    assert found.scores["far"].legend == {0: "near", 1: "far"}
print(*names, said.model, asked.model, beside.model, refused, invalid)
"""


def long_prompts(**settings: Any) -> Any:
    """Of a daemon that reads 255 described options, a byte a token."""
    return inproc_config(
        standing="none",
        pool=PoolConfig(blocks=2048, frame_limit=16_384),
        scheduler=SchedulerConfig(max_prompt_tokens=16_000),
        query=QueryConfig("tcp://127.0.0.1:*", max_wait=Duration(120 * SECOND)),
        **settings,
    )


async def run(program: Path, *arguments: str) -> str:
    """What a program says."""
    process = await asyncio.create_subprocess_exec(
        str(program), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()[-20_000:]
    return told.decode()


async def met(daemon: RunningDaemon, folder: Path, *arguments: str, keyed: bool = False) -> dict[str, str]:
    """Every requirement of the suite is met, but for those that it skips; the level of each, by its id."""
    programs = await asyncio.to_thread(environment, JEVCOMPAT_HOME, JEVCOMPAT, SDK)
    report = folder / "report.json"
    url = f"http://127.0.0.1:{daemon.port}"
    told = await run(programs / "jevcompat", "test", url, "--json", str(report), *arguments)
    found = json.loads(report.read_bytes())
    assert found["summary"]["verdict"] == "conformant", told
    passed = {each["id"]: each["level"] for each in found["results"] if each["status"] == "pass"}
    assert {each["id"] for each in found["results"]} - set(passed) == (KEYED if keyed else KEYLESS), told
    counts = {level: found["summary"][level]["passed"] for level in REQUIRED}
    assert counts == {"MUST": 32, "SHOULD": 15 if keyed else 13}, told
    return passed


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("", id="the tape model"),
        pytest.param("smollm2", marks=[pytest.mark.weights, pytest.mark.timeout(1200)]),
    ],
)
async def test_each_model_conforms_with_keys_and_without(model: str, tmp_path: Path) -> None:
    """Over both, all requirements of the suite are tested, and met."""
    key, file, passed = new_key(), tmp_path / "tenants.toml", dict[str, str]()
    file.write_text(f'[[tenants]]\nname = "desk"\napi_keys = ["{hash_of(key)}"]\n')
    chosen = ModelConfig(path=str(smollm2_directory()), dtype="float32") if model else ModelConfig()
    config = long_prompts(model=chosen, sessions=())
    async with running(config) as daemon:
        passed |= await met(daemon, tmp_path)
    async with running(replace(config, tenants=TenantsConfig(str(file)))) as daemon:
        passed |= await met(daemon, tmp_path, "--key", key, keyed=True)
    assert Counter(passed.values()) == REQUIRED


async def test_a_model_that_chats_conforms_also_about_a_session(tmp_path: Path) -> None:
    async with running(long_prompts(model=ModelConfig(path=UNTRAINED))) as daemon:
        await daemon.advance()
        await met(daemon, tmp_path)
        await met(daemon, tmp_path, "--model", "session:aaa")


async def test_typesafe_sdk_asks_about_text_and_a_session(tmp_path: Path) -> None:
    programs = await asyncio.to_thread(environment, JEVCOMPAT_HOME, JEVCOMPAT, SDK)
    (tmp_path / "program.py").write_text(PROGRAM)
    async with running(inproc_config(standing="none")) as daemon:
        await daemon.advance()
        own = daemon.gateway.status.model
        said = await run(programs / "python", str(tmp_path / "program.py"), f"http://127.0.0.1:{daemon.port}")
    assert said.split() == [own, "jev-latest", "session:aaa", own, "session:aaa", "session:aaa", "404", "422"]
