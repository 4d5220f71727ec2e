"""The OpenAI API: chat completions, completions, responses and models, as pure translations."""
