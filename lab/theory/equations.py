"""The capacity equations of *Attention Once*: sections 3.9.5 (14), 3.9.7 (18) and 6.3 (21 and 23).

Equation 16 is `flash.capacity.k_max`, which the daemon uses, too.

Times are in seconds or any other unit, the same one in all arguments of a call; memory is in bytes.
"""

from math import floor

from flash.capacity import EDGE


def background_time(ingest: float, header: float, questions: int, flash: float) -> float:
    """Equation 14: device time of one data update with its standing questions.

    ``ingest``: reading the update; ``header``: pre-decoding the ready position (0 without one); ``flash``:
    one question.
    """
    return ingest + header + questions * flash


def mean_latency(
    flash_share: float, spec_share: float, t_flash: float, t_spec: float, t_standard: float
) -> float:
    """Equation 18: mean latency of asks by hit mix.

    ``flash_share`` of them hit a standing question's answer, ``spec_share`` exit at the ready position, and
    the others are computed. Raises ValueError unless the shares are at least 0 and add up to at most 1.
    """
    if flash_share < 0 or spec_share < 0 or flash_share + spec_share > 1 + 1e-9:
        raise ValueError(
            f"hit shares {flash_share:g} and {spec_share:g} must be at least 0 and at most 1 together"
        )
    rest = max(0.0, 1 - flash_share - spec_share)
    return flash_share * t_flash + spec_share * t_spec + rest * t_standard


def kv_bytes(layers: int, width: int, tokens: int, number_bytes: int) -> int:
    """Equation 21: memory of the KV of ``tokens`` tokens.

    ``width``: numbers of a token's keys in one layer, KV heads times head size; without grouped heads this is
    the paper's hidden dimension d.
    """
    return 2 * layers * width * tokens * number_bytes


def sessions_max(available: float, model: float, session: float) -> int:
    """Equation 23: the most sessions whose KV fits beside the model; 0 where the model does not fit.

    ``session``: bytes of one session's KV. Raises ValueError unless that is above 0.
    """
    if not session > 0:
        raise ValueError("a session's KV takes more than 0 bytes")
    return max(0, floor((available - model) / session + EDGE))
