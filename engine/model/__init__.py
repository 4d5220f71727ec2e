"""Loading a model and proving that it runs: architectures, canary, prompt format."""
