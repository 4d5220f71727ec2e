"""What `show_prompt` shows is what the model reads: the unmodified model answers it as the daemon does."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from daemon.api.messages import PromptShown, QueryError
from daemon.config.schema import FlashConfig, QuestionConfig
from engine.model.chat_format import BRIEF, SYSTEM_PROMPT, schema_of
from engine.model.embedded import embedded_directory
from tests.kit import inproc_config, tolerance
from tests.kit.daemon import invoke
from tests.kit.inproc import RunningDaemon, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIDE = QuestionConfig("side", text="Which side?", choices=("BUY", "SELL", "NONE"))
LONG = QuestionConfig("story", text="Tell the story.", max_tokens=40)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ephemeral", "frozen"])
async def daemon(request: pytest.FixtureRequest) -> AsyncIterator[RunningDaemon]:
    """Of four bars; questions stand behind the bars, or numbered before them."""
    flash = FlashConfig(placement=request.param)
    config = inproc_config(standing="none", questions=(SIDE, LONG), flash=flash)
    async with running(config) as made:
        await made.advance(4)
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_directory())


def tokens_of(shown: PromptShown, tokenizer: Any) -> list[int]:
    """Each region encoded by itself, as the daemon does; the numbers of tokens must be those that it says."""
    assert shown.question is not None
    found: list[int] = []
    for region in (shown.frozen, shown.sliding, shown.question):
        tokens = tokenizer.encode(region.text, add_special_tokens=False)
        assert len(tokens) == region.tokens
        found += tokens
    return found


async def test_the_unmodified_model_answers_it_as_the_daemon_did(
    daemon: RunningDaemon, tokenizer: Any
) -> None:
    shown = await daemon.call("show_prompt", "aaa", "side")
    (answer,) = (await daemon.call("answers", "aaa", "side")).answers
    assert shown.data_version == answer.data_version == 4
    model = AutoModelForCausalLM.from_pretrained(embedded_directory(), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens_of(shown, tokenizer)])).logits[0, -1]
    assert SIDE.choices is not None
    first = [tokenizer.encode(each, add_special_tokens=False)[0] for each in SIDE.choices]
    best, second = sorted((float(logits[token]) for token in first), reverse=True)[:2]
    assert answer.choice == SIDE.choices[max(range(3), key=lambda n: float(logits[first[n]]))]
    assert abs(best - second - answer.logit_gap) <= tolerance.of_embedded_gap()


async def test_regions_say_what_they_are_and_a_short_answer_is_asked_for_in_a_word(
    daemon: RunningDaemon,
) -> None:
    shown = await daemon.call("show_prompt", "aaa", "Is it quiet?")
    assert SYSTEM_PROMPT in shown.frozen.text
    assert shown.frozen.text.endswith(schema_of("decimal"))
    assert "one word" not in shown.frozen.text.replace(f"{SIDE.text} {BRIEF}", "")
    assert len(shown.sliding.text.splitlines()) == 4
    assert f"Is it quiet? {BRIEF}" in shown.question.text
    free = await daemon.call("show_prompt", "aaa", "Is it quiet?", 64)
    assert "Is it quiet?" in free.question.text
    assert BRIEF not in free.question.text
    story = await daemon.call("show_prompt", "aaa", "story")
    assert BRIEF not in story.question.text


async def test_http_shows_the_same_and_says_what_cannot_be_shown(daemon: RunningDaemon) -> None:
    shown = await daemon.call("show_prompt", "aaa", "side")
    reply = await daemon.http("GET", "/v1/sessions/aaa/prompt?question=side")
    assert reply.status == 200
    assert reply.json["question"] == {"text": shown.question.text, "tokens": shown.question.tokens}
    assert reply.json["sliding"]["text"] == shown.sliding.text
    bare = await daemon.http("GET", "/v1/sessions/aaa/prompt")
    assert bare.json["question"] is None
    assert (await daemon.http("GET", "/v1/sessions/nobody/prompt")).json["code"] == "unknown_session"
    with pytest.raises(QueryError) as refused:
        await daemon.call("show_prompt", "aaa", " ")
    assert refused.value.code == "bad_request"


async def test_explain_shows_the_newest_answer_and_what_was_read_for_it(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """Whatever the source keeps: the running daemon is asked."""
    config = tmp_path / "foretick.toml"
    config.write_text(f'query.endpoint = "{daemon.endpoint}"\n[[sessions]]\nname = "aaa"\nsymbol = "V:AAA"\n')
    arguments = ("explain", "aaa/side", "--config", str(config))
    done = await asyncio.to_thread(invoke, *arguments, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    shown = await daemon.call("show_prompt", "aaa", "side")
    assert (told["answer"]["data_version"], told["prompt"]["data_version"]) == (4, 4)
    assert told["prompt"]["sliding"] == {"text": shown.sliding.text, "tokens": shown.sliding.tokens}
    plain = await asyncio.to_thread(invoke, *arguments)
    assert f"sliding region, {shown.sliding.tokens} tokens" in plain.output
    assert shown.sliding.text.splitlines()[-1] in plain.output
