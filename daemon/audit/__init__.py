"""Looking back: dead letters, what an answer was read from, and deriving it again."""
