"""`foretick train --base`: loads a released model, trains an adapter, and says how good it has become."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.architectures import ModelError
from engine.model.chat_format import PromptFormat, turn_ends
from engine.model.loading import end_ids_of
from engine.model.lora import write_adapter
from engine.model.revision import revision_of
from tapes.generate import EVALUATION
from tapes.rules import RULES
from training.evaluate import Report, score
from training.sources import Asked, Generated, Setting, collect
from training.tape_prompts import TapePrompts
from training.teach_run import reading_dtype
from training.tokenizer import NONE
from training.tune import Run, TunedReader, TunePlan, nats, own_texts
from training.tuned_model import TunedModel

_FIVE = 5
"""The paper's questions, which come first."""
_OWN_TEXTS, _OWN_TOKENS = 96, 192
_HELD_OUT, _HELD_OUT_TOKENS = 12, 384
_SCALE = 2.0
_SAVED_EVERY = 25
_EVALUATED = 1
"""Seed of held-out tapes, as `foretick evaluate` draws them by default."""


@dataclass(frozen=True)
class Loaded:
    """A model to be trained. ``held_out``: texts that nothing is trained on."""

    directory: Path
    revision: str
    model: TunedModel
    prompts: TapePrompts
    none: int
    texts: list[list[int]]
    held_out: list[list[int]]


def load(directory: Path, plan: TunePlan, texts: list[list[int]] | None = None) -> Loaded:
    """Load a model directory; without ``texts`` the model says some first. Raises ModelError."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} is not a model directory: it has no config.json")
    dtype = reading_dtype()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=dtype).eval()
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory} cannot be loaded: {error}") from error
    if getattr(model.config, "foretick", None):
        raise ModelError(f"{directory.name} reads compact lines, no words: it is trained without --base")
    ends = end_ids_of(model) | turn_ends(tokenizer)
    prompt = PromptFormat.of(tokenizer, end_ids=ends)
    if not prompt.stop_ids:
        raise ModelError(f"{directory.name} names no token that ends an answer")
    end = min(turn_ends(tokenizer) or prompt.stop_ids)
    prompts = TapePrompts(prompt, plan.lines, Asked(RULES[:_FIVE]), end)
    if texts is None:
        begin, needed = _begin_of_chat(prompt), -(-plan.steps // plan.talk_every)
        texts = own_texts(model, begin, plan.seed, min(_OWN_TEXTS, needed), len(begin) + _OWN_TOKENS)
    tuned = TunedModel(model, rank=plan.rank, scale=_SCALE, seed=plan.seed, upper=plan.upper)
    found = revision_of(directory)
    return Loaded(directory, found, tuned, prompts, prompt.choice(NONE), texts, _held_out(prompt))


def _begin_of_chat(prompt: PromptFormat) -> list[int]:
    """The tokens of a chat up to what its user says."""
    mark = "\x00"
    return prompt.encode(prompt.chat([("user", mark)]).partition(mark)[0]) or prompt.encode("\n")


def _held_out(prompt: PromptFormat) -> list[list[int]]:
    """English prose that every Python has, the reference of its language."""
    tokens = prompt.encode("\n\n".join(pydoc_data.topics.topics.values()))
    apart = max(len(tokens) // _HELD_OUT, 1)
    return [tokens[at * apart :][:_HELD_OUT_TOKENS] for at in range(_HELD_OUT)]


def begin(base: Path, plan: TunePlan, resume: Path | None) -> tuple[Loaded, Run]:
    """A run from its beginning, or from a checkpoint. Raises ModelError."""
    state: dict[str, Any] | None = None
    if resume is not None:
        try:
            state = torch.load(resume, weights_only=True)
            texts = state["texts"]
        except Exception as error:  # whatever torch raises of a file that is broken, or another one
            raise ModelError(f"{resume} is no checkpoint of an adapter: {error}") from error
    loaded = load(base, plan, None if state is None else texts)
    run = Run(loaded.model, loaded.prompts, plan, loaded.texts, loaded.revision)
    if state is not None:
        run.restore(state)
    return loaded, run


def expected(loaded: Loaded, run: Run) -> str:
    """What a run is, before it starts."""
    plan, model = run.plan, loaded.model
    sizes = [each.numel() for each in model.model.parameters() if not each.requires_grad]
    learnt = sum(each.numel() for each in model.learnt().values())
    tokens = run.tapes * len(run.first.pack.ids) + 2 * len(run.texts[0]) // plan.talk_every
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"{loaded.directory.name}: {sum(sizes) / 1e6:.1f}M weights in {dtype}; "
        f"{len(model.loras)} matrices get a LoRA of rank {plan.rank}, {learnt / 1e6:.2f}M weights to learn.\n"
        f"{plan.steps:,} steps of about {tokens:,} tokens, {plan.steps * tokens / 1e6:.1f}M in all: each has "
        f"{run.tapes} tapes of {plan.window} bars in {plan.lines} lines with "
        f"some {len(run.first.queries)} questions, none in the first {plan.reading:,} steps, and every "
        f"{plan.talk_every} steps a text."
    )


def carry_out(
    loaded: Loaded, run: Run, out: Path, advance: Callable[[int, str], None]
) -> Iterator[dict[str, Any]]:
    """Train to the end of the plan; yields what is written to log.jsonl. The adapter is in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    began = tokens = 0.0
    with (out / "log.jsonl").open("a", encoding="utf-8") as file:
        for log in run.train():
            began, tokens = log["seconds"], log["tokens"]
            speed = f"{tokens / max(began, 1e-9):,.0f} tokens/s"
            advance(run.step, f"{_said(log)}, KL {log['divergence']:.3f}, {speed}")
            file.write(json.dumps(log) + "\n")
            file.flush()
            if run.step % _SAVED_EVERY == 0 or run.step == run.plan.steps:
                run.save(out / "last.pt")
                write_adapter(loaded.model.adapter(out, loaded.revision), loaded.directory.name)
            yield log


