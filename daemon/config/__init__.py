"""The settings: their schema, how they are loaded and checked, and their reference page."""
