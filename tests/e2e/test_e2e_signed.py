"""Prices of zero and below, as of spreads, rates and power: from every way in to bars and answers."""

from decimal import Decimal
from pathlib import Path

import pytest

from daemon.config.errors import ConfigError
from daemon.config.load import load_config
from daemon.config.schema import UNTRAINED, SourceConfig
from feeds.connectors.http import HttpSourceConnector
from ingest.bars import Bars
from tests.kit import SECOND, START, inproc_config, trade, until
from tests.kit.config import sessions
from tests.kit.daemon import invoke
from tests.kit.http import request
from tests.kit.inproc import running

PRICES = ("-37.63", "0", "1.5", "-0.01")
FORM = """
description = "oil"
container = "csv"
[[records]]
kind = "trade"
venue = "V"
symbol = "AAA"
{more}
time = {{ field = "t", format = "epoch-s" }}
fields = {{ price = "p", size = "q" }}
"""


def seen(rows: Bars) -> list[tuple[Decimal, ...]]:
    return [tuple(Decimal(int(row[name])) / 10**9 for name in "ohlc") for row in rows]


async def test_a_session_of_signed_prices_takes_them_by_http_and_another_refuses_them() -> None:
    config = inproc_config(
        sessions=(
            *sessions("V:AAA", retention_tokens=1024, signed=True),
            *sessions("V:BBB", retention_tokens=1024),
        ),
        source=SourceConfig(kind="http", http=HttpSourceConnector()),  # type: ignore[call-arg]  # by connectors
    )
    made: dict[str, list[tuple[Decimal, ...]]] = {"aaa": [], "bbb": []}
    async with running(config, [], watch=lambda name, rows: made[name].extend(seen(rows))) as daemon:
        body = b"\n".join(
            trade(symbol, START + n * SECOND // 2, price, "1")
            for n, price in enumerate((*PRICES, "2"))
            for symbol in ("V:AAA", "V:BBB")
        )
        reply = await request(
            daemon.port, "POST", "/v1/data?replay=true", body, {"content-type": "application/x-ndjson"}
        )
        assert (reply.status, reply.json["accepted"], reply.json["refused"]) == (202, 7, 3)
        assert all("must be above 0" in each["message"] for each in reply.json["errors"])
        await until(lambda: len(made["aaa"]) == 2 and bool(daemon.answers("aaa")))
        numbers = [Decimal(price) for price in PRICES]
        assert made["aaa"] == [
            (a, max(a, b), min(a, b), b) for a, b in zip(numbers[::2], numbers[1::2], strict=True)
        ]
        assert daemon.count("records_malformed", reason="price") == 3


@pytest.mark.parametrize("signed", [True, False])
def test_a_file_says_whether_its_prices_are_signed(tmp_path: Path, signed: bool) -> None:
    (tmp_path / "form.toml").write_text(FORM.format(more="signed_prices = true" if signed else ""))
    rows = [f"{1587405600 + n},{price},1" for n, price in enumerate((*PRICES, "2"))]
    (tmp_path / "ticks.csv").write_text("t,p,q\n" + "\n".join(rows) + "\n")
    bars = tmp_path / "bars.csv"
    done = invoke(
        *("replay", str(tmp_path / "ticks.csv"), "--format", str(tmp_path / "form.toml"), "--to", "inproc"),
        *("--speed", "0", "--set", f"model.path={UNTRAINED}", "--bars", str(bars)),
    )
    closes = [line.split(",")[-4] for line in bars.read_text().splitlines()[1:]] if bars.exists() else []
    if signed:
        assert done.exit_code == 0, done.output
        assert len(closes) == 5
        assert "-37.63" in bars.read_text()
    else:
        assert "first malformed line: line 2: price: price must be above 0, got -37.63" in done.output


def test_sessions_of_a_symbol_agree_and_compact_lines_have_no_sign(tmp_path: Path) -> None:
    file = tmp_path / "foretick.toml"
    one = '[[sessions]]\nname = "{}"\nsymbol = "V:A"\n{}\n'
    file.write_text(one.format("a", "signed = true") + one.format("b", ""))
    with pytest.raises(ConfigError, match=r"sessions\[1\].signed"):
        load_config(file, environment={})
    done = invoke("check", "--config", str(_written(file, one.format("a", "signed = true"))))
    assert done.exit_code == 2
    assert "it needs decimal lines" in done.output


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file
