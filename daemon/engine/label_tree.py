"""Choices of several tokens, scored as wholes: which tokens to look at, and what each choice comes to.

The choices form a tree of tokens. One row of logits at each node, behind the tokens that lead there, has the
log probability of every token that goes on; a choice's is the sum along its tokens. Where a choice begins
another one, it has the rest: the probability that the answer begins with it, and with no longer choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log1p

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class LabelTree:
    """``labels``: the tokens of each choice. ``nodes``: the tokens that may follow each path."""

    labels: tuple[Tokens, ...]
    nodes: Mapping[Tokens, Tokens]

    @classmethod
    def of(cls, labels: Sequence[Tokens]) -> "LabelTree":
        """Raises ValueError for a choice without tokens, and for two with the same."""
        if not all(labels):
            raise ValueError("a choice has no text that the model can write")
        if len(set(labels)) < len(labels):
            raise ValueError("two choices are the same tokens for this model; reword them")
        nodes: dict[Tokens, dict[int, None]] = {(): {}}
        for label in labels:
            for n, token in enumerate(label):
                nodes.setdefault(label[:n], {})[token] = None
        return cls(tuple(labels), {path: tuple(after) for path, after in nodes.items()})

    @property
    def is_flat(self) -> bool:
        """Each choice is one token, so that the root's tokens are the choices, in their order."""
        return len(self.nodes) == 1

    def scores(self, logprobs: Mapping[Tokens, Sequence[float]]) -> list[float]:
        """Log probability of each choice; ``logprobs``: at each node, of its tokens in their order."""
        paths = sorted(self.nodes, key=len)
        reached: dict[Tokens, float] = {(): 0.0}
        for path in paths:
            for token, logprob in zip(self.nodes[path], logprobs[path], strict=True):
                reached[*path, token] = reached[path] + logprob
        # of what goes on behind a path, the probability that it is a choice, or begins with one
        longer = dict.fromkeys(self.labels, 0.0)
        chosen = frozenset(self.labels)
        for path in reversed(paths):
            longer[path] = sum(
                exp(logprob) * (1.0 if (*path, token) in chosen else longer[*path, token])
                for token, logprob in zip(self.nodes[path], logprobs[path], strict=True)
            )
        return [
            reached[label] + log1p(-longer[label]) if longer[label] < 1 else -inf for label in self.labels
        ]
