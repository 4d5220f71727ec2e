"""Looking back: DLQ records, what an answer was read from, and deriving it again."""
