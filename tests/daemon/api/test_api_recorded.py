"""Streams and replies of each API, byte by byte, as its documentation writes them.

The order of the events and the members of each are from the published references of the APIs.
"""

import json
import time
from collections.abc import Iterator

import msgspec
import pytest

from daemon.api import anthropic
from daemon.api.compatible import ApiError, ReplyIdentity, Writer
from daemon.api.generation import Begun, Delta, Finished
from daemon.api.messages import ReplyMetadata
from daemon.api.openai import chat, common, completions, responses

MADE = ReplyIdentity("0a", 1700000000, "tape", "fp_01")
FACTS = (
    '{"session":null,"data_version":null,"as_of":null,"staleness_ns":null,"source_age_ns":null,'
    '"daemon_age_ns":null,"choice":null,"probability":null,"choice_set":null,'
    '"uncalibrated":null,"act":null,"abstain_reason":null,"logit_gap":0.5,"untrained":false,'
    '"flags":[],"cached":false,"model":""}'
)
DONE = Finished(
    id=0,
    text="Up we",
    finish="stop",
    stop=None,
    prompt_tokens=10,
    reused_tokens=4,
    answer_tokens=2,
    metadata=ReplyMetadata(logit_gap=0.5),
)
BAD = ApiError("engine", "because")


def written(writer: Writer, *, fails: bool = False) -> list[str]:
    """The events of a stream of two pieces, as text."""

    def events() -> Iterator[bytes]:
        yield from writer.write(0, Begun(0, 10, 4))
        yield from writer.write(0, Delta(0, "Up"))
        if fails:
            yield from writer.failed(BAD)
            return
        yield from writer.write(0, Delta(0, " we"))
        yield from writer.write(0, DONE)
        yield from writer.end()

    return b"".join(events()).decode().split("\n\n")[:-1]


def test_chat_completions() -> None:
    asked = chat.ChatRequest(model="tape", messages=[], stream_options=common.StreamOptions(True))
    head = (
        'data: {"id":"chatcmpl-0a","object":"chat.completion.chunk","created":1700000000,"model":"tape",'
        '"service_tier":"default","system_fingerprint":"fp_01","choices":'
    )
    usage = (
        '{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12,"prompt_tokens_details":'
        '{"cached_tokens":4,"text_tokens":10,"audio_tokens":0,"image_tokens":0,"cache_write_tokens":0},'
        '"completion_tokens_details":{"text_tokens":2,"reasoning_tokens":0,'
        '"audio_tokens":0,"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}'
    )
    first = head + (
        '[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,'
        '"finish_reason":null}],"usage":null,"moderation":null,"foretick":null}'
    )
    rest = '"logprobs":null,"finish_reason":null}],"usage":null,"moderation":null,"foretick":null}'
    assert written(chat.Chat().writer(asked, MADE)) == [
        first,
        f'{head}[{{"index":0,"delta":{{"content":"Up"}},{rest}',
        f'{head}[{{"index":0,"delta":{{"content":" we"}},{rest}',
        f'{head}[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop"}}],"usage":null,'
        f'"moderation":null,"foretick":{FACTS}}}',
        f'{head}[],"usage":{usage},"moderation":null,"foretick":null}}',
        "data: [DONE]",
    ]
    assert written(chat.Chat().writer(asked, MADE), fails=True)[2:] == [
        'data: {"error":{"message":"because","type":"server_error","param":null,"code":"server_error"}}',
        "data: [DONE]",
    ]
    assert msgspec.json.encode(chat.Chat().build_response(asked, MADE, [DONE])).decode() == (
        '{"id":"chatcmpl-0a","object":"chat.completion","created":1700000000,"model":"tape","choices":'
        '[{"index":0,"message":{"content":"Up we","role":"assistant","refusal":null,"annotations":[],'
        '"audio":null,"function_call":null,"tool_calls":null},'
        f'"logprobs":null,"finish_reason":"stop","foretick":{FACTS}}}],"usage":{usage},'
        f'"service_tier":"default","system_fingerprint":"fp_01","metadata":null,"moderation":null,'
        f'"foretick":{FACTS}}}'
    )


