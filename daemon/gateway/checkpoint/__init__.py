"""What makes answers durable: outbox, offsets, progress, commits."""
