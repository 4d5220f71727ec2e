"""The recipes of CONTRIBUTING.md: the first three are performed, and what the others name exists."""

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.test_examples import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPE = re.compile(r"<!-- recipe: (\S+)(?: after: (.*?))? -->\n```(?:python|text)\n(.*?)^```$", re.M | re.S)
RECIPES = [(path, after, text) for path, after, text in RECIPE.findall(PAGE)]
FEED = """
import asyncio, sys
from importlib.util import find_spec, module_from_spec

spec = find_spec("feeds.connectors")
spec.submodule_search_locations.append(sys.argv[1])
package = sys.modules["feeds.connectors"] = module_from_spec(spec)
spec.loader.exec_module(package)

from feeds.connector import SinkRoute
from foretick import Daemon, load_config
from tests.kit import MemorySink, until


async def main():
    sink = MemorySink()
    async with Daemon(load_config(sys.argv[2], {}), routes=[SinkRoute(sink, "answers.v1")]):
        await until(lambda: sink.sent)


asyncio.run(main())
"""
CONFIG = """
[model]
path = "untrained"
[bars]
interval = "100ms"
[[sessions]]
name = "made-up"
symbol = "V:UP"
[source]
kind = "pulse"
[source.pulse]
venue = "V"
symbol = "UP"
every = "20ms"
[query]
endpoint = ""
[http]
port = 0
[process]
mode = "inproc"
[recovery]
interval = "0s"
"""
PUBLISHING = """
from flash.publishing import PublishedValue, suppressed
from flash.question import Question

question = Question("q", "Well?", publish_when="answered")
values = [PublishedValue(1, text, None, None, 1.0) for text in ("yes", " ")]
assert [suppressed(question, each, None) for each in values] == [None, "unchanged"]
"""
METRIC = """
from metrics.export import exposition
from metrics.store import MetricStore

store = MetricStore.local({"session": ["a"]})
store.inc("foretick_naps_total", session="a")
assert b'foretick_naps_total{session="a"} 1.0' in exposition(store)
"""


def perform(path: Path, after: str, text: str) -> None:
    """Write a recipe's module, or insert its lines behind a line of a copy of the package."""
    if not after:
        path.write_text(text, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.count(after) == 1, f"{path.name} has no line {after!r}"
    lines.insert(lines.index(after) + 1, text.rstrip("\n"))
    path.write_text("\n".join(lines), encoding="utf-8")


def test_there_are_recipes_of_three_kinds() -> None:
    assert [path for path, _, _ in RECIPES] == [
        "feeds/connectors/pulse.py", "flash/question.py", "flash/publishing.py", "metrics/catalogue.py",
    ]  # fmt: skip


def test_the_feed_is_read_and_answered(tmp_path: Path) -> None:
    ((_, _, module),) = [each for each in RECIPES if each[0].startswith("feeds/")]
    perform(tmp_path / "pulse.py", "", module)
    (tmp_path / "foretick.toml").write_text(CONFIG)
    run("-c", FEED, str(tmp_path), str(tmp_path / "foretick.toml"))


@pytest.mark.parametrize(("package", "program"), [("flash", PUBLISHING), ("metrics", METRIC)])
def test_what_a_recipe_inserts_works(package: str, program: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    steps = [each for each in RECIPES if each[0].startswith(f"{package}/")]
    assert steps
    for path, after, text in steps:
        perform(tmp_path / path, after, text)
    run("-c", program, first=tmp_path)


def test_what_the_recipes_name_exists() -> None:
    """Files, and names of code with the file that the same step names."""
    named = re.findall(r"`([\w/]+/[\w./]*)`", PAGE)
    assert named
    assert [
        name for name in named if name != "feeds/connectors/pulse.py" and not (ROOT / name).exists()
    ] == []
