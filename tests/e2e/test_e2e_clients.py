"""One real daemon, asked by clients of the query socket and by agents: Python without PyTorch, Node, MCP."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import QueryError
from daemon.api.subscriptions import SubscriptionUpdate
from daemon.config.schema import HttpConfig
from feeds.connectors.http import HttpSourceConnector
from feeds.market_data import Answer, FlashReady
from tests.kit import SECOND, START, QueueSource, inproc_config, until
from tests.kit.inproc import Recorder, RunningDaemon, Tape, running
from tests.kit.programs import need, unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[2]
URI = "foretick://sessions/aaa"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk() -> AsyncIterator[RunningDaemon]:
    pushed = HttpSourceConnector(max_waiting=50, max_body_bytes=4096).open("http", 1.0)
    config = inproc_config(("V:AAA", "V:PPP"), http=HttpConfig(port=0, mcp=True))
    async with running(config, [QueueSource(), pushed], Tape("V:AAA"), executor=Recorder(0.02)) as daemon:
        await daemon.advance()
        yield daemon


def addresses(desk: RunningDaemon) -> dict[str, str]:
    """Of both ways to the daemon."""
    return {"zeromq": desk.endpoint, "http": f"http://127.0.0.1:{desk.port}"}


@pytest_asyncio.fixture(loop_scope="module", params=["zeromq", "http"])
async def client(desk: RunningDaemon, request: pytest.FixtureRequest) -> AsyncIterator[AsyncQueryClient]:
    async with AsyncQueryClient(addresses(desk)[request.param], 30) as made:
        yield made


# Python.


async def test_a_session_is_described_paused_and_asked_again(
    desk: RunningDaemon, client: AsyncQueryClient
) -> None:
    described = await client.describe("aaa")
    names = [question.name for question in described.questions]
    assert (described.session.name, len(names), len(described.answers)) == ("aaa", 6, 6)
    one = await client.pause("aaa", names[0])
    assert [q.name for q in one.questions if q.paused] == [names[0]]
    none = await client.pause("aaa")
    assert all(q.paused for q in none.questions)
    assert (await client.describe("aaa")).answers == ()
    version = desk.state().version
    desk.feed()
    await until(lambda: desk.state().version > version)  # its data is read all the same
    again = await client.pause("aaa", paused=False)
    assert sorted(q.name for q in again.questions) == sorted(names)
    assert not any(q.paused for q in again.questions)
    await client.pause("aaa", names[1])
    assert names[1] not in [q.name for q in (await client.remove_question("aaa", names[1])).questions]
    old = next(q for q in described.questions if q.name == names[1])
    await client.set_question("aaa", old.name, old.text, old.choices)
    for session, name, code in (("zzz", "", "unknown_session"), ("aaa", "none", "bad_request")):
        with pytest.raises(QueryError) as refused:
            await client.pause(session, name)
        assert refused.value.code == code
    await desk.advance()


async def test_answers_come_to_subscribers_and_pushed_records_make_them(
    desk: RunningDaemon, client: AsyncQueryClient
) -> None:
    def record(second: int) -> dict[str, object]:
        at = START + second * SECOND
        return {"type": "trade", "venue": "V", "symbol": "PPP", "ts_event": at, "ts_recv": at, "price": "9.5",
                "size": "1"}  # fmt: skip

    async with await client.subscribe(sessions=["ppp"]) as stream:
        begin = 10 * desk.state("ppp").version  # behind what another client has pushed
        reply = await client.push([record(begin + n) for n in range(3)])
        assert (reply.pushed.accepted, reply.pushed.refused) == (3, 0)
        async with asyncio.timeout(60):
            seen = []
            async for item in stream:
                assert isinstance(item, SubscriptionUpdate)
                seen.append(item)
                if isinstance(item.message, FlashReady):
                    break
    said = [item.message for item in seen if isinstance(item.message, Answer)]
    assert [answer.data_version for answer in said] == [seen[-1].message.data_version] * 6
    bad = await client.push([{"type": "trade"}])
    assert (bad.pushed.accepted, bad.pushed.refused, bad.pushed.errors[0].line) == (0, 1, 1)
    for options in ({"content": "csv"}, {"format": "none"}, {"source": "none"}):
        with pytest.raises(QueryError) as refused:
            await client.push(b"x", **options)
        assert refused.value.code == "bad_request"
    # one that comes back gets what it missed
    async with await client.subscribe(sessions=["ppp"], after=seen[0].id) as stream:
        again = [await asyncio.wait_for(anext(stream), 60) for _ in seen[1:]]
        assert again == seen[1:]
    async with await client.subscribe(after="1.5") as stream:
        lost = await asyncio.wait_for(anext(stream), 60)
        assert (lost.events, lost.exact, lost.reason) == ("unknown", False, "restarted")
        assert lost.after


async def test_deadlines_and_cancelled_asks_end_in_the_engine_too(
    desk: RunningDaemon, client: AsyncQueryClient
) -> None:
    long = {"session": "aaa", "question": "Tell all.", "max_tokens": 60}  # over a second of passes
    before = {outcome: desk.count("asks", outcome=outcome) for outcome in ("cancelled", "timeout")}
    with pytest.raises(QueryError, match=r"0\.1 s") as late:
        await client.ask(**long, deadline_ms=100)
    assert late.value.code == "timeout"
    await until(lambda: not len(desk.gateway.pending))
    asking = asyncio.create_task(client.ask(**long))
    await until(lambda: len(desk.gateway.pending))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: desk.count("asks", outcome="cancelled") == before["cancelled"] + 1)
    assert desk.count("asks", outcome="timeout") == before["timeout"] + 1


ELSEWHERE = """
import importlib.util, sys
from foretick_client import QueryClient, SubscriptionUpdate
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("daemon") is None
with QueryClient(sys.argv[1]) as client, client.subscribe(["aaa"], events=["flash_ready"]) as stream:
    print(client.hello().version, client.ask("aaa", "up?", choices=("YES", "NO")).text, flush=True)
    item = stream.get(60)
    assert isinstance(item, SubscriptionUpdate)
    print(item.message.session)
