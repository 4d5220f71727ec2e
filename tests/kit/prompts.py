"""What the scheduler knows about a streaming prompt, for tests without a scheduler."""

from collections.abc import Sequence

from regions.streaming_kv import StreamingPrompt


def remaining(prompt: StreamingPrompt) -> int:
    """Prompt tokens that are not in KV."""
    return max(0, len(prompt.wanted) - prompt.length)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def next_tokens(prompt: StreamingPrompt, n: int) -> list[int]:
    """Up to ``n`` next tokens to compute."""
    tokens: list[int] = prompt.wanted[prompt.length : prompt.length + n].tolist()
    return tokens
