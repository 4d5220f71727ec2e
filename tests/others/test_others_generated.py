"""Clients that generators make of the OpenAPI document: complete, and one of them asks a daemon."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from daemon.api.openapi import ENDPOINTS, described, document
from daemon.api.operations import OPERATIONS
from tests.kit import inproc_config
from tests.kit.environments import environment
from tests.kit.inproc import running
from tests.kit.programs import need, unavailable

VERSION = "0.29.1"
HOME = Path(__file__).parents[2] / ".cache" / f"openapi-python-client-{VERSION}"
TYPESCRIPT, COMPILER = "openapi-typescript@7.9.1", "typescript@5.9.3"
SKIPPED = re.compile(r"Unsupported content type (application/x-ndjson|text/csv|application/msgpack)")
"""Bodies that the generator cannot make: records may be pushed as JSON."""
PROGRAM = """
import sys
from made.api.default import ask, list_sessions
from made.client import Client
from made.models import AskBody, AskReply, Problem

with Client(base_url=sys.argv[1], raise_on_unexpected_status=True) as client:
    names = [each.name for each in list_sessions.sync(client=client).sessions]
    reply = ask.sync(client=client, body=AskBody(session=names[0], question="Up?", choices=["YES", "NO"]))
    assert isinstance(reply, AskReply), reply
    refused = ask.sync(client=client, body=AskBody(session="nowhere", question="Up?"))
    assert isinstance(refused, Problem), refused
    print(*names, reply.text, reply.data_version, refused.code)
"""


def test_every_array_says_what_its_items_are() -> None:
    """JSON Schema does not ask for it, but generators do."""

    def arrays(schema: object) -> list[dict[str, object]]:
        inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        own = [schema] if isinstance(schema, dict) and schema.get("type") == "array" else []
        return own + [found for each in inner for found in arrays(each)]

    found = arrays(described())
    assert len(found) > 20
    assert all(isinstance(each["items"], dict) and "prefixItems" not in each for each in found)


@pytest.fixture(scope="module")
def generator() -> Path:
    """The folder of its programs. Skips, but not in CI, where there is no package registry."""
    return environment(HOME, f"openapi-python-client=={VERSION}")


async def run(*arguments: str, folder: Path, programs: Path) -> str:
    """What a program says, which finds others in ``programs``; it must end well."""
    environment = os.environ | {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
    process = await asyncio.create_subprocess_exec(
        *arguments,
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    said = output.decode()
    if process.returncode and re.search(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT", said):
        unavailable(f"there is no package registry: {said[-300:]}")
    assert process.returncode == 0, said[-4000:]
    return said


async def test_a_client_in_python_is_complete_and_asks_a_daemon(tmp_path: Path, generator: Path) -> None:
    (tmp_path / "openapi.json").write_bytes(document())
    made = ("--path", "openapi.json", "--output-path", "made", "--meta", "none")
    said = await run(
        str(generator / "openapi-python-client"), "generate", *made, folder=tmp_path, programs=generator
    )
    warned = re.findall(r"^WARNING .*$", said, re.MULTILINE)
    assert len(warned) == len(SKIPPED.findall(said)) == 3, said[-4000:]
    assert "Unable to" not in said
    modules = {each.stem for each in (tmp_path / "made" / "api" / "default").glob("*.py")}
    names = [each.name for each in (*OPERATIONS, *ENDPOINTS)]
    assert {re.sub("(?=[A-Z])", "_", name).lower() for name in names} <= modules
    (tmp_path / "program.py").write_text(PROGRAM)
    async with running(inproc_config(("V:AAA",))) as daemon:
        await daemon.advance()
        url = f"http://127.0.0.1:{daemon.port}"
        said = await run(str(generator / "python"), "program.py", url, folder=tmp_path, programs=generator)
    (line,) = said.splitlines()
    name, text, version, code = line.split()
    assert (name, text in ("YES", "NO"), int(version) >= 1, code) == ("aaa", True, True, "unknown_session")


async def test_types_for_typescript_compile(tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_bytes(document())
    npm = need("npm")
    for package, *arguments in (
        (TYPESCRIPT, "openapi-typescript", "openapi.json", "-o", "api.d.ts"),
        (COMPILER, "tsc", "--noEmit", "--strict", "api.d.ts"),
    ):
        command = (npm, "exec", "--yes", f"--package={package}", "--", *arguments)
        await run(*command, folder=tmp_path, programs=Path(npm).parent)
    text = (tmp_path / "api.d.ts").read_text()
    assert [each.path for each in ENDPOINTS if f'"{each.path}"' not in text] == []
