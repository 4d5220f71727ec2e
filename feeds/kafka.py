"""The public names of the Kafka modules."""

from feeds.kafka_admin import BrokerError, missing_topics
from feeds.kafka_client import quiet_client_log
from feeds.kafka_sink import KafkaSink
from feeds.kafka_source import KafkaSource

__all__ = ["BrokerError", "KafkaSink", "KafkaSource", "missing_topics", "quiet_client_log"]
