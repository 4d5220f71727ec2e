"""Messages in a declared format on their way to the ring: all of them are accounted for."""

import json
from pathlib import Path

import pytest

from feeds.file_format import load_format
from feeds.payloads.format_decoder import FormatDecoder
from feeds.source import Incoming
from ingest.record import FLAG_GAP, REFUSAL, TRADE
from tests.kit.fakes import QueueSource
from tests.kit.gateway import DecoderRig

NOW = 1_767_225_600 * 10**9
FORM = """
description = "trades"
container = "json"
[[records]]
kind = "trade"
venue = "V"
time = { field = "t", format = "epoch-ms" }
fields = { symbol = "s", price = "p", size = "q" }
match = { field = "e", values = ["trade"] }
[passed_over]
subscribed = { field = "e", values = ["subscribed"] }
"""


def body(**more: object) -> dict[str, object]:
    return {"e": "trade", "t": NOW // 10**6, "s": "AAA", "p": "1.5", "q": 2} | more


def messages(*bodies: object) -> list[Incoming]:
    return [
        Incoming("ticks", 0, offset, None, each if isinstance(each, bytes) else json.dumps(each).encode(),
                 ts_recv_ns=NOW)
        for offset, each in enumerate(bodies)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["pausing", "dropping"])
@pytest.mark.parametrize("copies", [1, 30])
async def test_every_message_is_in_the_ring_or_counted(tmp_path: Path, kind: str, copies: int) -> None:
    """One by one, and in runs that are long enough for columns."""
    (tmp_path / "form.toml").write_text(FORM)
    form = load_format(tmp_path / "form.toml", of_messages=True)
    rig = DecoderRig(QueueSource(kind), payloads=FormatDecoder(form, 1 << 12))  # type: ignore[arg-type]  # a Kind
    kinds = [
        body(),
        body(s="BBB"),
        {"e": "subscribed"},
        body(p="-"),
        b"",
        b"{",
        b" " * 5000,
        [body(), body(p=2), body(q=-1)],
        body(t=NOW // 10**9),
    ]
    try:
        await rig.run(messages(*(each for each in kinds for _ in range(copies))))
        found = rig.records()
        value = rig.store.value
        trades, holes = found[found["kind"] == TRADE], found[found["kind"] == REFUSAL]
        assert len(trades) == 3 * copies
        assert len(holes) == 3 * copies  # of unusable records, the symbol is known
        assert value("foretick_records_unknown_symbol_total") == copies
        assert value("foretick_records_passed_over_total", source="test") == copies
        assert value("foretick_messages_empty_total", source="test", kind="empty") == copies
        reasons = {"price": 1, "json": 1, "oversize": 1, "size": 1, "timestamp_unit": 1}
        for reason, each in reasons.items():
            assert value("foretick_records_malformed_total", reason=reason) == each * copies, reason
        assert len(rig.dead_letters) == 5 * copies
        assert not (found["flags"] & FLAG_GAP).any()
        assert rig.tracker.next_offset(("ticks", 0)) == len(kinds) * copies
    finally:
        rig.close()
