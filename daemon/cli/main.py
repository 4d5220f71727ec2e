"""The command line. Each command is a module of this package, imported on use."""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeGuard

import click

from support import plugins

COMMANDS = {
    "ask": "Ask a running daemon; the answer names its data version.",
    "audit": "Prove that a topic of answers is complete.",
    "backfill": "Ask the past: a question at every version of a topic or a file.",
    "bench": "Benchmarks: every figure next to a reference measured in the same run.",
    "calibrate": "Fit probabilities and choice sets of a model's answers.",
    "check": "Check the file, model, tokenizer, topics and sockets.",
    "dashboards": "Grafana dashboards as code.",
    "demo": "Run the whole pipeline: no broker, no GPU, no download.",
    "dlq": "List, show and send again what ended in the DLQ.",
    "doctor": "Look at machine, brokers, files and daemon: verdicts and next steps.",
    "dump": "Write a support bundle, without secrets.",
    "evaluate": "Score a model's answers against computed labels.",
    "explain": "Show what a published answer saw: records, tokens, settings.",
    "feasible": "Find a schedule that meets a TTFT bound, or show that none does.",
    "feed": "Test which faults of a feed are found, in your own recording.",
    "history": "Write published answers as a table: CSV, JSON lines, Parquet.",
    "init": "Write a format and a configuration for a file, a topic or a stream.",
    "install": "Install a systemd unit, a configuration and a directory for secrets.",
    "keys": "Make a pair of keys for encrypted ZeroMQ sockets.",
    "label": "Tell a running daemon the right choice of a past answer.",
    "mcp": "Serve a running daemon to an agent over stdio (MCP).",
    "model": "Make a model directory of a GGUF file.",
    "plan": "Say what a device carries of a configuration.",
    "profile": "Measure recompute and swap on this device.",
    "questions": "List, add, change, install and remove standing questions of a running daemon.",
    "replay": "Play a recorded file as if it were live.",
    "reproduce": "Derive a published answer again from its records.",
    "run": "Run the daemon until SIGTERM.",
    "sessions": "List, add, change and remove sessions of a running daemon.",
    "simulate": "Compare scheduling policies in simulated time.",
    "teach": "Teach the tape model a question of your own, as a question pack.",
    "top": "Watch a running daemon in the terminal: sessions, queues, latencies.",
    "trace": "Show where the time of a recent answer or request went.",
    "train": "Train the tape model on generated tapes.",
}
"""The lines of `foretick --help`, which loads no command.

A command is found by its entry point, or else is a module of this package that offers it as `command`.
"""
EXTRAS = {
    "grafana_client": "grafana",
    "matplotlib": "lab",
    "mcp": "mcp",
    "sklearn": "train",
    "textual": "top",
    "threadpoolctl": "bench",
}
"""Modules that a command may lack, and the extra of the package that installs each."""
_NO_ROOM = "failed to map segment"
"""Of the dynamic linker, where a limit of this process leaves no room for a library."""


class Commands(click.Group):
    """Our commands, and those of packages above `daemon`, found through their entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return sorted({*COMMANDS, *plugins.found(plugins.COMMANDS, COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        command: click.Command | None = None
        if entry := plugins.found(plugins.COMMANDS, COMMANDS).get(cmd_name):
            command = plugins.loaded(entry, "click.Command", _is_command)
        elif entry := plugins.own(plugins.COMMANDS).get(cmd_name):
            command = entry.load()
        elif cmd_name in COMMANDS:
            command = import_module(f"daemon.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; if it needs an extra that is not installed, name that and exit with status 2."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name not in EXTRAS:
                raise
            command = f"foretick {ctx.invoked_subcommand}"
            click.echo(f"`{command}` needs {name}: pip install 'foretick[{EXTRAS[name]}]'", err=True)
            sys.exit(2)
        except (ImportError, OSError) as error:
            if _NO_ROOM not in str(error):
                raise
            click.echo(f"no memory for the libraries: {error} (is there a limit, `ulimit -v`?)", err=True)
            sys.exit(2)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program; if a plug-in cannot be used, say so and exit with status 2."""
        try:
            return super().main(*args, **options)
        except plugins.PluginError as error:
            click.echo(str(error), err=True)
            sys.exit(2)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and short helps, without importing a command."""
        rows = [(name, COMMANDS.get(name, "")) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _is_command(found: object) -> TypeGuard[click.Command]:
    return isinstance(found, click.Command)


@click.group(cls=Commands)
@click.version_option(version("foretick"))
def main() -> None:
    """Foretick: answers before the question."""
