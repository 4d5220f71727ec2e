"""Frozen, sliding and ephemeral KV over one paged pool (*Attention Once* sections 3.3 and 3.4)."""
