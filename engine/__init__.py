"""The transformer forward pass over regions: unmodified transformers models with our attention."""
