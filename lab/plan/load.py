"""The load that a plan is made for."""

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Rates a second, over all sessions. Raises ValueError for numbers that make no sense."""

    ticks: float
    asks: float = 0.0
    asks_standing: float = 0.7
    """Share of the asks that a standing question's answer serves: rho_flash of equation 18."""
    asks_ready: float = 0.0
    """Share of the asks that exit at the ready position: rho_spec."""
    prompts: float = 0.0
    prompt_tokens: int = 512
    answer_tokens: int = 16
    """Tokens of each prompt, and of its answer."""
    seconds: float = 0.0
    """Virtual time to simulate; 0 is 30 bars of a session."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ticks > 0:
            raise ValueError(f"the rate must be above 0 ticks a second, not {self.ticks:g}")
        if min(self.asks, self.prompts, self.seconds, self.asks_standing, self.asks_ready) < 0:
            raise ValueError("asks, prompts, seconds and shares must be at least 0")
        if self.asks_standing + self.asks_ready > 1:
            raise ValueError("the shares of asks that are not computed add up to more than 1")
        if min(self.prompt_tokens, self.answer_tokens) < 1:
            raise ValueError("a prompt and its answer have at least one token")

    @property
    def asks_computed(self) -> float:
        """Asks that need a pass, a second."""
        return self.asks * (1 - self.asks_standing - self.asks_ready)
