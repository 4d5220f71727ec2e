"""The rules that label tapes, generated ones and real bars."""
