"""Exactly once, on a real Apache Kafka behind a proxy that loses and delays requests."""
