"""The documentation is true: examples decode, tables are complete; links, paths, commands and tests exist."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import pytest

from daemon import session_life
from daemon.api import messages as query_messages
from daemon.api.messages import Code, decode_reply, decode_request
from daemon.cli.main import main
from daemon.config.load import Config, load_config
from daemon.config.tenants_file import read_tenants
from feeds import market_data
from feeds.codec import decode_message, decode_record, encode
from feeds.file_format import FileFormat, RecordFormat, TimeFormat, load_format
from feeds.market_data import Answer, Bar, Flag, Record
from feeds.recorded_file import read_records
from feeds.zmq_feed import Header
from flash.confidence import UNCALIBRATED
from flash.question import PAPER_SIX
from metrics.catalogue import REASONS, STAGES
from tapes.question_file import read_question
from tests.docs import kinds_table, metrics_table

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples/README.md", *ROOT.glob("docs/**/*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"(?:<!-- example: (\w+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
FIELDS = re.compile(r"<!-- fields: (\w+) -->\n((?:\|.*\n)+)")
INLINE_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
REFERENCE = re.compile(r"\[[^\]]+\]\[([^\]]+)\]")
DEFINITION = re.compile(r"^\[([^\]]+)\]: *<?([^\s>]+)", re.M)
HTML_LINK = re.compile(r"<(?:a|img)\b[^>]*\b(?:href|src)=\"([^\"]+)")
PACKAGES = (
    "bench|daemon|dashboards|deploy|docs|engine|examples|feeds|flash|ingest|metrics|regions|scheduler|systemd"
    "|tapes|tests|training"
)
PATH = re.compile(rf"`((?:{PACKAGES})/[\w./-]*)`")
VERBS = "assert|check|compare|do|fail|find|hold|keep|prove|say|set|show|want"
CLAIM = re.compile(rf"\btests? (?:(?:{VERBS})(?:e?s)?|has|have)\b")
TEST_NAME = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``kind`` is the struct that its mark names."""

    page: str
    kind: str
    language: str
    text: str


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks() -> list[Block]:
    return [Block(name, *found) for name in NAMES for found in FENCE.findall(page(name))]


def examples(*kinds: str) -> list[Any]:
    return [pytest.param(b, id=f"{b.page}-{b.kind}-{i}") for i, b in enumerate(blocks()) if b.kind in kinds]


def test_every_json_and_toml_block_says_what_it_is_an_example_of() -> None:
    """No example escapes its decoder, and there are some."""
    assert [b for b in blocks() if b.language in ("json", "toml") and not b.kind] == []
    assert {b.kind for b in blocks() if b.kind} == {*LOADERS, *DECODERS, "message", "record"}


def test_no_json_example_has_a_member_twice() -> None:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len({name for name, _ in pairs}) == len(pairs), [name for name, _ in pairs]
        return dict(pairs)

    for block in blocks():
        if block.language == "json":
            json.loads(block.text, object_pairs_hook=once)


@pytest.mark.parametrize("block", examples("record", "message"))
def test_messages_decode_and_encode_to_the_same(block: Block) -> None:
    """Decoded by the daemon's decoders; records also pass its checks."""
    payload = block.text.encode()
    decoded = decode_record(payload) if block.kind == "record" else decode_message(payload)
    assert decode_message(encode(decoded)) == decoded
    if block.kind == "message":
        assert msgspec.json.decode(encode(decoded)) == msgspec.json.decode(payload)


def test_the_answer_example_shows_every_member() -> None:
    """Its question is one of the standing six, its hash the real one."""
    shown = [decode_message(b.text.encode()) for b in blocks() if b.kind == "message"]
    (answer,) = [each for each in shown if isinstance(each, Answer)]
    question = next(q for q in PAPER_SIX if q.name == answer.question)
    assert answer.question_hash == question.hash
    assert question.choices is not None
    assert answer.choice in question.choices
    assert answer.latency.total_ns == answer.daemon_age_ns


def test_every_reason_without_a_probability_says_what_gives_one() -> None:
    written = page("docs/protocol.md")
    assert [code for code, what in UNCALIBRATED.items() if f"| `{code}` | {what} |" not in written] == []


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "request": decode_request,
    "reply": decode_reply,
    "header": lambda wire: msgspec.msgpack.decode(wire, type=Header),
}


@pytest.mark.parametrize("block", examples(*DECODERS))
def test_socket_messages_decode_and_encode_to_the_same(block: Block) -> None:
    """Shown as JSON, sent as msgpack."""
    shown = msgspec.json.decode(block.text)
    decoded = DECODERS[block.kind](msgspec.msgpack.encode(shown))
    written = msgspec.json.decode(msgspec.json.encode(decoded))
    assert {key: written[key] for key in shown} == shown


