"""A real daemon answers over a mock broker; each of its answers is explained and derived again."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM

from daemon.audit.reproduction import plan
from daemon.config.load import load_config
from daemon.config.schema import Config, SessionConfig
from daemon.engine.build import directory_of, text_of
from daemon.gateway.wiring import make_gateway
from engine.model.chat_format import PromptFormat
from engine.model.loading import load_model
from feeds.market_data import Answer, Basis, InputRange
from feeds.mock_broker import MockBroker
from flash.question import PAPER_SIX
from tests.daemon.audit.broker import run_fill
from tests.kit import SECOND, START, tolerance, trade, until
from tests.kit.daemon import Topics, invoke

KEY = "V:AAA"
SECONDS = 16
SHORT = "retention_tokens = 160\nwarm_up_records = 0"
"""The window of the untrained model's decimal lines: a few bars."""
CASES = {
    "decimal, carry": ("untrained", SHORT),
    "decimal, exact": ("untrained", f'{SHORT}\nsemantics = "exact"\nrefresh_every = 2'),
    "compact, carry": ("", "retention_records = 6"),
}

pytestmark = [pytest.mark.sampled(1), pytest.mark.timeout(900)]  # a daemon and several engines for each case


def config_of(folder: Path, bootstrap: str, model: str, session: str, more: str = "") -> Path:
    file = folder / "foretick.toml"
    file.write_text(
        f"""
[model]
path = "{model}"
threads = 1
layers = "torch"
[[sessions]]
name = "aaa"
symbol = "{KEY}"
{session}
[source]
kind = "kafka"
kafka = {{ bootstrap = "{bootstrap}", topics = ["in"] }}
[sink]
kafka = {{ bootstrap = "{bootstrap}", topic = "answers.v1", dlq = "dlq.v1" }}
[process]
mode = "inproc"
drain = "5s"
[query]
endpoint = ""
[http]
port = 0
[log]
level = "error"
{more}
"""
    )
    return file


def second(n: int, shift: int = 0) -> list[bytes]:
    """Three trades; the price jumps twice, so that compact lines get other anchors."""
    base = 10_000 + (n * 7) % 13 + (700 if n >= 5 else 0) + (900 if n >= 12 else 0)
    return [
        trade(KEY, START + n * SECOND + i * 1000, f"{(base + (n * i) % 5 + shift) / 100:.2f}", f"{i + 1}")
        for i in range(3)
    ]


@contextlib.asynccontextmanager
async def daemon(config: Config) -> AsyncIterator[Callable[[], bool]]:
    """A daemon of one session; says whether its window is neither prefilled again nor to be replaced.

    Bars that come meanwhile leave the window that is prefilled (`Basis.left`), and are not repeated by a
    replay.
    """
    gateway = make_gateway(config)
    try:
        await asyncio.wait_for(gateway.start(), 200)
        host = gateway.engine._client._host  # type: ignore[union-attr]  # it is in this process
        # it is opened by its first record
        yield lambda: all(map(host.first.parts.settled, host.first.sessions.built.tapes.values()))
    finally:
        await gateway.stop()


async def answered(config: Config, bootstrap: str, seconds: int) -> list[Answer]:
    """Run a daemon at ease, a bar at a time; what it published."""
    async with Topics(bootstrap, "in", "answers.v1") as topics:
        async with daemon(config) as settled:
            for n in range(seconds + 1):
                await topics.produce([(KEY, payload) for payload in second(n)])
                if n:
                    await topics.answered("aaa", n)
                    await until(settled)
        return topics.answers("aaa")


def topics_of(broker: MockBroker) -> str:
    for topic in ("in", "answers.v1", "dlq.v1"):
        broker.create_topic(topic, 1)
    return broker.bootstrap


@torch.inference_mode()
def dense(config: Config, explained: dict[str, Any]) -> torch.Tensor:
    """The unmodified model, over all tokens that `explain` prints: its last logits."""
    parts = [explained["frozen"], *explained["window"], explained["question"]]
    ids = torch.tensor([[token for part in parts for token in part["tokens"]]])
    model = AutoModelForCausalLM.from_pretrained(directory_of(config.model), dtype=torch.float32)
    return model.eval()(input_ids=ids).logits[0, -1]