def test_completions() -> None:
    asked = completions.CompletionRequest(model="tape", prompt="x")
    head = (
        'data: {"id":"cmpl-0a","object":"text_completion","created":1700000000,"model":"tape",'
        '"system_fingerprint":"fp_01","choices":'
    )
    rest = '"index":0,"logprobs":null,"finish_reason":null}],"usage":null,"foretick":null}'
    assert written(completions.Completions().writer(asked, MADE)) == [
        f'{head}[{{"text":"Up",{rest}',
        f'{head}[{{"text":" we",{rest}',
        f'{head}[{{"text":"","index":0,"logprobs":null,"finish_reason":"stop"}}],"usage":null,'
        f'"foretick":{FACTS}}}',
        "data: [DONE]",
    ]


def responses_reply(status: str, output: str, usage: str, facts: str, error: str = "null") -> str:
    completed = 1700000009 if status == "completed" else "null"
    return (
        f'{{"id":"resp_0a","object":"response","created_at":1700000000,"completed_at":{completed},'
        f'"status":"{status}","background":false,"error":{error},"incomplete_details":null,'
        '"instructions":null,"max_output_tokens":null,"max_tool_calls":null,"model":"tape",'
        f'"output":{output},"parallel_tool_calls":true,"previous_response_id":null,'
        '"conversation":null,"moderation":null,"prompt":null,"prompt_cache_diagnostics":null,'
        '"prompt_cache_options":null,"prompt_cache_retention":null,"prompt_cache_key":null,"reasoning":{"effort":null,"summary":null},"safety_identifier":null,'
        '"service_tier":"default","store":false,"temperature":1.0,"text":{"format":{"type":"text"},'
        '"verbosity":"medium"},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,'
        f'"truncation":"disabled","usage":{usage},"user":null,"metadata":{{}},"frequency_penalty":0.0,'
        f'"presence_penalty":0.0,"foretick":{facts}}}'
    )


def test_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1700000009.5)  # when it is completed
    asked = responses.ResponseRequest(model="tape", input="x")
    part = '{"text":"Up we","type":"output_text","annotations":[],"logprobs":[]}'
    item = (
        f'{{"id":"msg_0a","status":"completed","content":[{part}],'
        '"type":"message","role":"assistant","phase":null}'
    )
    usage = (
        '{"input_tokens":10,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0,'
        '"cache_write_tokens_details":null},"output_tokens":2,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":12}'
    )
    begun = responses_reply("in_progress", "[]", "null", "null")
    done = responses_reply("completed", f"[{item}]", usage, FACTS)
    empty = (
        '{"id":"msg_0a","status":"in_progress","content":[],"type":"message","role":"assistant","phase":null}'
    )
    none = '{"text":"","type":"output_text","annotations":[],"logprobs":[]}'
    at = '"item_id":"msg_0a","output_index":0,"content_index":0'
    bodies = [
        ("response.created", f'"response":{begun}'),
        ("response.in_progress", f'"response":{begun}'),
        ("response.output_item.added", f'"output_index":0,"item":{empty}'),
        ("response.content_part.added", f'{at},"part":{none}'),
        ("response.output_text.delta", f'{at},"delta":"Up","logprobs":[]'),
        ("response.output_text.delta", f'{at},"delta":" we","logprobs":[]'),
        ("response.output_text.done", f'{at},"text":"Up we","logprobs":[]'),
        ("response.content_part.done", f'{at},"part":{part}'),
        ("response.output_item.done", f'"output_index":0,"item":{item}'),
        ("response.completed", f'"response":{done}'),
    ]
    expected = [
        f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{n},{body}}}'
        for n, (kind, body) in enumerate(bodies)
    ]
    # members in any order: the documentation does not say one
    assert list(map(sorted_event, written(responses.Responses().writer(asked, MADE)))) == list(
        map(sorted_event, expected)
    )
    failed = written(responses.Responses().writer(asked, MADE), fails=True)[-1]
    error = '{"code":"server_error","message":"because"}'
    reply = responses_reply("failed", "[]", "null", "null", error)
    body = f'{{"type":"response.failed","sequence_number":5,"response":{reply}}}'
    assert sorted_event(failed) == sorted_event(f"event: response.failed\ndata: {body}")
    whole = msgspec.json.encode(responses.Responses().build_response(asked, MADE, [DONE])).decode()
    assert whole == done


