"""Standing questions: their registry, and batched evaluation for every data version."""
