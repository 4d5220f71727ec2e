"""Fixtures shared by the whole suite."""

pytest_plugins = ["tests.fixtures_kafka", "tests.fixtures_prometheus"]
