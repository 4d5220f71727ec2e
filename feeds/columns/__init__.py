"""Many records at a time: bytes to columns of integers in compiled code."""

from feeds.columns.decode import COLUMNS, ENCODINGS, OTHER, ColumnDecoder, Columns, warm_up

__all__ = ["COLUMNS", "ENCODINGS", "OTHER", "ColumnDecoder", "Columns", "warm_up"]
