"""Where records come from and where answers go: wire messages, codecs, Kafka, ZeroMQ and replayed files."""
