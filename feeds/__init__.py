"""Sources of records and sinks for answers: wire messages, codecs, Kafka, ZeroMQ and replayed files."""
