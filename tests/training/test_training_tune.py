"""`foretick train --base`: packed prompts are the daemon's, a run resumes to the bit, and it learns."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn import functional
from transformers import AutoModelForCausalLM

from daemon.config.schema import Config, ModelConfig
from daemon.engine.build import load as load_for_daemon
from engine.model.embedded import build_model, build_tokenizer
from engine.model.lora import read_adapter
from engine.model.terse import Lines
from tapes.generate import EVALUATION
from tapes.rules import RULES, UNDEFINED
from tests.kit import tolerance
from training import tune_run
from training.cli import evaluate, train
from training.prompt_pack import Branch, pack
from training.served import Served
from training.sources import Asked, Generated, Setting
from training.tape_prompts import Prompts
from training.tune import TunedReader, TunePlan, divergence, learn, own_texts
from training.tune_run import Loaded, begin

CHATML = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
PLAN = TunePlan(4, 1, tokens=1500, window=32, cuts=3, rank=4, talk_every=2)
SETTING = Setting("terse", 1, 32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few texts, and float32 on any machine."""
    monkeypatch.setattr(tune_run, "reading_dtype", lambda: torch.float32)
    for name, value in {"_OWN_TEXTS": 3, "_OWN_TOKENS": 12, "_HELD_OUT": 2, "_HELD_OUT_TOKENS": 16}.items():
        monkeypatch.setattr(tune_run, name, value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that chats, as far as its template goes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    shape = {"hidden": 48, "layers": 3, "heads": 3, "kv_heads": 1, "vocabulary": 2048, "seed": 1}
    model = build_model(**shape)
    del model.config.foretick_untrained
    model.save_pretrained(path)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    return path


def begun(base: Path, plan: TunePlan = PLAN) -> tuple[Loaded, tune_run.Run]:
    return begin(base, plan, None)


def moved(loaded: Loaded) -> None:
    """B is no longer zeros."""
    generator = torch.Generator().manual_seed(5)
    for each in loaded.model.loras.values():
        each.b.data = torch.randn(each.b.shape, generator=generator) * 0.3


def test_a_pack_has_the_logits_of_prompts_one_by_one(base: Path) -> None:
    """Each branch against the dense forward of its whole prompt."""
    loaded, _ = begun(base)
    moved(loaded)
    rng = np.random.default_rng(3)

    def drawn(count: int) -> list[int]:
        return rng.integers(3, 2000, count).tolist()

    tape = drawn(40)
    asked = [(12, 5, 2), (12, 3, 1), (30, 4, 3), (40, 6, 2)]
    branches = [Branch(seen, drawn(question), drawn(answer)) for seen, question, answer in asked]
    found = pack(tape, branches)
    logits, _ = loaded.model(found, found.rows)
    dense = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    loaded.model.adapter(Path("unused"), "").merge(dict(dense.named_parameters()))
    for number, (seen, question, answer) in enumerate(branches):
        prompt = [*tape[:seen], *question, *answer[:-1]]
        with torch.no_grad():
            expected = dense(input_ids=torch.tensor([prompt])).logits[0, -len(answer) :]
        own = found.branch == number
        assert found.targets[own].tolist() == answer
        tolerance.assert_sums(logits[own].detach(), expected, width=2000)


def plain_loss(loaded: Loaded, dense: Any, prompts: Prompts) -> torch.Tensor:
    """The mean cross entropy of a pack's answers, each prompt read by itself with W + scale B A."""
    weights = dict(dense.named_parameters())
    for name, lora in loaded.model.loras.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + lora.scale * lora.b @ lora.a
    found, entropy = prompts.pack, []
    for number in range(len(prompts.queries)):
        own = found.branch == number
        rows, targets = found.rows[own], found.targets[own]
        (part,) = (each for each in found.parts if each.start <= int(rows[0]) < each.stop)
        start = int(rows[0])
        while start > part.start and found.positions[start] > part.seen:
            start -= 1
        prompt = torch.cat((found.ids[: part.seen], found.ids[start : int(rows[-1]) + 1]))
        logits = torch.func.functional_call(dense, weights, kwargs={"input_ids": prompt[None]}).logits[0]
        entropy.append(functional.cross_entropy(logits[-len(targets) :], targets, reduction="none"))
    return torch.cat(entropy).mean()


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("lines", ["decimal", "compact"])
def test_gradients_are_those_of_prompts_one_by_one(base: Path, lines: Lines, upper: int) -> None:
    """Of all layers, and of the last one alone, below which nothing is computed backward."""
    loaded, run = begun(base, replace(PLAN, lines=lines, upper=upper))
    assert len(loaded.model.loras) == 7 * (upper or 3)
    moved(loaded)
    prompts = run.prompts.of(*run.drawn(0), range(6))
    learnt = {name: each for name, each in loaded.model.learnt().items() if name != "measures"}
    logits, _ = loaded.model(prompts.pack, prompts.pack.rows)
    found = torch.autograd.grad(functional.cross_entropy(logits, prompts.pack.targets), learnt.values())
    dense = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").requires_grad_(False)
    expected = torch.autograd.grad(plain_loss(loaded, dense, prompts), learnt.values())
    for name, one, other in zip(learnt, found, expected, strict=True):
        assert float(other.abs().max()) > 0, name
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def apart(loaded: Loaded, texts: list[list[int]]) -> float:
    """The mean divergence from the model as it was, over texts."""
    with torch.no_grad():
        return float(np.mean([float(divergence(loaded.model, each)) for each in texts]))


def test_the_divergence_is_that_of_two_dense_models(base: Path) -> None:
    """In nats a token, by its definition and in float64: the model as it was beside the merged one."""
    loaded, run = begun(base)
    text = run.texts[0]
    assert apart(loaded, [text]) == pytest.approx(0, abs=1e-7)
    moved(loaded)
    before, after = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64) for _ in range(2))
    loaded.model.adapter(Path("unused"), "").merge(dict(after.named_parameters()))
    with torch.no_grad():
        p, q = (
            each(input_ids=torch.tensor([text])).logits[0].softmax(-1).numpy() for each in (before, after)
        )
    assert apart(loaded, [text]) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-3)


