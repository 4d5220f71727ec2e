"""Writes the golden files of a release, by the code of that release: `python write_golden.py FOLDER`.

Run it in a checkout of the release with this file's path: what is imported is the release's own. Messages are
those of the release's documentation, encoded by its encoders.
"""

import json
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import msgspec

ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))

from daemon.api.events import sse  # noqa: E402
from daemon.api.messages import decode_reply, decode_request  # noqa: E402
from daemon.progress import Position, Progress, WindowStart  # noqa: E402
from feeds.codec import decode_message, encode, make_headers  # noqa: E402
from tests.regions.offload import test_regions_snapshot as snapshots  # noqa: E402

BLOCK = re.compile(r"<!-- example: (\w+) -->\n```\w*\n(.*?)^```$", re.M | re.S)
PAGES = tuple(sorted(ROOT.glob("docs/*.md")))
KEY = re.compile(r"^\| `(\w+)` \|", re.M)
TABLE = re.compile(r"^## `\[+([\w.]+)\]+`\n(.*?)(?=^## |\Z)", re.M | re.S)


def shown(*kinds: str) -> list[str]:
    """The examples of these kinds."""
    return [text for page in PAGES for kind, text in BLOCK.findall(page.read_text()) if kind in kinds]


def published() -> list[dict[str, object]]:
    """Each message with its headers, as sinks get it."""
    found = []
    for number, text in enumerate(shown("message", "record"), 1):
        message = decode_message(text.encode())
        headers = {k: v.decode() for k, v in make_headers(message, "json", "foretick", number).items()}
        found.append({"headers": headers, "value": encode(message).decode()})
    return found


def query() -> dict[str, list[bytes]]:
    """Requests and replies in msgpack, as they are on the socket."""
    pack = msgspec.msgpack.encode
    return {
        "requests": [pack(decode_request(pack(json.loads(text)))) for text in shown("request")],
        "replies": [pack(decode_reply(pack(json.loads(text)))) for text in shown("reply")],
    }


def events() -> bytes:
    """An answer and an update, as server-sent events."""
    told = [decode_message(text.encode()) for text in shown("message")]
    kinds = [each for each in told if each.__struct_config__.tag in ("answer", "data_updated", "flash_ready")]
    return b"".join(sse(str(e.__struct_config__.tag), encode(e), f"1.{n}") for n, e in enumerate(kinds, 1))


def progress() -> str:
    """Of two sessions, as it stood beside an offset and in the state directory."""
    window = WindowStart(7, (Position("", "md.trades.v1", 0, 40),))
    sessions = {
        "btcusdt": Progress(3, 812, 4872, (1_700_000_000_000_000_000,), window),
        "ethusdt": Progress(3),
    }
    pack = import_module("daemon.commit_metadata").pack  # of 0.1.0; later releases have daemon.progress
    return str(pack(3, sessions, owner="tcp://127.0.0.1:7801").text)


def member() -> bytes:
    """What a daemon of a group tells the group's leader."""
    assignor = import_module("feeds.kafka_assignor").StandbyAssignor  # of 0.1.0
    return bytes(assignor.metadata(["md.trades.v1"]).encode())


def main(folder: Path) -> None:
    """Write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "published.json").write_text(json.dumps(published(), indent=1) + "\n")
    (folder / "query.msgpack").write_bytes(msgspec.msgpack.encode(query()))
    (folder / "events.sse").write_bytes(events())
    (folder / "progress").write_text(progress())
    (folder / "member.bin").write_bytes(member())
    with tempfile.TemporaryDirectory() as name:
        snapshots.written(Path(name) / "t.kv", snapshots.pool())
        (folder / "session.snapshot").write_bytes((Path(name) / "t.kv").read_bytes())
    for kind in ("config", "format", "tenants"):
        for number, text in enumerate(shown(kind), 1):
            (folder / f"{kind}-{number}.toml").write_text(text)
    for path in ROOT.glob("examples/*.toml"):
        (folder / f"config-{path.name}").write_text(path.read_text())
    reference = (ROOT / "docs/configuration.md").read_text()
    keys = [f"{table}.{key}" for table, rows in TABLE.findall(reference) for key in KEY.findall(rows)]
    (folder / "keys").write_text("\n".join(keys) + "\n")
    calibration = json.loads((ROOT / "engine/model/foretick-tape/calibration.json").read_text())
    calibration["questions"] = calibration["questions"][:1]
    (folder / "calibration.json").write_text(json.dumps(calibration) + "\n")
    (folder / "profile.json").write_text((ROOT / "scheduler/profiles/a40-paper.json").read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
