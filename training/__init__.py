"""The tape model: its tokenizer, its training on generated tapes, its evaluation and calibration."""
