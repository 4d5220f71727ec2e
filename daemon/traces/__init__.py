"""What became of one answer or request: its trace id, where its time went, and export to OpenTelemetry."""
