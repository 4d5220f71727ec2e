"""Fakes and rigs of the scheduler: exact, small, without tensors."""
