"""What a device takes for a pass, measured."""