@dataclass(frozen=True)
class Ran:
    """What a daemon published, and its broker."""

    case: str
    file: Path
    config: Config
    bootstrap: str
    answers: list[Answer]

    def of(self, version: int, question: str = "trend") -> Answer:
        return next(a for a in self.answers if (a.data_version, a.question) == (version, question))

    def invoke(self, command: str, answer: str, *more: str) -> Result:
        return invoke(command, answer, "--config", str(self.file), *more)

    def told(self, command: str, answer: str, *more: str) -> Any:
        """The JSON that a command prints, which succeeds."""
        result = self.invoke(command, answer, *more, "--json")
        assert result.exit_code == 0, (answer, result.output)
        return json.loads(result.output)

    def check(self, *answers: Answer) -> None:
        """Each answer is derived again, and its window explained."""
        for answer in answers:
            told = self.told("reproduce", answer.answer_id)
            assert (told["says"], told["text"], told["notes"]) == ("reproduced", answer.text, []), told
            assert answer.basis is not None
            window = self.told("explain", answer.answer_id)["window"]
            assert len(window) == answer.basis.window_bars

    def saved(self, folder: Path, answer: Answer) -> str:
        file = folder / "answer.json"
        file.write_bytes(msgspec.json.encode(answer))
        return str(file)


@pytest.fixture(scope="module", params=CASES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """A daemon at ease ran on a mock broker, which is still there."""
    model, session = CASES[request.param]
    with MockBroker() as broker:
        bootstrap = topics_of(broker)
        file = config_of(tmp_path_factory.mktemp("audit"), bootstrap, model, session)
        config = load_config(file)
        published = asyncio.run(answered(config, bootstrap, SECONDS))
        assert len(published) == SECONDS * len(PAPER_SIX)
        yield Ran(request.param, file, config, bootstrap, published)


def test_every_answer_says_what_its_state_was_made_of(ran: Ran) -> None:
    for answer in ran.answers:
        version, basis = answer.data_version, answer.basis
        assert basis is not None
        assert (basis.bars, basis.window_bars, basis.left) == (1, min(version, 6), False)
        # three trades a bar
        (window,), (state,) = basis.window, basis.state
        assert (window.first_offset, window.last_offset) == (
            3 * (version - basis.window_bars),
            3 * version - 1,
        )
        assert (state.first_offset, state.last_offset) == (3 * (version - basis.state_bars), 3 * version - 1)
        assert answer.inputs == [InputRange("in", 0, 3 * version - 3, 3 * version - 1)]
        assert answer.answer_id == f"aaa:{answer.question_hash}:{answer.as_of // SECOND * SECOND}"
        assert basis.config == ran.answers[0].basis.config  # type: ignore[union-attr]  # as above
    evicted = {a.basis.state_bars - a.basis.window_bars for a in ran.answers if a.basis is not None}
    assert (
        max(evicted) == {"decimal, carry": SECONDS - 6, "decimal, exact": 2}.get(ran.case, max(evicted)) > 0
    )


def test_answers_are_reproduced_whether_or_not_their_state_absorbed_evicted_bars(ran: Ran) -> None:
    for answer in (ran.of(5, "volume"), ran.of(SECONDS, "exact_value")):
        told = ran.told("reproduce", answer.answer_id)
        assert (told["says"], told["text"], told["notes"]) == ("reproduced", answer.text, [])
        assert told["apart"] <= told["tolerance"] < 1e-3


def test_answers_are_equal_to_the_last_bit_when_all_is_read_again_in_one_thread(ran: Ran) -> None:
    result = ran.invoke("reproduce", ran.of(SECONDS, "pullback").answer_id, "--bits", "--from", "0")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("reproduced: aaa, ")
    assert "equal to the last bit" in result.output


def test_the_tokens_that_explain_prints_give_the_answer_to_the_unmodified_model(
    ran: Ran, tmp_path: Path
) -> None:
    answer = ran.of(4)
    explained = ran.told("explain", ran.saved(tmp_path, answer))
    assert len(explained["window"]) == 4
    assert explained["answer"] == msgspec.json.decode(msgspec.json.encode(answer))
    loaded = load_model(directory_of(ran.config.model))
    prompt = PromptFormat.of(loaded.tokenizer, described=loaded.described)
    logits = dense(ran.config, explained)
    trend = next(question for question in PAPER_SIX if question.name == "trend")
    ids = prompt.choices(text_of(prompt, trend), trend.choices or ())
    assert ids is not None
    values = [float(logits[token]) for token in ids]
    first, other = sorted(values, reverse=True)[:2]
    bound = tolerance.of_gap(loaded, tolerance.largest(logits))
    assert answer.logit_gap == tolerance.near(first - other, bound)
    assert trend.choices is not None
    assert answer.text == trend.choices[values.index(first)] or first - other <= bound


def test_explain_shows_records_regions_and_settings(ran: Ran, tmp_path: Path) -> None:
    answer = ran.of(9, "volume")
    output = ran.invoke("explain", answer.answer_id).output
    basis = answer.basis
    assert basis is not None
    for shown in (
        answer.answer_id,
        f"version   9, as of {answer.as_of}, 1 new bars",
        "new       1 bars: in/0 24 to 26",
        "window    6 bars: in/0 9 to 26",
        f"state     {basis.state_bars} bars: in/0 {basis.state[0].first_offset} to 26",
        "window, 6 lines",
        f"settings, hash {basis.config}",
        "bars.interval = 1s",
    ):
        assert shown in output, output


def test_other_records_make_another_answer(ran: Ran, tmp_path: Path) -> None:
    """The same offsets and times with other prices, and with a bar less."""
    answer = ran.of(8)
    name = ran.saved(tmp_path, answer)
    other_prices = [second(n, shift=250 if n == 6 else 0) for n in range(SECONDS + 1)]
    a_bar_less = [second(n) for n in range(1, SECONDS + 1)]
    for seconds, told in ((other_prices, "differs"), (a_bar_less, "make no bar that ends")):
        with MockBroker() as broker:
            elsewhere = topics_of(broker)
            run_fill(elsewhere, "in", chain.from_iterable(seconds), KEY.encode())
            result = ran.invoke("reproduce", name, "--set", f"source.kafka.bootstrap={elsewhere}")
        assert (result.exit_code, told in result.output) == (1, True), result.output


def test_a_later_start_never_says_reproduced(ran: Ran) -> None:
    answer = ran.of(SECONDS)
    basis = answer.basis
    assert basis is not None
    later = basis.state[0].first_offset + 3
    result = ran.invoke("reproduce", answer.answer_id, "--from", str(later), "--json")
    told = json.loads(result.output)
    assert told["says"] in ("agrees", "differs")
    assert f"its state begins at in/0 offset {later - 3}, before what was read" in told["notes"]
    bad = ran.invoke("reproduce", answer.answer_id, "--from", "yesterday")
    assert (bad.exit_code, "neither an offset nor a time" in bad.output) == (3, True)


def test_what_does_not_fit_is_an_error(ran: Ran, tmp_path: Path) -> None:
    answer = ran.of(2)
    name = ran.saved(tmp_path, answer)
    other = "" if ran.config.model.path else "untrained"
    for change, why in (
        ("sessions.0.retention_tokens=176", "the configuration is another one than answered"),
        ("sessions.0.lateness=1s", "the configuration is another one than answered"),
        ("sessions.0.name=bbb", "has no session 'aaa'"),
        ("standing=none", "ran is missing in"),
        ("model.seed=1" if not other else f"model.path={other}", "by another"),
    ):
        result = ran.invoke("reproduce", name, "--set", change)
        assert result.exit_code == 3, (change, result.output)
        assert why in result.output, result.output
    replace = msgspec.structs.replace
    for changed, why in (
        (replace(answer, basis=None), "does not say what it was made of"),
        (replace(answer, model_revision="0"), "another revision of the model"),
        (replace(answer, flags=("provisional",)), "open bars"),
        (replace(answer, inputs=[]), "names no records"),
        (replace(answer, basis=replace(answer.basis, state=[])), "Name a start"),
    ):
        result = ran.invoke("reproduce", ran.saved(tmp_path, changed))
        assert (result.exit_code, why in result.output) == (3, True), (why, result.output)
    (tmp_path / "bad.json").write_text("{}\n{}\n")
    for name in (
        "aaa:nothing",
        str(tmp_path / "bad.json"),
        f"{tmp_path / 'bad.json'}:1",
        f"{tmp_path / 'bad.json'}:9",
    ):
        result = ran.invoke("explain", name)
        assert result.exit_code == 3, (name, result.output)


def test_a_note_keeps_a_verdict_from_saying_reproduced() -> None:
    session = SessionConfig(name="s", symbol="V:S")
    basis = Basis(
        window=[InputRange("in", 0, 0, 8)], state=[InputRange("in", 0, 0, 8)], state_bars=3, left=True
    )
    assert "bars left the window" in plan(basis, session).notes[0]
    two = [InputRange("in", 0, 0, 8), InputRange("in", 1, 0, 8)]
    assert "several partitions" in plan(Basis(window=two, state=two), session).notes[0]
