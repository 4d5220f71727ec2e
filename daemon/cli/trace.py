"""`foretick trace`: where the time of one answer or request went."""

import time

import click
import msgspec
from rich.console import Console

from daemon.cli.options import endpoint_option, query
from daemon.top.panels import bars
from daemon.top.snapshot import shown
from daemon.traces.recorded_trace import Trace


@click.command("trace")
@click.argument("answer")
@endpoint_option
@click.option("--json", "as_json", is_flag=True, help="one JSON object a line")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="seconds")
def command(answer: str, endpoint: str, as_json: bool, timeout: float) -> None:
    """Show the stages of ANSWER, by its `answer_id`, or of a request, by its trace id, as a waterfall.

    A daemon keeps those of its newest answers and requests (traces.kept).
    """
    traces = query(endpoint, lambda client: client.trace(answer), timeout).traces
    console = Console(highlight=False, soft_wrap=True)
    for each in traces:
        if as_json:
            click.echo(msgspec.json.encode(each).decode())
        else:
            click.echo(described(each))
            console.print(bars(each.spans))


def described(trace: Trace) -> str:
    """What it is, in a few lines."""
    seconds, ns = divmod(trace.began_at, 1_000_000_000)
    began = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ns // 1000:06}Z"
    version = f", version {trace.data_version}" if trace.data_version else ""
    known = {
        "session": trace.session and f"{trace.session}{version}",
        "question": trace.question,
        "answer": trace.answer_id,
        "tokens": f"{trace.computed_tokens} computed, {trace.reused_tokens} reused",
        "cached": "ready before it was asked" if trace.cached else "",
        "failed": trace.error,
        "linked": ", ".join(trace.links),
    }
    head = f"{trace.kind} {trace.trace_id}, {shown(trace.duration_ns / 1e9)} from {began}"
    return "\n".join([head, *(f"  {name:<9}{value}" for name, value in known.items() if value)])