def _said(log: dict[str, Any]) -> str:
    """How a step went: its answers' mean entropy, or where it only read, how many margins it got right."""
    kind = "entropy" if log["entropy"] else "signs"
    return f"{kind} {sum(log[kind].values()) / max(len(log[kind]), 1):.3f}"


def measured(
    loaded: Loaded, plan: TunePlan, labels: int, advance: Callable[[float], None] = lambda share: None
) -> Report:
    """Scores on held-out tapes from wider ranges, in fresh windows, and the held-out text's perplexity."""
    reader = TunedReader(loaded.model, loaded.prompts, loaded.none)
    source, setting = Generated(_EVALUATED, EVALUATION), Setting("terse", 1, plan.window)
    answers = collect(reader, source, setting, labels, progress=advance)
    with loaded.model.untuned():
        before = exp(nats(loaded.model, loaded.held_out))
    after = exp(nats(loaded.model, loaded.held_out))
    data = {**source.described, "perplexity before": round(before, 3), "perplexity after": round(after, 3)}
    scores = {setting.name: [score(each) for each in answers]}
    return Report(loaded.directory.name, loaded.revision, data, scores, plan.lines)


def write_report(out: Path, report: Report) -> None:
    """As `foretick evaluate --json` does."""
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def means(report: Report) -> str:
    """The mean of the questions with choices, of numbers, and the perplexities."""
    (scores,) = report.settings.values()
    *rules, exact = [each.balanced.share for each in scores]
    before, after = (float(report.data[f"perplexity {when}"]) for when in ("before", "after"))
    return (
        f"questions {100 * sum(rules) / len(rules):.1f} % balanced, exact value {100 * exact:.1f} %, "
        f"perplexity of held-out text {before:.2f} before and {after:.2f} after "
        f"({100 * (after / before - 1):+.1f} %)"
    )


def tune(base: Path, out: Path, plan: TunePlan, resume: Path | None, labels: int, console: Any) -> None:
    """Train an adapter of ``base`` into ``out``, and show what it is worth. Raises ModelError."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from training.evaluate import tables

    loaded, run = begin(base, plan, resume)
    console.print(expected(loaded, run))
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=plan.steps)

        def advance(step: int, said: str) -> None:
            progress.update(task, completed=step, description=said)

        for _ in carry_out(loaded, run, out, advance):
            pass
        share = partial(progress.update, progress.add_task("evaluation", total=1.0))
        report = measured(loaded, plan, labels, lambda done: share(completed=done))
    write_report(out, report)
    for table in tables(report):
        console.print(table)
    console.print(f"{means(report)}\nadapter of step {run.step} in {out}")
