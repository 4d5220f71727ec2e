"""The command line. Each command is a module of this package, imported on use."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoints, entry_points, version

import click

COMMANDS = {
    "ask": "Ask a running daemon; the answer names its data version.",
    "audit": "Prove that a topic of answers is complete.",
    "check": "Check the file, model, tokenizer, topics and sockets.",
    "dlq": "List, show and send again what ended in the DLQ.",
    "demo": "Run the whole pipeline: no broker, no GPU, no download.",
    "explain": "Show what a published answer saw: records, tokens, settings.",
    "keys": "Make a pair of keys for encrypted ZeroMQ sockets.",
    "label": "Tell a running daemon the right choice of a past answer.",
    "mcp": "Serve a running daemon to an agent over stdio (MCP).",
    "questions": "List, add, change and remove standing questions of a running daemon.",
    "sessions": "List, add, change and remove sessions of a running daemon.",
    "replay": "Play a recorded file as if it were live.",
    "reproduce": "Derive a published answer again from its records in Kafka.",
    "run": "Run the daemon until SIGTERM.",
}
"""Module and its line in `foretick --help`; each module offers its click command as `command`."""


class Commands(click.Group):
    """Our commands, and those of packages above `daemon`, found through their entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return sorted({*COMMANDS, *_plugins().names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        if cmd_name in COMMANDS:
            command: click.Command = import_module(f"daemon.cli.{cmd_name}").command
            return command
        if cmd_name in _plugins().names:
            plugin: click.Command = _plugins()[cmd_name].load()
            return plugin
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and short helps, without importing our own commands."""
        rows: list[tuple[str, str]] = []
        for name in self.list_commands(ctx):
            plugin = None if name in COMMANDS else self.get_command(ctx, name)
            rows.append((name, plugin.get_short_help_str(80) if plugin else COMMANDS[name]))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _plugins() -> EntryPoints:
    return entry_points(group="foretick.commands")


@click.group(cls=Commands)
@click.version_option(version("foretick"))
def main() -> None:
    """Foretick: answers before the question."""
