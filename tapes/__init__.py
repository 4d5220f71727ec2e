"""Generated market tapes, and the rules that label them and real bars."""