LOADERS: dict[str, Callable[[Path], object]] = {
    "config": lambda path: load_config(path, environment={}),  # every check that needs no model
    "tenants": lambda path: read_tenants(str(path)),
    "format": lambda path: load_format(path).description,
    "messages": lambda path: load_format(path, of_messages=True).description,
    "question": read_question,
}


@pytest.mark.parametrize("block", examples(*LOADERS))
def test_files_load(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the questions of their page, which they may name."""
    file = tmp_path / "example.toml"
    file.write_text(block.text)
    for each in blocks():
        if each.page == block.page and each.kind == "question":
            name = tomllib.loads(each.text)["name"]
            (tmp_path / f"{name}.toml").write_text(each.text)
    monkeypatch.chdir(tmp_path)
    assert LOADERS[block.kind](file)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.toml")), ids=lambda path: path.name)
def test_example_files_load_and_are_listed(path: Path) -> None:
    assert load_config(path, environment={}).sessions
    assert f"({path.name})" in page("examples/README.md")


def test_the_quickstart_file_is_read_by_the_quickstart_format(tmp_path: Path) -> None:
    """The block of comma separated lines, through the declared format, to bars."""
    (form,) = [b.text for b in blocks() if b.page == "docs/quickstart.md" and b.kind == "format"]
    (lines,) = [b.text for b in blocks() if b.page == "docs/quickstart.md" and b.text.startswith("time,open")]
    (tmp_path / "bars.toml").write_text(form)
    (tmp_path / "bars.csv").write_text(lines)
    bars = list(read_records(tmp_path / "bars.csv", load_format(tmp_path / "bars.toml")))
    assert [bar.key for bar in bars] == ["DEMO:ACME"] * 2
    assert all(isinstance(bar, Bar) and bar.interval_ns == 60 * 10**9 for bar in bars)


def test_every_key_of_a_format_is_described() -> None:
    text = page("docs/formats.md")
    for struct, table in ((FileFormat, ""), (RecordFormat, ""), (TimeFormat, "time.")):
        for name in (each.encode_name for each in msgspec.structs.fields(struct)):
            assert f"`{table}{name}`" in text or name in ("description", "time"), name


def test_shipped_formats_are_named() -> None:
    for file in ROOT.glob("feeds/formats/messages/*.toml"):
        load_format(file, of_messages=True)
        assert f"`{file.stem}`" in page("docs/formats.md")
    for file in ROOT.glob("feeds/formats/*.toml"):
        load_format(file)
        assert f"`{file.stem}`" in page("docs/formats.md")


@pytest.mark.parametrize(("name", "rows"), FIELDS.findall(page("docs/protocol.md")))
def test_tables_list_exactly_the_members(name: str, rows: str) -> None:
    """Each struct's own members; the common members of records have their own table."""
    struct = Header if name == "Header" else getattr(market_data, name, None) or getattr(query_messages, name)
    common = {f.name for f in msgspec.structs.fields(Record)} if Record in struct.__bases__ else set()
    members = {f.name for f in msgspec.structs.fields(struct)} - common
    listed = [name for row in rows.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(members)


def test_the_table_of_a_session_s_life_is_the_one_that_runs() -> None:
    """`python -m daemon.session_life` prints it."""
    shown = page("docs/lifecycle.md").partition("<!-- session:begin -->\n")[2]
    assert shown.partition("<!-- session:end -->")[0] == session_life.table()


def test_the_table_of_metrics_is_the_catalogue() -> None:
    """`python -m tests.docs.metrics_table` writes it."""
    assert metrics_table.PLACE.committed() == metrics_table.table()


def test_the_table_of_kinds_of_faults_is_the_one_that_runs() -> None:
    """`python -m tests.docs.kinds_table` writes it."""
    assert kinds_table.PLACE.committed() == kinds_table.table()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("docs/operations.md", [*REASONS, *STAGES]),
        ("docs/protocol.md", [*get_args(Code), *get_args(Flag)]),
        # patterns stand among the sessions
        ("docs/configuration.md", [n for n in Config.__struct_fields__ if n != "patterns"]),
    ],
)
def test_closed_sets_are_complete(name: str, words: list[str]) -> None:
    text = page(name)
    assert [word for word in words if not re.search(rf"`\[*{word}[`.\]]", text)] == []


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings, a repeated one numbered, and anchors written as HTML."""
    prose = FENCE.sub("", text)
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)", prose))
    for title in re.findall(r"^#+ (.+)$", prose, re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        repeats = sum(1 for other in found if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other))
        found.add(f"{anchor}-{repeats}" if repeats else anchor)
    return found


def links(text: str) -> list[str]:
    """Targets of inline links, images, link definitions and HTML."""
    prose = FENCE.sub("", text)
    definitions = [target for _, target in DEFINITION.findall(prose)]
    return [*INLINE_LINK.findall(prose), *definitions, *HTML_LINK.findall(prose)]


def is_broken(name: str, link: str) -> bool:
    if link.startswith(("http://", "https://", "mailto:")):
        return False
    path, _, anchor = link.partition("#")
    target = (ROOT / name).parent / path if path else ROOT / name
    if not target.exists() or not anchor:
        return not target.exists()
    return target.suffix != ".md" or anchor not in anchors(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_links_and_images_lead_to_files_and_headings_that_exist(name: str) -> None:
    text = page(name)
    assert [link for link in links(text) if is_broken(name, link)] == []
    defined = {label.lower() for label, _ in DEFINITION.findall(text)}
    assert {label.lower() for label in REFERENCE.findall(FENCE.sub("", text))} <= defined


def test_broken_links_of_every_form_are_found() -> None:
    forms = (
        '[a](none.md) ![b](none.png) [c][d]\n\n[d]: none.txt\n<img src="none.svg">\n# A `b`, c\n# A `b`, c\n'
    )
    assert links(forms) == ["none.md", "none.png", "none.txt", "none.svg"]
    assert all(
        is_broken("README.md", link) for link in [*links(forms), "#none", "docs/models.md#none", "Makefile#a"]
    )
    assert anchors(forms) == {"a-b-c", "a-b-c-1"}


@pytest.mark.parametrize("name", NAMES)
def test_repository_paths_in_the_text_exist(name: str) -> None:
    assert [path for path in PATH.findall(page(name)) if not (ROOT / path).exists()] == []


def test_every_claim_about_a_test_names_the_test() -> None:
    paragraphs = [(name, p) for name in NAMES for p in re.split(r"\n\s*\n|\n(?=[-*|] )", page(name))]
    claims = [(name, p) for name, p in paragraphs if CLAIM.search(p)]
    assert claims
    assert [(name, p) for name, p in claims if not TEST_NAME.search(p)] == []


def test_every_test_that_a_page_names_exists() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}
    named = [found for name in NAMES for found in TEST_NAME.findall(page(name))]
    assert named
    for file, function in named:
        defined = {path for path, text in files.items() if f"def {function}(" in text}
        assert (ROOT / file in defined) if file else defined, function


def commands(language: str = "sh") -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command line shown, and of `foretick ...` in running text."""
    for block in blocks():
        if block.language == language:
            yield from ((block.page, line.split(" #")[0].split()) for line in block.text.splitlines() if line)
    for name in NAMES:
        for words in re.findall(r"`(foretick [^`]+)`", FENCE.sub("", page(name))):
            yield name, words.split()


