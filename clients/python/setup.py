"""Builds the client from the daemon's own modules, so that both read and write the same structs.

The modules are copied under the name of the package: `daemon` and `feeds` may be others elsewhere.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TREE = Path(__file__).resolve().parents[2]
MODULES = {
    "daemon.audit.bar_table": "bar_table",
    "daemon.api.blocking": "blocking",
    "daemon.api.client": "client",
    "daemon.api.dealer": "dealer",
    "daemon.api.http_calls": "http_calls",
    "daemon.api.http_exchange": "http_exchange",
    "daemon.api.messages": "messages",
    "daemon.api.operations": "operations",
    "daemon.api.socket_calls": "socket_calls",
    "daemon.api.subscriptions": "subscriptions",
    "daemon.traces.recorded_trace": "recorded_trace",
    "daemon.traces.trace_context": "trace_context",
    "feeds.decimals": "decimals",
    "feeds.decoding": "decoding",
    "feeds.market_data": "records",
    "flash.question": "questions",
}
"""Modules of the tree, and their names in the package."""
ALLOWED = {*sys.stdlib_module_names, "foretick_client", "httpx2", "msgspec", "zmq"}
_FROM = re.compile(r"^( *)from (\S+) import", re.M)


def renamed(source: str) -> str:
    """A module's text, with its imports from the package. Raises ValueError for one that is not in it."""

    def replace(found: re.Match[str]) -> str:
        indent, name = found.groups()
        if name == "daemon.api":  # `from daemon.api import messages`
            return f"{indent}from foretick_client import"
        return f"{indent}from foretick_client.{MODULES[name]} import" if name in MODULES else found[0]

    made = _FROM.sub(replace, source)
    for node in ast.walk(ast.parse(made)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.partition(".")[0] not in ALLOWED:
                raise ValueError(f"the client must not import {name}")
    return made


class Build(build_py):
    """Adds the tree's modules to what is built."""

    def run(self) -> None:
        """Build."""
        super().run()
        for name, short in MODULES.items():
            source = (TREE / Path(*name.split("."))).with_suffix(".py").read_text("utf-8")
            target = Path(self.build_lib, "foretick_client", f"{short}.py")
            target.write_text(renamed(source), "utf-8")
        shutil.copy(TREE / "LICENSE", Path(self.build_lib, "foretick_client"))


VERSION = tomllib.loads((TREE / "pyproject.toml").read_text("utf-8"))["project"]["version"]
setup(version=VERSION, cmdclass={"build_py": Build})
