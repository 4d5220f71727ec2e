"""KV outside the device pool: the host tier, files, and which sessions go there."""