def test_foretick_commands_and_their_options_exist() -> None:
    """Resolved through click, like the shell would."""
    shown = [(name, words) for name, words in commands() if words[0] == "foretick"]
    assert {words[1] for _, words in shown} >= {"run", "check", "demo", "replay", "ask", "dashboards"}
    for name, words in shown:
        command: click.Command = main
        rest = words[1:]
        context = click.Context(main)
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(context, rest.pop(0))
            assert found is not None, f"{name}: {' '.join(words)}"
            command = found
        if name.startswith("docs/measurements/"):
            continue  # a record of what was run at its commit
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in rest if word.startswith("--")} <= known, f"{name}: {' '.join(words)}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", page("Makefile"), re.M))
    shown = {words[1] for _, words in commands() if words[0] == "make"}
    assert {"run", "test"} <= shown <= targets


def test_settings_named_in_the_text_exist() -> None:
    """`table.key` in running text or after --set is a key of the configuration."""
    reference = page("docs/configuration.md")
    known = set()
    for table, rows in re.findall(r"^## `\[+([\w.]+)\]+`\n(.*?)(?=^## |\Z)", reference, re.M | re.S):
        known |= {f"{table}.{key}" for key in re.findall(r"^\| `(\w+)`", rows, re.M)}
    tables = "|".join({key.split(".")[0] for key in known})
    for name in NAMES:
        named = re.findall(rf"(?:`|--set )((?:{tables})\.[a-z_.]+)(?==|`| )", page(name))
        assert [key for key in named if key not in known and not key.endswith((".py", ".csv", ".toml"))] == []


def test_the_changelog_has_this_version() -> None:
    version = tomllib.loads(page("pyproject.toml"))["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", page("CHANGELOG.md"), re.M)
