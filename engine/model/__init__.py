"""Loads a model and checks that it runs over regions: architectures, canary, prompt format."""
