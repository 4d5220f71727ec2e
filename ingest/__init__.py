"""From the ring to the tape: records, bars, text lines and token ids (*Attention Once* section 3.5)."""

from ingest.warm import warm_up

__all__ = ["warm_up"]
