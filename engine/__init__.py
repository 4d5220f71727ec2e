"""The transformer forward over regions: unmodified transformers models, our attention."""
