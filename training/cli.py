"""`foretick train`, `evaluate` and `calibrate`. Heavy modules are imported on use."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import click

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--out", type=_DIRECTORY, required=True, help="Directory of the checkpoints.")
@click.option(
    "--steps", type=click.IntRange(1), default=9000, show_default=True, help="Steps, cooldown included."
)
@click.option(
    "--cooldown",
    type=click.IntRange(0),
    default=2500,
    show_default=True,
    help="Last steps, over which the rate falls to nothing.",
)
@click.option(
    "--short",
    type=click.IntRange(0),
    default=1500,
    show_default=True,
    help="First steps, with windows of 32 bars.",
)
@click.option(
    "--tokens", type=click.IntRange(256), default=8192, show_default=True, help="Tokens of a worker's step."
)
@click.option("--hidden", type=click.IntRange(20), default=160, show_default=True, help="Width of the model.")
@click.option("--layers", type=click.IntRange(1), default=6, show_default=True, help="Layers of the model.")
@click.option("--heads", type=click.IntRange(1), default=5, show_default=True, help="Heads of a layer.")
@click.option(
    "--inner", type=click.IntRange(8), default=416, show_default=True, help="Width of the feed-forward part."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of weights and tapes."
)
@click.option(
    "--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes, one thread each."
)
@click.option("--resume", type=_FILE, help="Checkpoint to continue from, such as last.pt.")
@click.option("--export", "directory", type=_DIRECTORY, help="Write a transformers directory at the end.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of the exported weights.",
)
def train(
    out: Path, workers: int, resume: Path | None, directory: Path | None, dtype: str, **options: Any
) -> None:
    """Train the tape model on generated tapes, from the beginning or from a checkpoint.

    Checkpoints are `last.pt` (every 100 steps) and `stable.pt` (before the cooldown). Equal seeds, steps and
    workers make equal models. A checkpoint that has all --steps is not trained further, only exported.
    """
    if options["hidden"] % options["heads"] or options["hidden"] // options["heads"] % 2:
        raise click.UsageError("--hidden must be a multiple of --heads, and the quotient even")
    import torch
    from torch.multiprocessing.spawn import spawn

    from training.export import export
    from training.train import load

    out.mkdir(parents=True, exist_ok=True)
    arguments = (out, workers, resume, options, _free_port())
    if workers == 1:
        _work(0, *arguments)
    else:
        spawn(_work, arguments, workers)  # type: ignore[no-untyped-call]  # torch's own has no annotation
    if directory is not None:
        done = (
            resume if resume is not None and load(resume)[1]["step"] >= options["steps"] else out / "last.pt"
        )
        model, state = load(done)
        try:
            export(model, directory, getattr(torch, dtype))
        except ValueError as error:
            raise click.ClickException(str(error)) from None
        click.echo(f"step {state['step']} written to {directory}")


def _work(
    rank: int, out: Path, workers: int, resume: Path | None, options: dict[str, Any], port: int
) -> None:
    """One worker's training; the first shows the progress."""
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from training.model import Shape
    from training.train import Plan
    from training.train import train as steps

    torch.set_num_threads(1)
    if workers > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.distributed.init_process_group("gloo", rank=rank, world_size=workers)
    plan = Plan(
        options["steps"], options["cooldown"], options["short"], options["seed"], tokens=options["tokens"]
    )
    shape = Shape(options["hidden"], options["layers"], options["heads"], options["inner"])
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, disable=rank > 0) as progress:
        task = progress.add_task("", total=plan.steps)
        for log in steps(plan, out, shape, resume, rank, workers):
            mean = sum(log["loss"].values()) / len(log["loss"])
            rate = log["tokens"] / max(log["seconds"], 1)
            progress.update(task, completed=log["step"], description=f"loss {mean:.3f}, {rate:,.0f} tokens/s")
    if workers > 1:
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
