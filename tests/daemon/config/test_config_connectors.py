"""A connector is one module: its tables, checks and reference page follow from it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONNECTOR = '''
from typing import Annotated

from msgspec import Meta

from feeds.connector import SettingError, Finding, SourceConnector


class PipeConnector(SourceConnector, frozen=True):
    """Reads a pipe."""

    path: Annotated[str, Meta(min_length=1, description="the pipe")]

    def bound(self):
        return {"path": "tcp://0.0.0.0:1"}

    def check(self):
        yield Finding("path", "no such pipe", ok=False)

    def open(self, name, stop_timeout_s):
        raise SettingError("path", f"{name} cannot be opened")


SOURCE = PipeConnector
'''
PROGRAM = """
import sys
from importlib.util import find_spec, module_from_spec

spec = find_spec("feeds.connectors")
spec.submodule_search_locations.append(sys.argv[1])
package = sys.modules["feeds.connectors"] = module_from_spec(spec)
spec.loader.exec_module(package)

from daemon.config.checks import connectors_of, exposure_warnings
from daemon.config.load import ConfigError, load_config
from daemon.config.key_reference import configuration_reference
from feeds.connector import SettingError
from daemon.gateway.connectors import make_sources

session = [{"name": "a", "symbol": "V:A"}]
config = load_config(None, {"FORETICK_SOURCE__PIPE__PATH": "p"}, {"source.kind": "pipe", "sessions": session})
assert config.source.connector.path == "p"
assert [(table, *c.check()) for table, c in connectors_of(config).items()][0][1].key == "path"
assert [warning.key for warning in exposure_warnings(config)] == ["source.pipe.path"]
assert "## `[source.pipe]`\\n\\nReads a pipe." in configuration_reference()
for call, error in ((lambda: make_sources(config), SettingError), (
    lambda: load_config(None, {}, {"source.kind": "pipe", "sessions": session}), ConfigError
)):
    try:
        call()
    except error as found:
        print(found)
"""


def test_a_module_is_all_that_a_new_feed_needs(tmp_path: Path) -> None:
    (tmp_path / "pipe.py").write_text(CONNECTOR)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "source.pipe.path: pipe cannot be opened",
        'source.pipe: source.kind is "pipe", so the table [source.pipe] is needed, with path',
    ]