def test_its_own_texts_keep_it_talking(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held to its own texts, it stays near itself on texts it was not trained on, and still learns."""
    monkeypatch.setattr(tune_run, "_OWN_TEXTS", 16)
    monkeypatch.setattr(tune_run, "_OWN_TOKENS", 48)
    plan = replace(PLAN, steps=16, cooldown=4, warm=3, cuts=2, learning_rate=1e-2, talk_every=1)
    held_out = own_texts(AutoModelForCausalLM.from_pretrained(base), [1, 4], 99, 8, 50)
    found = {}
    for talk in (0.0, 4.0):
        loaded, run = begun(base, replace(plan, talk=talk))
        run.balance.frequency[:] = 0.5
        means = [np.mean(list(log["entropy"].values())) for log in run.train()]
        assert np.mean(means[-3:]) < 0.8 * np.mean(means[:3])
        found[talk] = apart(loaded, held_out)
    assert found[4.0] < 0.5 * found[0.0]


def test_prompts_and_logits_are_those_that_are_served(base: Path, tmp_path: Path) -> None:
    """The model in training and the adapter on the engine, asked about the same bars of held-out tapes."""
    loaded, run = begun(base)
    moved(loaded)
    tune_run.write_adapter(loaded.model.adapter(tmp_path / "a", loaded.revision), "tiny")
    served = Served.load(base, "float32", "decimal", Asked(RULES[:5]), tmp_path / "a")
    reader = TunedReader(loaded.model, loaded.prompts, loaded.none)
    drawn = next(Generated(1, EVALUATION).batches(run.prompts.vocabulary, 32, 32))
    cuts, wanted = np.array([29, 31]), np.arange(6)
    mine = list(reader.read(drawn, SETTING, cuts, wanted, np.random.default_rng(0)))
    theirs = {
        each.question: each for each in served.read(drawn, SETTING, cuts, wanted, np.random.default_rng(0))
    }
    assert len(mine) == 6
    packed = run.first.pack
    size = float(loaded.model(packed, packed.rows)[0].detach().abs().max())
    for each in mine:
        other = theirs[each.question]
        place = {key: n for n, key in enumerate(zip(other.tape.tolist(), other.bar.tolist(), strict=True))}
        rows = [place[key] for key in zip(each.tape.tolist(), each.bar.tolist(), strict=True)]
        if each.question == 5:
            assert each.right is not None
            assert other.right is not None
            assert each.right.tolist() == other.right[rows].tolist()
        else:
            expected = torch.from_numpy(other.chosen[rows])
            bound = tolerance.of_model(served.engine.model, size)
            assert float((torch.from_numpy(each.chosen) - expected).abs().max()) <= bound


def test_labels_are_those_of_the_rules(base: Path) -> None:
    _, run = begun(base)
    drawn, tape, cuts = run.drawn(11)
    prompts = run.prompts.of(drawn, tape, cuts, range(6))
    labels = [rule.label(drawn.levels).value[tape] for rule in RULES[:5]]
    expected = [
        (n, bar, int(labels[n][bar])) for bar in cuts for n in range(5) if labels[n][bar] != UNDEFINED
    ]
    assert [tuple(each) for each in prompts.queries if each.question < 5] == expected
    assert [each.bar for each in prompts.queries if each.question == 5] == cuts
    decode = run.prompts.prompt.tokenizer.decode
    answers = [decode(run.prompts.answers[n][label]) for n, _, label in expected]
    packed = prompts.pack
    kept = [n for n, each in enumerate(prompts.queries) if each.question < 5]
    assert [decode(packed.targets[packed.branch == n]) for n in kept] == answers


def test_each_cut_is_in_its_own_part_of_the_bars_with_labels(base: Path) -> None:
    """Consolidation needs thirty bars; a number of cuts beyond the bars there are asks behind each once."""
    _, run = begun(base, replace(PLAN, window=64, cuts=3))
    for number in range(20):
        _, _, (one, two, three) = run.drawn(number)
        assert 29 <= one < 41 <= two < 53 <= three < 64
    _, few = begun(base, replace(PLAN, cuts=8))
    assert few.drawn(0)[2] == [29, 30, 31]


def tape_tokens(run: tune_run.Run, asked: range) -> list[int]:
    """Of each of the first four steps, with the questions ``asked``."""
    tapes = (run.prompts.of(*run.drawn(number), asked) for number in range(4 * run.tapes))
    return [sum(len(each.pack.ids) for each in step) for step in zip(*[tapes] * run.tapes, strict=True)]


def test_a_run_reads_before_it_is_asked(base: Path) -> None:
    """On the tapes alone, at a rate that falls to that of answers."""
    loaded, run = begun(base, replace(PLAN, steps=6, reading=4, talk_every=5, warm=1))
    moved(loaded)
    tapes = tape_tokens(run, range(0))
    logs, rates = [], []
    for _ in range(6):
        logs.append(run.advance())
        rates.append(run.optimiser.param_groups[0]["lr"])
    assert rates == [pytest.approx(1.5e-4 + 8.5e-4 * share) for share in (1, 0.75, 0.5, 0.25, 0, 0)]
    assert [each["tokens"] for each in logs[1:4]] == tapes[1:]
    assert [bool(each["entropy"]) for each in logs] == [False] * 4 + [True] * 2
    assert all(0 <= share <= 1 for each in logs for share in each["signs"].values())


class Knowing:
    """In place of a model: it reads what the tape's measures are, times ``factor``."""

    def __init__(self, prompts: Prompts, factor: float) -> None:
        self._read = factor * torch.from_numpy(prompts.measures[0])

    def __call__(
        self, pack: Any, rows: torch.Tensor, bars: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(rows), 1), self._read.expand(2, -1, -1, -1)[:, 0]


def test_signs_and_loss_of_reading_are_of_the_rules_margins(base: Path) -> None:
    _, run = begun(base)
    drawn, tape, _ = run.drawn(0)
    prompts = run.prompts.of(drawn, tape, (), ())
    known = np.stack([rule.label(drawn.levels).value[tape] != UNDEFINED for rule in RULES[:5]], -1)
    for factor, sign in ((1.0, 1.0), (-1.0, 0.0)):
        lesson = learn(Knowing(prompts, factor), prompts, run.balance, 5)  # type: ignore[arg-type]  # all it takes
        assert (lesson.signs.isnan().numpy() == ~known).all()
        assert bool((lesson.signs.nan_to_num(sign) == sign).all())
        assert (float(lesson.loss) == 0) == (factor == 1)


def test_reading_learns(base: Path) -> None:
    """What heads read of one tape comes near to its measures."""
    loaded, run = begun(base, replace(PLAN, reading=1))
    prompts = run.prompts.of(*run.drawn(0)[:2], (), ())
    optimiser = torch.optim.AdamW(loaded.model.learnt().values(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        lesson = learn(loaded.model, prompts, run.balance, 5)
        lesson.loss.backward()  # type: ignore[no-untyped-call]  # torch's has no annotation
        optimiser.step()
        losses.append(float(lesson.loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_a_text_stands_for_the_steps_between(base: Path) -> None:
    """Every second step has one, in their order; those between log its divergence and pay nothing for it."""
    loaded, run = begun(base)
    moved(loaded)
    assert len(run.texts) == 2, "no more than the run needs"
    packed = tape_tokens(run, range(6))
    expected, logs = [], []
    for step in range(4):
        if step % 2 == 0:
            expected += [apart(loaded, [run.texts[step // 2]])] * 2
        logs.append(run.advance())
    assert [each["divergence"] for each in logs] == pytest.approx(expected)
    spent = [each["tokens"] - own for each, own in zip(logs, packed, strict=True)]
    assert spent == [2 * len(run.texts[0]), 0, 2 * len(run.texts[1]), 0]


def state_of(run: tune_run.Run) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in run.model.learnt().items()}


def test_a_run_that_is_resumed_is_the_same_to_the_bit(base: Path, tmp_path: Path) -> None:
    _, whole = begun(base)
    for _ in whole.train():
        pass
    loaded, half = begun(base)
    for _ in range(2):
        half.advance()
    half.save(tmp_path / "last.pt")
    _, rest = begin(base, PLAN, tmp_path / "last.pt")
    assert rest.step == 2
    assert rest.texts == loaded.texts
    for _ in rest.train():
        pass
    expected, found = state_of(whole), state_of(rest)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    other = begun(base, replace(PLAN, seed=1))[1]
    assert not torch.equal(
        state_of(other)["model.layers.0.self_attn.q_proj.a"], expected["model.layers.0.self_attn.q_proj.a"]
    )


def test_it_learns(base: Path) -> None:
    """On few tapes the entropy of the answers' first tokens falls by a third and more."""
    plan = replace(PLAN, steps=24, cooldown=6, warm=3, cuts=2, learning_rate=3e-2, talk=0.0)
    _, run = begun(base, plan)
    run.balance.frequency[:] = 0.5
    means = [np.mean(list(log["entropy"].values())) for log in run.train()]
    assert np.mean(means[-3:]) < 0.67 * np.mean(means[:3])


def test_its_own_texts_follow_from_the_seed(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    texts = own_texts(model, [1, 4], 7, 3, 10)
    assert texts == own_texts(model, [1, 4], 7, 3, 10)
    assert texts != own_texts(model, [1, 4], 8, 3, 10)
    assert [(len(each), each[:2]) for each in texts] == [(10, [1, 4])] * 3


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(train, [str(each) for each in arguments])


def sized(base: Path, out: Path, *more: object) -> list[object]:
    sizes = ("--steps", 2, "--cooldown", 1, "--tokens", 1500, "--window", 32, "--rank", 4, "--labels", 4)
    return ["--base", base, "--out", out, *sizes, *more]


def test_the_command_writes_an_adapter_that_daemon_and_evaluation_load(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli(*sized(base, out))
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "21 matrices get a LoRA of rank 4" in said
    assert "perplexity of held-out text" in said
    assert [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()] == [1, 2]
    assert read_adapter(out).rank == 4
    loaded, _ = load_for_daemon(Config(model=ModelConfig(path=str(base), adapter=str(out), layers="torch")))
    assert loaded.name == "tiny+out"
    report = json.loads((out / "report.json").read_text())
    assert {each["question"] for each in report["settings"]["terse, fresh"]} >= {"trend", "exact_value"}
    arguments = ("--model", base, "--adapter", out, "--labels", 2, "--window", 32, "--windows", 1)
    scored = CliRunner().invoke(evaluate, [*map(str, arguments), "--placement", "terse", "--max-tapes", "8"])
    assert scored.exit_code == 0, scored.output
    assert "tiny+out: terse, fresh" in scored.output


@pytest.mark.parametrize("kind", ["no model", "cut weights", "cut checkpoint", "other rank", "tape model"])
def test_bad_input_is_a_sentence_and_status_2(kind: str, base: Path, tmp_path: Path) -> None:
    out, directory, more = tmp_path / "out", tmp_path / "model", list[object]()
    directory.mkdir()
    for file in base.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    if kind == "no model":
        (directory / "config.json").unlink()
        said = "has no config.json"
    elif kind == "cut weights":
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        said = "cannot be loaded"
    elif kind == "cut checkpoint":
        (tmp_path / "last.pt").write_bytes(b"PK\x03\x04")
        said, more = "is no checkpoint of an adapter", ["--resume", tmp_path / "last.pt"]
    elif kind == "other rank":
        begun(base, replace(PLAN, rank=2))[1].save(tmp_path / "last.pt")
        said, more = "has rank 2, not 4", ["--resume", tmp_path / "last.pt"]
    else:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"foretick": {"layout": "terse"}}))
        said = "reads compact lines"
    result = cli(*sized(directory, out, *more))
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.replace("│", " ").split())
    assert not out.exists()
