"""Standing questions: registry, batched evaluation for every data version, and the answer cache."""
