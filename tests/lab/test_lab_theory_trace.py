"""Query streams from JSON lines."""

import pytest

from lab.theory.query_stream import QueryStream, TraceError, read_trace


def test_a_trace_gives_tokens_or_the_characters_of_a_text() -> None:
    assert read_trace([b'{"tokens": [5, 6], "arrival": 1.5}\n', b"\n", b'{"arrival": 0, "tokens": [7]}']) == (
        QueryStream(((5, 6), (7,)), (1.5, 0))
    )
    assert read_trace(['{"text": "né", "arrival": 2}']) == QueryStream(((110, 233),), (2,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"tokens": [1], "arrival": 0}\nnonsense', "line 2: JSON is malformed"),
        ('{"tokens": [1]}', "line 1: Object missing required field `arrival`"),
        ('{"arrival": 0}', "line 1: needs either `tokens` or `text`"),
        ('{"tokens": [1], "text": "a", "arrival": 0}', "line 1: needs either"),
        ('{"tokens": [], "arrival": 0}', "line 1: the prompt is empty"),
        ('{"text": "", "arrival": 0}', "line 1: the prompt is empty"),
        ('{"tokens": [1.5], "arrival": 0}', "line 1: Expected `int`"),
        ('{"tokens": [1], "arrival": -2}', "line 1: `arrival` is -2"),
        ('{"tokens": [1], "arrival": 1e999}', "line 1: "),
        ('{"tokens": [1], "arrival": 0, "ttft": 3}', "line 1: Object contains unknown field `ttft`"),
        ('{"tokens": [1], "arrival": 0}\n{"text": "a", "arrival": 0}', "line 2: a trace gives either"),
        ("\n\n", "has no query"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        read_trace(text.split("\n"))
