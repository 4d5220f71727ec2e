"""Released weights: a language model from the package index, through the whole daemon."""
