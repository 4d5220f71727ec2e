"""What can never run is refused at the door, with the numbers."""

from __future__ import annotations

from scheduler.planner import cell_budget
from scheduler.request import Failure, Request
from scheduler.types import Limits, Memory


def refusal(request: Request, limits: Limits, memory: Memory) -> Failure | None:
    """Why the request, as it is by now, can never run; None if it can."""
    if request.prefill_only:
        return None
    prompt, new = len(request.prompt), request.max_tokens
    budget = cell_budget(memory, limits)
    if prompt > limits.max_prompt_tokens:
        message = f"the prompt has {prompt} tokens, the limit is {limits.max_prompt_tokens}"
    elif new > limits.max_new_tokens:
        message = f"{new} new tokens were asked for, the limit is {limits.max_new_tokens}"
    elif request.cells > budget:
        message = (
            f"prompt ({prompt} tokens) and answer (up to {new}) need {request.cells} cells; requests may "
            f"claim {budget} of the pool's {memory.total_blocks * memory.block_size}"
        )
    else:
        return None
    return Failure("too_long", message)