"""


async def run(*command: str, cwd: Path | None = None) -> str:
    """What a command prints. Raises CalledProcessError."""

    def work() -> str:
        return subprocess.run(
            command, cwd=cwd, check=True, timeout=120, stdout=subprocess.PIPE, text=True
        ).stdout

    return await asyncio.to_thread(work)


async def while_advancing(desk: RunningDaemon, work: asyncio.Task[str]) -> str:
    while not work.done():
        await desk.advance()
        await asyncio.wait([work], timeout=0.3)
    return work.result()


async def test_the_clients_own_distribution_needs_no_pytorch(desk: RunningDaemon, tmp_path: Path) -> None:
    """Built from this tree, installed from the index into a new environment."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "tree"
    for part in (
        "clients",
        "daemon/api",
        "daemon/audit",
        "daemon/traces",
        "feeds",
        "flash",
    ):  # a copy, so that nothing is built in the tree
        ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT / part, source / part, ignore=ignored)
    for part in ("LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / part, source / part)
    made = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    await run(*made, str(source / "clients/python"))
    wheel = tmp_path / "foretick_client-0.1.0-py3-none-any.whl"
    await run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv/bin/python")
    try:
        await run(*pip, "--python", python, "install", "--only-binary", ":all:", f"{wheel}[http]")
    except subprocess.CalledProcessError as error:
        unavailable(f"needs the package index: {error}")
    for address in addresses(desk).values():
        work = asyncio.create_task(run(python, "-I", "-c", ELSEWHERE, address, cwd=tmp_path))
        version, text, session = (await while_advancing(desk, work)).split()
        assert (version, text in ("YES", "NO"), session) == ("1", True, "aaa")


async def test_the_node_example_asks_and_listens(desk: RunningDaemon, tmp_path: Path) -> None:
    node, npm, example = need("node"), need("npm"), tmp_path / "node"
    shutil.copytree(ROOT / "examples/node", example, ignore=shutil.ignore_patterns("node_modules"))
    try:
        await run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", cwd=example)
    except subprocess.CalledProcessError as error:
        unavailable(f"needs the package index: {error}")
    name = desk.state().questions[0].name
    command = (node, "desk.mjs", "aaa", name, desk.endpoint, "3")
    lines = (await while_advancing(desk, asyncio.create_task(run(*command, cwd=example)))).splitlines()
    assert lines[0].startswith("protocol 1, daemon ")
    assert lines[1].startswith("asked: ")
    assert len(lines) == 5
    assert all(" s old" in line for line in lines[2:])


# Agents.


def agents(desk: RunningDaemon, transport: str, mode: str) -> Client:
    """The SDK's client, by streamable HTTP or over stdin and stdout of `foretick mcp`."""
    if transport == "http":
        return Client(f"http://127.0.0.1:{desk.port}/mcp", mode=mode)
    args = ["-c", "from daemon.cli.main import main; main()", "mcp", "--endpoint", desk.endpoint]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    return Client(StdioServerParameters(command=sys.executable, args=args, env=environment), mode=mode)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("transport", "mode"), [("http", "auto"), ("http", "legacy"), ("stdio", "auto"), ("stdio", "legacy")]
)
@pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")
async def test_an_agent_asks_and_is_told_of_new_answers(
    desk: RunningDaemon, transport: str, mode: str
) -> None:
    told: list[str] = []

    async def hear(message: Any) -> None:
        uri = getattr(getattr(message, "params", None), "uri", None)
        if uri is not None:
            told.append(uri)

    agent = agents(desk, transport, mode)
    agent.message_handler = hear
    async with agent:
        listed = (await agent.call_tool("list_sessions", {})).structured_content["sessions"]
        assert [each["name"] for each in listed] == ["aaa", "ppp"]
        ask = {"session": "aaa", "question": "up?", "choices": ["YES", "NO"]}
        replies = await asyncio.gather(*(agent.call_tool("ask", ask) for _ in range(5)))
        assert {reply.structured_content["text"] for reply in replies} <= {"YES", "NO"}
        refused = await agent.call_tool("latest_answers", {"session": "zzz"})
        assert (refused.is_error, refused.structured_content["code"]) == (True, "unknown_session")
        (contents,) = (await agent.read_resource(URI)).contents
        assert '"answers":[{' in contents.text
        with pytest.raises(MCPError, match="no session 'zzz'"):
            await agent.read_resource("foretick://sessions/zzz")
        if mode == "legacy":
            await agent.subscribe_resource(URI)
            while URI not in told:  # stdio: the subscription behind it begins later
                await desk.advance()
                await asyncio.sleep(0.1)
        else:
            async with agent.listen(resource_subscriptions=[URI]) as stream:
                update = asyncio.ensure_future(anext(aiter(stream)))
                while not update.done():
                    await desk.advance()
                    await asyncio.wait([update], timeout=0.1)
                assert update.result().uri == URI
        computed = desk.count("asks", outcome="computed")
        pending = desk.gateway.pending
        long = {"session": "aaa", "question": "Tell all.", "max_tokens": 60}  # over a second of passes
        asking = asyncio.create_task(agent.call_tool("ask", long))
        await until(lambda: len(pending))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not len(pending))
        assert desk.count("asks", outcome="computed") == computed


async def test_agents_pass_the_guard_as_all_do(desk: RunningDaemon) -> None:
    foreign = await desk.http("POST", "/mcp", {}, {"origin": "http://evil.example"})
    assert foreign.status == 403