def sorted_event(event: str) -> tuple[str, str]:
    """Its first line, and its data with sorted members."""
    name, data = event.split("\ndata: ")
    return name, json.dumps(json.loads(data), sort_keys=True)


def test_messages() -> None:
    asked = anthropic.MessageRequest(model="tape", messages=[], max_tokens=9)

    def usage(output: int, more: str = "") -> str:
        return (
            '{"input_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,'
            f'"output_tokens":{output},"output_tokens_details":{{"thinking_tokens":0}},"server_tool_use":null{more}}}'
        )

    whole_usage = (
        ',"cache_creation":{"ephemeral_1h_input_tokens":0,"ephemeral_5m_input_tokens":0},'
        '"inference_geo":null,"service_tier":"standard","speed":null'
    )

    def reply(content: str, reason: str, output: int, facts: str) -> str:
        return (
            '{"id":"msg_0a","type":"message","role":"assistant","model":"tape",'
            f'"content":{content},"stop_reason":{reason},"stop_sequence":null,"stop_details":null,'
            f'"usage":{usage(output, whole_usage)},"container":null,"diagnostics":null,"foretick":{facts}}}'
        )

    start = reply("[]", "null", 0, "null")
    stop = '{"stop_reason":"end_turn","stop_sequence":null,"stop_details":null,"container":null}'

    def delta(text: str) -> str:
        return (
            f'event: content_block_delta\ndata: {{"delta":{{"text":"{text}","type":"text_delta"}},'
            '"index":0,"type":"content_block_delta"}'
        )

    begin = [
        f'event: message_start\ndata: {{"message":{start},"type":"message_start"}}',
        'event: content_block_start\ndata: {"content_block":{"text":"","type":"text","citations":null},'
        '"index":0,"type":"content_block_start"}',
        'event: ping\ndata: {"type":"ping"}',
        delta("Up"),
    ]
    assert written(anthropic.Messages().writer(asked, MADE)) == [
        *begin,
        delta(" we"),
        'event: content_block_stop\ndata: {"index":0,"type":"content_block_stop"}',
        f'event: message_delta\ndata: {{"delta":{stop},"usage":{usage(2)},"foretick":{FACTS},'
        '"type":"message_delta"}',
        'event: message_stop\ndata: {"type":"message_stop"}',
    ]
    assert written(anthropic.Messages().writer(asked, MADE), fails=True) == [
        *begin,
        'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"because"}}',
    ]
    block = '[{"text":"Up we","type":"text","citations":null}]'
    whole = msgspec.json.encode(anthropic.Messages().build_response(asked, MADE, [DONE])).decode()
    assert whole == reply(block, '"end_turn"', 2, FACTS)


@pytest.mark.parametrize(
    ("finish", "openais", "status", "anthropics"),
    [
        ("stop", "stop", "completed", "end_turn"),
        ("stop_sequence", "stop", "completed", "stop_sequence"),
        ("length", "length", "incomplete", "max_tokens"),
    ],
)
def test_why_an_answer_ended_in_each_apis_words(finish, openais, status, anthropics) -> None:
    done = [msgspec.structs.replace(DONE, finish=finish)]
    one = chat.Chat().build_response(chat.ChatRequest(model="tape", messages=[]), MADE, done)
    assert one.choices[0].finish_reason == openais
    two = responses.Responses().build_response(responses.ResponseRequest(model="tape", input="x"), MADE, done)
    assert (two.status, two.output[0].status) == (status, status)
    three = anthropic.MessageRequest(model="tape", messages=[], max_tokens=9)
    assert anthropic.Messages().build_response(three, MADE, done).stop_reason == anthropics
