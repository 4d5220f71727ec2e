"""Signals of a daemon with a real engine: what is published, what clients hear, and what they may ask."""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from daemon.api.events import EventFilter, Subscription
from daemon.config.load import load_config
from daemon.config.schema import ClauseConfig, QuestionConfig, SignalConfig
from daemon.config.signals import rules_of
from daemon.tenants import LOCAL, Client, Tenant
from feeds.codec import decode_message
from feeds.market_data import Answer, Signal
from tests.kit import inproc_config, until
from tests.kit.daemon import invoke
from tests.kit.inproc import running
from tests.kit.records import bars_format
from tests.kit.signals import ids_of

QUESTIONS = (
    QuestionConfig("trend", "Up or down?", ("UP", "DOWN")),
    QuestionConfig("pullback", "Is it pulling back?", ("YES", "NO")),
)
BARS = 12
SIGNALS = (
    SignalConfig("any", (ClauseConfig("trend", changed=True),), withheld_by=()),
    SignalConfig(
        "both",
        (ClauseConfig("trend", answer=("UP",)), ClauseConfig("pullback", "bbb", answer=("YES",))),
        withheld_by=(),
    ),
)


def ids(listening: Subscription) -> set[str]:
    """Of the signals that a client has received."""
    return {event.message.signal_id for event in listening.take()[1] if isinstance(event.message, Signal)}


async def test_signals_follow_from_published_answers_and_reach_every_client() -> None:
    config = inproc_config(["V:AAA", "V:BBB"], standing="none", questions=QUESTIONS, signals=SIGNALS)
    async with running(config, signals="signals.v1") as daemon:
        listening = daemon.gateway.events.subscribe(
            Client(LOCAL, "test"), EventFilter(kinds=frozenset(["signal"])), "sse"
        )
        restricted = daemon.gateway.events.subscribe(
            Client(Tenant("desk", sessions=("aaa",)), "test"), EventFilter(kinds=frozenset(["signal"])), "sse"
        )
        await daemon.advance(BARS)
        await until(lambda: daemon.gateway.publisher.progress.of("aaa").version == BARS)
        await until(lambda: daemon.gateway.publisher.progress.of("bbb").version == BARS)
        sent = [each for each in daemon.sink.messages("signals.v1") if isinstance(each, Signal)]
        every = [each for name in ("aaa", "bbb") for each in daemon.answers(name)]
        expected = set(ids_of(rules_of(config), every))
        assert expected
        assert {
            each.signal_id for each in sent if len({cause.session for cause in each.answers}) == 1
        } == expected
        assert len({each.signal_id for each in sent}) == len(sent)
        published = {each.answer_id: each for each in every}
        for signal in sent:
            for cause in signal.answers:
                assert published[cause.answer_id].text == cause.text
        assert all(Decimal(each.close or 0) >= 100 for each in sent)
        assert ids(listening) == {each.signal_id for each in sent}
        assert ids(restricted) == {
            each.signal_id for each in sent if {cause.session for cause in each.answers} == {"aaa"}
        }
        reply = (await daemon.http("GET", "/v1/signals?session=aaa")).json
        assert {(each["name"], each["owner"]) for each in reply["conditions"]} == {
            ("any", "aaa"),
            ("both", "aaa"),
        }
        assert {each["signal_id"] for each in reply["signals"]} == {
            each.signal_id for each in sent if "aaa" in {each.session, *(c.session for c in each.answers)}
        }
        unknown = await daemon.http("GET", "/v1/signals?session=zzz")
        assert unknown.json["code"] == "unknown_session"
        assert daemon.count("signals", outcome="fired") == len(sent)


def test_a_replay_prints_what_the_page_s_example_fires(tmp_path: Path) -> None:
    """A price that falls and rises again: the signals follow from the answers that are printed with them."""
    page = Path(__file__).parents[2] / "docs/signals.md"
    (example,) = re.findall(r"<!-- example: config -->\n```toml\n(.*?)```", page.read_text(), re.DOTALL)
    config, form, bars = tmp_path / "c.toml", tmp_path / "bars.toml", tmp_path / "bars.csv"
    config.write_text(example.replace("BINANCE:", "V:"))
    form.write_text(bars_format("BTCUSDT"))
    start, close, rows = datetime(2024, 8, 8, 12, tzinfo=UTC), 70_400, ["time,o,h,l,c,v"]
    for n in range(70):
        before, close = close, close + (-25 if n < 40 else 35) + 7 * (n % 3 - 1)
        opened = (start + timedelta(minutes=n)).isoformat()
        rows.append(
            f"{opened},{before},{max(before, close) + 5},{min(before, close) - 5},{close},{10 + n % 5}"
        )
    bars.write_text("\n".join(rows))
    played = ("replay", str(bars), "--format", str(form), "--to", "inproc", "--speed", "0", "--every-bar")
    done = invoke(*played, "--config", str(config), "--json")
    assert done.exit_code == 0, done.stderr
    messages = [decode_message(line.encode()) for line in done.stdout.splitlines()]
    answers = [each for each in messages if isinstance(each, Answer)]
    signals = [each for each in messages if isinstance(each, Signal)]
    assert [each.signal_id for each in signals] == ids_of(rules_of(load_config(config, {})), answers)
    assert {"turn_up", "above_70000"} == {each.name for each in signals}
    assert all(each.close and each.bar > 0 for each in signals)
    assert f"{len(answers)} answers, 0 malformed lines\n" in done.stderr
