"""Configuration errors, by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem: `key` is its dotted path ("" for the whole file), `message` says what is wrong."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(Exception):
    """The configuration is unusable; `problems` is not empty. The CLI prints them and exits with 2."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def of(cls, key: str, message: str) -> ConfigError:
        """With one problem."""
        return cls([ConfigProblem(key, message)])
