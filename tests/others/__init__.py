"""Suites that others wrote, run against this daemon."""
